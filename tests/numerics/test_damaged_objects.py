"""One flipped bit in a stored array fails what would have been computed from it, whichever tier it lies in."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pytest

from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.engine import Engine, TrainingTask
from gradserve.compute.engine.sampler import Sampler
from gradserve.compute.objects import ObjectStore
from gradserve.compute.tasks import Done, Failed, GradTask, OptimTask, Outcome, ReduceTask, SampleTask
from gradserve.wire.ops import AdamParams
from tests.numerics.lab import CPU, Lab, ask, ids, plain_rows

Tier = Literal["fast", "durable"]


class Process:
    """A worker that has not read anything yet, over the tiers in ``root``."""

    def __init__(self, lab: Lab, root: Path) -> None:
        self.store = ObjectStore(root / "fast", root / "durable")
        self.arrays = Arrays(self.store, CPU)
        self.engine = Engine(lab.bases, self.arrays)
        self.sampler = Sampler(lab.bases, self.arrays, 1 << 24, 64)

    def run(self, task: TrainingTask | SampleTask) -> Outcome:
        if not isinstance(task, SampleTask):
            return self.engine.run(task)
        self.sampler.add(task)
        while True:
            for message in self.sampler.step():
                assert isinstance(message, Done | Failed)
                return message


class State:
    """Weights, a gradient on them, and what a step on that made."""

    def __init__(self, lab: Lab, root: Path) -> None:
        process = Process(lab, root)
        started = lab.store.path(lab.adapter("llama")).read_bytes()
        self.start = process.store.put(started)
        self.weights, self.moments = self._step(process, self.start, None)
        self.gradient = self._gradient(process, self.weights)

    def _gradient(self, process: Process, weights: str) -> str:
        done = process.run(GradTask("g", "llama", weights, plain_rows(), "cross_entropy", {}, backward=True))
        assert isinstance(done, Done), done
        return done.objects["gradient"]

    def _step(self, process: Process, weights: str, moments: str | None) -> tuple[str, str]:
        done = process.run(OptimTask("o", weights, moments, [self._gradient(process, weights)], AdamParams()))
        assert isinstance(done, Done), done
        return done.objects["weights"], done.objects["moments"]

    def reading(self, role: str) -> tuple[str, list[TrainingTask | SampleTask]]:
        """The object of a role, and Tasks that read it."""
        step = OptimTask("t", self.weights, self.moments, [self.gradient], AdamParams())
        forward = GradTask("t", "llama", self.weights, plain_rows(), "cross_entropy", {}, backward=False)
        sample = SampleTask("t", ask("llama", ids(0, 4), self.weights))
        match role:
            case "weights":
                return self.weights, [forward, step, sample]
            case "gradient":
                return self.gradient, [step, ReduceTask("t", [self.gradient, self.gradient])]
            case _:
                return self.moments, [step]


def flip_a_bit(file: Path) -> None:
    """In the middle of the last tensor, so that the file is still read without complaint by everything else."""
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.unlink()  # a new file: nobody's mapping changes
    file.write_bytes(bytes(data))


def files(root: Path) -> set[str]:
    return {file.name for tier in ("fast", "durable") for file in (root / tier).iterdir()}


@pytest.mark.parametrize("tier", ["fast", "durable"])
@pytest.mark.parametrize("role", ["weights", "gradient", "moments"])
def test_nothing_is_computed_from_a_damaged_object(lab: Lab, tmp_path: Path, role: str, tier: Tier) -> None:
    state = State(lab, tmp_path)
    digest, tasks = state.reading(role)
    store = ObjectStore(tmp_path / "fast", tmp_path / "durable")
    if tier == "durable":
        store.demote(digest)
    sound = [Process(lab, tmp_path).run(task) for task in tasks]
    assert all(isinstance(outcome, Done) for outcome in sound), sound
    for outcome in sound:
        assert isinstance(outcome, Done)
        for made in set(outcome.objects.values()):
            store.discard(made)
    flip_a_bit(store.path(digest))
    before = files(tmp_path)
    for task in tasks:
        failed = Process(lab, tmp_path).run(task)
        assert isinstance(failed, Failed), failed
        assert (failed.kind, failed.message) == ("corrupt", f"object {digest} is damaged")
        assert str(store.path(digest)) in failed.traceback, "the log says which file"
    assert files(tmp_path) == before


def test_a_good_durable_copy_stands_in_for_a_damaged_fast_one(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = State(lab, tmp_path)
    digest, (forward, *_) = state.reading("weights")
    expected = Process(lab, tmp_path).run(forward)
    store = ObjectStore(tmp_path / "fast", tmp_path / "durable")
    store.persist(digest)
    flip_a_bit(store.path(digest))
    assert store.path(digest).parent == store.fast
    with caplog.at_level(logging.ERROR):
        outcome = Process(lab, tmp_path).run(forward)
    assert isinstance(outcome, Done)
    assert isinstance(expected, Done)
    assert outcome.rows == expected.rows
    assert digest in caplog.text
    assert store.path(digest).parent == store.durable, "the damaged copy is gone"
