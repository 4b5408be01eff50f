"""Rollouts made while the trainer trains, never staler than allowed.

One thread collects batch after batch in the data's order, each with the weights that are the newest when it begins. It
runs ahead of the trainer by as many batches as the bound on staleness permits; with a bound of 0 a batch is begun when
the trainer asks for it. One thread suffices: a batch's rows are in flight together, and a second batch at the same time
would only take the sampler from the one that is needed first.

The invariants: batches are handed out in the order of the data, each once, whatever the timing; and no token in one is
older than ``max_off_policy_steps`` optimizer steps at the weights that it is trained on.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeAlias, TypeVar

from gradserve.episodes.episode import Episode

log = logging.getLogger(__name__)

Group: TypeAlias = list[Episode]
Collect: TypeAlias = Callable[[Sequence[Mapping[str, Any]], int, int], list[Group]]
"""``collect(rows, version, seed)``: the groups of the rows, in order, sampled by the weights ``version``. It blocks."""


class RowBatch(Protocol):
    """A dataclass with ``items``; its other fields, the position in the data for one, go through unchanged."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def items(self) -> Sequence[Any]: ...


Batch = TypeVar("Batch", bound=RowBatch)


class RolloutTimeout(TimeoutError):
    """A batch was not there in time; the text names it and what it waits for."""


class WrongRollouts(RuntimeError):
    """``collect`` gave what can't be trained on: too few groups, tokens of a future version, or only stale ones."""


@dataclass
class _Job(Generic[Batch]):
    """A batch on its way. ``places`` are the rows that are still to be collected."""

    number: int
    batch: Batch
    places: list[int]
    attempt: int = 0
    groups: dict[int, Group] = field(default_factory=dict)


class RolloutProducer(Generic[Batch]):
    """An iterator over ``batches`` with groups of episodes for rows as their ``items``; a context manager::

        with RolloutProducer(batches, collect, lambda: trainer.step, max_off_policy_steps=1) as producer:
            for batch in producer:
                trainer.step_on(batch.items)
                save(batch.position)  # a resume goes on behind this batch: what is in flight is made again

    ``current`` says how many optimizer steps are behind the newest weights; a batch is trained on those that are the
    newest when it is asked for. ``first`` is the number of the first batch: ``collect``'s seed is the batch's number,
    so a resume that gives the number of batches behind it samples as the uninterrupted run does.

    Groups that would be too old when they are handed out are dropped, counted in ``dropped`` and collected again with
    the newest weights, in at most ``max_attempts`` attempts. ``steps_per_batch`` is how many optimizer steps are
    made with a batch. A batch that is not there ``timeout_s`` seconds after it was asked for raises RolloutTimeout; an
    error of ``collect`` or of the data is raised at the next ask, or in the one that waits.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        collect: Collect,
        current: Callable[[], int],
        *,
        max_off_policy_steps: int = 0,
        steps_per_batch: int = 1,
        first: int = 0,
        timeout_s: float = 1800.0,
        close_timeout_s: float = 10.0,
        max_attempts: int = 3,
    ) -> None:
        if max_off_policy_steps < 0 or steps_per_batch < 1 or max_attempts < 1 or timeout_s <= 0:
            raise ValueError(
                f"max_off_policy_steps is {max_off_policy_steps} (from 0), steps_per_batch {steps_per_batch} and "
                f"max_attempts {max_attempts} (from 1), timeout_s {timeout_s} (above 0)"
            )
        self._batches, self._collect, self._current = iter(batches), collect, current
        self._staleness, self._ahead = max_off_policy_steps, max_off_policy_steps // steps_per_batch
        self._timeout_s, self._close_timeout_s, self._max_attempts = timeout_s, close_timeout_s, max_attempts
        self.dropped = 0
        """Groups that had become too old and were collected again."""
        self.waited_s = 0.0
        """Wall time that the trainer waited in all."""
        self._changed = threading.Condition()
        # All below belong to the lock of _changed.
        self._begun = self._handed = first
        self._asked = first - 1
        self._ready: dict[int, _Job[Batch]] = {}
        """By number: one that is collected again comes after its successors."""
        self._again: _Job[Batch] | None = None
        self._error: BaseException | None = None
        self._exhausted = self._closed = False
        self._doing = _Doing("nothing was begun")
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; at most ``close_timeout_s`` seconds. A ``collect`` that is still at it is left alone."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            log.warning("rollouts did not end within %g s and are left alone: %s", self._close_timeout_s, self._doing)

    # The trainer's side

    def __next__(self) -> Batch:
        """The next batch. Raises RolloutTimeout, WrongRollouts, RuntimeError when closed, and what collect raised."""
        began = time.monotonic()
        version = self._current()
        with self._changed:
            self._asked = self._handed
            self._changed.notify_all()
            try:
                while True:
                    job = self._take(began + self._timeout_s)
                    stale = [place for place, group in job.groups.items() if self._is_stale(group, version)]
                    if not stale:
                        self._handed += 1
                        return replace(job.batch, items=[job.groups[place] for place in range(len(job.batch.items))])
                    self._collect_again(job, sorted(stale), version)
            finally:
                self.waited_s += time.monotonic() - began

    def _take(self, deadline: float) -> _Job[Batch]:
        """The batch that is next in the data's order, when it is there."""
        while not (self._closed or self._error or self._handed in self._ready or self._is_over()):
            left = deadline - time.monotonic()
            if left <= 0:
                raise RolloutTimeout(f"batch {self._handed} is not there after {self._timeout_s:g} s: {self._doing}")
            self._changed.wait(left)
        if self._error is not None:
            raise _as_raised(self._error)
        if self._closed:
            raise RuntimeError("the rollouts are closed")
        if self._is_over():
            raise StopIteration
        return self._ready.pop(self._handed)

    def _is_over(self) -> bool:
        return self._exhausted and self._handed == self._begun

    def _is_stale(self, group: Group, version: int) -> bool:
        return any(turn.version < version - self._staleness for episode in group for turn in episode.turns)

    def _collect_again(self, job: _Job[Batch], places: list[int], version: int) -> None:
        self.dropped += len(places)
        if job.attempt + 1 >= self._max_attempts:
            raise WrongRollouts(
                f"batch {job.number}, row {places[0]} {_shown(job.batch.items[places[0]])}: "
                f"collected {job.attempt + 1} times, it has tokens more than {self._staleness} steps behind {version}"
            )
        job.places, job.attempt = places, job.attempt + 1
        self._again = job
        self._changed.notify_all()

    # The thread's side

    def _work(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                self._run(job)
        except BaseException as error:  # all belong to the trainer's thread
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            if (close := getattr(self._batches, "close", None)) is not None:
                close()

    def _next_job(self) -> _Job[Batch] | None:
        """Wait until there is something to do; None when there never will be."""
        with self._changed:
            # Without a deadline: a trainer takes as long as it takes, and close() ends it.
            self._changed.wait_for(lambda: self._closed or self._again is not None or self._may_begin())
            if self._closed:
                return None
            if self._again is not None:
                job, self._again = self._again, None
                return job
            number = self._begun
            self._doing = _Doing(f"the data has not given the rows of batch {number}")
        batch = next(self._batches, None)
        with self._changed:
            if batch is None:
                self._exhausted = True
                self._doing = _Doing("the data is at its end")
                self._changed.notify_all()
            else:
                self._begun += 1
        if batch is None:
            return self._next_job()  # batches may become too old after the end of the data
        return _Job(number, batch, list(range(len(batch.items))))

    def _may_begin(self) -> bool:
        return not self._exhausted and self._begun <= self._asked + self._ahead

    def _run(self, job: _Job[Batch]) -> None:
        """Collect its places."""
        version = self._current()
        rows = [job.batch.items[place] for place in job.places]
        what = (
            f"batch {job.number} at version {version}, {len(rows)} rows, the first {_shown(rows[0] if rows else None)}"
        )
        with self._changed:
            self._doing = _Doing(f"collect has not returned {what}")
        try:
            groups = self._collect(rows, version, job.number + job.attempt * _ATTEMPTS_APART)
        except BaseException as error:
            error.add_note(f"while collecting {what}")
            raise
        self._refuse_wrong(groups, rows, what)
        job.groups.update(zip(job.places, groups, strict=True))
        with self._changed:
            self._doing = _Doing(f"{what}, was returned")
            self._ready[job.number] = job
            self._changed.notify_all()

    def _refuse_wrong(self, groups: Sequence[Group], rows: Sequence[Any], what: str) -> None:
        if len(groups) != len(rows):
            raise WrongRollouts(f"collect returned {len(groups)} groups for {what}")
        newest = self._current()
        versions = (turn.version for turn in itertools.chain.from_iterable(_turns(group) for group in groups))
        if (found := max(versions, default=newest)) > newest:
            raise WrongRollouts(f"collect returned tokens of version {found} for {what}; the newest is {newest}")


_ATTEMPTS_APART = 1_000_003
"""Between the seeds of a batch's attempts; more than there are batches."""


class _Doing:
    """What the thread is at, and since when."""

    def __init__(self, what: str) -> None:
        self._what, self._since = what, time.monotonic()

    def __str__(self) -> str:
        return f"{self._what} (for {time.monotonic() - self._since:.1f} s)"


def _turns(group: Group) -> Iterator[Any]:
    return (turn for episode in group for turn in episode.turns)


def _shown(row: object) -> str:
    text = repr(row)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _as_raised(error: BaseException) -> BaseException:
    """StopIteration, of a ``next`` in collect, would end the trainer's loop as if all data had been seen."""
    if isinstance(error, StopIteration):
        wrapped = RuntimeError("collect raised StopIteration")
        wrapped.__cause__ = error
        return wrapped
    return error
