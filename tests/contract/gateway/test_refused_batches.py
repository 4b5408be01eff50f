"""Every kind of bad training batch: what exactly is answered, and that the run goes on with the next seq."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from gradserve.wire.proto import gradserve_wire_pb2 as pb
from tests.contract.gateway.gate import Gate, batch, problem, row

IDS = np.array([1, 2, 3], np.int64)


def f32(*values: float) -> Any:
    return np.array(values, np.float32)


def rl(**inputs: Any) -> pb.Datum:
    return row([1, 2, 3], **{"logprobs": f32(-1, -1, -1), "advantages": f32(1, 1, 1), **inputs})


def image_row() -> pb.Datum:
    datum = row([1, 2, 3])
    datum.model_input.add().image.format = "png"
    return datum


def sparse_row(columns: int) -> pb.Datum:
    datum = row([1, 2, 3], target_tokens=None)
    target = datum.loss_fn_inputs["target_tokens"]
    target.dtype = pb.DTYPE_INT64
    target.shape.extend([3, columns])
    target.sparse_csr.crow_indices = np.zeros(4, np.int64).tobytes()
    return datum


def v2(**values: Any) -> dict[str, pb.LossConfigValue]:
    return {
        key: pb.LossConfigValue(text=value) if isinstance(value, str) else pb.LossConfigValue(number=value)
        for key, value in values.items()
    }


class Bad(NamedTuple):
    rows: list[pb.Datum]
    code: str
    field: str
    row: int | None = None
    loss: str = "cross_entropy"
    fields: Mapping[str, Any] = MappingProxyType({})
    status: int = 400


def target(index: int) -> str:
    return f"data[{index}].loss_fn_inputs.target_tokens"


GOOD = row([1, 2, 3])
CASES = {
    "token above vocabulary": Bad(
        [GOOD, row([1, 320], target_tokens=IDS[:2])], "data.vocabulary", "data[1].model_input", 1
    ),
    "negative token": Bad([row([-1, 2], target_tokens=IDS[:2])], "data.vocabulary", "data[0].model_input", 0),
    "target above vocabulary": Bad([GOOD, row([1], target_tokens=np.array([320]))], "data.vocabulary", target(1), 1),
    "negative target": Bad([row([1], target_tokens=np.array([-1]))], "data.vocabulary", target(0), 0),
    "target beyond int32": Bad([row([1], target_tokens=np.array([2**40]))], "data.vocabulary", target(0), 0),
    "no rows": Bad([], "data.empty", "data"),
    "empty row": Bad([GOOD, row([])], "data.empty_row", "data[1].model_input", 1),
    "row beyond context": Bad([row([1] * 513)], "data.too_long", "data[0].model_input", 0),
    "targets too short": Bad([row([1, 2, 3], target_tokens=IDS[:2])], "input.shape", target(0), 0),
    "targets too wide": Bad([row([1, 2, 3], target_tokens=np.zeros((3, 321), np.int64))], "input.shape", target(0), 0),
    "targets of no width": Bad([row([1, 2, 3], target_tokens=np.zeros((3, 0), np.int64))], "input.shape", target(0), 0),
    "targets of three dimensions": Bad(
        [row([1], target_tokens=np.zeros((1, 1, 1), np.int64))], "input.shape", target(0), 0
    ),
    "weights too long": Bad(
        [GOOD, row([1, 2, 3], weights=f32(1, 1, 1, 1))], "input.shape", "data[1].loss_fn_inputs.weights", 1
    ),
    "weights of other width": Bad(
        [row([1, 2, 3], target_tokens=np.ones((3, 2), np.int64), weights=f32(1, 1, 1))],
        "input.shape",
        "data[0].loss_fn_inputs.weights",
        0,
    ),
    "wide targets in ppo": Bad([rl(target_tokens=np.ones((3, 2), np.int64))], "input.shape", target(0), 0, "ppo"),
    "float targets": Bad([row([1, 2, 3], target_tokens=f32(1, 2, 3))], "input.dtype", target(0), 0),
    "integer weights": Bad([row([1, 2, 3], weights=IDS)], "input.dtype", "data[0].loss_fn_inputs.weights", 0),
    "unknown loss": Bad([GOOD], "loss.unknown", "loss_fn", None, "crossentropy"),
    "custom loss without its id": Bad([GOOD], "loss.id", "loss_fn_config.loss_id", None, "custom"),
    "no targets": Bad([GOOD, row([1], target_tokens=None)], "input.missing", target(1), 1),
    "no advantages": Bad(
        [rl(advantages=None)], "input.missing", "data[0].loss_fn_inputs.advantages", 0, "importance_sampling"
    ),
    "no sequence mask": Bad([rl()], "input.missing", "data[0].loss_fn_inputs.sequence_ratio_mask", 0, "gspo"),
    "unknown input": Bad([rl(rewards=f32(1, 1, 1))], "input.unknown", "data[0].loss_fn_inputs.rewards", 0, "ppo"),
    "input of another loss": Bad(
        [row([1], advantages=f32(1))], "input.unknown", "data[0].loss_fn_inputs.advantages", 0
    ),
    "NaN weight": Bad(
        [GOOD, row([1, 2], weights=f32(1, np.nan))], "input.not_finite", "data[1].loss_fn_inputs.weights", 1
    ),
    "infinite logprob": Bad(
        [rl(), rl(logprobs=f32(-1, -np.inf, -1))], "input.not_finite", "data[1].loss_fn_inputs.logprobs", 1, "ppo"
    ),
    "infinite advantage": Bad(
        [rl(advantages=f32(np.inf, 1, 1))], "input.not_finite", "data[0].loss_fn_inputs.advantages", 0, "cispo"
    ),
    "unknown setting": Bad(
        [rl()], "config.unknown", "loss_fn_config.epsilon", None, "ppo", {"loss_fn_config": {"epsilon": 0.2}}
    ),
    "setting of a loss without any": Bad(
        [GOOD], "config.unknown", "loss_fn_config.beta", None, "cross_entropy", {"loss_fn_config_v2": v2(beta=1.0)}
    ),
    "text setting": Bad(
        [rl()], "config.number", "loss_fn_config.beta", None, "dro", {"loss_fn_config_v2": v2(beta="much")}
    ),
    "NaN setting": Bad(
        [rl()], "config.number", "loss_fn_config.beta", None, "dro", {"loss_fn_config": {"beta": float("nan")}}
    ),
    "clip bounds the wrong way round": Bad(
        [rl()],
        "config.range",
        "loss_fn_config.clip_low_threshold",
        None,
        "ppo",
        {"loss_fn_config": {"clip_low_threshold": 1.3}},
    ),
    "image": Bad([GOOD, image_row()], "unsupported.chunk", "data[1].model_input", 1),
    "half a token": Bad(
        [pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"12345"))])],
        "data.tensor",
        "data[0].model_input",
        0,
    ),
    "tensor shorter than its shape": Bad(
        [row([1, 2], target_tokens=pb.Tensor(dense=b"12345678", dtype=pb.DTYPE_INT64, shape=[2]))],
        "data.tensor",
        target(0),
        0,
    ),
    "sparse bomb": Bad([GOOD, sparse_row(2**50)], "data.too_large", target(1), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_and_the_run_goes_on(gate: Gate, name: str) -> None:
    bad, run = CASES[name], gate.run()
    message = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn=bad.loss, **bad.fields)
    message.data.extend(bad.rows)
    gate.submitted()

    answer = gate.forward_backward(message.SerializeToString())

    assert answer.status_code == bad.status
    document = problem(answer)
    assert (document["code"], document.get("field"), document.get("index")) == (bad.code, bad.field, bad.row)
    assert gate.op(f"{run}:op:1").state == "rejected"
    assert gate.cursor(run) == 1, "the refused seq is consumed"
    assert [op.seq for op in gate.submitted()] == [1], "the scheduler hears of it"
    assert gate.forward_backward(batch(run, 2)).status_code == 200


def test_every_loss_takes_a_good_batch(gate: Gate) -> None:
    run = gate.run()
    inputs = {
        "cross_entropy": row([1, 2, 3], weights=f32(0, 1, 0.5)),
        "importance_sampling": rl(mask=f32(0, 1, 1)),
        "ppo": rl(clip_low_threshold=f32(0.8, 0.8, 0.8), clip_high_threshold=f32(1, 1, 1)),
        "cispo": rl(),
        "dro": rl(),
        "gspo": rl(sequence_ratio_mask=f32(0, 1, 1)),
        "stable_reinforce": rl(),
    }
    for seq, (loss, datum) in enumerate(inputs.items(), 1):
        answer = gate.forward_backward(batch(run, seq, datum, loss=loss))
        assert answer.status_code == 200, answer.text
