"""The whole of an export: write beside the goal, check, stamp, and only then give it its name."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from gradserve.compute.checkpoints import pretty
from gradserve.compute.engine.export import gguf_file, merged, parity, peft_folder
from gradserve.compute.exports import STAMP, CannotExport, DType, Exported, Format, Source, stamp

FAILED = ".failed-parity"
"""What is appended to the name of an artefact that is not what the engine computes."""


class _Writer(Protocol):
    """A format: a module with these functions."""

    def dtype_of(self, source: Source, asked: DType | None) -> DType: ...
    def write(self, source: Source, dtype: DType, folder: Path) -> list[str]: ...
    def load(self, source: Source, folder: Path) -> Any: ...


WRITERS: dict[Format, _Writer] = {"peft": peft_folder, "merged": merged, "gguf": gguf_file}


def export(
    source: Source, to: Path, format: Format, dtype: DType | None = None, tell: Callable[[str], None] = lambda _: None
) -> Exported:
    """Write ``source`` to the folder ``to``; one that fails the parity check is kept as ``<to>.failed-parity``.

    ``dtype`` None leaves the choice to the format. ``tell`` hears about steps that take long. Nothing is left behind
    when an exception ends it. Raises CannotExport.
    """
    failed = to.with_name(to.name + FAILED)
    refuse_existing(to, failed)
    writer = WRITERS[format]
    chosen = writer.dtype_of(source, dtype)
    prompts = parity.held_prompts(source.base)
    tell("computing the log-probs of the held prompts with gradserve's engine")
    expected = parity.by_engine(source, prompts)
    temporary = to.with_name(f"{to.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        tell(f"writing {format} in {chosen}")
        notes = writer.write(source, chosen, temporary)
        tell("computing them again from what was written")
        found = parity.by_transformers(writer.load(source, temporary), prompts)
        result = Exported(temporary, chosen, parity.compare(prompts, expected, found, chosen), notes)
        (temporary / STAMP).write_bytes(pretty(stamp(source, format, result, _versions())))
        final = to if result.parity.passed else failed
        temporary.rename(final)
        return Exported(final, chosen, result.parity, notes)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(*folders: Path) -> None:
    """Raises CannotExport when one of them exists."""
    for folder in folders:
        if folder.exists():
            raise CannotExport(f"{folder} exists and is not overwritten: remove it or choose another --to.")


def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in ("gradserve", "torch", "transformers", "peft")}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
