"""Names of operators in a graph -> what computes them: the allow-list's only, and only what returns new tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from gradserve.compute.engine.graphs.guards import guarded
from gradserve.compute.engine.graphs.python import FUNCTIONS
from gradserve.wire.errors import Invalid
from gradserve.wire.operators import FACTORIES, LISTS, allowed

_TENSORS = ("Tensor", "Tensor?", "List[Tensor]", "List[Optional[Tensor]]", "Optional[Tensor]")


@cache
def resolve(op: str) -> Callable[..., Any]:
    """The function of an operator's name. Raises Invalid where it isn't allowed, doesn't exist or would write."""
    if not allowed(op):
        raise Invalid("graph_operator", f"{op[:64]!r} is not among the allowed operators.")
    if op in FUNCTIONS:
        return FUNCTIONS[op]
    namespace, name, *overload = op.split(".")
    packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
    if not isinstance(packet, OpOverloadPacket):
        raise Invalid("graph_operator", f"this server's torch has no operator {op!r}.")
    if not overload:
        return _by_arguments(f"{namespace}.{name}", packet)
    found = getattr(packet, overload[0], None) if len(overload) == 1 else None
    if not isinstance(found, OpOverload) or not _is_pure(found, factory=f"{namespace}.{name}" in FACTORIES):
        raise Invalid("graph_operator", f"{op[:64]!r} is no operator that returns new tensors.")
    return guarded(f"{namespace}.{name}", found)


def _is_pure(overload: OpOverload, factory: bool) -> bool:
    """Takes tensors (or is known to make one), returns tensors or sizes, writes nothing.

    Beside the operators on tensors torch keeps those of TorchScript's lists and strings under the same names.
    """
    schema = overload._schema
    takes = any(str(argument.type) in _TENSORS for argument in schema.arguments)
    sizes = schema.name in ("aten::sym_size", "aten::sym_numel", "aten::dim", "aten::numel")
    gives = all(str(returned.type) in ("Tensor", "List[Tensor]") for returned in schema.returns)
    return not schema.is_mutable and (takes or factory) and (gives or sizes)


def _by_arguments(name: str, packet: OpOverloadPacket) -> Callable[..., Any]:
    """The operator whose overload torch chooses by the arguments, kept away from those on lists and strings."""
    factory, lists = name in FACTORIES, name in LISTS

    def call(*args: Any, **kwargs: Any) -> Any:
        if not factory and not _holds_tensor([*args, *kwargs.values()], nested=lists):
            raise TypeError(f"{name} takes tensors")
        return packet(*args, **kwargs)

    return call


def _holds_tensor(values: Iterable[Any], nested: bool) -> bool:
    return any(
        isinstance(value, Tensor) or (nested and isinstance(value, list) and _holds_tensor(value, nested))
        for value in values
    )
