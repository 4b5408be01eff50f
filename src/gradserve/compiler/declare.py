"""Declarations of inputs: ``float32[token, 5]`` is a dtype and one size per dimension.

A size is a number, ``row`` (one item per row), ``token`` (one per row and token: two sizes) or another symbol.
"""

from __future__ import annotations

import re
from typing import get_args

from gradserve.compiler.refusals import CaptureError
from gradserve.wire.graph import DType, Input

BATCH = "B"
"""The symbol of the number of rows."""
TOKENS = "T"
"""The symbol of the length of the longest row."""

_DECLARATION = re.compile(r"\s*(\w+)\s*\[([\w\s,]*)\]\s*")
_AXES = {"row": [BATCH], "token": [BATCH, TOKENS]}
_KNOWN = {"lengths": "int64[row]", "target_tokens": "int64[token]"}
_UNDECLARED = {
    "topk_logprobs": "float32[token, K] with K the number of log-probs wanted",
    "hidden": "float32[token, H] with H the model's hidden size",
}


def declared(name: str, text: str | None) -> Input:
    """The input that ``text`` declares; without a text the usual one of that name. Raises CaptureError.

    >>> declared("group", "int64[row]").shape
    ['B']
    """
    if text is None:
        if name in _UNDECLARED:
            raise CaptureError(f"{name!r} has to be declared:", f"inputs={{{name!r}: ...}}, {_UNDECLARED[name]}.")
        text = _KNOWN.get(name, "float32[token]")
    found = _DECLARATION.fullmatch(text)
    if found is None or found[1] not in get_args(DType) or found[1] == "any":
        raise CaptureError(
            f"{text!r} does not declare the input {name!r}.",
            "Write a dtype and sizes, e.g. 'float32[token]', 'int64[row]' or 'float32[token, 5]'.",
        )
    sizes = [size.strip() for size in found[2].split(",") if size.strip()]
    shape = [part for size in sizes for part in _AXES.get(size, [int(size) if size.isdigit() else size])]
    return Input(name, "input", found[1], shape)  # type: ignore[arg-type]


def symbols_of(inputs: list[Input]) -> list[str]:
    """The symbols that the inputs' shapes use, in order of appearance."""
    return list(dict.fromkeys(size for given in inputs for size in given.shape if isinstance(size, str)))
