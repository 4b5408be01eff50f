"""Losses in NumPy, JAX and TensorFlow give the gradient of the same loss in torch beside the weights: a real server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from torch import Tensor

import gradserve
from gradserve.client import download
from gradserve.compiler import CaptureError
from gradserve.compiler.client_side import ClientLoss
from gradserve.compiler.foreign import ForeignLossError
from tests.sdk import adam, client, datum, sequences

CLIP = 0.2
SCALE = 1e4
"""Adam's first step with this rate and eps is minus the gradient, to 1e-4 of it: g * SCALE / (|g| + SCALE)."""


def data() -> list[tinker.types.Datum]:
    """Ragged rows with the inputs of a clipped policy-gradient loss; some ratios are beyond the clip."""
    rng = np.random.default_rng(3)
    rows = sequences(3, seed=5, shortest=4, longest=9)
    return [
        datum(row, advantages=rng.normal(size=len(row)), logprobs=rng.normal(-5.7, 0.3, size=len(row))) for row in rows
    ]


def in_torch(logprobs: Tensor, mask: Tensor, advantages: Tensor, old_logprobs: Tensor) -> tuple[Tensor, dict[str, Any]]:
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
    terms = torch.minimum(ratio * advantages, clipped * advantages) * mask
    return -terms.sum() / mask.sum(), {"ratio": (ratio * mask).sum() / mask.sum()}


def in_numpy(rows: list[dict[str, Any]], logprobs: list[Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """The gradient by hand: -A r / n where the unclipped term is the smaller one, else 0."""
    n = sum(len(logp) for logp in logprobs)
    loss, total, gradients = 0.0, 0.0, []
    for row, logp in zip(rows, logprobs, strict=True):
        ratio = np.exp(logp - row["logprobs"])
        free, clipped = ratio * row["advantages"], np.clip(ratio, 1 - CLIP, 1 + CLIP) * row["advantages"]
        loss -= np.minimum(free, clipped).sum() / n
        total += ratio.sum()
        inside = (ratio >= 1 - CLIP) & (ratio <= 1 + CLIP)
        gradients.append(-np.where((free < clipped) | inside, free, 0) / n)
    return loss, gradients, {"ratio": total / n}


def in_jax(rows: list[dict[str, Any]], logprobs: list[Any]) -> tuple[Any, dict[str, Any]]:
    import jax.numpy as jnp

    assert all(isinstance(value, jnp.ndarray) for row in rows for value in row.values())
    old, advantages, new = (jnp.concatenate(part) for part in (*_columns(rows), logprobs))
    ratio = jnp.exp(new - old)
    terms = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    return -terms.mean(), {"ratio": ratio.mean()}


def in_tensorflow(rows: list[dict[str, Any]], logprobs: list[Any]) -> tuple[Any, dict[str, Any]]:
    import tensorflow as tf

    assert all(isinstance(value, tf.Tensor) for row in rows for value in row.values())
    old, advantages, new = (tf.concat(part, 0) for part in (*_columns(rows), logprobs))
    ratio = tf.exp(new - old)
    terms = tf.minimum(ratio * advantages, tf.clip_by_value(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    return -tf.reduce_mean(terms), {"ratio": tf.reduce_mean(ratio)}


def _columns(rows: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    return [row["logprobs"] for row in rows], [row["advantages"] for row in rows]


def gradient_of(url: str, loss: Any, folder: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of fresh adapters' B matrices (A's is 0, since B is) and the metrics, through the server."""
    run = client(url).create_lora_training_client(base_model="tiny", rank=4, seed=11).result()
    metrics = gradserve.forward_backward(run, data(), loss).result().metrics
    run.optim_step(adam(SCALE, eps=SCALE)).result()
    file = folder / run.model_id.replace(":", "_")
    download.weights(url, run.save_state("after").result().path, "tml-test", file)
    return {name: -tensor for name, tensor in load_file(file).items() if ".lora_B." in name}, metrics


@pytest.fixture
def expected(url: str, tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    return gradient_of(url, gradserve.loss(in_torch), tmp_path)


def assert_equal(found: tuple[dict[str, Tensor], dict[str, float]], expected: Any) -> None:
    gradient, metrics = found
    assert max(float(tensor.abs().max()) for tensor in expected[0].values()) > 1e-3
    for name, tensor in expected[0].items():
        torch.testing.assert_close(gradient[name], tensor, atol=1e-6, rtol=1e-5)
    assert metrics["loss:sum"] == pytest.approx(expected[1]["loss:sum"], abs=1e-6)
    assert metrics["ratio"] == pytest.approx(expected[1]["ratio:mean"], abs=1e-6)


def test_numpy(url: str, expected: Any, tmp_path: Path) -> None:
    assert_equal(gradient_of(url, gradserve.numpy_loss(in_numpy), tmp_path), expected)


@pytest.mark.parametrize("jitted", [False, True])
def test_jax(url: str, expected: Any, tmp_path: Path, jitted: bool) -> None:
    jax = pytest.importorskip("jax")
    assert_equal(gradient_of(url, gradserve.jax_loss(jax.jit(in_jax) if jitted else in_jax), tmp_path), expected)


def test_tensorflow(url: str, expected: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    assert_equal(gradient_of(url, gradserve.tensorflow_loss(in_tensorflow), tmp_path), expected)


def branching(logprobs: Tensor, mask: Tensor, advantages: Tensor, old_logprobs: Tensor) -> Any:
    """The same loss, written so that it can't be captured."""
    loss, metrics = in_torch(logprobs, mask, advantages, old_logprobs)
    if loss > 100:
        return loss * 0, metrics
    return loss, metrics


def test_the_client_side_road_only_where_it_is_asked_for(url: str, expected: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError):
        gradserve.loss(branching)
    with pytest.warns(UserWarning, match=r"branching runs on the client.*test_foreign_losses\.py:\d+"):
        loss = gradserve.loss(branching, fallback="client")
    assert isinstance(loss, ClientLoss)
    assert_equal(gradient_of(url, loss, tmp_path), expected)
    assert isinstance(gradserve.loss(in_torch, fallback="client"), str)
    with pytest.raises(ValueError, match="'server'"):
        gradserve.loss(in_torch, fallback="server")  # type: ignore[call-overload]


def test_what_only_the_server_has_does_not_fall_back() -> None:
    def needs_entropy(logprobs: Tensor, entropy: Tensor) -> Tensor:
        total = logprobs.sum()
        return entropy.sum() if total > 0 else total

    with pytest.raises(CaptureError, match="needs_entropy reads 'entropy'"):
        gradserve.loss(needs_entropy, fallback="client")


def call(loss: Callable[..., Any]) -> Any:
    """A loss on data(), as the SDK calls it."""
    rows = data()
    return loss(rows, [torch.zeros(row.model_input.length, requires_grad=True) for row in rows])


ZEROS = [np.zeros(row.model_input.length) for row in data()]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (1.0, "a float; it must return (loss, gradients) or (loss, gradients, metrics)"),
        ((1.0, ZEROS[:2]), "2 gradients; it must return one for each of the 3 arrays"),
        ((1.0, [ZEROS[0], ZEROS[1][:-1], ZEROS[2]]), f"a gradient of shape [{len(ZEROS[1]) - 1}] for data[1]"),
        ((1.0, [ZEROS[0], ZEROS[1], ZEROS[2] * np.nan]), "a gradient for data[2] that is not finite"),
        ((np.ones(2), ZEROS), "a loss of float64[2]; it must return a scalar"),
        ((1.0, ZEROS, 3.0), "metrics that are a float; it must return a dict of numbers"),
        ((1.0, ZEROS, {"a": np.ones(2)}), "the metric 'a' as a ndarray of shape [2]"),
    ],
)
def test_what_is_no_loss_is_said(returned: Any, words: str) -> None:
    def my_loss(rows: Any, logprobs: Any) -> Any:
        return returned

    with pytest.raises(ForeignLossError, match=f"^my_loss returned {re.escape(words)}"):
        call(gradserve.numpy_loss(my_loss))


def test_what_is_no_loss_in_jax_is_said() -> None:
    pytest.importorskip("jax")
    for wrong, words in (
        (lambda rows, logprobs: logprobs[0], r"an array of float32\[\d\]; it must return a scalar"),
        (lambda rows, logprobs: len(rows), r"an array of int32\[\]"),
        (lambda rows, logprobs: (logprobs[0].sum(), {}, {}), "a tuple of 3; it must return loss or"),
    ):
        with pytest.raises(ForeignLossError, match=f"<lambda> returned {words}"):
            call(gradserve.jax_loss(wrong))


def test_what_is_no_loss_in_tensorflow_is_said() -> None:
    tf = pytest.importorskip("tensorflow")
    for wrong, words in (
        (lambda rows, logprobs: logprobs[0], r"a EagerTensor of shape \[\d\]; it must return a scalar"),
        (lambda rows, logprobs: tf.constant(1.0), "a loss that does not depend on logprobs"),
    ):
        with pytest.raises(ForeignLossError, match=f"<lambda> returned {words}"):
            call(gradserve.tensorflow_loss(wrong))
