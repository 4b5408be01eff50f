"""A flipped bit in a file of a kept state: the same bytes again, or an error naming the file and what is good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gradserve.compute.archive import Archive
from gradserve.compute.objects import ObjectStore
from gradserve.store.base import Checkpoint, Op, SamplingSession
from gradserve.store.wakeups import MakeWhole
from gradserve.wire.errors import Problem, ServerError
from gradserve.wire.ops import CreateModel, LoadWeights, SaveWeights
from tests.unit.test_recovery import kinds_of, lose_memory, steps
from tests.unit.test_scheduler import LORA, World, play

Place = Callable[[World, Checkpoint], Path]


def durable(world: World, digest: str | None) -> Path:
    assert digest is not None
    return world.objects.durable / f"{digest}.safetensors"


def in_folder(world: World, name: str) -> Path:
    return world.folders._root / "r" / "weights" / "b" / name


FILES: dict[str, Place] = {
    "object of the weights": lambda world, kept: durable(world, kept.weights),
    "object of the moments": lambda world, kept: durable(world, kept.moments),
    "folder's weights": lambda world, _: in_folder(world, "adapter_model.safetensors"),
    "folder's moments": lambda world, _: in_folder(world, "optimizer.safetensors"),
}


def flip_a_bit(file: Path) -> None:
    """In place: whatever else is linked to these bytes is damaged with them."""
    with open(file, "r+b") as opened:
        first = opened.read(1)
        opened.seek(0)
        opened.write(bytes([first[0] ^ 1]))


async def two_saved_states(world: World) -> tuple[Checkpoint, Checkpoint]:
    """ "a" after one step, "b" after two; only on disk, like after a restart."""
    await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
    seq = 1
    for name in ("a", "b"):
        seq = await steps(world, 1, seq)
        await world.ended(await world.submit(seq, SaveWeights(name, "weights")))
        seq += 1
    lose_memory(world)
    return await saved(world, "a"), await saved(world, "b")


async def saved(world: World, name: str) -> Checkpoint:
    found = await world.store.get_checkpoint("t", "r", "weights", name)
    assert found is not None
    return found


async def load(world: World, name: str, seq: int = 7, optimizer: bool = True) -> Op:
    return await world.ended(await world.submit(seq, LoadWeights(f"tinker://r/weights/{name}", optimizer)))


def no_replays(world: World) -> None:
    """As when the bodies have expired."""
    world.worker.refuse |= {f"r:op:{seq}~replay/0" for seq in range(10)}


def told(op: Op) -> Problem:
    assert op.state == "failed"
    assert op.problem is not None
    return op.problem


@pytest.mark.parametrize("by", ["its own run", "another"])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_computed_again(tmp_path: Path, file: str, by: str) -> None:
    async def story(world: World) -> None:
        _, kept = await two_saved_states(world)
        place = FILES[file](world, kept)
        whole = place.read_bytes()
        flip_a_bit(place)
        if by == "another":
            await world.wakeups.ask(MakeWhole.of(kept, "t", "weights", "optimizer moments"))
        else:
            assert (await load(world, "b")).state == "done"
        assert place.read_bytes() == whole, "the folder too has the good bytes"
        for digest in (kept.weights, kept.moments):
            assert digest is not None
            assert ObjectStore.digest(durable(world, digest).read_bytes()) == digest
        assert (await kinds_of(world)).count("recovered") == 1
        assert not list(world.objects.durable.glob("*.damaged"))

    play(tmp_path, story)


@pytest.mark.parametrize("file", FILES)
def test_what_cannot_be_computed_again_is_named_with_what_is_good(tmp_path: Path, file: str) -> None:
    async def story(world: World) -> None:
        _, kept = await two_saved_states(world)
        no_replays(world)
        place = FILES[file](world, kept)
        flip_a_bit(place)
        left = place.read_bytes()
        for seq in (7, 8):  # it stays what it was
            problem = told(await load(world, "b", seq))
            assert (problem.status, problem.code) == (500, "checkpoint.corrupt")
            role, digest = ("weights", kept.weights) if "weights" in file else ("optimizer moments", kept.moments)
            named = f"durable/{digest}.safetensors (the {role} of tinker://r/weights/b) is damaged"
            assert named in problem.detail
            if role == "weights":
                assert "The next older good one is tinker://r/weights/a (step 1)." in problem.detail
            else:
                assert "load it without optimizer moments" in problem.detail
        assert place.read_bytes() == left, "what is left of it is not thrown away"

    play(tmp_path, story)


def test_only_what_was_read_and_is_good_is_offered(tmp_path: Path) -> None:
    """Without names and with "a" damaged too, a durable version is; when that is damaged, nothing."""

    async def story(world: World) -> None:
        first, kept = await two_saved_states(world)
        no_replays(world)
        flip_a_bit(durable(world, kept.weights))
        await world.store.delete_checkpoint("t", "r", "weights", "a")
        assert "is step 1: gradserve rollback r --to 1" in told(await load(world, "b")).detail
        flip_a_bit(durable(world, first.weights))
        assert "No older version or checkpoint of the run is left" in told(await load(world, "b", 8)).detail
        for digest in (first.weights, kept.weights):
            durable(world, digest).unlink(missing_ok=True)
        problem = told(await load(world, "b", 9))
        assert (problem.status, problem.code) == (500, "checkpoint.lost")

    play(tmp_path, story)


def test_good_weights_load_without_damaged_moments(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        _, kept = await two_saved_states(world)
        no_replays(world)
        flip_a_bit(durable(world, kept.moments))
        assert (await load(world, "b", optimizer=False)).state == "done"

    play(tmp_path, story)


@pytest.mark.parametrize("again", [True, False])
def test_sampling_from_damaged_weights(tmp_path: Path, again: bool) -> None:
    async def story(world: World) -> None:
        _, kept = await two_saved_states(world)
        if not again:
            no_replays(world)
        session = SamplingSession("p", "t", "s", "tiny", 0.0, kept.weights, "r", 2, kept.path)
        await world.store.put_sampling_session(session)
        flip_a_bit(durable(world, kept.weights))
        ended = await world.ended((await world.sample(1, kept.weights)).id)
        if again:
            assert (ended.state, ended.weights) == ("done", kept.weights)
            assert "recovered" in await kinds_of(world)
        else:
            assert told(ended).code == "checkpoint.corrupt"
            assert "The next older good one is tinker://r/weights/a (step 1)." in told(ended).detail

    play(tmp_path, story)


def test_a_clients_state_cannot_be_computed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.ended(await world.submit(0, CreateModel("tiny", LORA)))
        states = [world.objects.put(content) for content in (b"row 1", b"row 2")]
        for digest in states:
            world.objects.persist(digest)
        for seq, (name, state) in enumerate(zip("ab", states, strict=True), 1):
            await world.ended(await world.submit(seq, SaveWeights(name, "weights", client_state=state)))
        lose_memory(world)
        flip_a_bit(durable(world, states[1]))
        ask = MakeWhole.of(await saved(world, "b"), "t", "client state")
        with pytest.raises(ServerError, match="client state of tinker://r/weights/b") as caught:
            await world.wakeups.ask(ask)
        assert "good one is tinker://r/weights/a (step 0)" in caught.value.problem().detail

    play(tmp_path, story)


def test_others_hear_nothing_of_a_tenants_states(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        _, kept = await two_saved_states(world)
        no_replays(world)
        flip_a_bit(durable(world, kept.weights))
        with pytest.raises(ServerError) as caught:
            await world.wakeups.ask(MakeWhole.of(kept, "somebody else", "weights"))
        assert "weights/a" not in caught.value.problem().detail
        assert "rollback" not in caught.value.problem().detail

    play(tmp_path, story)


def test_a_folder_gets_what_the_archive_gave_back(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        _, kept = await two_saved_states(world)
        no_replays(world)
        world.objects.remote = Archive((tmp_path / "nas").as_uri())
        world.objects.archive(kept.weights)
        file = in_folder(world, "adapter_model.safetensors")
        whole = file.read_bytes()
        flip_a_bit(file)
        assert (await load(world, "b")).state == "done"
        assert file.read_bytes() == whole
        assert file.samefile(durable(world, kept.weights))

    play(tmp_path, story)
