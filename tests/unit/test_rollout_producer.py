"""Rollouts ahead of the trainer: the bound on staleness, the order of the data, resume, errors, the end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from gradserve.algorithms.rollouts.producer import RolloutProducer, RolloutTimeout, WrongRollouts
from gradserve.episodes.episode import Episode
from tests.unit.rollouts import episode

ROWS = 24
SIZE = 2
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Batch:
    items: Sequence[Any]
    position: int


def batches(position: int = 0) -> Iterator[Batch]:
    """Of ROWS numbered rows, from a position on."""
    for start in range(position, ROWS, SIZE):
        yield Batch([{"number": number} for number in range(start, start + SIZE)], start + SIZE)


class Run:
    """A trainer's version, and a ``collect`` that samples by the version it is told, after ``delay()`` seconds."""

    def __init__(self, version: int = 0, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.version, self._delay = version, delay
        self.calls: list[tuple[list[int], int, int]] = []

    def current(self) -> int:
        return self.version

    def collect(self, rows: Rows, version: int, seed: int) -> list[list[Episode]]:
        self.calls.append(([row["number"] for row in rows], version, seed))
        time.sleep(self._delay())
        return [[episode(1.0, version=version, row=row) for _ in range(2)] for row in rows]


def numbers(batch: Batch) -> list[int]:
    return [group[0].row["number"] for group in batch.items]


def versions(batch: Batch) -> list[int]:
    return [turn.version for group in batch.items for found in group for turn in found.turns]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_no_token_is_staler_than_allowed_and_the_order_is_the_datas(bound: int, seed: int) -> None:
    """Delays on both sides are random, and a sampler may use weights older than the newest."""
    rng = random.Random(seed)
    run = Run(delay=lambda: rng.random() * 0.003)
    outdated = 0

    def collect(rows: Rows, version: int, attempt_seed: int) -> list[list[Episode]]:
        groups = run.collect(rows, version, attempt_seed)
        is_first = attempt_seed < ROWS
        return [
            [episode(1.0, version=max(0, version - rng.randint(0, bound + 2)), row=group[0].row)] if is_first else group
            for group in groups
        ]

    with RolloutProducer(batches(), collect, run.current, max_off_policy_steps=bound) as producer:
        seen = []
        for batch in producer:
            assert all(run.version - bound <= version <= run.version for version in versions(batch))
            outdated += any(version < run.version for version in versions(batch))
            seen += numbers(batch)
            time.sleep(rng.random() * 0.003)
            run.version += 1
    assert seen == list(range(ROWS))
    assert producer.dropped == sum(len(rows) for rows, _, attempt in run.calls if attempt >= ROWS) > 0
    assert bool(outdated) == bool(bound)


def test_bound_0_is_on_policy() -> None:
    """A batch is begun when it is asked for, by the version that it is trained on."""
    run = Run()
    with RolloutProducer(batches(), run.collect, run.current) as producer:
        for number, batch in enumerate(producer):
            assert [call[1:] for call in run.calls] == [(version, version) for version in range(number + 1)]
            assert set(versions(batch)) == {run.version}
            run.version += 1
    assert len(run.calls) == ROWS // SIZE
    assert producer.dropped == 0


def test_bound_1_samples_the_next_batch_while_this_one_is_trained() -> None:
    run = Run()
    begun = [threading.Event() for _ in range(ROWS)]

    def collect(rows: Rows, version: int, seed: int) -> list[list[Episode]]:
        begun[seed].set()
        return run.collect(rows, version, seed)

    with RolloutProducer(batches(), collect, run.current, max_off_policy_steps=1) as producer:
        next(producer)
        assert begun[1].wait(10)
        assert not begun[2].wait(0.05)
        run.version += 1
        assert set(versions(next(producer))) == {0}
        assert begun[2].wait(10)


def test_more_steps_than_expected_make_groups_too_old() -> None:
    """They are collected again, and the batches after them, ready before, wait for their turn."""
    run = Run()
    with RolloutProducer(batches(), run.collect, run.current, max_off_policy_steps=3) as producer:
        seen = []
        for batch in producer:
            assert min(versions(batch)) >= run.version - 3
            seen += numbers(batch)
            run.version += 4
    assert seen == list(range(ROWS))
    assert producer.dropped > 0


def test_steps_per_batch_says_so_before() -> None:
    run = Run()
    with RolloutProducer(batches(), run.collect, run.current, max_off_policy_steps=3, steps_per_batch=2) as producer:
        for _ in producer:
            run.version += 2
    assert producer.dropped == 0


@pytest.mark.parametrize("done", [0, 1, 5, 12])
def test_a_resume_sees_each_row_once(done: int) -> None:
    """What was in flight at the end of the first run is collected again, with the seeds of an uninterrupted run."""
    position, seen, run = 0, list[int](), Run()
    with RolloutProducer(batches(), run.collect, run.current, max_off_policy_steps=3) as producer:
        for _ in range(done):
            batch = next(producer)
            position, run.version = batch.position, run.version + 1
            seen += numbers(batch)
    resumed = Run(version=done)
    again = RolloutProducer(batches(position), resumed.collect, resumed.current, max_off_policy_steps=3, first=done)
    with again:
        for batch in again:
            seen += numbers(batch)
            resumed.version += 1
    assert seen == list(range(ROWS))
    assert [(rows, seed) for rows, _, seed in resumed.calls] == [
        ([SIZE * number, SIZE * number + 1], number) for number in range(done, ROWS // SIZE)
    ]


def test_an_error_of_collect_comes_before_batches_that_are_ready() -> None:
    run = Run()

    def collect(rows: Rows, version: int, seed: int) -> list[list[Episode]]:
        if seed == 2:
            raise ConnectionError("the sampler is gone")
        return run.collect(rows, version, seed)

    with RolloutProducer(batches(), collect, run.current, max_off_policy_steps=5) as producer:
        producer._thread.join(10)
        with pytest.raises(ConnectionError, match="the sampler is gone") as error:
            next(producer)
    assert [seed for _, _, seed in run.calls] == [0, 1]
    assert "collecting batch 2 at version 0, 2 rows, the first {'number': 4}" in error.value.__notes__[0]


def test_an_error_ends_a_wait() -> None:
    waiting = threading.Event()

    def collect(rows: Rows, version: int, seed: int) -> list[list[Episode]]:
        waiting.wait(10)
        raise ValueError("no such column")

    with RolloutProducer(batches(), collect, lambda: 0) as producer:
        threading.Timer(0.05, waiting.set).start()
        with pytest.raises(ValueError, match="no such column"):
            next(producer)


def test_stop_iteration_in_collect_does_not_end_the_data() -> None:
    def collect(rows: Rows, version: int, seed: int) -> list[list[Episode]]:
        return next(iter([]))

    with RolloutProducer(batches(), collect, lambda: 0) as producer, pytest.raises(RuntimeError, match="StopIteration"):
        list(producer)


def test_an_error_of_the_data() -> None:
    def broken() -> Iterator[Batch]:
        yield from batches(ROWS - SIZE)
        raise OSError("line 7")

    run = Run()
    with RolloutProducer(broken(), run.collect, run.current) as producer:
        assert numbers(next(producer)) == [ROWS - 2, ROWS - 1]
        with pytest.raises(OSError, match="line 7"):
            next(producer)


@pytest.mark.parametrize(
    ("collect", "said"),
    [
        (lambda rows, version, seed: [[episode(1.0, version=8)], [episode(1.0, version=7)]], "tokens of version 8"),
        (lambda rows, version, seed: [[episode(1.0, version=7)]], "returned 1 groups for batch 0"),
        (lambda rows, version, seed: [[episode(1.0, version=4)] for _ in rows], r"row 0 {'number': 0}: collected 3"),
    ],
    ids=["future", "too few", "stale for ever"],
)
def test_wrong_rollouts(collect: Any, said: str) -> None:
    with (
        RolloutProducer(batches(), collect, lambda: 7, max_off_policy_steps=2) as producer,
        pytest.raises(WrongRollouts, match=said),
    ):
        next(producer)


def test_a_wait_ends_and_names_its_cause_and_close_leaves_it_alone() -> None:
    release, closed = threading.Event(), list[bool]()

    def data() -> Iterator[Batch]:
        try:
            yield from batches()
        finally:
            closed.append(True)

    def collect(rows: Rows, version: int, seed: int) -> list[list[Episode]]:
        release.wait(60)
        return [[episode(1.0, row=row)] for row in rows]

    with (
        RolloutProducer(data(), collect, lambda: 0, timeout_s=0.1, close_timeout_s=0.1) as producer,
        pytest.raises(RolloutTimeout) as error,
    ):
        next(producer)
    assert "batch 0 is not there after 0.1 s: collect has not returned batch 0 at version 0, 2 rows" in str(error.value)
    assert not closed
    with pytest.raises(RuntimeError, match="closed"):
        next(producer)
    release.set()
    producer.close()
    assert closed, "the thread ends once collect does, and closes the data"


def test_close_ends_the_thread() -> None:
    run = Run()
    before = threading.active_count()
    for bound in (0, 4):
        producer = RolloutProducer(batches(), run.collect, run.current, max_off_policy_steps=bound)
        next(producer)
        producer.close()
    assert threading.active_count() == before


def test_an_episode_that_failed_before_any_token_is_not_stale() -> None:
    rows = [{"number": 0}, {"number": 1}]
    with RolloutProducer([Batch(rows, 2)], lambda *_: [[Episode(row, ())] for row in rows], lambda: 9) as producer:
        assert numbers(next(producer)) == [0, 1]
        with pytest.raises(StopIteration):
            next(producer)
