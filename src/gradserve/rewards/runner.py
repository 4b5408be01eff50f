"""Runs a reward over samples, in processes that can be killed: one bad sample costs its time limit and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Self

from gradserve.rewards.contract import Failure, Outcome, Reward, Sample
from gradserve.rewards.naming import reference_to
from gradserve.rewards.process import Child


@dataclass(frozen=True)
class RewardCounts:
    """Samples by how they ended, and calls made again (``retried``). A sample that a retry saved counts as scored."""

    scored: int = 0
    timeout: int = 0
    crash: int = 0
    invalid_value: int = 0
    retried: int = 0


class RewardRunner:
    """Scores samples; a context manager.

        with RewardRunner(reward, timeout_s=5, workers=2) as runner:
            results = runner.score([Sample("2 + 2 =", "4", answer="4")])  # [Outcome(1.0)]

    ``reward`` is a top-level function, what a :func:`~gradserve.rewards.factory` made, or its name
    (``"file.py:function"``, ``"module:function"``). ``timeout_s`` is of one call. A call that failed is made again up
    to ``retries`` times, in a new process if it ended the old one. Safe to use from several threads.
    """

    def __init__(self, reward: Reward | str, timeout_s: float = 5.0, workers: int = 1, retries: int = 1) -> None:
        """Load the reward. Raises RewardUnusable when it can't be named or loaded, ValueError on a bad limit."""
        if not 0 < timeout_s <= threading.TIMEOUT_MAX:
            raise ValueError(f"timeout_s is {timeout_s}: give seconds above 0")
        if workers < 1 or retries < 0:
            raise ValueError(f"workers is {workers} and retries is {retries}: give at least 1 and 0")
        self._reference, self._timeout_s, self._retries = reference_to(reward), timeout_s, retries
        self._lock = threading.Lock()
        self._counts = RewardCounts()
        self._closed = False
        first = Child(self._reference, timeout_s)
        self.accepted = first.accepted
        self._idle: queue.LifoQueue[Child | None] = queue.LifoQueue()  # None: a process to start when it is needed
        for child in [*[None] * (workers - 1), first]:
            self._idle.put(child)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="reward")

    @property
    def counts(self) -> RewardCounts:
        """Of all samples so far."""
        return self._counts

    def score(self, samples: Sequence[Sample]) -> list[Outcome | Failure]:
        """One result for each sample, in order. Raises TypeError for a sample that is not JSON, before any call."""
        if self._closed:
            raise RuntimeError("this RewardRunner is closed")
        for index, sample in enumerate(samples):
            _refuse_what_is_not_json(sample, index)
        return list(self._pool.map(self._score_one, samples))

    async def score_async(self, samples: Sequence[Sample]) -> list[Outcome | Failure]:
        """:meth:`score` beside a running event loop."""
        return await asyncio.to_thread(self.score, samples)

    def close(self) -> None:
        """Let running calls end, within their limits, and end the processes."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        while not self._idle.empty():
            if (child := self._idle.get()) is not None:
                child.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _score_one(self, sample: Sample) -> Outcome | Failure:
        result = self._call(sample)
        for _ in range(self._retries):
            if isinstance(result, Failure):
                self._count("retried")
                result = self._call(sample)
        self._count(result.kind if isinstance(result, Failure) else "scored")
        return result

    def _call(self, sample: Sample) -> Outcome | Failure:
        with self._a_child() as child:
            return child.score(sample)

    @contextlib.contextmanager
    def _a_child(self) -> Iterator[Child]:
        """An idle process, for this thread alone; its place is kept when it dies or can't be started."""
        child = self._idle.get()
        try:
            child = child or Child(self._reference, self._timeout_s)
            yield child
        finally:
            self._idle.put(child if child is not None and child.alive else None)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts = replace(self._counts, **{name: getattr(self._counts, name) + 1})


def _refuse_what_is_not_json(sample: Sample, index: int) -> None:
    try:
        json.dumps(asdict(sample))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"sample {index} can't cross to the reward's process as JSON: {error}") from error
