"""Runs that train a module, and custom losses: what is answered to every kind of bad request, and that runs go on."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gradserve.compute.safetensors_file import dump, layout
from gradserve.store.base import RunUpdate
from gradserve.store.wakeups import Ask, CheckGraph
from gradserve.wire import graph as ir
from gradserve.wire.data import Array
from gradserve.wire.graph import Graph, Input, Node, Output
from gradserve.wire.ops import ApplyGraph, CreateModule, OptimStep, PutTrajectory, Rollout, UpdatePolicy, decode_body
from tests.contract.gateway.gate import Gate, batch, opened, problem, row

MINE, THEIRS = "tml-alice-0123456789abcdef", "tml-bob-0123456789abcdef"
PACKED = {"Content-Type": "application/msgpack"}

POLICY = Graph(
    "gradserve-graph/1",
    "policy",
    "batch",
    ["B"],
    [Input("w", "parameter", "float32", [2, 3]), Input("obs", "input", "float32", ["B", 3])],
    [],
    [
        Node("logits", "aten.linear.default", [{"ref": "obs"}, {"ref": "w"}]),
        Node("value", "aten.sum.dim_IntList", [{"ref": "obs"}, [1]]),
    ],
    [Output("logits", {"ref": "logits"}), Output("value", {"ref": "value"})],
)
LOSS = Graph(
    "gradserve-graph/1",
    "loss",
    "batch",
    ["B", "T"],
    [Input("logprobs", "input", "float32", ["B", "T"]), Input("worth", "input", "float32", ["B"])],
    [],
    [
        Node("mean", "aten.sum.dim_IntList", [{"ref": "logprobs"}, [1]]),
        Node("each", "aten.mul.Tensor", [{"ref": "mean"}, {"ref": "worth"}]),
        Node("total", "aten.sum.default", [{"ref": "each"}]),
    ],
    [Output("loss", {"ref": "total"})],
)
ONES = np.ones((4, 4), np.float32)
WEIGHTS = dump({"w": np.zeros((2, 3), np.float32)})
TRAJECTORY = {
    "observations": ("F32", (4, 2, 3)),
    "actions": ("F32", (4, 2, 1)),
    **dict.fromkeys(("logprobs", "values", "next_values", "rewards"), ("F32", (4, 2))),
    **dict.fromkeys(("terminated", "truncated", "valid"), ("BOOL", (4, 2))),
}


def zeros(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """A safetensors file of zeros."""
    header, _ = layout(tensors, None)
    size = sum(int(np.prod(shape)) * (4 if dtype == "F32" else 1) for dtype, shape in tensors.values())
    return header + bytes(size)


def described_as(first: int, end: int, dtype: str = "F32") -> bytes:
    """A file of 24 bytes whose header says where in them a [2, 3] lies."""
    header = json.dumps({"w": {"dtype": dtype, "shape": [2, 3], "data_offsets": [first, end]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(24)


def text(graph: Graph) -> str:
    return ir.encode(graph).decode()


def changed(graph: Graph, **fields: Any) -> str:
    return text(msgspec.structs.replace(graph, **fields))


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gateway whose graphs pass every dry run."""
    with opened(tmp_path, api_keys=(MINE, THEIRS)) as made:
        made.key = MINE

        def ask(what: Ask) -> asyncio.Future[Any]:
            assert isinstance(what, CheckGraph)
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            answer.set_result(None)
            return answer

        monkeypatch.setattr(made.wakeups, "ask", ask)
        yield made


def packed(gate: Gate, path: str, **fields: Any) -> Any:
    return gate.call("POST", path, content=msgspec.msgpack.encode(fields), headers=PACKED)


def create(gate: Gate, session: str | None = None, **fields: Any) -> Any:
    body = {"session_id": session or gate.session(), "model_seq_id": 0, "graph": text(POLICY), "weights": WEIGHTS}
    return packed(gate, "gradserve/modules", **{**body, **fields})


@pytest.fixture
def run(gate: Gate) -> str:
    """A module run whose creation has been settled."""
    run_id: str = create(gate).json()["model_id"]
    body = decode_body(gate.op(f"{run_id}:op:0").body)
    assert isinstance(body, CreateModule)
    gate.settle(f"{run_id}:op:0", b"{}", run=RunUpdate(run_id, 0, body.weights, None, ()))
    return run_id


def test_a_module_is_its_graph_and_its_weights(gate: Gate, run: str) -> None:
    body = decode_body(gate.op(f"{run}:op:0").body)
    digest = ir.digest(ir.encode(POLICY))
    assert isinstance(body, CreateModule)
    assert body.graph == digest
    assert gate.objects.verified_path(body.weights).read_bytes() == WEIGHTS
    answer = gate.get(f"gradserve/runs/{run}/weights")
    assert (answer.content, answer.headers["x-gradserve-weights"]) == (WEIGHTS, body.weights)
    assert gate.get(f"training_runs/{run}").json()["base_model"] == f"module:{digest}"


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"graph": "{}"}, "graph_format", None),
        ({"graph": changed(POLICY, over="row")}, "graph.over", "graph"),
        ({"graph": text(POLICY).replace("aten.linear.default", "aten.system")}, "graph_operator", None),
        ({"weights": b"12345678"}, "weights.malformed", "weights"),
        ({"weights": WEIGHTS[:-1]}, "weights.malformed", "weights"),
        ({"weights": described_as(0, 8)}, "weights.malformed", "weights"),
        ({"weights": described_as(-8, 16)}, "weights.malformed", "weights"),
        ({"weights": described_as(0, 24, dtype="F8")}, "weights.malformed", "weights"),
        ({"weights": dump({"w": np.zeros((3, 3), np.float32)})}, "weights.shape", "weights.w"),
        ({"weights": dump({"w": ONES[0:2, 0:3], "x": ONES})}, "weights.unknown", "weights.x"),
        ({"weights": dump({})}, "weights.missing", "weights.w"),
        ({"model_seq_id": -1}, "seq.range", "model_seq_id"),
        ({"weights": 3}, "body.type", "weights"),
        ({"colour": 3}, "body.unknown_field", "colour"),
    ],
)  # fmt: skip
def test_a_module_that_does_not_fit_is_refused(
    gate: Gate, fields: dict[str, Any], code: str, field: str | None
) -> None:
    session = gate.session()
    found = problem(create(gate, session, **fields))
    assert (found["code"], found.get("field")) == (code, field)
    assert create(gate, session).status_code == 200


ENV = {"id": "CartPole-v1"}
SPEC = {"env": ENV, "num_envs": 2, "steps": 4, "seed": 0}
JSON: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("rollout", {"spec": {**SPEC, "num_envs": 0}}, "bad_control", "num_envs"),
    ("rollout", {"spec": {**SPEC, "env": {"id": "os:system"}}}, "bad_control", "env.id"),
    ("rollout", {"spec": {**SPEC, "env": {"id": "CartPole-v1", "kwargs": {"render_mode": "human"}}}}, "bad_control",
     "env.kwargs.render_mode"),
    ("rollout", {"spec": {**SPEC, "colour": 1}}, "body.unknown_field", "spec.colour"),
    ("update", {"config": {}}, "update.actions", "env"),
    ("update", {"config": {}, "env": ENV, "space": {"kind": "discrete", "nvec": [2]}}, "update.actions", "env"),
    ("update", {"config": {"epochs": 0}, "env": ENV}, "bad_control", "epochs"),
    ("update", {"config": {"learning_rate": -1.0}, "env": ENV}, "bad_control", "learning_rate"),
    ("update", {"config": {}, "env": ENV, "seed": -1}, "seed.range", "seed"),
    ("evaluate", {"env": ENV, "episodes": 0}, "evaluate.episodes", "episodes"),
    ("optim_step", {"sgd": {"learning_rate": -1.0}}, "optim.range", "sgd.learning_rate"),
    ("optim_step", {"sgd": {"learning_rate": 1.0, "nesterov": True}}, "optim.nesterov", "sgd.nesterov"),
    ("optim_step", {"sgd": {"learning_rate": 1.0}, "adam": {"learning_rate": 1.0}}, "optim.both", "sgd"),
    ("optim_step", {}, "body.missing_field", "adam_params"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "code", "field"), JSON)
def test_bad_requests_consume_their_number(
    gate: Gate, run: str, path: str, fields: dict[str, Any], code: str, field: str | None
) -> None:
    graph = {} if path == "optim_step" else {"graph": ir.digest(ir.encode(POLICY))}
    found = problem(gate.post(f"gradserve/{path}", model_id=run, seq_id=1, **graph, **fields))
    assert (found["code"], found.get("field")) == (code, field)
    assert gate.cursor(run) == 1
    good = gate.post("gradserve/optim_step", model_id=run, seq_id=2, adam={"learning_rate": 1e-3})
    assert good.status_code == 200
    assert isinstance(decode_body(gate.op(f"{run}:op:2").body), OptimStep)


def test_a_graph_must_be_known_and_be_a_policy(gate: Gate, run: str) -> None:
    unknown = problem(gate.post("gradserve/rollout", model_id=run, seq_id=1, graph="0" * 64, spec=SPEC))
    assert (unknown["status"], unknown["code"], unknown["field"]) == (404, "graph.unknown", "graph")
    headless = changed(POLICY, name="headless", outputs=POLICY.outputs[:1])
    digest = gate.post("gradserve/graphs", graph=headless).json()["graph"]
    no_policy = problem(gate.post("gradserve/rollout", model_id=run, seq_id=2, graph=digest, spec=SPEC))
    assert (no_policy["code"], no_policy["field"]) == ("policy.graph", "graph")
    digest = ir.digest(ir.encode(POLICY))
    assert gate.post("gradserve/rollout", model_id=run, seq_id=3, graph=digest, spec=SPEC).status_code == 200
    assert gate.post("gradserve/update", model_id=run, seq_id=4, graph=digest, env=ENV, config={}).status_code == 200
    rollout, update = (decode_body(gate.op(f"{run}:op:{seq}").body) for seq in (3, 4))
    assert isinstance(rollout, Rollout)
    assert isinstance(update, UpdatePolicy)
    assert rollout.spec.num_envs == 2


def test_another_tenants_graph_is_unknown(gate: Gate, run: str) -> None:
    digest = ir.digest(ir.encode(POLICY))
    gate.key = THEIRS
    theirs: str = create(gate).json()["model_id"]
    loss = gate.post("gradserve/graphs", graph=changed(POLICY, name="secret")).json()["graph"]
    gate.key = MINE
    found = problem(gate.post("gradserve/rollout", model_id=run, seq_id=1, graph=loss, spec=SPEC))
    assert found["code"] == "graph.unknown"
    assert gate.post("gradserve/rollout", model_id=run, seq_id=2, graph=digest, spec=SPEC).status_code == 200
    assert problem(gate.get(f"gradserve/runs/{theirs}/weights"))["code"] == "run.unknown"


def test_arrays_must_be_the_graphs_inputs(gate: Gate, run: str) -> None:
    digest = ir.digest(ir.encode(POLICY))
    good = {"obs": Array.of(np.zeros((5, 3), np.float32))}
    for seq, (arrays, backward, code, field) in enumerate(
        [
            ({}, False, "input.missing", "arrays.obs"),
            ({**good, "more": good["obs"]}, False, "input.unknown", "arrays.more"),
            ({"obs": Array.of(np.zeros((5, 4), np.float32))}, False, "input.shape", "arrays.obs"),
            ({"obs": Array.of(np.zeros(3, np.float32))}, False, "input.shape", "arrays.obs"),
            (good, True, "graph.no_loss", "backward"),
        ],
        1,
    ):
        sent = {"model_id": run, "seq_id": seq, "graph": digest, "arrays": arrays, "backward": backward}
        found = problem(packed(gate, "gradserve/apply", **sent))
        assert (found["code"], found["field"]) == (code, field)
        assert gate.cursor(run) == seq
    assert packed(gate, "gradserve/apply", model_id=run, seq_id=6, graph=digest, arrays=good).status_code == 200
    assert isinstance(decode_body(gate.op(f"{run}:op:6").body), ApplyGraph)


def test_a_trajectory_must_be_whole(gate: Gate, run: str) -> None:
    short = {**TRAJECTORY, "rewards": ("F32", (3, 2))}
    lacking = {name: value for name, value in TRAJECTORY.items() if name != "valid"}
    for seq, (file, code, field) in enumerate(
        [
            (b"", "trajectory.malformed", "trajectory"),
            (zeros(short), "trajectory.shape", "trajectory.rewards"),
            (zeros(lacking), "trajectory.missing", "trajectory.valid"),
        ],
        1,
    ):
        found = problem(packed(gate, "gradserve/trajectory", model_id=run, seq_id=seq, trajectory=file))
        assert (found["code"], found["field"]) == (code, field)
    sent = packed(gate, "gradserve/trajectory", model_id=run, seq_id=4, trajectory=zeros(TRAJECTORY))
    assert sent.status_code == 200
    assert isinstance(decode_body(gate.op(f"{run}:op:4").body), PutTrajectory)


def test_language_models_and_modules_are_not_mixed_up(gate: Gate, run: str) -> None:
    language = gate.run()
    digest = ir.digest(ir.encode(POLICY))
    found = problem(gate.post("gradserve/rollout", model_id=language, seq_id=1, graph=digest, spec=SPEC))
    assert (found["code"], found["field"]) == ("run.no_module", "model_id")
    found = problem(gate.forward_backward(batch(run, 1)))
    assert (found["code"], found["field"]) == ("model.module", "model_id")
    assert "gradserve/apply" in found["fix"]


WORTH = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("loss", "inputs", "code", "field"),
    [
        (text(LOSS), {}, "input.missing", "data[0].loss_fn_inputs.worth"),
        (text(LOSS), {"worth": np.ones(3, np.float32)}, "input.shape", "data[0].loss_fn_inputs.worth"),
        (text(LOSS), {"worth": np.ones(1, np.int64)}, "input.dtype", "data[0].loss_fn_inputs.worth"),
        (text(LOSS), {"worth": WORTH * np.nan}, "input.not_finite", "data[0].loss_fn_inputs.worth"),
        (text(LOSS), {"worth": WORTH, "target_tokens": None}, "input.missing", "data[0].loss_fn_inputs.target_tokens"),
        (text(LOSS)[:-9], {"worth": WORTH}, "graph_format", None),
        (changed(LOSS, outputs=[Output("total", {"ref": "total"})]), {"worth": WORTH}, "loss.outputs", "loss_fn"),
        (changed(LOSS, inputs=[*LOSS.inputs, Input("w", "parameter", "float32", [1])]), {"worth": WORTH},
         "loss.parameter", "loss_fn"),
        (text(LOSS).replace('"logprobs"', '"x"'), {"worth": WORTH}, "loss.no_logprobs", "loss_fn"),
        (text(LOSS).replace("aten.mul.Tensor", "os.system"), {"worth": WORTH}, "graph_operator", None),
    ],
)  # fmt: skip
def test_a_bad_custom_loss_consumes_its_number(
    gate: Gate, loss: str, inputs: dict[str, Any], code: str, field: str | None
) -> None:
    run = gate.run()
    found = problem(gate.forward_backward(batch(run, 1, row([1, 2, 3], **inputs), loss=loss)))
    assert (found["code"], found.get("field")) == (code, field)
    assert gate.cursor(run) == 1
    good = gate.forward_backward(batch(run, 2, row([1, 2, 3], worth=WORTH, ignored=WORTH), loss=text(LOSS)))
    assert good.status_code == 200
    kept = decode_body(gate.op(f"{run}:op:2").body)
    assert kept.loss == f"graph:{ir.digest(ir.encode(LOSS))}"  # type: ignore[union-attr]
    assert set(kept.rows[0].inputs) == {"target_tokens", "worth"}  # type: ignore[union-attr]


def test_the_public_sdks_loss_is_named_by_its_hash(gate: Gate) -> None:
    session = gate.session()
    returned = {"tuple": [{"ref": "total"}, {"dict": {}}]}
    graph: dict[str, Any] = {
        "format": 1,
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]},
            {"op": "output", "name": "output", "target": "output", "args": [returned]},
        ],
    }
    body = {"session_id": session, "custom_loss_seq_id": 0, "name": "mine", "inputs": [{"name": "logprobs", "rank": 1}]}
    answer = gate.post("create_custom_loss", graph=graph, **body)
    assert answer.status_code == 200, answer.text
    again = gate.post("create_custom_loss", graph=graph, **body)
    assert again.json() == answer.json()
    graph["nodes"][1]["target"] = "backward"
    found = problem(gate.post("create_custom_loss", graph=graph, **{**body, "custom_loss_seq_id": 1}))
    assert "backward" in found["detail"]
