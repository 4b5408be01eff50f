"""The export of a language model's checkpoint: write, load as others would, compare, stamp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gradserve.compute.checkpoints import pretty
from gradserve.compute.engine.export import gguf_file, merged, parity, peft_folder
from gradserve.compute.engine.export.placing import place, refuse_existing, versions_of
from gradserve.compute.exports import STAMP, DType, Exported, Format, Source, stamp


class _Writer(Protocol):
    """A format: a module with these functions."""

    def dtype_of(self, source: Source, asked: DType | None) -> DType: ...
    def write(self, source: Source, dtype: DType, folder: Path) -> list[str]: ...
    def load(self, source: Source, folder: Path) -> Any: ...


_LIBRARIES = ("gradserve", "torch", "transformers", "peft")

WRITERS: dict[Format, _Writer] = {"peft": peft_folder, "merged": merged, "gguf": gguf_file}


def export(
    source: Source, to: Path, format: Format, dtype: DType | None = None, tell: Callable[[str], None] = lambda _: None
) -> Exported:
    """Write ``source`` to the folder ``to``; one that fails the parity check is kept as ``<to>.failed-parity``.

    ``dtype`` None leaves the choice to the format. ``tell`` hears about steps that take long. Nothing is left behind
    when an exception ends it. Raises CannotExport.
    """
    refuse_existing(to)
    writer = WRITERS[format]
    chosen = writer.dtype_of(source, dtype)
    prompts = parity.held_prompts(source.base)
    tell("computing the log-probs of the held prompts with gradserve's engine")
    expected = parity.by_engine(source, prompts)

    def fill(folder: Path) -> Exported:
        tell(f"writing {format} in {chosen}")
        notes = writer.write(source, chosen, folder)
        tell("computing them again from what was written")
        found = parity.by_transformers(writer.load(source, folder), prompts)
        result = Exported(folder, chosen, parity.compare(prompts, expected, found, chosen), notes)
        (folder / STAMP).write_bytes(pretty(stamp(source, format, result, versions_of(*_LIBRARIES))))
        return result

    return place(to, fill)
