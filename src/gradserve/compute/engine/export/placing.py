"""Where an artefact goes: written beside its goal, and given its name only when it is whole and was checked."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from gradserve.compute.exports import CannotExport, Exported, ExportedModule

FAILED = ".failed-parity"
"""What is appended to the name of an artefact that is not what the engine computes."""

Artefact = TypeVar("Artefact", Exported, ExportedModule)


def place(to: Path, fill: Callable[[Path], Artefact]) -> Artefact:
    """What ``fill`` made in a folder of its own, moved to ``to``, or to ``<to>.failed-parity`` if its check failed.

    Nothing is left behind when an exception ends it.
    """
    temporary = to.with_name(f"{to.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        made = fill(temporary)
        final = to if made.parity.passed else failed(to)
        temporary.rename(final)
        return replace(made, folder=final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def failed(to: Path) -> Path:
    """Where an artefact that failed its check is kept."""
    return to.with_name(to.name + FAILED)


def refuse_existing(to: Path) -> None:
    """Raises CannotExport when one of the folders that an export may make exists."""
    for folder in (to, failed(to)):
        if folder.exists():
            raise CannotExport(f"{folder} exists and is not overwritten: remove it or choose another --to.")


def versions_of(*packages: str) -> dict[str, str | None]:
    """The installed versions; None for what is not installed."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
