"""The scheduler over the in-memory store and workers that answer from a script: order, failure, recovery."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gradserve.compute.catalog import Catalog
from gradserve.compute.checkpoints import CheckpointFolders
from gradserve.compute.executor import ExitReason, WorkerState
from gradserve.compute.objects import ObjectCorrupt, ObjectStore
from gradserve.compute.tasks import (
    Done,
    Failed,
    GradTask,
    InitTask,
    OptimTask,
    Outcome,
    Progress,
    ReduceTask,
    SampleTask,
    Task,
    Usage,
)
from gradserve.orchestration.scheduler import Scheduler
from gradserve.settings import Settings
from gradserve.store.base import Op, Run, Settlement
from gradserve.store.sql import SqlStore
from gradserve.store.wakeups import Wakeups
from gradserve.wire.data import Array, Row, as_tokens
from gradserve.wire.ops import (
    AdamParams,
    CreateModel,
    ForwardBackward,
    LoraConfig,
    OpBody,
    OptimStep,
    Sample,
    SamplingParams,
    SaveWeights,
    encode_body,
    kind_of,
)
from gradserve.wire.results import ForwardBackwardResult, SampledSequence, SampleResult

LORA = LoraConfig(4, seed=1)
TOKENS = [7, 8, 9]
LOGPROB = b"\0\0\0\0"


class ScriptedWorker:
    """Does each Task at once: objects are small byte strings that say what they were made from."""

    def __init__(self, objects: ObjectStore) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.objects = objects
        self.given: list[str] = []
        self.done: list[str] = []
        self.told_to_stop: list[str] = []
        self.refuse: set[str] = set()
        self.slow: dict[str, asyncio.Event] = {}
        self.cannot_start = False
        self.used: str | None = None
        """Weights that it uses whatever it is asked for."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def workers(self) -> list[WorkerState]:
        if self.cannot_start:
            return [WorkerState("w", "down", None, 9, 0, ExitReason("exit", "ended with no GPU"), 9)]
        return [WorkerState("w", "ready", 1, 0, 0)]

    async def run(self, worker_id: str, task: Task, on_progress: Callable[[Progress], None] | None = None) -> Outcome:
        await asyncio.sleep(0)
        self.given.append(task.id)
        if task.id in self.slow:
            await self.slow[task.id].wait()
        if task.id in self.told_to_stop:
            return Failed(task.id, "cancelled", "")
        self.done.append(task.id)
        if task.id in self.refuse:
            return Failed(task.id, "user", "not finite")
        usage = Usage(train_tokens=1, compute_us=1000)
        match task:
            case InitTask():
                return Done(task.id, usage, {"weights": self.objects.put(b"w0")})
            case GradTask():
                rows = ForwardBackwardResult([Array("float32", (1,), b"\0" * 4) for _ in task.rows], {"loss:sum": 1.0})
                rows = msgspec.structs.replace(rows, weights=self.used or task.weights)
                return Done(
                    task.id, usage, {"gradient": self.objects.put(f"g:{_first_time(task.id)}".encode())}, rows=rows
                )
            case ReduceTask():
                for gradient in task.gradients:
                    self.objects.path(gradient)  # as a worker reads them
                return Done(task.id, usage, {"gradient": self.objects.put("+".join(task.gradients).encode())})
            case SampleTask():
                try:
                    if task.op.weights is not None:
                        self.objects.verified_path(task.op.weights)  # as a worker reads them
                except ObjectCorrupt as damaged:
                    return Failed(task.id, "corrupt", str(damaged))
                if on_progress is not None and task.stream:
                    for token in TOKENS:
                        on_progress(Progress(task.id, 0, as_tokens([token]), LOGPROB))
                sequence = SampledSequence(as_tokens(TOKENS), LOGPROB * len(TOKENS), stopped=False)
                return Done(task.id, usage, sample=SampleResult([sequence], weights=task.op.weights))
            case OptimTask():
                made = {
                    "weights": self.objects.put(f"w:{_first_time(task.id)}".encode()),
                    "moments": self.objects.put(b"m"),
                }
                return Done(task.id, usage, made, metrics={"grad_norm": float(len(task.gradients))})
            case _:
                raise AssertionError(task)

    def cancel(self, worker_id: str, task_id: str) -> None:
        self.told_to_stop.append(task_id)
        if task_id in self.slow:
            self.slow[task_id].set()


def _first_time(task_id: str) -> str:
    """Tasks are pure: a replay of one makes the same."""
    return task_id.replace("~replay", "")


class World:
    """Everything that a scheduler needs, and a run "r"."""

    def __init__(self, folder: Path, catalog: Catalog | None = None, **changed: Any) -> None:
        self.objects = ObjectStore(folder / "fast", folder / "durable")
        self.folders = CheckpointFolders(folder / "checkpoints", self.objects, Catalog([]))
        self.store = SqlStore.in_memory()
        self.wakeups = Wakeups()
        self.worker = ScriptedWorker(self.objects)
        self.fatal: list[bool] = []
        settings = Settings(data_dir=folder, task_tokens=4, **changed)
        self.scheduler = Scheduler(
            self.store,
            self.wakeups,
            self.worker,
            self.objects,
            self.folders,
            catalog or Catalog([]),
            settings,
            on_fatal=lambda: self.fatal.append(True),
        )

    async def submit(self, seq: int, body: OpBody, told: bool = True, **of_run: Any) -> str:
        op = Op(f"r:op:{seq}", "t", "s", "r", seq, kind_of(body), encode_body(body), float(seq), run_id="r")
        run = Run("r", "t", "s", "tiny", LORA, 0.0, 0.0, **of_run) if seq == 0 else None
        stored, _ = await self.store.submit(op, run)
        if told:
            self.wakeups.submitted(stored)
        return stored.id

    async def sample(self, seq: int, weights: str | None = None) -> Op:
        """A sample from the base alone, or from ``weights``."""
        body = Sample("tiny", weights, as_tokens([1]), 1, SamplingParams(3, seed=0))
        op = Op(f"p:op:{seq}", "t", "s", "p", seq, "sample", encode_body(body), float(seq))
        stored, _ = await self.store.submit(op)
        self.wakeups.submitted(stored)
        return stored

    async def given(self, task_id: str) -> None:
        """Until a worker has the Task."""
        async with asyncio.timeout(10):
            while task_id not in self.worker.given:  # noqa: ASYNC110  (given by a background task)
                await asyncio.sleep(0.005)

    async def ended(self, op_id: str) -> Op:
        async with asyncio.timeout(10):
            while True:
                waiter = self.wakeups.waiter(op_id)
                op = await self.store.get_op("t", op_id)
                assert op is not None
                if op.state != "accepted":
                    await self.wakeups.wait(op_id, waiter, 0)
                    return op
                await self.wakeups.wait(op_id, waiter, 10)


def play(folder: Path, story: Callable[[World], Awaitable[None]], start: bool = True, **settings: Any) -> World:
    """A server's life; the arrays in ``folder`` and what ``story`` wrote stay."""

    async def whole() -> World:
        world = World(folder, **settings)
        await world.store.open()
        if start:
            await world.scheduler.start()
        try:
            await story(world)
        finally:
            await world.scheduler.close()
            await world.store.close()
        return world

    return asyncio.run(whole())


def rows(*lengths: int) -> list[Row]:
    return [Row(as_tokens([1] * length), {}) for length in lengths]


def forward_backward(*lengths: int) -> ForwardBackward:
    return ForwardBackward(rows(*lengths), "cross_entropy", {})


def test_a_step_sums_the_gradients_of_all_calls_in_seq_order(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.submit(0, CreateModel("tiny", LORA))
        await world.submit(2, forward_backward(2))
        step = await world.submit(3, OptimStep(AdamParams()))
        await world.submit(1, forward_backward(3, 3, 2))
        ended = await world.ended(step)
        assert ended.state == "done"
        assert ended.result == b'{"metrics":{"grad_norm":2.0}}'
        run = await world.store.get_run("t", "r")
        assert run is not None
        assert (run.version, run.gradients, run.cursor) == (1, (), 3)

    world = play(tmp_path, story)
    assert world.worker.done[0] == "r:op:0/0"
    assert world.worker.done[-1] == "r:op:3/0"
    # three rows of 3 + 3 + 2 tokens under a budget of 4 are three Tasks and a Reduce
    assert sorted(world.worker.done[1:-1]) == ["r:op:1/0", "r:op:1/1", "r:op:1/2", "r:op:1/3", "r:op:2/0"]


def test_a_failed_op_leaves_the_run_as_it_was_and_costs_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.worker.refuse.add("r:op:1/1")
        await world.submit(0, CreateModel("tiny", LORA))
        failed = await world.ended(await world.submit(1, forward_backward(3, 3)))
        assert failed.state == "failed"
        assert failed.problem is not None
        assert (failed.problem.status, failed.problem.code) == (400, "compute.refused")
        step = await world.ended(await world.submit(2, OptimStep(AdamParams())))
        assert step.result == b'{"metrics":{"grad_norm":0.0,"step_skipped":1.0}}'
        assert (await world.store.ledger_total("t", "r")).lines == 1, "only create_model"

    play(tmp_path, story)


def test_what_an_earlier_server_accepted_is_run(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.submit(0, CreateModel("tiny", LORA), told=False)
        last = await world.submit(1, forward_backward(2), told=False)
        await world.scheduler.start()
        assert (await world.ended(last)).state == "done"

    play(tmp_path, story, start=False)


def test_weights_that_a_power_cut_took_are_named(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        for file in world.objects.fast.iterdir():
            file.unlink()
        lost = await world.ended(await world.submit(1, forward_backward(2)))
        assert lost.problem is not None
        assert (lost.problem.status, lost.problem.code) == (410, "weights.lost")

    play(tmp_path, story)


def test_the_janitor_leaves_what_a_running_op_has_made(tmp_path: Path) -> None:
    """Found by a cookbook recipe: the first Tasks' gradients were swept while the last Task was still computing."""

    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        world.worker.slow["r:op:1/1"] = asyncio.Event()
        op = await world.submit(1, forward_backward(3, 3))
        async with asyncio.timeout(10):
            while "r:op:1/0" not in world.worker.done:  # noqa: ASYNC110  (done by a background task)
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        for file in world.objects.fast.iterdir():
            os.utime(file, (1, 1))
        await world.scheduler.sweep()
        world.worker.slow["r:op:1/1"].set()
        assert (await world.ended(op)).state == "done"
        run = await world.store.get_run("t", "r")
        assert run is not None
        await world.scheduler.sweep()
        assert {file.stem for file in world.objects.fast.iterdir()} >= {run.weights, run.gradients[0][1]}

    play(tmp_path, story)


def test_the_janitor_takes_what_nobody_refers_to(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        await world.ended(await world.submit(1, forward_backward(3, 3)))
        await world.ended(await world.submit(2, OptimStep(AdamParams())))
        run = await world.store.get_run("t", "r")
        assert run is not None
        for file in world.objects.fast.iterdir():
            os.utime(file, (1, 1))
        await asyncio.sleep(0.05)
        await world.scheduler.sweep()
        assert {file.stem for file in world.objects.fast.iterdir()} == {run.weights, run.moments}

    play(tmp_path, story)


def test_a_checkpoint_is_a_folder_and_an_unwanted_overwrite_is_refused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.submit(0, CreateModel("tiny", LORA))
        saved = await world.ended(await world.submit(1, SaveWeights("a", "weights")))
        assert saved.result == b'{"path":"tinker://r/weights/a"}'
        again = await world.ended(await world.submit(2, SaveWeights("a", "weights")))
        assert again.problem is not None
        assert again.problem.code == "checkpoint.exists"
        over = await world.ended(await world.submit(3, SaveWeights("a", "weights", overwrite=True)))
        assert over.state == "done"

    world = play(tmp_path, story)
    folder = tmp_path / "checkpoints" / "r" / "weights" / "a"
    assert (folder / "adapter_model.safetensors").read_bytes() == b"w0"
    assert world.objects.has_durable(ObjectStore.digest(b"w0"))


def was_cancelled(op: Op) -> bool:
    return op.state == "failed" and op.problem is not None and op.problem.code == "op.cancelled" and op.result is None


def test_a_running_sample_is_cancelled_and_costs_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.worker.slow["p:op:1/0"] = asyncio.Event()
        op = await world.sample(1)
        await world.given("p:op:1/0")
        assert await world.wakeups.cancel(op)
        ended = await world.ended(op.id)
        assert was_cancelled(ended)
        assert world.worker.told_to_stop == ["p:op:1/0"]
        assert not await world.wakeups.cancel(ended), "again: nothing is left to stop"
        assert (await world.ended((await world.sample(2)).id)).state == "done"
        assert [line.op_id for line in (await world.store.ledger_lines("t", None, 10, 0))[0]] == ["p:op:2"]
        assert await world.store.unfinished_ops() == [], "so no later server runs it"

    play(tmp_path, story)


def test_a_sample_is_cancelled_before_it_is_even_queued(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        op = await world.sample(1)
        assert await world.wakeups.cancel(op)
        assert was_cancelled(await world.ended(op.id))

    assert play(tmp_path, story).worker.given == []


def test_a_training_op_is_cancelled_only_while_it_waits(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.worker.slow["r:op:1/0"] = asyncio.Event()
        await world.submit(0, CreateModel("tiny", LORA))
        running = await world.submit(1, forward_backward(2))
        step = await world.submit(2, OptimStep(AdamParams()))
        later = await world.submit(3, forward_backward(2))
        await world.given("r:op:1/0")

        async def stop(op_id: str) -> bool:
            op = await world.store.get_op("t", op_id)
            assert op is not None
            return await world.wakeups.cancel(op)

        assert not await stop(running)
        assert await stop(step)
        assert was_cancelled(await world.ended(step))
        assert not await stop(step)
        world.worker.slow["r:op:1/0"].set()
        assert (await world.ended(running)).state == "done"
        assert (await world.ended(later)).state == "done"
        run = await world.store.get_run("t", "r")
        assert run is not None
        assert (run.version, run.cursor, sorted(seq for seq, _ in run.gradients)) == (0, 3, [1, 3])
        assert not await stop(running)

    assert "r:op:2/0" not in play(tmp_path, story).worker.given


def test_the_tokens_of_a_sample_come_before_its_end(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        with world.scheduler.stream("p:op:1") as stream:
            op = await world.sample(1)
            await world.sample(2)
            seen = [progress.tokens async for progress in stream]
            assert seen == [as_tokens([token]) for token in TOKENS]
            stored = await world.store.get_op("t", op.id)
            assert stored is not None
            assert stored.state == "done", "the end of the stream comes after the result"

    assert play(tmp_path, story).scheduler._execution._streams == {}


def test_the_stream_of_a_cancelled_sample_ends(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.worker.slow["p:op:1/0"] = asyncio.Event()
        with world.scheduler.stream("p:op:1") as stream:
            op = await world.sample(1)
            await world.given("p:op:1/0")
            assert await world.wakeups.cancel(op)
            async with asyncio.timeout(10):
                assert [progress async for progress in stream] == []

    play(tmp_path, story)


def test_a_result_of_other_weights_is_no_result(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        sound = await world.ended(await world.submit(1, forward_backward(2)))
        assert (sound.weights, sound.version) == (ObjectStore.digest(b"w0"), 0)
        world.worker.used = "0" * 64
        wrong = await world.ended(await world.submit(2, forward_backward(2)))
        assert wrong.problem is not None
        assert (wrong.state, wrong.problem.code, wrong.result) == ("failed", "weights.mismatch", None)
        run = await world.store.get_run("t", "r")
        assert run is not None
        assert [seq for seq, _ in run.gradients] == [1]

    play(tmp_path, story)


def test_damaged_weights_are_not_saved(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        world.objects.path(ObjectStore.digest(b"w0")).write_bytes(b"w1")
        world.worker.refuse.add("r:op:0~replay/0")  # nor can they be made again
        saved = await world.ended(await world.submit(1, SaveWeights("a", "weights")))
        assert saved.problem is not None
        assert (saved.problem.status, saved.problem.code) == (410, "weights.lost")
        assert "create_model #0, which had succeeded, failed this time" in saved.problem.detail
        assert await world.store.get_checkpoint("t", "r", "weights", "a") is None

    world = play(tmp_path, story)
    assert not world.objects.has_durable(ObjectStore.digest(b"w0")), "nor when the server stops"


@pytest.mark.parametrize("arrays_lost", [False, True])
def test_without_workers_requests_fail_and_the_run_goes_on_when_there_are_some(
    tmp_path: Path, arrays_lost: bool
) -> None:
    """Also when the run's arrays must be computed again first: that is tried again for later requests."""

    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        await world.ended(await world.submit(1, forward_backward(2)))
        before = await world.store.ledger_total("t")
        world.worker.cannot_start = True
        if arrays_lost:
            for file in world.objects.fast.iterdir():
                file.unlink()
            world.scheduler._lanes.clear()
        ops = [await world.submit(2, forward_backward(2)), await world.submit(3, OptimStep(AdamParams()))]
        ops += [(await world.sample(1)).id]
        for op in ops:
            ended = await world.ended(op)
            assert ended.problem is not None
            assert (ended.problem.status, ended.problem.code) == (500, "compute.no_workers")
            assert "ended with no GPU" in ended.problem.detail
        assert await world.store.ledger_total("t") == before
        world.worker.cannot_start = False
        step = await world.ended(await world.submit(4, OptimStep(AdamParams())))
        assert step.result == b'{"metrics":{"grad_norm":1.0}}', "the gradient that it had is still there"
        assert (await world.ended((await world.sample(2)).id)).state == "done"

    assert not play(tmp_path, story).fatal


def test_a_settlement_that_cannot_be_written_stops_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        async def full(settlement: Settlement) -> bool:
            raise OSError("disk full")

        monkeypatch.setattr(world.store, "settle", full)
        await world.submit(0, CreateModel("tiny", LORA))
        async with asyncio.timeout(10):
            while not world.fatal:  # noqa: ASYNC110  (set by a background task)
                await asyncio.sleep(0.01)

    assert play(tmp_path, story).fatal
