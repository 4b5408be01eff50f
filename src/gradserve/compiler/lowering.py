"""An exported program as a Graph: one node per ATen operator, in order, those that nothing needs left out.

torch.export's own form may write into tensors (``total += x``) and holds blocks without gradients as functions. Here
``x.add_(y)`` becomes ``add(x, y)`` where nobody sees ``x`` under another name, and a block under ``torch.no_grad()``
becomes its nodes, their results detached. Nothing is decomposed: running the graph is running what eager would run.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from gradserve.compiler import refusals
from gradserve.compiler.refusals import CaptureError, Place
from gradserve.wire.graph import Constant, Node, Value, references
from gradserve.wire.operators import ARITHMETIC, allowed, impurity

_DROPPED = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
_ALIASES = ("lift_fresh_copy", "lift_fresh", "alias")
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout")
_VALUES = ("item", "_local_scalar_dense")
_FUNCTIONAL = {"zero": "zeros_like", "fill": "full_like"}
"""What an operator that writes is called where its name without the underscore will not do."""

_ARITHMETIC = [op.removeprefix("py.") for op in ARITHMETIC | {"py.getitem"}]
_MATHEMATICS = ("exp", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tanh", "ceil", "floor")

_PYTHON: dict[Callable[..., Any], str] = {
    **{getattr(operator, name): f"py.{name}" for name in _ARITHMETIC},
    **{getattr(math, name): f"py.{name}" for name in _MATHEMATICS},
    torch.sym_float: "py.float",
    torch.sym_int: "py.int",
    torch.sym_max: "py.max",
    torch.sym_min: "py.min",
    torch.sym_not: "py.not_",
}


_IMPURITIES = {"random": refusals.RANDOM, "writes": refusals.BUFFER, "sparse": refusals.SPARSE}


class Lowering:
    """Collects the nodes of a graph. ``taken`` are names of inputs; ``places`` where torch functions were called."""

    def __init__(self, taken: Sequence[str], places: dict[str, Place | None]) -> None:
        self.nodes: list[Node] = []
        self.constants: list[Constant] = []
        self._names = set(taken)
        self._places = places

    def constant(self, name: str, tensor: Tensor) -> Value:
        """A constant of the graph. A tensor that is being trained can't be one: its gradient would be lost."""
        if tensor.requires_grad:
            raise CaptureError(
                "A tensor that requires a gradient is used but is no input; its gradient would be lost.",
                "Detach it, pass it as an input, or capture the module that owns it.",
            )
        constant = Constant(self._fresh(name), _dtype(tensor.dtype), list(tensor.shape), bytes_of(tensor))
        self.constants.append(constant)
        return {"ref": constant.name}

    def node(self, name: str, op: str, args: list[Value], kwargs: dict[str, Value] | None = None) -> Value:
        """One more node; returns the reference to its value."""
        node = Node(self._fresh(name), op, args, kwargs or {})
        self.nodes.append(node)
        return {"ref": node.name}

    def used(self, outputs: list[Value]) -> tuple[list[Node], list[Constant]]:
        """The nodes and constants that ``outputs`` need."""
        needed = set(references(outputs))
        kept = []
        for node in reversed(self.nodes):
            if node.name in needed:
                kept.append(node)
                needed.update(references([node.args, list(node.kwargs.values())]))
        return kept[::-1], [constant for constant in self.constants if constant.name in needed]

    def block(self, graph: fx.Graph, owner: torch.nn.Module, given: Sequence[Value]) -> list[Value]:
        """Add the nodes of ``graph``, its placeholders bound to ``given``; returns its outputs."""
        return _Block(self, graph, owner).run(given)

    def place_of(self, node: fx.Node) -> Place | None:
        """Where the user called what ``node`` does, as well as it is known."""
        target = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
        base = target.strip("_")
        for name in (target, base, f"__{base}__", f"__i{base}__", f"{base}_"):
            if name in self._places:
                return self._places[name]
        return None

    def _fresh(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self._names:
            count += 1
            candidate = f"{name}_{count}"
        self._names.add(candidate)
        return candidate


class _Block:
    """One fx graph on its way into a Lowering. Remembers which values share memory, for what writes."""

    def __init__(self, into: Lowering, graph: fx.Graph, owner: torch.nn.Module) -> None:
        self.into = into
        self.graph = graph
        self.owner = owner
        self.values: dict[fx.Node, Value] = {}
        self.roots: dict[fx.Node, fx.Node] = {}
        self.order = {node: position for position, node in enumerate(graph.nodes)}

    def run(self, given: Sequence[Value]) -> list[Value]:
        waiting = iter(given)
        for node in self.graph.nodes:
            self.roots[node] = node
            if node.op == "placeholder":
                self.values[node] = next(waiting)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                return [self._encode(value, node) for value in node.args[0]]
            elif node.op != "get_attr":
                raise CaptureError(f"A graph can't hold {node.op} {node.target}.", place=self.into.place_of(node))
        raise AssertionError("an exported graph ends with its output")

    def _call(self, node: fx.Node) -> Value:
        target = node.target
        if isinstance(target, HigherOrderOperator):
            return self._nested(node, target)
        if isinstance(target, OpOverload):
            return self._operator(node, target)
        if target is operator.getitem and isinstance(node.args[0], fx.Node):
            self._share(node, node.args[0])
            source = self.values[node.args[0]]
            if isinstance(source, list):  # the results of a block without gradients
                return source[node.args[1]]  # type: ignore[index]
        name = _PYTHON.get(target)  # type: ignore[arg-type]
        if name is None:
            raise CaptureError(f"A graph can't call {target}.", place=self.into.place_of(node))
        return self.into.node(node.name, name, self._encode(list(node.args), node))

    def _nested(self, node: fx.Node, target: HigherOrderOperator) -> Value:
        """A block under torch.no_grad(): its nodes, then a detach of each result."""
        if target._name != "wrap_with_set_grad_enabled":
            raise refusals.CONTROL.at(self.into.place_of(node))
        enabled, body, *given = node.args
        assert isinstance(body, fx.Node)
        module = getattr(self.owner, str(body.target))
        results = self.into.block(module.graph, module, [self._encode(value, node) for value in given])
        if enabled:
            return results
        return [self.into.node(f"{node.name}_detach", "aten.detach.default", [result]) for result in results]

    def _operator(self, node: fx.Node, target: OpOverload) -> Value:
        name = target._opname
        if name.startswith(_DROPPED):
            return None
        if name in _VALUES:
            raise refusals.VALUE.at(self.into.place_of(node))
        if node.meta.get("unbacked_bindings"):
            raise refusals.DATA_DEPENDENT.at(self.into.place_of(node))
        if name in _DROPOUTS and not (node.args[2] and node.args[1]):
            return self._same(node)
        if name in _ALIASES:
            return self._same(node, shares=name != "lift_fresh_copy")
        if target._schema.is_mutable:
            return self._write(node, target)
        if _is_view(target) and isinstance(node.args[0], fx.Node):
            self._share(node, node.args[0])
        return self._emit(node, target)

    def _emit(self, node: fx.Node, target: OpOverload) -> Value:
        op = str(target)
        if target.namespace != "aten" or not allowed(op):
            refusal = refusals.RANDOM if torch.Tag.nondeterministic_seeded in target.tags else None
            place = self.into.place_of(node)
            raise refusal.at(place) if refusal else CaptureError(f"A graph can't use {op}.", place=place)
        args = self._encode(list(node.args), node)
        if target._opname == "slice" and len(args) > 3 and args[3] == sys.maxsize:
            args[3] = None
        kwargs = self._keywords(node)
        impure = impurity(op, args, kwargs)
        if impure is not None:
            raise _IMPURITIES[impure].at(self.into.place_of(node))
        return self.into.node(node.name, op, args, kwargs)

    def _keywords(self, node: fx.Node) -> dict[str, Value]:
        given = {key: value for key, value in node.kwargs.items() if value is not None}
        for default in ("layout", "pin_memory"):
            if given.get(default) in (torch.strided, False):
                del given[default]
        return {key: self._encode(value, node) for key, value in given.items()}

    def _same(self, node: fx.Node, shares: bool = True) -> Value:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if shares:
            self._share(node, source)
        return self.values[source]

    def _share(self, node: fx.Node, source: fx.Node) -> None:
        self.roots[node] = self.roots[source]

    def _write(self, node: fx.Node, target: OpOverload) -> Value:
        """``x.add_(y)`` as ``add(x, y)``: from here on, x and the result are the new value."""
        written = node.args[0]
        name = target._opname.removesuffix("_")
        packet = getattr(torch.ops.aten, _FUNCTIONAL.get(name, name), None)
        functional = getattr(packet, target._overloadname if name not in _FUNCTIONAL else "default", None)
        if not isinstance(written, fx.Node) or functional is None or not target._opname.endswith("_"):
            raise refusals.IN_PLACE.at(self.into.place_of(node))
        self._check_unseen(node, written)
        self._check_dtypes(node, written)
        if name == "zero":
            value = self.into.node(node.name, str(functional), [self.values[written]])
        else:
            value = self._emit(node, functional)
        for other in self._group(written):
            self.values[other] = value
        self._share(node, written)
        return value

    def _group(self, member: fx.Node) -> list[fx.Node]:
        return [node for node, root in self.roots.items() if root is self.roots[member] and node in self.values]

    def _check_unseen(self, node: fx.Node, written: fx.Node) -> None:
        """No value that shares the written one's memory may be used afterwards, unless it is that very value."""
        root = self.roots[written]
        if root.op == "placeholder":
            buffer = str(root.target).startswith(("b_", "p_"))
            raise (refusals.BUFFER if buffer else refusals.IN_PLACE).at(self.into.place_of(node))
        for other in self._group(written):
            same = self.values[other] == self.values[written]
            if not same and any(self.order[user] > self.order[node] for user in other.users):
                raise refusals.ASSIGN.at(self.into.place_of(node))

    def _check_dtypes(self, node: fx.Node, written: fx.Node) -> None:
        """Writing keeps the dtype; a new value would take the wider one."""
        dtype = written.meta["val"].dtype
        others = [value.meta["val"] for value in node.all_input_nodes if isinstance(value.meta.get("val"), Tensor)]
        if any(other.dtype.is_floating_point and other.dtype != dtype for other in others):
            raise refusals.IN_PLACE.at(self.into.place_of(node))

    def _encode(self, value: Any, node: fx.Node) -> Value:
        if isinstance(value, fx.Node):
            return self.values[value]
        if isinstance(value, (list, tuple)):
            return [self._encode(item, node) for item in value]
        encoded = encode_plain(value)
        if encoded is NotImplemented:
            raise CaptureError(
                f"A graph can't hold the argument {value!r} of {node.target}.", place=self.into.place_of(node)
            )
        return encoded


def encode_plain(value: Any) -> Value:
    """A scalar, dtype, device or memory format as a graph holds it; NotImplemented for anything else."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": _dtype(value)}
    if isinstance(value, torch.device):
        return {"device": "any"}
    if value in (torch.contiguous_format, torch.preserve_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    return NotImplemented


def bytes_of(tensor: Tensor) -> bytes:
    """A tensor's items, row-major, in this machine's byte order (little-endian wherever torch runs)."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _dtype(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")


def _is_view(target: OpOverload) -> bool:
    return any(argument.alias_info is not None for argument in target._schema.arguments)
