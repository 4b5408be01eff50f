"""Graphs gone wrong: by accident, or because somebody means harm."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

from gradserve.wire.graph import ITEM_BYTES
from gradserve.wire.operators import ATEN, PYTHON

Document = dict[str, Any]

_OPERATORS = sorted(ATEN | PYTHON)
_OVERLOADS = ("", "", "", ".default", ".Tensor", ".Scalar", ".int", ".dim", ".dim_IntList", ".input", ".self", ".out")
_FOREIGN = (
    "aten.rand",
    "aten.item",
    "aten.add_.Tensor",
    "aten.set_",
    "prims.sin",
    "os.system",
    "py.eval",
    "",
    ".",
    "aten.",
)
_INTEGERS = (-1, 0, 1, 2, 3, 7, 64, 4097, 10**6, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 10**30)
_STRINGS = ("", "none", "reflect", "i,i->", "ij,jk->ik", "...", "i" * 200, "circular", "sum", "tanh", "\0", "ii->i")


def mutated(document: Document, random: Random) -> Document:
    """One to three faults in a copy of a graph's document; mostly one, which goes deepest."""
    made = copy.deepcopy(document)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        random.choice(_FAULTS)(made, random)
    return made


def text_of(document: Document, random: Random) -> bytes:
    """The document's text, now and then cut or with a byte changed."""
    text = bytearray(json.dumps(document).encode())
    if random.random() < 0.05:
        del text[random.randrange(len(text)) :]
    elif random.random() < 0.05:
        text[random.randrange(len(text))] = random.randrange(256)
    return bytes(text)


def _node(document: Document, random: Random) -> Document:
    if not document["nodes"]:
        document["nodes"].append({"name": "n", "op": "aten.ones", "args": [[2]]})
    node: Document = random.choice(document["nodes"])
    return node


def _name(document: Document, random: Random) -> str:
    names = [part["name"] for kind in ("inputs", "constants", "nodes") for part in document[kind]]
    name: str = random.choice([*names, "nothing"])
    return name


def value(document: Document, random: Random, depth: int = 0) -> Any:
    """Any argument."""
    kind = random.randrange(12)
    if kind < 5:
        return {"ref": _name(document, random)}
    if kind < 8:
        return random.choice(_INTEGERS[:9] if random.random() < 0.9 else _INTEGERS)
    if kind == 8 and depth < 6:
        return [value(document, random, depth + 1) for _ in range(random.randrange(5))]
    plain: list[Any] = [
        None, True, False, 0.0, 0.5, -1e300, 1e-300, random.choice(_STRINGS), {"dtype": random.choice([*ITEM_BYTES])},
        {"float": random.choice(["inf", "nan", "-inf", "1"])}, {"memory_format": "contiguous_format"},
        {"device": "any"}, {"ellipsis": True}, {"slice": [None, random.choice(_INTEGERS), None]},
        {"tuple": [{"slice": [None, None, None]}, 0]}, {"ref": 5}, {"ref": None}, {"code": "1"}, {}, [[]],
    ]  # fmt: skip
    return random.choice(plain)


def _drop(document: Document, random: Random) -> None:
    if len(document["nodes"]) > 1:
        document["nodes"].remove(_node(document, random))


def _duplicate(document: Document, random: Random) -> None:
    document["nodes"].insert(random.randrange(len(document["nodes"]) + 1), dict(_node(document, random)))


def _rename(document: Document, random: Random) -> None:
    _node(document, random)["name"] = random.choice([_name(document, random), "fresh", "", "n" * 1000])


def _swap_operator(document: Document, random: Random) -> None:
    foreign = random.random() < 0.1
    op = random.choice(_FOREIGN) if foreign else random.choice(_OPERATORS) + random.choice(_OVERLOADS)
    _node(document, random)["op"] = op


def _swap_argument(document: Document, random: Random) -> None:
    args = _node(document, random)["args"]
    if args:
        args[random.randrange(len(args))] = value(document, random)


def _more_arguments(document: Document, random: Random) -> None:
    _node(document, random)["args"].append(value(document, random))


def _fewer_arguments(document: Document, random: Random) -> None:
    args = _node(document, random)["args"]
    if args:
        args.pop()


def _keyword(document: Document, random: Random) -> None:
    name = random.choice(["dim", "keepdim", "dtype", "out", "device", "reduction", "alpha", "min", "other", "x" * 300])
    _node(document, random).setdefault("kwargs", {})[name] = value(document, random)


def _new_node(document: Document, random: Random) -> None:
    """A node that grows out of the graph's values, and what follows uses it."""
    op = random.choice(_OPERATORS) + random.choice(_OVERLOADS)
    args = [value(document, random) for _ in range(random.randrange(5))]
    if random.random() < 0.7:
        args.insert(0, {"ref": _name(document, random)})
    position = random.randrange(len(document["nodes"]) + 1)
    name = f"new{random.randrange(1000)}"
    document["nodes"].insert(position, {"name": name, "op": op, "args": args})
    if random.random() < 0.5 and position + 1 < len(document["nodes"]):
        later = document["nodes"][position + 1]["args"]
        if later:
            later[0] = {"ref": name}


def _grow(document: Document, random: Random) -> None:
    """Something that would be very large."""
    x = {"ref": _name(document, random)}
    big = random.choice([10**6, 10**9, 2**31 - 1])
    op, args = random.choice(
        [
            ("aten.expand", [x, [big, -1, -1]]), ("aten.arange", [big]), ("aten.repeat", [x, [big, 1, 1]]),
            ("aten.pad", [x, [big, big]]), ("aten.full", [[big, big], 1.0]), ("aten.zeros", [[big]]),
            ("aten.one_hot", [x, big]), ("aten.eye", [big]), ("aten.tile", [x, [big, big]]), ("aten.split", [x, 1]),
            ("aten.tensor_split", [x, big]), ("aten.chunk", [x, big]), ("aten.outer", [x, x]),
            ("aten.repeat_interleave", [x, big]), ("aten.linspace", [0, 1, big]), ("aten.unfold", [x, 0, 1, 0]),
            ("aten.diff", [x, big]), ("aten.py", [x]), ("py.mul", [[x], big]), ("py.pow", [big, big]),
            ("aten.upsample_nearest2d", [x, [big, big]]), ("aten.max_pool2d", [x, [0, 0], [0, 0]]),
            ("aten.conv2d", [x, x, None, [0, 0], [big, big], [0, 0], 0]), ("aten.mul", [[x], big]),
            ("aten.einsum", ["ij,kl,mn,op,qr->ikmoq", [x] * 5]), ("aten.constant_pad_nd", [x, [big] * 4]),
            ("aten.diag_embed", [x, big]), ("aten.narrow", [x, 0, -big, big]), ("aten.roll", [x, [big], [0]]),
            ("aten.cat", [[x] * 4000]), ("aten.broadcast_to", [x, [big, big, 1]]), ("aten.rot90", [x, big]),
            ("aten.scalar_tensor", [big]), ("aten.meshgrid", [[x] * 40]), ("aten.pixel_shuffle", [x, big]),
            ("aten.gru.input", [x, x, [x] * 4, True, big, 0.0, False, False, True]),
        ]
    )  # fmt: skip
    name = f"big{random.randrange(1000)}"
    document["nodes"].append({"name": name, "op": op, "args": args})
    document["outputs"][0]["value"] = {"ref": name}


def _double(document: Document, random: Random) -> None:
    """A chain that doubles a tensor at every node."""
    last = _name(document, random)
    for i in range(random.choice([8, 40])):
        name = f"double{i}.{random.randrange(10**6)}"
        document["nodes"].append({"name": name, "op": "aten.cat", "args": [[{"ref": last}] * 2]})
        last = name
    document["outputs"][0]["value"] = {"ref": last}


def _input(document: Document, random: Random) -> None:
    given = random.choice(document["inputs"])
    if random.random() < 0.5:
        given["dtype"] = random.choice([*ITEM_BYTES, "any", "complex64"])
    else:
        given["shape"] = random.choice([[], ["B"], ["B", "T"], ["T", "B", 3], [0], [0, "T"], ["Z"], [-1], [10**9]])


def _constant(document: Document, random: Random) -> None:
    document["constants"].append(
        {
            "name": "more",
            "dtype": random.choice([*ITEM_BYTES]),
            "shape": [random.choice([0, 2, 10**9])],
            "data": "AAAAAAAAAAA=",
        }
    )


def _output(document: Document, random: Random) -> None:
    document["outputs"][0] = {"name": random.choice(["loss", "metrics.x"]), "value": {"ref": _name(document, random)}}


def _shuffle(document: Document, random: Random) -> None:
    random.shuffle(document["nodes"])


def _field(document: Document, random: Random) -> None:
    key = random.choice([*document])
    document[key] = random.choice([None, [], {}, 5, "row", document[key]])
    document.update(
        {kind: document[kind] if isinstance(document[kind], list) else [] for kind in ("inputs", "constants", "nodes")}
    )
    document["inputs"] = document["inputs"] or [{"name": "x", "kind": "input", "dtype": "float32", "shape": [2]}]
    if not isinstance(document["outputs"], list) or not document["outputs"]:
        document["outputs"] = [{"name": "loss", "value": {"ref": _name(document, random)}}]


_FAULTS = [
    _drop, _duplicate, _rename, _swap_operator, _swap_operator, _swap_operator, _swap_argument, _swap_argument,
    _swap_argument, _more_arguments, _fewer_arguments, _keyword, _new_node, _new_node, _new_node, _grow, _grow, _double,
    _input, _constant, _output, _shuffle, _field,
]  # fmt: skip
