"""A captured loss is the Python function: values, metrics and gradients have the same bits, at any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradserve
from gradserve.compiler import capture_loss
from gradserve.wire.graph import decode, digest, encode, to_text
from tests.graphs.cases import LOSSES, gradients, leaves, ppo_clip, same_bits, sent, values_for

SIZES = [(4, 6), (8, 1), (240, 13), (12, 33)]


@pytest.mark.parametrize("fn", LOSSES, ids=lambda fn: fn.__name__)
def test_values_and_gradients_have_the_same_bits(fn: Callable[..., Any]) -> None:
    graph = capture_loss(fn, inputs={"rewards": "float32[row]"} if fn.__name__ == "grpo" else None)
    executable = sent(graph)
    for rows, tokens in SIZES:
        values = values_for(graph, rows, tokens)
        eager, graphed = leaves(values), leaves(values)
        expected = fn(**eager)
        loss, metrics = expected if isinstance(expected, tuple) else (expected, {})
        torch.autograd.backward(loss)
        found = executable.run(graphed)
        torch.autograd.backward(found["loss"])
        assert same_bits(found["loss"], loss)
        assert set(found) == {"loss"} | {f"metrics.{name}" for name in metrics}
        assert all(same_bits(found[f"metrics.{name}"], value.detach()) for name, value in metrics.items())
        theirs = gradients(graphed)
        assert all(same_bits(theirs[name], gradient) for name, gradient in gradients(eager).items()), (rows, tokens)


def test_a_setting_is_part_of_the_graph() -> None:
    values = values_for(capture_loss(ppo_clip), 4, 6, seed=3)
    logprobs, mask, old_logprobs, advantages = values.values()
    narrow = sent(capture_loss(ppo_clip, settings={"clip": 0.01})).run(values)["loss"]
    assert same_bits(narrow, ppo_clip(logprobs, mask, old_logprobs, advantages, clip=0.01))
    assert not same_bits(narrow, ppo_clip(logprobs, mask, old_logprobs, advantages))


def test_a_loss_is_the_text_of_its_graph() -> None:
    made = gradserve.loss(ppo_clip, clip=0.1)
    assert isinstance(made, str)
    assert made.graph == decode(made)
    assert made.digest == digest(encode(made.graph)) == digest(str(made).encode())
    assert made.fn is ppo_clip
    assert gradserve.loss(ppo_clip, clip=0.1) == made
    assert gradserve.loss(ppo_clip).digest != made.digest


def test_inputs_are_declared() -> None:
    def loss(logprobs: Tensor, group: Tensor, features: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        return (logprobs * features.sum(-1) * weight).sum() + hidden.mean() * group.sum()

    graph = capture_loss(
        loss,
        inputs={
            "group": "int64[row]",
            "features": "float32[token, 5]",
            "hidden": "float32[token, H]",
            "weight": "float32[]",
        },
    )
    assert [(each.name, each.dtype, each.shape) for each in graph.inputs] == [
        ("logprobs", "float32", ["B", "T"]),
        ("group", "int64", ["B"]),
        ("features", "float32", ["B", "T", 5]),
        ("hidden", "float32", ["B", "T", "H"]),
        ("weight", "float32", []),
    ]
    assert graph.symbols == ["B", "T", "H"]
    values = {
        "logprobs": torch.randn(3, 4),
        "group": torch.arange(3),
        "features": torch.randn(3, 4, 5),
        "hidden": torch.randn(3, 4, 7),
        "weight": torch.tensor(0.5),
    }
    assert same_bits(sent(graph).run(values)["loss"], loss(**values))


def test_a_constant_travels_with_the_graph() -> None:
    table = torch.linspace(0, 1, 5)

    def loss(logprobs: Tensor) -> Tensor:
        return (logprobs[:, :5] * table).sum()

    graph = capture_loss(loss)
    values = {"logprobs": torch.randn(2, 9)}
    assert [constant.shape for constant in graph.constants] == [[5]]
    assert same_bits(sent(graph).run(values)["loss"], loss(**values))


def test_a_graph_can_be_read() -> None:
    def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -(logprobs * advantages).sum()

    assert to_text(capture_loss(reinforce)).splitlines() == [
        "graph reinforce over a batch, sizes B, T",
        "  input logprobs: float32[B, T]",
        "  input advantages: float32[B, T]",
        "  mul = aten.mul.Tensor(logprobs, advantages)",
        "  sum_1 = aten.sum.default(mul)",
        "  neg = aten.neg.default(sum_1)",
        "  return loss = neg",
    ]
