"""Rows of tokens as the SDK's Datum: inputs are all tokens but the last, targets all but the first.

Position i of every other input belongs to the prediction of token i + 1, so values that are given per token lose their
first one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tinker import types


def datum(tokens: Sequence[int], **per_token: ArrayLike) -> types.Datum:
    """``tokens`` [N] and float inputs [N] by name, one number for each token; a Datum of N - 1 positions."""
    inputs = {"target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64))}
    for name, values in per_token.items():
        array = np.asarray(values, dtype=np.float32)
        if array.shape != (len(tokens),):
            raise ValueError(f"{name} has shape {array.shape} for {len(tokens)} tokens")
        inputs[name] = types.TensorData.from_numpy(np.ascontiguousarray(array[1:]))
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


def scored(output: types.LossFnOutput) -> NDArray[np.float64]:
    """The log-probs [N - 1] that a forward pass gave for a datum of N tokens."""
    return np.asarray(output["logprobs"].to_numpy(), dtype=np.float64)


def grad_norm(stepped: Any) -> float:
    """Of a future of optim_step; NaN where the service does not say."""
    found: float = (stepped.result().metrics or {}).get("grad_norm", math.nan)
    return found
