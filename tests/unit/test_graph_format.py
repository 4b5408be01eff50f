"""The format of graphs: canonical text, and what is refused before torch sees anything."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from gradserve.wire.errors import Invalid
from gradserve.wire.graph import (
    FORMAT,
    MAX_BYTES,
    MAX_NODES,
    Constant,
    Graph,
    Input,
    Node,
    Output,
    check_structure,
    decode,
    digest,
    encode,
    to_text,
)

X = {"ref": "x"}


def graph(*nodes: Node, **changes: Any) -> Graph:
    """``x`` float32 [B, T], then the nodes; the last one is the loss."""
    made = Graph(
        FORMAT,
        "example",
        "batch",
        ["B", "T"],
        [Input("x", "input", "float32", ["B", "T"])],
        [],
        list(nodes) or [Node("total", "aten.sum.default", [X])],
        [Output("loss", {"ref": nodes[-1].name if nodes else "total"})],
    )
    return msgspec.structs.replace(made, **changes)


def node(op: str, *args: Any, **kwargs: Any) -> Node:
    return Node("y", op, list(args), kwargs)


def test_text_is_canonical() -> None:
    first = graph(node("aten.add.Tensor", X, 1.0, b=1, a=2))
    again = decode(json.dumps(json.loads(encode(graph(node("aten.add.Tensor", X, 1.0, a=2, b=1)))), indent=1))
    assert encode(first) == encode(again)
    assert digest(encode(first)) == digest(encode(again))
    assert digest(encode(graph())) != digest(encode(first))


def test_everything_survives_the_text() -> None:
    whole = graph(
        node("aten.where.self", X, [X, {"float": "-inf"}], dtype={"dtype": "float32"}, index={"slice": [None, 1, 2]}),
        constants=[Constant("c", "float32", [2], b"\0\0\x80?\0\0\0@")],
    )
    assert decode(encode(whole)) == whole
    assert decode(encode(whole).decode()) == whole
    check_structure(whole)


def test_a_graph_is_printed_for_people() -> None:
    index = {"tuple": [{"ellipsis": True}, {"slice": [None, 3, None]}]}
    text = to_text(graph(node("py.getitem", X, index), constants=[Constant("c", "int64", [], bytes(8))]))
    assert text.splitlines()[2:] == ["  constant c: int64[]", "  y = py.getitem(x, (..., :3:))", "  return loss = y"]


@pytest.mark.parametrize(
    ("broken", "code", "words"),
    [
        (graph(node("aten.bernoulli.p", X, 0.5)), "graph_operator", "'y' uses 'aten.bernoulli.p'"),
        (graph(node("prims.add", X, X)), "graph_operator", "prims.add"),
        (graph(node("os.system", "true")), "graph_operator", "os.system"),
        (graph(node("py.__import__", "os")), "graph_operator", "py.__import__"),
        (graph(node("aten.add_.Tensor", X, 1)), "graph_operator", "aten.add_"),
        (graph(node("aten.item", X)), "graph_operator", "aten.item"),
        (graph(node("aten.add.out", X, X, out=X)), "graph_operator", "writes into an argument"),
        (
            graph(node("aten.batch_norm.default", X, None, None, X, X, True, 0.1, 1e-5, False)),
            "graph_operator",
            "buffer",
        ),
        (graph(node("aten.batch_norm.default", X, None, None, X, X, X, 0.1, 1e-5, False)), "graph_operator", "buffer"),
        (graph(node("aten.gru.input", X, X, [X], True, 1, 0.5, True, False, True)), "graph_operator", "random"),
        (graph(node("aten.scaled_dot_product_attention", X, X, X, None, 0.1)), "graph_operator", "random"),
        (graph(node("aten.embedding.default", X, X, -1, False, True)), "graph_operator", "sparse"),
        (graph(node("aten.abs", {"ref": "later"})), "graph_reference", "'later'"),
        (graph(node("aten.abs", {"ref": "y"})), "graph_reference", "not defined before"),
        (graph(node("aten.abs", {"ref": 3})), "graph_reference", "'3'"),
        (graph(node("aten.abs", {"code": "1"})), "graph_argument", "'code'"),
        (graph(node("aten.abs", {"dtype": "object"})), "graph_argument", "object"),
        (graph(node("aten.abs", {"float": "1e5"})), "graph_argument", "1e5"),
        (graph(node("aten.abs", {"device": "cuda"})), "graph_argument", "cuda"),
        (graph(node("aten.abs", {"slice": [1, 2]})), "graph_argument", "slice"),
        (graph(node("aten.abs", {"ref": "x", "dtype": "float32"})), "graph_argument", "2 keys"),
        (graph(node("aten.abs", [[[[[X]]]]])), "graph_argument", "deep"),
        (graph(node("aten.abs", [0] * 5000)), "graph_argument", "4096"),
        (graph(node("aten.full", [2**31], 0.0)), "graph_argument", "2147483648"),
        (graph(node("aten.full", [10**5000], 0.0)), "graph_argument", "bits"),
        (graph(node("aten.einsum", "i" * 300, [X])), "graph_argument", "300 characters"),
        (graph(Node("x", "aten.abs", [X])), "graph_name", "'x' is used twice"),
        (graph(Node("", "aten.abs", [X])), "graph_name", "no name"),
        (graph(name="n" * 300), "graph_name", "300 characters"),
        (graph(outputs=[]), "graph_output", "no output"),
        (graph(outputs=[Output("loss", 1.0)]), "graph_output", "reference"),
        (graph(outputs=[Output("loss", [X, X])]), "graph_output", "reference"),
        (graph(outputs=[Output("loss", {"ref": "z"})]), "graph_reference", "'z'"),
        (graph(outputs=[Output("loss", X), Output("loss", X)]), "graph_name", "twice"),
        (graph(symbols=["B"]), "graph_shape", "'T'"),
        (graph(symbols=["B", "B"]), "graph_name", "twice"),
        (graph(inputs=[Input("x", "input", "float32", [-1])]), "graph_shape", "-1"),
        (graph(inputs=[Input("x", "input", "float32", [1] * 9)]), "graph_shape", "9 dimensions"),
        (graph(constants=[Constant("c", "float32", [2], b"1234")]), "graph_constant", "4 bytes"),
        (graph(constants=[Constant("c", "any", [], b"")]), "graph_constant", "dtype"),
        (graph(constants=[Constant("c", "uint8", [2**21], bytes(2**21))]), "graph_too_large", "constants"),
        (graph(*[Node(f"n{i}", "aten.abs", [X]) for i in range(MAX_NODES + 1)]), "graph_too_large", "2001 nodes"),
    ],
)
def test_what_is_wrong_is_named(broken: Graph, code: str, words: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_structure(broken)
    assert refused.value.code == code
    assert words in refused.value.detail


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        "\ud800",
        b'{"format":"gradserve-graph/2"}',
        b"[" * 100_000,
        encode(graph()).replace(b'"nodes"', b'"knots"'),
        encode(graph()).replace(b'"nodes"', b'"more":1,"nodes"'),
        encode(graph()).replace(b'"batch"', b'"world"'),
        encode(graph(node("aten.abs", X))).replace(b'{"ref":"x"}', b"[" * 5000 + b"]" * 5000),
        encode(graph(constants=[Constant("c", "uint8", [3], b"abc")])).replace(b"YWJj", b"???"),
    ],
    ids=range(12),
)
def test_what_is_no_graph_is_refused(text: bytes | str) -> None:
    with pytest.raises(Invalid) as refused:
        check_structure(decode(text))
    assert refused.value.code in ("graph_format", "graph_argument")


def test_a_text_that_is_too_long_is_not_read() -> None:
    with pytest.raises(Invalid) as refused:
        decode(b" " * (MAX_BYTES + 1))
    assert refused.value.code == "graph_too_large"


def test_larger_constants_where_the_caller_allows_them() -> None:
    check_structure(graph(constants=[Constant("c", "uint8", [2**21], bytes(2**21))]), max_constant_bytes=2**22)


def test_reading_a_graph_needs_no_torch() -> None:
    program = "import sys, gradserve, gradserve.wire.fx, gradserve.compiler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_symbol_stands_for_one_size() -> None:
    logprobs, mask = (Input(name, "input", "float32", ["B", "T", 3]) for name in ("logprobs", "mask"))
    for shape, fits in (((4, 7, 3), True), ((4, 8, 3), False), ((5, 7, 3), False), ((4, 7, 2), False), ((4, 7), False)):
        sizes: dict[str, int] = {}
        assert logprobs.fits((4, 7, 3), sizes)
        assert sizes == {"B": 4, "T": 7}
        assert mask.fits(shape, sizes) is fits
    assert not Input("square", "input", "float32", ["B", "B"]).fits((2, 3), {})
    assert Input("scalar", "input", "float32", []).fits((), {})
