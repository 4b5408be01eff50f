"""cancel_future: whose it is, what it was, and what the scheduler said."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gradserve.orchestration.settle import cancelled, settle_failed
from gradserve.store.base import Op
from gradserve.wire.errors import Gone
from tests.contract.gateway.gate import Gate, Reply, batch, opened, problem


@contextmanager
def scheduler(gate: Gate, decide: Callable[[Op], bool]) -> Iterator[list[str]]:
    """Somebody who answers cancels, and ends what is to stop as a scheduler does. Gives the ids that were asked for."""
    asked: list[str] = []
    stop = threading.Event()

    async def once() -> None:
        for op, told in gate.wakeups.take_cancels():
            asked.append(op.id)
            told.set_result(stops := decide(op))
            if stops:
                await asyncio.sleep(0.01)
                await gate.store.settle(settle_failed(op, cancelled(), 1.0))
                gate.wakeups.ended(op.id)

    def loop() -> None:
        while not stop.wait(0.005):
            gate.on_loop(once)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield asked
    finally:
        stop.set()
        thread.join()


def cancel(gate: Gate, request_id: str) -> Reply:
    return gate.post("cancel_future", request_id=request_id)


def test_a_sample_ends_as_cancelled_for_good(tmp_path: Path) -> None:
    with opened(tmp_path, long_poll_s=10) as gate, scheduler(gate, lambda _: True) as asked:
        request_id = gate.sample(gate.sampler()).json()["request_id"]
        for _ in range(2):
            answer = cancel(gate, request_id)
            assert (answer.status_code, answer.json()) == (
                200,
                {"request_id": request_id, "cancelled": True, "state": "failed"},
            )
        assert asked == [request_id], "the second time the journal knows"
        told = gate.retrieve(request_id)
        assert (told.status_code, told.json()["code"], told.json()["category"]) == (200, "op.cancelled", "user")
        stored = gate.op(request_id).problem
        assert stored is not None
        assert stored.status == Gone.status


def test_what_runs_is_left_alone_and_the_answer_says_so(tmp_path: Path) -> None:
    with opened(tmp_path, long_poll_s=10) as gate, scheduler(gate, lambda _: False):
        run = gate.run()
        request_id = gate.forward_backward(batch(run, 1)).json()["request_id"]
        answer = cancel(gate, request_id).json()
        assert (answer["cancelled"], answer["state"]) == (False, "accepted")
        assert "while it waits" in answer["detail"]
        gate.settle(request_id, b"{}")
        assert gate.retrieve(request_id).status_code == 200


def test_what_has_ended_stays(gate: Gate) -> None:
    request_id = gate.sample(gate.sampler()).json()["request_id"]
    gate.settle(request_id, b"x", "application/x-protobuf")
    answer = cancel(gate, request_id)
    assert answer.status_code == 200
    assert answer.json() == {
        "request_id": request_id,
        "cancelled": False,
        "state": "done",
        "detail": "It had ended before.",
    }
    assert gate.retrieve(request_id).content == b"x"


def test_without_a_scheduler_the_answer_comes_all_the_same(gate: Gate) -> None:
    request_id = gate.sample(gate.sampler()).json()["request_id"]
    answer = cancel(gate, request_id)
    assert (answer.status_code, answer.json()["cancelled"]) == (200, False)
    assert gate.wakeups._waiting == {}


def test_unknown_and_others_futures_do_not_exist(tmp_path: Path) -> None:
    alice, bob = "tml-alice-0123456789abcdef", "tml-bob-0123456789abcdef"
    with opened(tmp_path, api_keys=(alice, bob)) as gate:
        gate.key = alice
        request_id = gate.sample(gate.sampler()).json()["request_id"]
        gate.key = bob
        for unknown in (request_id, "nowhere:op:1"):
            answer = cancel(gate, unknown)
            assert (answer.status_code, problem(answer)["code"]) == (404, "future.unknown")
        assert gate.wakeups.take_cancels() == []


def test_bodies_without_an_id(gate: Gate) -> None:
    answer = gate.post("cancel_future")
    assert (answer.status_code, problem(answer)["code"]) == (400, "body.missing_field")


def test_clients_are_told_that_they_may(gate: Gate) -> None:
    from tinker.types.client_dynamic_config_response import ClientDynamicConfigResponse

    config = ClientDynamicConfigResponse.model_validate(gate.post("client/dynamic_config").json())
    assert (config.sample_cancel_enabled, config.sample_cancel_max_batch_size) == (True, 64)
