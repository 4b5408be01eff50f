"""How much memory this machine, or the container that the process is in, has left."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that can still be taken without swapping: the machine's, or less where a cgroup (v2) sets a limit."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
