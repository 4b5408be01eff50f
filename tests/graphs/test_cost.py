"""The dry run: what it counts, worked out by hand, and what it refuses, without computing or allocating."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradserve.compiler import capture_loss, capture_module
from gradserve.compute.engine.graphs import Executable, Limits, measure
from gradserve.wire.errors import Invalid
from gradserve.wire.graph import FORMAT, Graph, Input, Node, Output
from tests.graphs.cases import sent

X = {"ref": "x"}


def graph(*nodes: Node, shape: list[int | str] | None = None, dtype: Any = "float32") -> Graph:
    given = Input("x", "input", dtype, ["B", "T"] if shape is None else shape)
    return Graph(
        FORMAT, "example", "batch", ["B", "T"], [given], [], list(nodes), [Output("y", {"ref": nodes[-1].name})]
    )


def node(op: str, *args: Any, **kwargs: Any) -> Node:
    return Node("y", op, list(args), kwargs)


def test_shapes_bytes_and_operations_by_hand() -> None:
    def loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -(logprobs * advantages).view(-1).sum()

    cost = measure(capture_loss(loss), {"B": 3, "T": 5})
    assert [(each.op, each.shape, each.bytes, each.flops) for each in cost.nodes] == [
        ("aten.mul.Tensor", (3, 5), 60, 30),
        ("aten.view.default", (15,), 0, 0),
        ("aten.sum.default", (), 4, 15),
        ("aten.neg.default", (), 4, 1),
    ]
    assert cost.outputs == {"loss": ()}
    assert (cost.bytes, cost.flops) == (68, 46)
    assert cost.backward_flops > 0


def test_products_are_counted_by_their_formula() -> None:
    linear, _ = capture_module(nn.Linear(8, 4, bias=False), torch.zeros(3, 8))
    assert measure(linear, {"B": 7}).flops == 2 * 7 * 8 * 4
    convolution, _ = capture_module(nn.Conv2d(3, 8, 3, bias=False), torch.zeros(3, 3, 10, 10))
    assert measure(convolution, {"B": 2}).flops == 2 * 2 * (8 * 8) * 8 * (3 * 3 * 3)
    # Two products of 32 x 4 and 32 x 8 per row and step; what else there is (gates) is below a tenth of that.
    lstm, _ = capture_module(nn.LSTM(4, 8, batch_first=True), torch.zeros(3, 5, 4))
    products = 2 * 7 * 5 * 32 * (4 + 8)
    assert products <= measure(lstm, {"B": 7}).flops <= 1.1 * products


def test_the_peak_is_what_is_held_at_once() -> None:
    chain = [Node("n0", "aten.exp", [X])] + [Node(f"n{i}", "aten.neg", [{"ref": f"n{i - 1}"}]) for i in range(1, 20)]
    # exp keeps its result for its gradient; neg keeps nothing: two more tensors while one becomes the next.
    assert measure(graph(*chain), {"B": 10, "T": 10}).peak_bytes == 3 * 400


def rows(count: int) -> Limits:
    return Limits(node_bytes=count * 400, peak_bytes=count * 400, flops=10**6)


@pytest.mark.parametrize(
    ("hostile", "code"),
    [
        (node("aten.expand", X, [10**6, 10, 10]), "graph_too_large"),
        (node("aten.repeat", X, [2**31 - 1, 1]), "graph_too_large"),
        (node("aten.arange", 2**31 - 1, device={"device": "any"}), "graph_too_large"),
        (node("aten.full", [2**31 - 1, 2**20], 1.0), "graph_too_large"),
        (node("aten.pad", X, [2**30, 2**30]), "graph_too_large"),
        (node("aten.eye", 10**9), "graph_too_large"),
        (node("aten.einsum", "ij,kl,mn,op->ikmo", [X] * 4), "graph_too_large"),
        (node("aten.tensor_split", X, 2**31 - 1), "graph_too_large"),
        (node("aten.chunk", X, 2**31 - 1), "graph_too_large"),
        (node("aten.cat", [X] * 100), "graph_too_large"),
        (node("aten.index", X, [X]), "graph_node"),
        (node("py.mul", [X], 10**9), "graph_node"),
        (node("aten.mul", [X], 10**9), "graph_node"),
        (node("py.pow", 10, 10**9), "graph_node"),
        (node("aten.add", "a", "b"), "graph_node"),
        (node("py.getitem", "abc", 0), "graph_node"),
        (node("py.getitem", X, X), "graph_node"),
        (node("py.dtype", "abc"), "graph_node"),
        (node("aten.max_pool2d", X, [0, 0]), "graph_node"),
        (node("aten.unfold", X, 0, 1, 0), "graph_node"),
        (node("aten.add.str", "a", "b"), "graph_operator"),
        (node("aten.mul.left_t", [1], 10**9), "graph_operator"),
        (node("aten.add.out", X, X), "graph_operator"),
        (node("aten.abs.__class__", X), "graph_operator"),
        (node("aten.abs.no_such", X), "graph_operator"),
    ],
)
def test_hostile_nodes_are_refused_without_memory(hostile: Node, code: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Invalid) as refused:
        measure(graph(hostile), {"B": 10, "T": 10}, rows(50))
    assert refused.value.code == code
    if code != "graph_too_large" or "y" in refused.value.detail:
        assert "'y'" in refused.value.detail
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_a_mask_as_index_is_refused_with_the_cure() -> None:
    picks = [Node("m", "aten.gt", [X, 0]), Node("y", "py.getitem", [X, {"ref": "m"}])]
    with pytest.raises(Invalid, match="depends on values") as refused:
        measure(graph(*picks), {"B": 10, "T": 10})
    assert refused.value.code == "graph_data_dependent"
    assert "(x * mask).sum()" in str(refused.value.fix)


def test_many_operations_are_refused() -> None:
    product = [Node(f"n{i}", "aten.matmul", [X, X]) for i in range(20)]
    with pytest.raises(Invalid, match="floating-point operations"):
        measure(graph(*product), {"B": 10, "T": 10}, Limits(flops=20 * 2000 - 1))
    assert measure(graph(*product), {"B": 10, "T": 10}, Limits(flops=20 * 2000)).flops == 20 * 2000


def test_a_dry_run_ends_in_time() -> None:
    chain = [Node("n0", "aten.exp", [X])] + [Node(f"n{i}", "aten.neg", [{"ref": f"n{i - 1}"}]) for i in range(1, 2000)]
    with pytest.raises(Invalid) as refused:
        measure(graph(*chain), {"B": 2, "T": 2}, Limits(seconds=0.001))
    assert refused.value.code == "graph_time"


def test_a_run_ends_at_its_deadline() -> None:
    executable = Executable(graph(node("aten.abs", X)))
    with pytest.raises(Invalid) as refused:
        executable.run({"x": torch.ones(2, 2)}, deadline=0.0)
    assert refused.value.code == "graph_time"


@pytest.mark.parametrize(
    ("state_rows", "weight_rows"), [(2, 32), (3, 16)], ids=["state of another batch", "weights of another size"]
)
def test_a_recurrent_operator_gets_what_fits_only(state_rows: int, weight_rows: int) -> None:
    """torch itself takes the sizes on trust and writes past the end of a buffer."""
    zeros = [Node(f"s{i}", "aten.zeros", [[1, state_rows, 8]]) for i in range(2)]
    weights = [Node(f"w{i}", "aten.zeros", [shape]) for i, shape in enumerate([[weight_rows, 4], [32, 8], [32], [32]])]
    lstm = node(
        "aten.lstm.input", X, [{"ref": "s0"}, {"ref": "s1"}], [{"ref": f"w{i}"} for i in range(4)],
        True, 1, 0.0, False, False, True,
    )  # fmt: skip
    last = Node("z", "py.getitem", [{"ref": "y"}, 0])
    with pytest.raises(Invalid, match="is needed"):
        Executable(graph(*zeros, *weights, lstm, last, shape=[3, 5, 4])).run({"x": torch.ones(3, 5, 4)})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "needs the input 'logprobs'"),
        ({"logprobs": torch.ones(2, 3, dtype=torch.float64), "lengths": torch.ones(2, dtype=torch.int64)}, "float64"),
        ({"logprobs": torch.ones(2), "lengths": torch.ones(2, dtype=torch.int64)}, "'logprobs' must be"),
        ({"logprobs": torch.ones(2, 3), "lengths": torch.ones(4, dtype=torch.int64)}, "'lengths' must be"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Tensor], words: str) -> None:
    def loss(logprobs: Tensor, lengths: Tensor) -> Tensor:
        return logprobs.sum() / lengths.sum()

    with pytest.raises(Invalid, match=words) as refused:
        sent(capture_loss(loss)).run(values)
    assert refused.value.code == "graph_input"


def test_a_loss_must_be_a_scalar_that_has_a_gradient() -> None:
    for y in (node("aten.abs", X), node("aten.argmax", X)):
        made = graph(y)
        made = Graph(
            made.format, "l", "batch", made.symbols, made.inputs, [], made.nodes, [Output("loss", {"ref": "y"})]
        )
        with pytest.raises(Invalid, match="scalar of a floating dtype"):
            measure(made, {"B": 2, "T": 2})
