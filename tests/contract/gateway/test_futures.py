"""What becomes of a future: done, failed by the user or by us, expired, unknown."""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
from starlette.requests import Request

from gradserve.gateway.call import Call
from gradserve.gateway.routes import futures
from gradserve.store.base import Op
from gradserve.wire.data import Array
from gradserve.wire.ops import ForwardBackward, OptimStep, SaveWeights, decode_body
from tests.contract.gateway.gate import Gate, batch, problem, row


def test_result_can_be_read_more_than_once(gate: Gate) -> None:
    run = gate.run()
    request_id = gate.post("optim_step", model_id=run, seq_id=1, adam_params={"learning_rate": 1e-3}).json()[
        "request_id"
    ]
    gate.settle(request_id, b'{"metrics":{"x":1.0}}')
    for _ in range(2):
        answer = gate.retrieve(request_id)
        assert (answer.status_code, answer.json()) == (200, {"metrics": {"x": 1.0}})


def test_the_end_of_a_running_op_is_handed_on_to_its_tenant_only(gate: Gate) -> None:
    """Whoever waits while it ends gets it from memory; another tenant that asks in that moment still gets a 404."""
    run = gate.run()
    request_id = gate.forward_backward(batch(run, 1)).json()["request_id"]
    op = gate.op(request_id)
    ended = msgspec.structs.replace(op, body=b"", state="done", result=b"{}", content_type="application/json")
    assert gate.wakeups.is_coming(op.tenant, request_id)
    assert not gate.wakeups.is_coming("somebody else", request_id)

    async def ask(tenant: str) -> Op | None:
        call = Call(gate.app.state.gateway, Request({"type": "http"}), tenant)
        asking = asyncio.create_task(futures._ended(call, request_id, 5.0))
        await asyncio.sleep(0)  # it waits now, or asks the store
        gate.wakeups.ended(request_id, ended)
        return await asking

    assert gate.on_loop(lambda: ask(op.tenant)) is ended, "not read from the store again"
    gate.on_loop(lambda: _submitted_again(gate, op))
    assert gate.on_loop(lambda: ask("somebody else")) is None


async def _submitted_again(gate: Gate, op: Op) -> None:
    gate.wakeups.submitted(op)


def test_failures_say_who_can_mend_them(gate: Gate) -> None:
    run = gate.run()
    for seq, (status, category) in enumerate(((400, "user"), (404, "user"), (500, "server")), 1):
        request_id = gate.forward_backward(batch(run, seq)).json()["request_id"]
        gate.fail(request_id, status, "what happened")
        answer = gate.retrieve(request_id)
        told = {"error": "what happened", "category": category, "code": "some.code"}
        assert (answer.status_code, answer.json()) == (200, told)


def test_refused_op_answers_its_problem(gate: Gate) -> None:
    run = gate.run()
    gate.forward_backward(batch(run, 1, row([999])))
    answer = gate.retrieve(f"{run}:op:1")
    assert (answer.status_code, problem(answer)["code"]) == (400, "data.vocabulary")


def test_expired_is_410_so_that_samples_are_sent_again(gate: Gate) -> None:
    sampler = gate.sampler()
    request_id = gate.sample(sampler).json()["request_id"]
    gate.settle(request_id, b"x", "application/x-protobuf")
    gate.on_loop(lambda: gate.store.expire_results(time.time() + 1))
    answer = gate.retrieve(request_id)
    assert (answer.status_code, problem(answer)["code"]) == (410, "future.expired")


def test_unknown_is_404(gate: Gate) -> None:
    answer = gate.retrieve("nowhere:op:1")
    assert (answer.status_code, problem(answer)["code"]) == (404, "future.unknown")
    assert gate.wakeups._waiting == {}, "nobody is left waiting"


def test_nobody_is_left_waiting(gate: Gate) -> None:
    run = gate.run()
    request_id = gate.forward_backward(batch(run, 1)).json()["request_id"]
    assert gate.retrieve(request_id).status_code == 408
    gate.settle(request_id, b"{}")
    assert gate.retrieve(request_id).status_code == 200
    assert gate.wakeups._waiting == {}


def test_bodies_say_all_that_is_computed(gate: Gate) -> None:
    """Defaults are written into the journal, so that a later version of the server can't change what was asked."""
    run = gate.run()
    gate.forward_backward(batch(run, 1, row([1, 2, 3]), loss_fn_config={}))
    gate.post("optim_step", model_id=run, seq_id=2, adam_params={"learning_rate": 0.5})
    gate.post("save_weights", model_id=run, seq_id=3, path="a", user_metadata={"n": 1})
    batch_body, step, save = [decode_body(gate.op(f"{run}:op:{seq}").body) for seq in (1, 2, 3)]
    assert isinstance(batch_body, ForwardBackward)
    assert isinstance(step, OptimStep)
    assert (step.adam.learning_rate, step.adam.beta2, step.adam.eps) == (0.5, 0.95, 1e-12)
    assert save == SaveWeights("a", "weights", user_metadata={"n": "1"})


def test_loss_settings_are_filled_in_and_masks_dropped(gate: Gate) -> None:
    run, ones = gate.run(), np.ones(2, np.float32)
    datum = row([1, 2], logprobs=-ones, advantages=ones, mask=ones)
    answer = gate.forward_backward(batch(run, 1, datum, loss="ppo", loss_fn_config={"clip_high_threshold": 2.0}))
    body = decode_body(gate.op(answer.json()["request_id"]).body)
    assert isinstance(body, ForwardBackward)
    assert body.config == {"clip_low_threshold": 0.8, "clip_high_threshold": 2.0}
    assert set(body.rows[0].inputs) == {"target_tokens", "logprobs", "advantages"}


def test_narrow_targets_are_widened(gate: Gate) -> None:
    run = gate.run()
    answer = gate.forward_backward(batch(run, 1, row([1, 2], target_tokens=np.array([3, 4], np.int32))))
    body = decode_body(gate.op(answer.json()["request_id"]).body)
    assert isinstance(body, ForwardBackward)
    assert body.rows[0].inputs["target_tokens"] == Array.of(np.array([3, 4]))
