"""The time by which things expire: a wall clock that suddenly jumps ahead is not believed for an hour.

What has expired is gone for good, and clocks do jump: after a dead battery, a restored machine, a wrong time server.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_TOLERANCE_S = 60.0
_DOUBT_S = 3600.0


class SteadyClock:
    """``wall`` may jump, ``steady`` (time.monotonic) may not."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._steady = steady
        self._seen = wall(), steady()
        self._doubted_since: float | None = None

    @property
    def suspicious(self) -> bool:
        """Whether the wall clock is not believed just now."""
        return self._doubted_since is not None

    def now(self) -> float:
        """Seconds since the epoch, as far as they are believed."""
        wall, steady = self._wall(), self._steady()
        expected = self._seen[0] + steady - self._seen[1]
        if wall <= expected + _TOLERANCE_S:
            self._doubted_since = None
        elif self._doubted_since is None:
            self._doubted_since = steady
            return expected
        elif steady - self._doubted_since < _DOUBT_S:
            return expected
        self._doubted_since = None
        self._seen = wall, steady
        return wall
