"""Small helpers over the public tinker SDK."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

Floats = NDArray[np.float32]


def client(url: str) -> tinker.ServiceClient:
    """A ServiceClient as a user's script makes it."""
    return tinker.ServiceClient(base_url=url, api_key="tml-test")


def prompt(tokens: Sequence[int]) -> types.ModelInput:
    """Tokens as the SDK's ModelInput."""
    return types.ModelInput.from_ints(list(tokens))


def tensor(values: Any, dtype: type[np.generic]) -> types.TensorData:
    """Values as the SDK's TensorData."""
    return types.TensorData.from_numpy(np.asarray(values, dtype=dtype))


def datum(tokens: Sequence[int], **inputs: Any) -> types.Datum:
    """Tokens shifted by one as targets, unless ``target_tokens`` is given; every other input is float32."""
    targets = inputs.pop("target_tokens", [*tokens[1:], tokens[0]])
    arrays = {name: tensor(values, np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=prompt(tokens), loss_fn_inputs={"target_tokens": tensor(targets, np.int64), **arrays}
    )


def sequences(
    count: int, seed: int = 0, shortest: int = 2, longest: int = 24, vocabulary: int = 320
) -> list[list[int]]:
    """Random ragged token sequences without special tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(20, vocabulary) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def supervised(count: int, seed: int = 0, **lengths: int) -> list[types.Datum]:
    """Random data for cross_entropy with weights of ones."""
    return [datum(tokens, weights=[1.0] * len(tokens)) for tokens in sequences(count, seed, **lengths)]


def logprobs(result: types.ForwardBackwardOutput) -> list[Floats]:
    """The log-probs of every datum."""
    return [np.asarray(output["logprobs"].tolist(), dtype=np.float32) for output in result.loss_fn_outputs]


def adam(learning_rate: float = 1e-3, **more: float) -> types.AdamParams:
    """Parameters of one optimizer step."""
    return types.AdamParams(learning_rate=learning_rate, **more)


def train(run: tinker.TrainingClient, data: list[types.Datum], steps: int, learning_rate: float = 1e-2) -> list[float]:
    """Steps of cross_entropy and AdamW; the loss before each."""
    losses = []
    for _ in range(steps):
        forward_backward = run.forward_backward(data, "cross_entropy")
        step = run.optim_step(adam(learning_rate))
        losses.append(forward_backward.result().metrics["loss:sum"])
        step.result()
    return losses
