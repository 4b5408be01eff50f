"""The adapters that vLLM has loaded: a folder each, by digest, the least recently used given up first."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from gradserve.compute.checkpoints import peft_config
from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.fingerprint import Fingerprint
from gradserve.compute.engine.lora import Adapter, Tensors, tensor_names
from gradserve.compute.engine.vllm_engine import PeftFolder, SamplingEngine
from gradserve.wire.errors import Invalid

MOST_ADAPTERS = 32
"""Adapters kept loaded. More than these only while requests are using them."""

BASE = "base"
"""The name of the adapter that changes nothing.

The base alone is sampled through it: on a CPU, vLLM gives rows without an adapter the last one loaded (index -1; seen
in 0.32: log-probs wrong by 0.6).
"""


@dataclass(eq=False)
class Loaded:
    """An adapter in vLLM. ``fingerprint`` is None until it has been compared; ``users`` keep it loaded."""

    adapter: PeftFolder
    fingerprint: Fingerprint | None = None
    users: int = 0


class Adapters:
    """``hold`` before use, ``release`` after it. Folders lie under ``root``, which is emptied first."""

    def __init__(
        self, engine: SamplingEngine, arrays: Arrays, base: Base, root: Path, max_rank: int, most: int = MOST_ADAPTERS
    ) -> None:
        self._engine = engine
        self._arrays = arrays
        self._base = base
        self._root = root
        self._max_rank = max_rank
        self._most = most
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._count = 0
        shutil.rmtree(root, ignore_errors=True)

    def hold(self, digest: str | None) -> Loaded:
        """The adapter of a weights object (None: of the base alone), loaded if need be.

        Raises ObjectMissing, and Invalid for weights that vLLM can't apply.
        """
        name = BASE if digest is None else digest
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        self._loaded.move_to_end(name)
        loaded = self._loaded[name]
        self.hold_again(loaded)
        self._shrink()
        return loaded

    def hold_again(self, loaded: Loaded) -> None:
        """One user more of what somebody holds."""
        loaded.users += 1

    def release(self, loaded: Loaded) -> None:
        """One user less."""
        loaded.users -= 1
        self._shrink()

    def weights(self, name: str) -> Tensors:
        """The tensors of the adapter of that name. Raises ObjectMissing."""
        return no_change(self._base) if name == BASE else self._arrays.get(name)

    def _load(self, name: str) -> Loaded:
        weights = self.weights(name)
        rank = self._check(weights)
        self._count += 1
        adapter = PeftFolder(name, self._count, self._root / name)
        write_folder(adapter.folder, weights, rank)
        try:
            self._engine.load(adapter)
        except BaseException:
            shutil.rmtree(adapter.folder)
            raise
        return Loaded(adapter)

    def _check(self, weights: Tensors) -> int:
        """The rank of the adapter."""
        pairs = Adapter.of(weights).pairs
        unknown = sorted(pairs.keys() - self._base.targets.keys())
        if unknown:
            raise Invalid("not_an_adapter", f"the base has no module {unknown[0]} that can carry an adapter")
        rank = next(iter(pairs.values()))[0].shape[0]
        if rank > self._max_rank:
            raise Invalid(
                "bad_rank",
                f"these weights have rank {rank}; this server samples adapters of rank {self._max_rank} at most.",
                fix="Raise max_lora_rank, or set sampler to builtin.",
            )
        return rank

    def _shrink(self) -> None:
        idle = [name for name, loaded in self._loaded.items() if not loaded.users]
        for name in idle[: max(0, len(self._loaded) - self._most)]:
            adapter = self._loaded.pop(name).adapter
            self._engine.unload(adapter)
            shutil.rmtree(adapter.folder)


def write_folder(folder: Path, weights: Tensors, rank: int) -> None:
    """A folder as peft writes it. The tensors of a weights object have PEFT's names already."""
    folder.mkdir(parents=True)
    modules = sorted({name.rpartition(".")[2] for name in Adapter.of(weights).pairs})
    (folder / "adapter_config.json").write_text(json.dumps(peft_config("", rank, modules)))
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in weights.items()}, folder / "adapter_model.safetensors"
    )


def no_change(base: Base) -> Tensors:
    """An adapter that changes nothing: one pair of zeros."""
    name, linear = next(iter(base.targets.items()))
    a, b = tensor_names(name)
    return {a: torch.zeros(1, linear.in_features), b: torch.zeros(linear.out_features, 1)}
