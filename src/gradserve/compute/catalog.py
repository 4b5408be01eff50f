"""The base models a server offers: from what the user wrote to a directory in Hugging Face layout and its facts.

Reads config files only; torch is not needed to answer "how long may a prompt be".
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradserve.compute.identity import identify
from gradserve.compute.safetensors_file import entries_of, read_one
from gradserve.compute.tasks import BaseSpec
from gradserve.wire.identity import BaseIdentity

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""model_type values whose modelling code is known to train and sample here (each has a test)."""


class ModelUnusable(ValueError):
    """The path is not a model that the engine can run; the message says why and what to give instead."""


class BaseFacts(msgspec.Struct, frozen=True):
    """What the gateway must know to check a request. ``context`` counts prompt and generated tokens together.

    ``parameters`` counts the numbers in the weight files; None when they are not safetensors.
    """

    name: str
    path: str
    family: str
    vocab_size: int
    context: int
    eos_tokens: tuple[int, ...]
    parameters: int | None = None

    @property
    def spec(self) -> BaseSpec:
        """What a worker needs of it."""
        return BaseSpec(self.name, self.path)


def read_facts(name: str, directory: Path) -> BaseFacts:
    """Facts from config.json and generation_config.json of a model directory. Raises ModelUnusable."""
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise ModelUnusable(
            f"model {name!r}: {directory} has no config.json. Give a Hugging Face model directory, a .gguf file, "
            "an installed package that carries one, or hub:org/name."
        )
    config = json.loads(config_file.read_text())
    family = config.get("model_type", "")
    if family not in FAMILIES:
        raise ModelUnusable(
            f"model {name!r}: model_type {family!r} is not supported. Supported: {', '.join(FAMILIES)}."
        )
    generation_file = directory / "generation_config.json"
    generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_tokens = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
    return BaseFacts(
        name=name,
        path=str(directory.resolve()),
        family=family,
        vocab_size=int(config["vocab_size"]),
        context=int(config["max_position_embeddings"]),
        eos_tokens=eos_tokens,
        parameters=_parameters(directory),
    )


def parameter_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, from the headers of the weight files alone; empty when they are not safetensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in directory.glob("model*.safetensors"):
        shapes |= {name: tuple(entry["shape"]) for name, entry in entries_of(file).items()}
    return shapes


def read_parameter(directory: Path, name: str) -> NDArray[np.float32] | None:
    """One tensor of the weight files, float32; None when they have none of that name."""
    for file in directory.glob("model*.safetensors"):
        if name in entries_of(file):
            return read_one(file, name)
    return None


def _parameters(directory: Path) -> int | None:
    shapes = parameter_shapes(directory)
    return sum(math.prod(shape) for shape in shapes.values()) if shapes else None


class Catalog:
    """Immutable after start. Names are matched exactly; a ``:variant`` suffix of a request is ignored if unknown.

    ``notes`` is the file that spares the next start the reading of all models (compute/identity.py).
    """

    def __init__(self, models: list[BaseFacts], notes: Path | None = None) -> None:
        self._models = {facts.name: facts for facts in models}
        self._notes = notes
        self._identities: dict[str, BaseIdentity | None] = {}
        self._identifying = asyncio.Lock()

    def names(self) -> list[str]:
        """All names, in the order given."""
        return list(self._models)

    def all(self) -> list[BaseFacts]:
        """All models, in the order given."""
        return list(self._models.values())

    def get(self, name: str) -> BaseFacts | None:
        """The model of that name, of the part before its ``:`` variant, or in that directory."""
        by_name = self._models.get(name) or self._models.get(name.partition(":")[0])
        return by_name or next((facts for facts in self._models.values() if facts.path == name), None)

    async def identity(self, name: str) -> BaseIdentity | None:
        """The digests of a model's files; None when none of that name is offered. Reads them once."""
        facts = self.get(name)
        if facts is None:
            return None
        if facts.name not in self._identities:
            async with self._identifying:
                if facts.name not in self._identities:
                    found = await asyncio.to_thread(identify, Path(facts.path), self._notes)
                    self._identities[facts.name] = found
        return self._identities[facts.name]

    def tokenizer_source(self, name: str) -> str:
        """What a client may hand to ``AutoTokenizer``: a name like a hub id as it is, else the model's directory.

        See docs/decisions/0004.
        """
        facts = self._models.get(name)
        return name if facts is None or name.count("/") == 1 else facts.path
