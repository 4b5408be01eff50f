"""Python's operators as graphs use them: on tensors, and on sizes and numbers of bounded length.

Sequences are only indexed, never added or repeated, and powers of integers stay small: nothing here can be made to take
long or to allocate.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import SymFloat, SymInt, Tensor

from gradserve.wire.operators import ARITHMETIC, NUMBERS

MAX_INTEGER: Final = 2**63 - 1
"""Of a result: what torch can take as a size."""
_MAX_EXPONENT: Final = 64

Function = Callable[..., Any]


def _number(value: Any) -> bool:
    """Also a size that stands for many, as torch.export has them (export/onnx_file.py)."""
    return isinstance(value, (bool, int, float, SymInt, SymFloat))


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise OverflowError("an integer exceeds 2^63 - 1")
    return value


def _arithmetic(name: str) -> Function:
    apply = getattr(operator, name)

    def call(*operands: Any) -> Any:
        tensors = False
        for operand in operands:
            if isinstance(operand, Tensor):
                tensors = True
            elif not _number(operand):
                raise TypeError(f"py.{name} takes tensors and numbers, not {type(operand).__name__}")
        return apply(*operands) if tensors else _bounded(apply(*operands))

    return call


def _pow(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) > _MAX_EXPONENT:
        raise OverflowError(f"py.pow of integers takes exponents up to {_MAX_EXPONENT}")
    return _arithmetic("pow")(base, exponent)


_BUILTINS: dict[str, Function] = {
    "bool": bool,
    "float": float,
    "int": int,
    "max": max,
    "min": min,
    "not_": operator.not_,
    "prod": math.prod,
    "sum": sum,
}


def _numeric(name: str) -> Function:
    apply: Function = _BUILTINS.get(name) or getattr(math, name)

    def call(*numbers: Any) -> Any:
        flat = numbers[0] if len(numbers) == 1 and isinstance(numbers[0], (list, tuple)) else numbers
        if not all(map(_number, flat)):
            raise TypeError(f"py.{name} takes numbers; for tensors there is the torch function of that name")
        return _bounded(apply(*numbers))

    return call


def _getitem(value: Any, index: Any) -> Any:
    if not isinstance(value, (Tensor, Sequence)) or isinstance(value, str):
        raise TypeError(f"py.getitem takes a tensor or a tuple, not {type(value).__name__}")
    return value[index]


def _attribute(name: str) -> Function:
    def call(value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise TypeError(f"py.{name} takes a tensor, not {type(value).__name__}")
        found = getattr(value, name)
        return tuple(found) if name == "shape" else found

    return call


FUNCTIONS: Final[dict[str, Function]] = {
    **{op: _arithmetic(op.removeprefix("py.")) for op in ARITHMETIC},
    **{op: _numeric(op.removeprefix("py.")) for op in NUMBERS},
    "py.pow": _pow,
    "py.getitem": _getitem,
    **{f"py.{name}": _attribute(name) for name in ("shape", "ndim", "dtype", "device")},
}
