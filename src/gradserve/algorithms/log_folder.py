"""A training's folder: what it was told, and where it can go on from.

manifest.json     how the trainer was made and called
checkpoints.jsonl one line for each checkpoint: the server's path, the step, the position in the data
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint. ``step`` optimizer steps are behind it; ``position`` is in the data, ``state`` of the trainer."""

    path: str
    step: int
    epoch: int
    position: str
    run_id: str = ""
    state: dict[str, Any] = {}
    saved_at: float = 0.0


class LogFolder:
    """Makes ``folder``; None: a new one below ``gradserve-runs``, named by trainer and time."""

    def __init__(self, folder: str | Path | None, kind: str) -> None:
        self.path = Path(folder) if folder is not None else _new(kind)
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoints(self) -> list[Saved]:
        """Oldest first. Raises ValueError for a line that can't be read, by number."""
        file = self.path / "checkpoints.jsonl"
        if not file.exists():
            return []
        found = []
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            try:
                found.append(msgspec.json.decode(line, type=Saved))
            except msgspec.MsgspecError as error:
                raise ValueError(f"{file}, line {number} is damaged ({error}); remove the line") from error
        return found

    def add_checkpoint(self, saved: Saved) -> None:
        """Append it, and have it on the disk before this returns."""
        with (self.path / "checkpoints.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(saved) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace manifest.json."""
        draft = self.path / "manifest.json.part"
        draft.write_text(json.dumps(manifest, indent=2) + "\n")
        draft.replace(self.path / "manifest.json")


def _new(kind: str) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path("gradserve-runs") / f"{kind}-{stamp}"
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"{kind}-{stamp}-{number}")
    return folder
