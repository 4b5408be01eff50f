"""A handle on one child process that calls a reward, from its start to its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gradserve.rewards.contract import Failure, Outcome, RewardUnusable, Sample
from gradserve.rewards.naming import Reference

START_LIMIT_S = 60.0
"""How long importing the reward may take. torch and transformers take some ten seconds on a slow machine."""

GRACE_S = 1.0
"""How long after its limit a child that has not ended itself is killed from here."""

_CHILD = "gradserve.rewards.child"
_DETAIL_CHARACTERS = 2000
_PRINTED_BYTES = 100_000
_HUNG = "Timeout ("
"""How faulthandler begins the traceback of a process that it ends."""


class Child:
    """Scores one sample at a time. After a Failure that ended the process ``alive`` is False: start another."""

    def __init__(self, reference: Reference, timeout_s: float) -> None:
        """Start the process and load the reward. Raises RewardUnusable when that fails."""
        _refuse_inside_a_child()
        self._timeout_s = timeout_s
        self.alive = True
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  what the reward prints; closed by end()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            env=_environment(),
            start_new_session=True,  # so that what the reward itself started can be ended with it
        )
        self.accepted = self._load(reference)

    def score(self, sample: Sample) -> Outcome | Failure:
        """The reward of one sample, within the time limit; whatever happens, this returns."""
        self._printed.seek(0)
        self._printed.truncate()  # a failure's detail is about its own sample
        began = time.monotonic()
        answer = self._exchange(json.dumps(asdict(sample)), self._timeout_s + GRACE_S)
        if answer is not None:
            return Failure(**answer) if "kind" in answer else Outcome(**answer)
        expired = time.monotonic() - began >= self._timeout_s
        code, printed = self._ended(), self._tail()
        self.end()
        if expired:
            return Failure("timeout", f"no result within {self._timeout_s:g} s. {printed}".strip())
        return Failure("crash", f"the process ended with {code}. {printed}".strip())

    def end(self) -> None:
        """Kill the process with all that it started; harmless when it is done already."""
        if not self.alive:
            return
        self.alive = False
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._printed):
            _close(stream)

    def _load(self, reference: Reference) -> tuple[str, ...]:
        hello = {"reference": asdict(reference), "timeout_s": self._timeout_s}
        answer = self._exchange(json.dumps(hello), START_LIMIT_S)
        if answer is not None and "accepted" in answer:
            return tuple(answer["accepted"])
        why = answer["unusable"] if answer else f"its process ended or took over {START_LIMIT_S:g} s: {self._tail()}"
        self.end()
        raise RewardUnusable(f"{reference.target} can't be loaded: {why}")

    def _exchange(self, line: str, limit_s: float) -> Mapping[str, Any] | None:
        """Send a line and await the answer; None when the process ended, or was killed after ``limit_s``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        killer = threading.Timer(limit_s, self._kill)  # ends a write to a full pipe as well as a read
        killer.start()
        try:
            self._process.stdin.write(line.encode("ascii") + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError, ValueError):  # ValueError: end() closed the pipes meanwhile
            return None
        finally:
            killer.cancel()
        return json.loads(answer) if answer.endswith(b"\n") else None

    def _kill(self) -> None:
        if sys.platform == "win32":
            self._process.kill()
            return
        try:  # the group is there as long as the process has not been waited for
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()

    def _ended(self) -> str:
        self._kill()
        code = self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        return f"{name} (memory ran out, somebody killed it, or it closed its pipes)" if name == "SIGKILL" else name

    def _tail(self) -> str:
        """The end of what was printed; of a hang its traceback, whose first lines say where it was."""
        size = self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, size - _PRINTED_BYTES))
        printed = self._printed.read().decode(errors="replace").strip()
        hung = printed.rfind(_HUNG)
        return printed[-_DETAIL_CHARACTERS:] if hung < 0 else printed[hung : hung + _DETAIL_CHARACTERS]


def _environment() -> dict[str, str]:
    """This process's, with its import path: what can be imported here can be imported there."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _refuse_inside_a_child() -> None:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == _CHILD:
        raise RewardUnusable(
            "the file of the reward starts a RewardRunner when it is imported. Put what it does when it is run under "
            "if __name__ == '__main__':, or the reward in a file of its own."
        )


def _close(stream: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # closing flushes what a dead process never read
        stream.close()
