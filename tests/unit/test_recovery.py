"""What the scheduler does about lost arrays, full disks and durable versions, with a worker that only makes names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gradserve.orchestration.lanes import Lane
from gradserve.store.base import Run, Settlement, StoreError, Version
from gradserve.store.wakeups import NameVersion, Rollback
from gradserve.wire.errors import Conflict, NotFound
from gradserve.wire.ops import AdamParams, CreateModel, OpBody, OptimStep, SaveWeights
from tests.unit.test_scheduler import LORA, World, forward_backward, play


async def steps(world: World, count: int, first_seq: int = 1) -> int:
    """``count`` times forward_backward and optim_step; the next free seq."""
    seq = first_seq
    for _ in range(count):
        await world.ended(await world.submit(seq, forward_backward(3)))
        await world.ended(await world.submit(seq + 1, OptimStep(AdamParams())))
        seq += 2
    return seq


async def run_of(world: World) -> Run:
    run = await world.store.get_run("t", "r")
    assert run is not None
    return run


async def versions_of(world: World, count: int) -> list[Version]:
    """Until so many are durable."""
    async with asyncio.timeout(10):
        while len(found := await world.store.list_versions("t", "r")) < count:  # noqa: ASYNC110  (made in the background)
            await asyncio.sleep(0.01)
    return found


async def kinds_of(world: World) -> list[str]:
    return [event.kind for event in (await world.store.list_events("t", "r", 99, 0))[0]]


def lose_memory(world: World) -> None:
    """A power cut, as far as arrays and lanes go."""
    for file in world.objects.fast.glob("*"):
        file.unlink()
    world.scheduler._lanes.clear()


def test_lost_arrays_are_computed_again_and_settled_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        seq = await steps(world, 3)
        await world.ended(await world.submit(seq, forward_backward(3)))
        before = await run_of(world)
        assert len(before.gradients) == 1
        lines = (await world.store.ledger_total("t")).lines
        lose_memory(world)
        assert (await world.ended(await world.submit(seq + 1, OptimStep(AdamParams())))).state == "done"
        after = await run_of(world)
        assert after.version == before.version + 1
        assert (await world.store.ledger_total("t")).lines == lines + 1, "only the new step is billed"
        assert await kinds_of(world) == ["recovered"]
        again = [task for task in world.worker.given if "~replay" in task]
        assert len(again) == 1 + 3 * 2 + 1, "creation, three steps, and the gradient that waited"

    play(tmp_path, story)


def test_a_replay_begins_at_the_newest_whole_version(tmp_path: Path) -> None:
    """The newest one was damaged meanwhile: that is found, and the older one serves."""

    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        seq = await steps(world, 1)
        await versions_of(world, 1)
        seq = await steps(world, 1, seq)
        newest = (await versions_of(world, 2))[0]
        world.scheduler._settings = world.scheduler._settings.model_copy(update={"durable_every_steps": 99})
        (world.objects.durable / f"{newest.weights}.safetensors").write_bytes(b"flipped")
        lose_memory(world)
        assert (await world.ended(await world.submit(seq, forward_backward(3)))).state == "done"
        (event,) = [e for e in (await world.store.list_events("t", "r", 9, 0))[0] if e.kind == "recovered"]
        assert event.detail.startswith("2 requests run again from durable step 1,")

    play(tmp_path, story, durable_every_steps=1)


def test_when_a_version_is_due() -> None:
    from gradserve.orchestration.held import Held
    from gradserve.orchestration.snapshots import Snapshots
    from gradserve.settings import Settings

    settings = Settings(durable_every_steps=3, durable_every_s=3600, durable_replay_s=10)
    snapshots = Snapshots(None, None, None, settings, None, Held())  # type: ignore[arg-type]

    def stepped(version: int, compute_ms: float = 1.0) -> list[tuple[str, str]]:
        snapshots.stepped(Run("r", "t", "s", "tiny", LORA, 0.0, 0.0, version=version), version, compute_ms)
        return [(run, cause) for run, cause in snapshots.due()]

    assert [stepped(1), stepped(2)] == [[], []]
    assert stepped(3) == [("r", "steps")]
    snapshots.covered("r")
    assert snapshots.due() == []
    assert stepped(4, 9_000.0) == []
    assert stepped(5, 2_000.0) == [("r", "replay")]


def test_training_goes_on_when_versions_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        real = world.objects.persist

        def full(digest: str) -> Path:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(world.objects, "persist", full)
        monkeypatch.setattr("gradserve.orchestration.snapshots._RETRY_S", 0.0)
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        seq = await steps(world, 2)
        assert (await run_of(world)).version == 2
        assert "No space left" in world.scheduler.alarms.active["versions"]
        assert await world.store.list_versions("t", "r") == []
        monkeypatch.setattr(world.objects, "persist", real)
        await steps(world, 1, seq)
        async with asyncio.timeout(10):
            while (await versions_of(world, 1))[0].version != 3:  # noqa: ASYNC110  (made in the background)
                await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            while world.scheduler.alarms.active:  # noqa: ASYNC110  (cleared in the background)
                await asyncio.sleep(0.01)
        told = [event.kind for event in (await world.store.list_events("t", None, 9, 0))[0]]
        assert told == ["storage_well", "storage_alarm"]

    play(tmp_path, story, durable_every_steps=1)


def test_results_wait_in_order_while_the_journal_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is told before it is written, and an older end never overwrites a newer one."""

    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        real, written = world.store.settle, []
        broken = True

        async def settle(settlement: Settlement) -> bool:
            if broken:
                raise StoreError("database or disk is full")
            written.append(settlement.op_id)
            return await real(settlement)

        monkeypatch.setattr(world.store, "settle", settle)
        monkeypatch.setattr("gradserve.orchestration.scheduler._RETRY_S", 0.01)
        step: list[OpBody] = [forward_backward(3), OptimStep(AdamParams())]
        bodies = step + step
        ids = [await world.submit(seq, body) for seq, body in enumerate(bodies, 1)]
        async with asyncio.timeout(10):
            while len(world.worker.done) < 5:  # noqa: ASYNC110  (all are computed, none is told)
                await asyncio.sleep(0.01)
        assert (await run_of(world)).version == 0
        assert "full" in world.scheduler.alarms.active["journal"]
        broken = False
        for op_id in ids:
            assert (await world.ended(op_id)).state == "done"
        assert written == ids
        assert (await run_of(world)).version == 2
        assert world.scheduler.alarms.active == {}
        assert not world.fatal

    play(tmp_path, story)


def test_a_reader_that_ended_ahead_does_not_stop_the_lane_of_the_next_server(tmp_path: Path) -> None:
    """forward_backward 2 had ended before 1 when the server died: its number is not waited for."""

    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        world.worker.slow["r:op:1/0"] = asyncio.Event()
        first = await world.submit(1, forward_backward(3))
        second = await world.submit(2, forward_backward(3))
        assert (await world.ended(second)).state == "done"
        assert (await run_of(world)).cursor == 0
        world.scheduler._lanes.clear()  # as a new server begins
        for op in await world.store.unfinished_ops():
            await world.scheduler._admit(op)
        world.worker.slow["r:op:1/0"].set()
        third = await world.submit(3, OptimStep(AdamParams()))
        assert (await world.ended(first)).state == "done"
        step = await world.ended(third)
        assert step.result is not None
        assert b'"grad_norm":2.0' in step.result, "both gradients are in it"

    play(tmp_path, story)


def test_any_step_can_be_named_and_gone_back_to(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        states = []
        seq = 1
        for _ in range(3):
            seq = await steps(world, 1, seq)
            states.append((await run_of(world)).weights)
        named = await world.wakeups.ask(NameVersion("t", "r", 2, "two", purpose="forked"))
        assert (named.weights, named.version, named.path) == (states[1], 2, "tinker://r/weights/two")
        assert world.objects.has_durable(named.weights)
        run = await world.wakeups.ask(Rollback("t", "r", 1))
        assert (run.version, run.weights) == (1, states[0])
        with pytest.raises(NotFound, match="Step 7 of r can't be had"):
            await world.wakeups.ask(NameVersion("t", "r", 7, "seven"))
        with pytest.raises(NotFound, match="no run 'q'"):
            await world.wakeups.ask(Rollback("t", "q", 1))
        world.worker.slow[f"r:op:{seq}/0"] = asyncio.Event()
        busy = await world.submit(seq, forward_backward(3))
        await world.given(f"r:op:{seq}/0")
        with pytest.raises(Conflict, match="have not ended"):
            await world.wakeups.ask(Rollback("t", "r", 1))
        world.worker.slow[f"r:op:{seq}/0"].set()
        await world.ended(busy)
        assert await kinds_of(world) == ["rolled_back", "forked"]
        lose_memory(world)
        assert (await world.wakeups.ask(Rollback("t", "r", 1))).weights == states[0], "it waits for the recovery"
        # What was rolled back stays in the journal: the step that was left can still be forked.
        again = await world.wakeups.ask(NameVersion("t", "r", 3, "three"))
        assert again.weights == states[2]

    play(tmp_path, story)


def test_a_save_covers_what_came_before_it(tmp_path: Path) -> None:
    """Its version is durable, and says everything that a resume needs, each thing with its digest."""
    import json

    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        seq = await steps(world, 1)
        await world.ended(await world.submit(seq, SaveWeights("a", "weights")))
        (version,) = await world.store.list_versions("t", "r")
        assert (version.cause, version.version, version.seq) == ("save", 1, seq)
        entries = json.loads(version.manifest)["entries"]
        assert len(entries) >= 12
        assert all("digest" in entry for entry in entries.values())
        assert entries["weights"]["digest"] == version.weights
        assert entries["cursors"]["value"] == {"version": 1, "seq": seq}

    play(tmp_path, story)


def test_a_paused_lane_starts_nothing() -> None:
    lane = Lane(Run("r", "t", "s", "tiny", LORA, 0.0, 0.0), 0)
    lane.resumed.clear()
    assert lane.start_ready() == []
    assert not lane.idle
