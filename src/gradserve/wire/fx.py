"""The public SDK's custom losses (create_custom_loss: a torch.fx trace as data) -> Graph.

Such a loss sees one datum at a time; the losses of a request are summed (``over="row"``). fx names what was written:
``torch.exp``, ``operator.mul``, the method ``sum``, the attribute ``shape``. Each becomes the ATen operator of that
name, Python's spelling of its arguments put right, or one of the ``py.*`` operations. What is not known is refused by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

from gradserve.wire.errors import Invalid
from gradserve.wire.graph import (
    FORMAT,
    ITEM_BYTES,
    MAX_RANK,
    MEMORY_FORMATS,
    Graph,
    Input,
    Node,
    Output,
    Value,
    check_structure,
)
from gradserve.wire.operators import ARITHMETIC, FACTORIES, allowed

MAX_INPUTS: Final = 16
TOKENS: Final = "T"
"""The symbol of a datum's number of tokens; the second size of a rank 2 input ``x`` is ``K_x``."""

Kwargs = dict[str, Value]


class FxInput(msgspec.Struct, frozen=True):
    """``rank`` 0 is a scalar, 1 [T], 2 [T, K]."""

    name: str
    rank: Literal[0, 1, 2]


class FxNode(msgspec.Struct, frozen=True):
    """A node as torch.fx records it; arguments as in the SDK's ``CustomLossNode``."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class FxGraph(msgspec.Struct, frozen=True):
    """A traced loss: nodes in the order of execution."""

    nodes: list[FxNode]
    format: Literal[1] = 1


def translate(name: str, inputs: object, graph: object) -> Graph:
    """The Graph of a create_custom_loss request's fields, as JSON objects or as the classes above.

    Outputs are ``loss`` and ``metrics.custom/NAME:sum`` or ``:mean``. Raises Invalid (graph_*), naming the node.
    """
    try:
        given = msgspec.convert(inputs, list[FxInput])
        traced = msgspec.convert(graph, FxGraph)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Invalid("graph_format", f"this is no custom loss: {error}.", field="graph") from None
    if not given or given[0].name != "logprobs" or len(given) > MAX_INPUTS:
        raise Invalid(
            "graph_input", f"a custom loss takes logprobs first and at most {MAX_INPUTS} inputs.", field="inputs"
        )
    translated = _Translation(name, given, traced).graph()
    check_structure(translated)
    return translated


class _Translation:
    def __init__(self, name: str, inputs: list[FxInput], traced: FxGraph) -> None:
        self.name = name
        self.inputs = [_input(each) for each in inputs]
        self.traced = traced
        self.values: dict[str, Value] = {}
        self.tuples: set[str] = set()
        """Names of fx nodes that are a shape, not a number: ``x.view(y.shape)`` isn't ``x.view([y.shape])``."""
        self.nodes: list[Node] = []
        self.taken = {given.name for given in self.inputs}
        self.outputs: list[Output] = []
        self.where = ""
        self.node: FxNode

    def graph(self) -> Graph:
        waiting = iter(self.inputs)
        for node in self.traced.nodes:
            self.where = f"node {node.name[:64]!r} of custom loss {self.name[:64]!r}"
            self.node = node
            if node.op == "placeholder":
                expected = next(waiting, None)
                if expected is None or expected.name != node.target:
                    raise Invalid(
                        "graph_input", f"{self.where} reads {node.target[:64]!r}, which is not its next input."
                    )
                self.values[node.name] = {"ref": expected.name}
            elif node.op == "call_function":
                self.values[node.name] = self._function(node)
            elif node.op == "call_method":
                self.values[node.name] = self._method(node.target, self._list(node.args), self._keywords(node))
            elif node.op == "output":
                self._output(node)
            else:
                raise self.refused(f"uses {node.op} {node.target[:64]!r}", "A custom loss reads its inputs only.")
        symbols = list(dict.fromkeys(size for given in self.inputs for size in given.shape if isinstance(size, str)))
        return Graph(FORMAT, self.name, "row", symbols, self.inputs, [], self.nodes, self.outputs)

    def emit(self, op: str, args: list[Value], kwargs: Kwargs | None = None) -> Value:
        """One node, under the fx node's name; further ones of the same fx node get a number besides."""
        if not allowed(op):
            raise self.refused(f"uses {self.node.target[:64]!r}", "docs/reference/graph-ir.md lists what may be used.")
        name, count = self.node.name, 0
        while name in self.taken:
            count += 1
            name = f"{self.node.name}.{count}"
        self.taken.add(name)
        self.nodes.append(Node(name, op, args, kwargs or {}))
        return {"ref": name}

    # What fx calls functions

    def _function(self, node: FxNode) -> Value:
        if node.target in ("getattr", "builtins.getattr"):
            return self._attribute(node)
        module, _, name = node.target.rpartition(".")
        if module == "operator":
            return self._operator(name, node)
        args, kwargs = self._list(node.args), self._keywords(node)
        if module == "math":
            return self.emit(f"py.{name}", args, kwargs)
        if module == "torch.Tensor":
            return self._method(name, args, kwargs)
        if module not in _TORCH:
            raise self.refused(f"calls {node.target[:64]!r}", "A custom loss uses torch, math and operator only.")
        return self._torch(name, args, kwargs)

    def _operator(self, name: str, node: FxNode) -> Value:
        if name == "getitem" and len(node.args) == 2:
            return self.emit("py.getitem", [self._value(node.args[0]), self._index(node.args[1])])
        op = f"py.{name}"
        if op not in ARITHMETIC:
            raise self.refused(f"uses operator.{name[:64]}", "Write x = x + y instead of x += y.")
        return self.emit(op, self._list(node.args))

    def _attribute(self, node: FxNode) -> Value:
        if len(node.args) != 2 or not isinstance(node.args[1], str):
            raise self.refused("uses getattr with a default")
        value, name = self._value(node.args[0]), node.args[1]
        if name in _FIELDS:  # of what torch.max(x, dim) and the like return
            return self.emit("py.getitem", [value, _FIELDS[name]])
        if name not in _ATTRIBUTES:
            raise self.refused(f"reads the attribute {name[:64]!r}", "Shapes, dtypes, .T and .mT may be read.")
        if name == "shape":
            self.tuples.add(node.name)
        return self.emit(_ATTRIBUTES[name], [value])

    def _torch(self, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        """A function of torch or torch.nn.functional."""
        name = _RENAMED.get(name, name)
        args, kwargs = self._spelled(name, args, kwargs)
        if name in _COMPOSED:
            return _COMPOSED[name](self, args, kwargs)
        if name in _SIZES_FIRST:
            args = [self._packed(args)]
        op = f"aten.{name}"
        if op in FACTORIES:
            kwargs = kwargs | {"device": {"device": "any"}}
        return self.emit(op, args, kwargs)

    def _spelled(self, name: str, args: list[Value], kwargs: Kwargs) -> tuple[list[Value], Kwargs]:
        """Arguments as ATen spells them: names, reductions as numbers, what has no meaning here left out."""
        parameters = _FUNCTIONAL.get(name)
        if parameters is not None:
            kwargs = dict(zip(parameters, args[1:], strict=False)) | kwargs
            args = args[:1]
        kwargs = {_KEYWORDS.get(key, key): value for key, value in kwargs.items()}
        for key in _UNUSED & kwargs.keys():
            if kwargs.pop(key) not in (None, False) and key not in _IGNORED:
                raise self.refused(f"calls {name} with {key}", "That argument must be left out.")
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        if not args and "self" in kwargs:
            args = [kwargs.pop("self")]
        if isinstance(kwargs.get("reduction"), str):
            reduction = str(kwargs["reduction"])
            if reduction not in _REDUCTIONS:
                raise self.refused(f"calls {name} with reduction={reduction[:64]!r}")
            kwargs["reduction"] = _REDUCTIONS[reduction]
        return args, kwargs

    # What fx calls methods

    def _method(self, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        """A method of a tensor, ``args[0]``."""
        if not args:
            raise self.refused(f"calls the method {name[:64]!r} of nothing")
        if name.endswith("_") and not name.endswith("__"):
            raise self.refused(
                f"calls {name[:64]!r}, which writes into its tensor", "Write x = x.add(y), not x.add_(y)."
            )
        if name in _CASTS:
            return self.emit("aten.to.dtype", [args[0], {"dtype": _CASTS[name]}])
        if name in ("cpu", "requires_grad_"):
            return args[0]
        if name == "size" and len(args) == 1 and not kwargs:
            self.tuples.add(self.node.name)
            return self.emit("py.shape", args)
        if name == "size":
            return self.emit("aten.sym_size.int", [args[0], *args[1:], *kwargs.values()])
        if name in _ACCESSORS:
            return self.emit(_ACCESSORS[name], args)
        if name == "to":
            return self._to(args, kwargs)
        if name in _SIZES_AFTER and len(args) > 1:
            args = [args[0], self._packed(args[1:])]
        return self._torch(name, args, kwargs)

    def _to(self, args: list[Value], kwargs: Kwargs) -> Value:
        """``x.to(dtype)`` or ``x.to(other)``; where a loss runs is the server's affair."""
        targets = [
            value
            for value in [*args[1:], *kwargs.values()]
            if not isinstance(value, (str, bool)) and not (isinstance(value, dict) and "device" in value)
        ]
        if not targets:
            return args[0]
        return self.emit("aten.to", [args[0], targets[0]])

    def _packed(self, sizes: list[Value]) -> Value:
        """``view(2, -1)`` and ``view((2, -1))`` mean the same, and so does ``view(y.shape)``."""
        if len(sizes) == 1 and (isinstance(sizes[0], list) or self._is_shape(sizes[0])):
            return sizes[0]
        return sizes

    def _is_shape(self, value: Value) -> bool:
        return isinstance(value, dict) and value.get("ref") in self.tuples

    # Values

    def _list(self, values: Sequence[Any]) -> list[Value]:
        return [self._value(value) for value in values]

    def _keywords(self, node: FxNode) -> Kwargs:
        return {key: self._value(value) for key, value in node.kwargs.items()}

    def _value(self, value: Any, depth: int = 0) -> Value:
        """An argument of the SDK's as one of ours; its tuples are lists."""
        if depth > _MAX_DEPTH:
            raise self.refused("nests its arguments too deeply")
        if isinstance(value, list):
            return [self._value(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise self.refused(f"has an argument with {len(value)} keys")
        ((tag, content),) = value.items()
        if tag == "tuple" and isinstance(content, list):
            return [self._value(item, depth + 1) for item in content]
        if tag == "ref":
            return self._referred(content)
        if tag == "device":
            return {"device": "any"}
        if tag == "layout" and content == "strided":
            return None
        if tag in ("float", "dtype", "memory_format") and content in _PLAIN[tag]:
            return {tag: content}
        raise self.refused(f"has the argument {tag[:64]!r}: {str(content)[:64]!r}")

    def _index(self, value: Any, depth: int = 0) -> Value:
        """What stands in square brackets, where a tuple and a list differ."""
        if depth <= _MAX_DEPTH and isinstance(value, dict):
            ((tag, content),) = value.items() if len(value) == 1 else (("", None),)
            if tag in ("tuple", "slice") and isinstance(content, list):
                return {tag: [self._index(item, depth + 1) for item in content]}
            if tag == "ellipsis":
                return {"ellipsis": True}
        return self._value(value, depth)

    def _referred(self, name: Any) -> Value:
        if not isinstance(name, str) or name not in self.values:
            raise Invalid(
                "graph_reference", f"{self.where} refers to {str(name)[:64]!r}, which is not defined before it."
            )
        return self.values[name]

    def _output(self, node: FxNode) -> None:
        returned = node.args[0] if node.args else None
        parts = returned.get("tuple") if isinstance(returned, dict) else returned
        if not isinstance(parts, list) or len(parts) != 2:
            raise self.refused("must return (loss, metrics)")
        loss, metrics = parts
        names = metrics.get("dict") if isinstance(metrics, dict) else None
        if not isinstance(names, dict):
            raise self.refused("must return its metrics as a dict")
        self.outputs = [Output("loss", self._value(loss))]
        self.outputs += [Output(f"metrics.{key}", self._value(value)) for key, value in names.items()]

    def refused(self, what: str, cure: str | None = None) -> Invalid:
        """The error that says ``what`` the node at hand does."""
        return Invalid("graph_operator", f"{self.where} {what}, which a graph can't hold.", fix=cure)


def _input(given: FxInput) -> Input:
    shape: list[int | str] = [TOKENS, f"K_{given.name}"][: given.rank]  # type: ignore[assignment]
    return Input(given.name, "input", "float32" if given.name == "logprobs" else "any", shape)


# Compositions: what torch.nn.functional and torch.functional write in Python


def _size(t: _Translation, args: list[Value], kwargs: Kwargs) -> Value:
    return t.emit("aten.numel", args)


def _norm(t: _Translation, args: list[Value], kwargs: Kwargs) -> Value:
    """torch.norm: the vector norm, of order 2 unless ``p`` says otherwise."""
    given = dict(zip(("p", "dim", "keepdim", "dtype"), args[1:], strict=False)) | kwargs
    order = given.pop("p", "fro")
    return t.emit("aten.linalg_vector_norm", [args[0], 2 if order == "fro" else order], given)


def _normalize(t: _Translation, args: list[Value], kwargs: Kwargs) -> Value:
    """x / max(norm(x), eps)"""
    norm = t.emit(
        "aten.linalg_vector_norm",
        [args[0], kwargs.get("p", 2.0)],
        {"dim": [kwargs.get("dim", 1)], "keepdim": True},
    )
    return t.emit("aten.div", [args[0], t.emit("aten.clamp_min", [norm, kwargs.get("eps", 1e-12)])])


def _softsign(t: _Translation, args: list[Value], kwargs: Kwargs) -> Value:
    return t.emit("aten.div", [args[0], t.emit("aten.add", [t.emit("aten.abs", [args[0]]), 1])])


def _tanhshrink(t: _Translation, args: list[Value], kwargs: Kwargs) -> Value:
    return t.emit("aten.sub", [args[0], t.emit("aten.tanh", [args[0]])])


def _softmin(t: _Translation, args: list[Value], kwargs: Kwargs) -> Value:
    return t.emit("aten.softmax", [t.emit("aten.neg", [args[0]])], kwargs)


def _einsum(t: _Translation, args: list[Value], kwargs: Kwargs) -> Value:
    operands = args[1] if len(args) == 2 and isinstance(args[1], list) else args[1:]
    return t.emit("aten.einsum", [args[0], operands])


def _kl_div(t: _Translation, args: list[Value], kwargs: Kwargs) -> Value:
    """``batchmean`` divides the sum by the first size."""
    if kwargs.get("reduction") != _REDUCTIONS["batchmean"]:
        return t.emit("aten.kl_div", args, kwargs)
    total = t.emit("aten.kl_div", args, kwargs | {"reduction": _REDUCTIONS["sum"]})
    return t.emit("py.truediv", [total, t.emit("aten.sym_size.int", [args[0], 0])])


def _roll(t: _Translation, args: list[Value], kwargs: Kwargs) -> Value:
    given = dict(zip(("shifts", "dims"), args[1:], strict=False)) | kwargs
    lists = {key: value if isinstance(value, list) else [value] for key, value in given.items()}
    return t.emit("aten.roll", args[:1], lists)


def _tensordot(t: _Translation, args: list[Value], kwargs: Kwargs) -> Value:
    """``dims`` is a pair of lists, or how many of the last and the first dimensions to sum over."""
    dims = kwargs.get("dims", args[2] if len(args) > 2 else 2)
    if isinstance(dims, int):
        dims = [list(range(-dims, 0)), list(range(dims))] if 0 <= dims <= MAX_RANK else None
    if not isinstance(dims, list) or len(dims) != 2:
        raise t.refused("calls tensordot with dims that are neither a small number nor two lists")
    return t.emit("aten.tensordot", [*args[:2], *dims])


Composition = Callable[[_Translation, list[Value], Kwargs], Value]

_COMPOSED: Final[dict[str, Composition]] = {
    "einsum": _einsum,
    "kl_div": _kl_div,
    "norm": _norm,
    "normalize": _normalize,
    "numel": _size,
    "roll": _roll,
    "softmin": _softmin,
    "softsign": _softsign,
    "tanhshrink": _tanhshrink,
    "tensordot": _tensordot,
}

# Spellings

_TORCH: Final = frozenset(
    ["torch", "torch.functional", "torch.nn.functional", "torch.special", "torch.linalg"]
    + [f"torch._C._{part}" for part in ("nn", "special", "linalg", "VariableFunctions")]
)
_RENAMED: Final = {"logsigmoid": "log_sigmoid", "nll_loss": "nll_loss_nd", "cross_entropy": "cross_entropy_loss"}
_FUNCTIONAL: Final = {
    name: parameters.split()
    for name, parameters in {
        "relu": "inplace", "relu6": "inplace", "selu": "inplace", "silu": "inplace", "mish": "inplace",
        "hardsigmoid": "inplace", "hardswish": "inplace", "elu": "alpha inplace", "celu": "alpha inplace",
        "leaky_relu": "negative_slope inplace", "hardtanh": "min_val max_val inplace",
        "threshold": "threshold value inplace", "glu": "dim", "gelu": "approximate", "softplus": "beta threshold",
        "normalize": "p dim eps out", "pad": "pad mode value", "layer_norm": "normalized_shape weight bias eps",
        "mse_loss": "target size_average reduce reduction _unweighted",
        "l1_loss": "target size_average reduce reduction _unweighted",
        "smooth_l1_loss": "target size_average reduce reduction beta",
        "huber_loss": "target reduction delta _unweighted",
        "kl_div": "target size_average reduce reduction log_target",
        "binary_cross_entropy": "target weight size_average reduce reduction",
        "binary_cross_entropy_with_logits": "target weight size_average reduce reduction pos_weight",
        "cross_entropy_loss": "target weight size_average ignore_index reduce reduction label_smoothing",
        "nll_loss_nd": "target weight size_average ignore_index reduce reduction",
        "soft_margin_loss": "target size_average reduce reduction",
        "hinge_embedding_loss": "target margin size_average reduce reduction",
        "margin_ranking_loss": "input2 target margin size_average reduce reduction",
        "softmin": "dim _stacklevel dtype",
    }.items()
}  # fmt: skip
"""Parameters of torch.nn.functional's functions after the first one."""
_KEYWORDS: Final = {"input": "self", "input1": "self", "axis": "dim", "keepdims": "keepdim"}
_IGNORED: Final = frozenset(["device", "_stacklevel"])
"""Arguments that make no difference here."""
_UNUSED: Final = _IGNORED | frozenset(
    ["inplace", "size_average", "reduce", "out", "requires_grad", "generator", "pin_memory", "layout", "_unweighted"]
)
"""Arguments that must be left at None or False, those above apart."""
_REDUCTIONS: Final = {"none": 0, "mean": 1, "sum": 2, "batchmean": 3}
_FIELDS: Final = {"values": 0, "indices": 1}
_ATTRIBUTES: Final = {
    "shape": "py.shape", "ndim": "py.ndim", "dtype": "py.dtype", "device": "py.device", "T": "aten.numpy_T",
    "mT": "aten.mT",
}  # fmt: skip
_ACCESSORS: Final = {
    "dim": "py.ndim", "ndimension": "py.ndim", "numel": "aten.numel", "nelement": "aten.numel",
}  # fmt: skip
_CASTS: Final = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "long": "int64",
    "int": "int32", "short": "int16", "bool": "bool",
}  # fmt: skip
_SIZES_FIRST: Final = frozenset(["zeros", "ones"])
"""Functions that take sizes one by one or as a tuple."""
_SIZES_AFTER: Final = frozenset(
    ["view", "reshape", "expand", "repeat", "permute", "tile", "flip", "new_zeros", "new_ones"]
)
"""Methods that take sizes one by one or as a tuple."""
_PLAIN: Final[dict[str, Sequence[str]]] = {
    "float": ("inf", "-inf", "nan"),
    "dtype": tuple(ITEM_BYTES),
    "memory_format": MEMORY_FORMATS,
}
_MAX_DEPTH: Final = 8
