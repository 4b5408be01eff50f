"""Digests that somebody in memory still needs: the janitor leaves their objects alone."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator


class Held:
    """Counts, since the same object may be needed for several reasons."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, digests: Iterable[str]) -> None:
        """One reason more for each."""
        self._counts.update(digests)

    def release(self, digests: Iterable[str]) -> None:
        """One reason less for each."""
        self._counts.subtract(digests)
        self._counts = +self._counts

    def digests(self) -> set[str]:
        """All that are needed."""
        return set(self._counts)

    @contextlib.contextmanager
    def during(self) -> Iterator[list[str]]:
        """What was added and put into this list is released at the end of the block."""
        held: list[str] = []
        try:
            yield held
        finally:
            self.release(held)
