"""What an export starts from and what it says in the end; engine/export does the work in between."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gradserve.compute.catalog import BaseFacts
from gradserve.wire.ops import LoraConfig

Format = Literal["peft", "merged", "gguf"]
"""Of a language model."""
ModuleFormat = Literal["safetensors", "onnx"]
"""Of a module (a run whose base is a graph)."""
DType = Literal["float32", "float16", "bfloat16"]
DTYPES: tuple[DType, ...] = get_args(DType)

STAMP = "gradserve_export.json"
"""The file of an artefact that says where it comes from and how its parity check went."""

HELD_TEXTS = (
    "The capital of France is Paris, and the river that runs through it is called the Seine.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5\n",
    "Once upon a time there was a small dog who lived by the sea. Every morning it ran along the beach.",
    "Question: What is 17 + 25?\nAnswer: 17 + 25 = 42.",
)
"""What the parity check computes. Text, because models are ill-conditioned on ids at random: rounding to bfloat16 moves
their log-probs by up to 2 there, and by less than 0.1 on these."""


class CannotExport(Exception):
    """This checkpoint can't be written in that form; the message says why and what to do instead."""


@dataclass(frozen=True)
class Source:
    """A checkpoint whose weights lie on this machine and were compared with their digest.

    ``lora`` None means that ``weights`` are all parameters of the base.
    """

    path: str
    base: BaseFacts
    lora: LoraConfig | None
    weights: Path
    digest: str


@dataclass(frozen=True)
class ModuleSource:
    """A module's checkpoint on this machine, compared with its digests: forward graph (text), parameters, buffers."""

    path: str
    graph: bytes
    weights: Path
    digest: str


@dataclass(frozen=True)
class ModuleParity:
    """Outputs of a module on seeded inputs, artefact against interpreter.

    ``differences`` are the largest of each output, over its largest value where that exceeds 1. ``batches`` are the
    sizes that were computed.
    """

    differences: dict[str, float]
    batches: list[int]
    bound: float

    @property
    def passed(self) -> bool:
        """Not a number never passes."""
        return all(difference <= self.bound for difference in self.differences.values())


@dataclass(frozen=True)
class ExportedModule:
    """A module that was written to ``folder``."""

    folder: Path
    parity: ModuleParity


@dataclass(frozen=True)
class Parity:
    """Log-probs of the held prompts, artefact against engine: absolute differences in nats, and their bound."""

    prompts: list[list[int]]
    max_abs_difference: float
    mean_abs_difference: float
    bound: float

    @property
    def passed(self) -> bool:
        """Not a number never passes."""
        return self.max_abs_difference <= self.bound


@dataclass(frozen=True)
class Exported:
    """An artefact that was written to ``folder``. ``notes`` are what its user should know."""

    folder: Path
    dtype: DType
    parity: Parity
    notes: list[str]


def sha256(file: Path) -> str:
    """Of a file's bytes, in hex."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def stamp(source: Source, format: Format, exported: Exported, versions: dict[str, str | None]) -> dict[str, Any]:
    """The content of STAMP."""
    parity = exported.parity
    return {
        "source": source.path,
        "weights_sha256": source.digest,
        "base": {"name": source.base.name, "sha256": _digests(Path(source.base.path), "*.safetensors")},
        "format": format,
        "dtype": exported.dtype,
        "files_sha256": _digests(exported.folder, "*"),
        "versions": versions,
        "notes": exported.notes,
        "parity": {
            "compared": "log-probs of the prompts' tokens but the first: the artefact through plain transformers "
            "(and peft) in float32, against gradserve's engine on the checkpoint itself",
            "max_abs_difference": parity.max_abs_difference,
            "mean_abs_difference": parity.mean_abs_difference,
            "bound": parity.bound,
            "passed": parity.passed,
            "texts": HELD_TEXTS,
            "tokens": parity.prompts,
        },
    }


def module_stamp(
    source: ModuleSource, format: ModuleFormat, exported: ExportedModule, versions: dict[str, str | None]
) -> dict[str, Any]:
    """The content of STAMP for a module."""
    return {
        "source": source.path,
        "weights_sha256": source.digest,
        "graph_sha256": hashlib.sha256(source.graph).hexdigest(),
        "format": format,
        "files_sha256": _digests(exported.folder, "*"),
        "versions": versions,
        "parity": {
            "compared": "the outputs on seeded inputs: the artefact as loaded from its files, against gradserve's "
            "interpreter on the checkpoint itself; differences relative to the output's largest value above 1",
            "differences": exported.parity.differences,
            "batches": exported.parity.batches,
            "bound": exported.parity.bound,
            "passed": exported.parity.passed,
        },
    }


def _digests(folder: Path, pattern: str) -> dict[str, str]:
    return {file.name: sha256(file) for file in sorted(folder.glob(pattern)) if file.is_file()}
