"""What can't be captured is refused where the user wrote it, with the usual cure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradserve.compiler import CaptureError, capture_loss
from tests.graphs import uncapturable

FUNCTIONS = [
    function
    for _, function in inspect.getmembers(uncapturable, inspect.isfunction)
    if function.__module__ == uncapturable.__name__
]


def line_at_fault(function: Callable[..., Any]) -> tuple[int, str]:
    """The marked line's number and the part of the cure that it names."""
    lines, first = inspect.getsourcelines(function)
    ((offset, cure),) = [(i, line.split("# cure: ")[1].strip()) for i, line in enumerate(lines) if "# cure: " in line]
    return first + offset, cure


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_line_and_the_cure_are_named(function: Callable[..., Any]) -> None:
    line, cure = line_at_fault(function)
    with pytest.raises(CaptureError) as refused:
        capture_loss(function)
    error = refused.value
    assert (error.file, error.line) == (uncapturable.__file__, line), str(error)
    assert cure in str(error)
    assert f"{Path(uncapturable.__file__).name}:{line}" in str(error)


def test_tracing_leaves_torch_as_it_was() -> None:
    before = (torch.SymBool.__bool__, torch.SymInt.__index__, torch.distributions.Distribution._validate_args)
    with pytest.raises(CaptureError):
        capture_loss(uncapturable.branches_on_a_value)
    assert (torch.SymBool.__bool__, torch.SymInt.__index__, torch.distributions.Distribution._validate_args) == before


def test_a_check_of_shapes_is_let_through() -> None:
    def loss(logprobs: Tensor, mask: Tensor) -> Tensor:
        assert logprobs.shape == mask.shape
        if logprobs.shape[0] % 2 != 0:
            raise ValueError("rows come in pairs")
        return (logprobs * mask).sum()

    assert [node.op for node in capture_loss(loss).nodes] == ["aten.mul.Tensor", "aten.sum.default"]


@pytest.mark.parametrize(
    ("inputs", "settings", "words"),
    [
        ({"hidden": "float32[token"}, {}, "does not declare"),
        ({"hidden": "complex64[token]"}, {}, "does not declare"),
        ({}, {}, "'hidden' has to be declared"),
        ({"hidden": "float32[token, 8]", "other": "int64[row]"}, {}, "no parameter 'other'"),
        ({"hidden": "float32[token, 8]"}, {"beta": 1.0}, "no parameter 'beta'"),
    ],
)
def test_wrong_declarations_are_refused(inputs: dict[str, str], settings: dict[str, float], words: str) -> None:
    def loss(logprobs: Tensor, hidden: Tensor) -> Tensor:
        return logprobs.sum() + hidden.sum()

    with pytest.raises(CaptureError, match=words):
        capture_loss(loss, inputs=inputs, settings=settings)
