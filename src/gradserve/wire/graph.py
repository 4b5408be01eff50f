"""Losses and policies as graphs: named inputs, one operator per node, named outputs. Data, never code.

    {"format": "gradserve-graph/1", "name": "reinforce", "over": "batch", "symbols": ["B", "T"],
     "inputs": [{"name": "logprobs", "kind": "input", "dtype": "float32", "shape": ["B", "T"]}, ...],
     "constants": [],
     "nodes": [{"name": "mul", "op": "aten.mul.Tensor", "args": [{"ref": "logprobs"}, {"ref": "advantages"}]}, ...],
     "outputs": [{"name": "loss", "value": {"ref": "neg"}}]}

A graph's name among objects is the SHA-256 of its canonical text, :func:`encode`. :func:`check_structure` checks what
can be checked without torch; compute/engine/graphs does the rest. docs/reference/graph-ir.md describes every field.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from gradserve.wire.errors import Invalid
from gradserve.wire.operators import allowed, impurity

FORMAT: Final = "gradserve-graph/1"

MAX_BYTES: Final = 4 << 20
"""Of a graph's text."""
MAX_NODES: Final = 2000
MAX_INPUTS: Final = 2000
MAX_OUTPUTS: Final = 256
MAX_CONSTANT_BYTES: Final = 1 << 20
"""Of all constants of a loss together."""
MAX_INT: Final = 2**31 - 1
"""Of any integer written in a graph."""
MAX_DEPTH: Final = 4
"""Of lists in lists in a node's arguments."""
MAX_VALUES: Final = 4096
"""Of values in one node's arguments."""
MAX_TEXT: Final = 256
"""Characters of a string in an argument, an einsum's equation for one."""
MAX_RANK: Final = 8
MAX_SYMBOLS: Final = 32

DType = Literal["float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "any"]
"""Of an input. ``any``: as the caller has it, for the public SDK's losses, which declare no dtypes."""

ITEM_BYTES: Final[dict[str, int]] = {
    "float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip

MEMORY_FORMATS: Final = ("contiguous_format", "preserve_format")

Value = Any
"""A JSON scalar, a list of values, or an object with one key:

``{"ref": name}`` a value computed before, ``{"dtype": "float32"}``, ``{"float": "inf" | "-inf" | "nan"}``,
``{"device": "any"}`` the device that the graph runs on, ``{"memory_format": "contiguous_format"}``, and as an index
``{"tuple": [...]}``, ``{"slice": [start, stop, step]}``, ``{"ellipsis": true}``.
"""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything in a graph."""


class Input(_Part, frozen=True):
    """A tensor that is given when the graph runs; ``shape`` are numbers or symbols ([] is a scalar).

    Input("logprobs", "input", "float32", ["B", "T"])
    """

    name: str
    kind: Literal["input", "parameter", "buffer"]
    dtype: DType
    shape: list[int | str]

    def fits(self, shape: Sequence[int], sizes: dict[str, int]) -> bool:
        """Whether a tensor of this shape may be given. ``sizes`` remembers, from input to input, what symbols are.

        >>> sizes = {}
        >>> Input("logprobs", "input", "float32", ["B", "T"]).fits((4, 7), sizes), sizes
        (True, {'B': 4, 'T': 7})
        >>> Input("mask", "input", "float32", ["B", "T"]).fits((4, 8), sizes)
        False
        """
        return len(shape) == len(self.shape) and all(
            (sizes.setdefault(want, size) if isinstance(want, str) else want) == size
            for want, size in zip(self.shape, shape, strict=True)
        )


class Constant(_Part, frozen=True):
    """A tensor that belongs to the graph; ``data`` is little-endian and row-major, base64 in the text."""

    name: str
    dtype: DType
    shape: list[int]
    data: bytes


class Node(_Part, frozen=True, omit_defaults=True):
    """One operator applied to values. Node("mul", "aten.mul.Tensor", [{"ref": "logprobs"}, 2.0])"""

    name: str
    op: str
    args: list[Value]
    kwargs: dict[str, Value] = {}


class Output(_Part, frozen=True):
    """A named result: ``loss``, ``metrics.NAME``, or what a module returns."""

    name: str
    value: Value


class Graph(_Part, frozen=True):
    """``over`` says what one run of it sees: a whole batch, or one row (the losses are then summed)."""

    format: Literal["gradserve-graph/1"]
    name: str
    over: Literal["batch", "row"]
    symbols: list[str]
    inputs: list[Input]
    constants: list[Constant]
    nodes: list[Node]
    outputs: list[Output]

    def names(self, kind: Literal["input", "parameter", "buffer"]) -> list[str]:
        """The names of the inputs of one kind, in order."""
        return [given.name for given in self.inputs if given.kind == kind]


_decoder = msgspec.json.Decoder(Graph)


def encode(graph: Graph) -> bytes:
    """The canonical text of a graph: equal graphs give equal bytes."""
    return msgspec.json.encode(graph, order="deterministic")


def decode(data: bytes | str) -> Graph:
    """The graph in ``data``, its fields typed; check_structure has still to be called. Raises Invalid (graph_*)."""
    size = len(data)
    if size > MAX_BYTES:
        raise Invalid("graph_too_large", f"the graph's text has {size} bytes; at most {MAX_BYTES} are allowed.")
    try:
        # msgspec takes no subclass of str, and gradserve.loss makes one.
        return _decoder.decode(data.encode() if isinstance(data, str) else data)
    except RecursionError:
        raise Invalid("graph_format", "the graph's text nests too deeply.") from None
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise Invalid(
            "graph_format", f"this is no graph: {error}.", fix="gradserve.loss(fn) makes one from a Python function."
        ) from None


def digest(graph_bytes: bytes) -> str:
    """SHA-256 of a graph's canonical text, in hexadecimal: its name among objects."""
    return hashlib.sha256(graph_bytes).hexdigest()


def check_structure(graph: Graph, *, max_constant_bytes: int = MAX_CONSTANT_BYTES) -> None:
    """Raises Invalid (graph_*) unless names are unique, references point back, and operators and sizes are allowed."""
    _check_sizes(graph)
    known: set[str] = set()
    for given in graph.inputs:
        _define(given.name, known)
        _check_shape(given.name, given.shape, set(graph.symbols))
    _check_constants(graph.constants, known, max_constant_bytes)
    for node in graph.nodes:
        _check_node(node, known)
        _define(node.name, known)
    outputs: set[str] = set()
    for output in graph.outputs:
        _define(output.name, outputs)
        if references(output.value) != [output.value.get("ref") if isinstance(output.value, dict) else None]:
            raise Invalid("graph_output", f"output {output.name!r} must be a reference to one value.")
        _check_value(output.value, f"output {output.name!r}", known)


def references(value: Value) -> list[str]:
    """The names that a value refers to, with repetitions, in order."""
    if isinstance(value, list):
        return [name for item in value for name in references(item)]
    if isinstance(value, dict):
        return [value["ref"]] if "ref" in value else [name for item in value.values() for name in references(item)]
    return []


def _check_sizes(graph: Graph) -> None:
    for what, count, most in (
        ("nodes", len(graph.nodes), MAX_NODES),
        ("inputs", len(graph.inputs), MAX_INPUTS),
        ("outputs", len(graph.outputs), MAX_OUTPUTS),
        ("symbols", len(graph.symbols), MAX_SYMBOLS),
    ):
        if count > most:
            raise Invalid(
                "graph_too_large",
                f"graph {graph.name[:64]!r} has {count} {what}; at most {most} are allowed.",
                fix="Loops are written out one by one in a graph: use operations on whole tensors.",
            )
    if not graph.outputs:
        raise Invalid("graph_output", f"graph {graph.name[:64]!r} has no output.")
    if len(graph.name) > MAX_TEXT:
        raise Invalid("graph_name", f"the graph's name has {len(graph.name)} characters; at most {MAX_TEXT}.")
    symbols: set[str] = set()
    for symbol in graph.symbols:
        _define(symbol, symbols)


def _define(name: str, known: set[str]) -> None:
    if not 0 < len(name) <= MAX_TEXT:
        raise Invalid("graph_name", f"{name[:64]!r} is no name: it needs 1 to {MAX_TEXT} characters.")
    if name in known:
        raise Invalid("graph_name", f"the name {name!r} is used twice.", fix="Every value needs its own name.")
    known.add(name)


def _check_shape(name: str, shape: list[int | str] | list[int], symbols: set[str]) -> None:
    if len(shape) > MAX_RANK:
        raise Invalid("graph_shape", f"{name!r} has {len(shape)} dimensions; at most {MAX_RANK} are allowed.")
    for size in shape:
        if isinstance(size, str) and size not in symbols:
            raise Invalid("graph_shape", f"the shape of {name!r} uses {size[:64]!r}, which is not in symbols.")
        if isinstance(size, int) and not 0 <= size <= MAX_INT:
            raise Invalid("graph_shape", f"the shape of {name!r} has the size {_short(size)}.")


def _check_constants(constants: list[Constant], known: set[str], most: int) -> None:
    total = 0
    for constant in constants:
        _define(constant.name, known)
        _check_shape(constant.name, constant.shape, set())
        if constant.dtype == "any":
            raise Invalid("graph_constant", f"constant {constant.name!r} needs a dtype.")
        expected = math.prod(constant.shape) * ITEM_BYTES[constant.dtype]
        if expected != len(constant.data):
            raise Invalid(
                "graph_constant",
                f"constant {constant.name!r} has {len(constant.data)} bytes, its shape and dtype need {expected}.",
            )
        total += expected
    if total > most:
        raise Invalid(
            "graph_too_large",
            f"the graph's constants take {total} bytes; at most {most} are allowed.",
            fix="Send large tensors as inputs of the loss, or as parameters or buffers of the module.",
        )


def _check_node(node: Node, known: set[str]) -> None:
    where = f"node {node.name[:64]!r}"
    if not allowed(node.op):
        raise Invalid(
            "graph_operator",
            f"{where} uses {node.op[:64]!r}, which is not among the allowed operators.",
            fix="They are listed in docs/reference/graph-ir.md; random numbers and values read out of tensors are not.",
        )
    impure = impurity(node.op, node.args, node.kwargs)
    if impure is not None:
        raise Invalid("graph_operator", f"{where} ({node.op}): {_IMPURITIES[impure]}")
    if "out" in node.kwargs:
        raise Invalid("graph_operator", f"{where} writes into an argument (out=).")
    for key in node.kwargs:
        if len(key) > MAX_TEXT:
            raise Invalid("graph_argument", f"{where} has a keyword of {len(key)} characters.")
    values = [*node.args, *node.kwargs.values()]
    if _count(values, 0, where) > MAX_VALUES:
        raise Invalid("graph_argument", f"{where} has more than {MAX_VALUES} values in its arguments.")
    for value in values:
        _check_value(value, where, known)


_IMPURITIES = {
    "random": "a graph draws no random numbers; dropout must be written as 0 or switched off.",
    "writes": "a graph writes into no buffer; statistics must be frozen (training=False).",
    "sparse": "gradients are dense; sparse must be False.",
}


def _count(value: Value, depth: int, where: str) -> int:
    """How many values there are in ``value``; bounds their nesting, so that the functions below may recurse."""
    if depth > MAX_DEPTH:
        raise Invalid("graph_argument", f"{where} nests its arguments more than {MAX_DEPTH} deep.")
    if isinstance(value, list):
        return 1 + sum(_count(item, depth + 1, where) for item in value)
    if isinstance(value, dict):
        return 1 + sum(_count(item, depth, where) for item in value.values())
    return 1


def _check_value(value: Value, where: str, known: set[str]) -> None:
    for scalar in _scalars(value, where, known):
        if isinstance(scalar, str) and len(scalar) > MAX_TEXT:
            raise Invalid("graph_argument", f"{where} has a string of {len(scalar)} characters; at most {MAX_TEXT}.")
        if isinstance(scalar, int) and not isinstance(scalar, bool) and abs(scalar) > MAX_INT:
            raise Invalid("graph_argument", f"{where} has the integer {_short(scalar)}; at most 2^31 - 1 is allowed.")


def _scalars(value: Value, where: str, known: set[str]) -> Iterator[object]:
    """The plain scalars in a value; checks the tagged objects on the way."""
    if isinstance(value, list):
        for item in value:
            yield from _scalars(item, where, known)
        return
    if not isinstance(value, dict):
        yield value
        return
    if len(value) != 1:
        raise Invalid("graph_argument", f"{where} has an object with {len(value)} keys where one is expected.")
    ((tag, content),) = value.items()
    if tag in ("tuple", "slice") and isinstance(content, list) and (tag == "tuple" or len(content) == 3):
        yield from _scalars(content, where, known)
    elif tag == "ref":
        if not isinstance(content, str) or content not in known:
            raise Invalid(
                "graph_reference",
                f"{where} refers to {str(content)[:64]!r}, which is not defined before it.",
                fix="Nodes stand in the order in which they are computed.",
            )
    elif not _is_tagged(tag, content):
        raise Invalid("graph_argument", f"{where} has the argument {tag[:64]!r}: {str(content)[:64]!r}, unknown here.")


_TAGGED: dict[str, tuple[object, ...]] = {
    "dtype": tuple(ITEM_BYTES),
    "float": ("inf", "-inf", "nan"),
    "device": ("any",),
    "memory_format": MEMORY_FORMATS,
    "ellipsis": (True,),
}


def _is_tagged(tag: str, content: Value) -> bool:
    return isinstance(content, (str, bool)) and content in _TAGGED.get(tag, ())


def _short(value: int) -> str:
    """An integer in words that stay short: Python refuses to print one of more than 4300 digits."""
    return str(value) if abs(value) < 10**30 else f"of {value.bit_length()} bits"


def to_text(graph: Graph) -> str:
    """A graph for reading: one line per input, node and output.

    mul = aten.mul.Tensor(logprobs, 2.0)
    """
    lines = [f"graph {graph.name} over a {graph.over}, sizes {', '.join(graph.symbols) or 'fixed'}"]
    lines += [f"  {given.kind} {given.name}: {_typed(given.dtype, given.shape)}" for given in graph.inputs]
    lines += [f"  constant {each.name}: {_typed(each.dtype, each.shape)}" for each in graph.constants]
    lines += [f"  {node.name} = {node.op}({_arguments(node)})" for node in graph.nodes]
    lines += [f"  return {output.name} = {_shown(output.value)}" for output in graph.outputs]
    return "\n".join(lines)


def _typed(dtype: str, shape: list[int | str] | list[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _arguments(node: Node) -> str:
    shown = [_shown(value) for value in node.args]
    return ", ".join(shown + [f"{key}={_shown(value)}" for key, value in node.kwargs.items()])


def _shown(value: Value) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if not isinstance(value, dict):
        return repr(value)
    ((tag, content),) = value.items()
    if tag == "tuple":
        return f"({', '.join(map(_shown, content))})"
    if tag == "slice":
        return ":".join("" if part is None else _shown(part) for part in content)
    return "..." if tag == "ellipsis" else str(content)
