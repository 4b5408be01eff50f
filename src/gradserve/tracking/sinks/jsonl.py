"""metrics.jsonl and samples.jsonl: one object a line, on the disk as soon as it is logged; config.json beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradserve.tracking.sinks import Begin, SinkUnusable

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
CONFIG = "config.json"


class JsonLines:
    """metrics.jsonl has ``{"step": 3, "time": 1.7e9, "reward/mean": 0.5, ...}``, null for what is not finite;
    samples.jsonl has ``{"step": 3, "time": 1.7e9, "name": "sample", "text": "..."}``.
    """

    def __init__(self, begin: Begin) -> None:
        self._metrics = LineFile(begin.folder / METRICS, begin.resume_step)
        self._samples = LineFile(begin.folder / SAMPLES, begin.resume_step)
        (begin.folder / CONFIG).write_text(json.dumps(dict(begin.config), indent=2, default=str) + "\n")

    def metrics(self, step: int, time: float, values: Mapping[str, float | None]) -> None:
        self._metrics.append({"step": step, "time": time, **values})

    def text(self, step: int, time: float, name: str, markdown: str) -> None:
        self._samples.append({"step": step, "time": time, "name": name, "text": markdown})

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


class LineFile:
    """JSON objects with a step, appended one by one; each line is there whole or not at all."""

    def __init__(self, file: Path, resume_step: int | None) -> None:
        if resume_step is not None and file.exists():
            _cut(file, resume_step)
        elif file.exists() and file.stat().st_size:
            raise SinkUnusable(
                f"{file} is of another run: use another folder, or go on with that run (resume_step; 0 for its start)"
            )
        self._file = file.open("ab", buffering=0)
        self._end = file.stat().st_size

    def append(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, allow_nan=False, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self._file.truncate(self._end)  # A write that failed before, on a full disk say, may have left a part.
        if self._file.write(line) != len(line):
            raise OSError(f"{self._file.name}: not all of a line could be written; is the disk full?")
        self._end += len(line)

    def close(self) -> None:
        self._file.close()


def _cut(file: Path, last: int) -> None:
    """Leave the lines of steps up to ``last``. A kill in the middle leaves the file as it was."""
    part = file.with_name(file.name + ".part")
    with part.open("wb") as kept:
        kept.writelines(line for line, step in _lines(file) if step <= last)
    os.replace(part, file)


def _lines(file: Path) -> Iterator[tuple[bytes, int]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError) as error:
                if not line.endswith(b"\n"):
                    return  # The run was killed while it wrote this one.
                raise SinkUnusable(f"{file}, line {number} has no step; mend or remove it before resuming") from error
            yield line if line.endswith(b"\n") else line + b"\n", step
