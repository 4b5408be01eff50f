"""A checkpoint as a folder that people and peft can open: links to the durable objects, plus adapter_config.json.

<data_dir>/checkpoints/<run>/<kind>/<name>/
    adapter_model.safetensors      LoRA tensors under PEFT's names
    adapter_config.json            what peft.PeftModel.from_pretrained needs
    optimizer.safetensors          AdamW moments, only in training checkpoints
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from gradserve.compute.objects import ObjectStore
from gradserve.wire.ops import LORA_ALPHA, LoraConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = ("lm_head",)


def target_modules(lora: LoraConfig) -> list[str]:
    """The names of the linear layers that carry an adapter, by the flags of the protocol."""
    groups = ((lora.train_attn, ATTENTION), (lora.train_mlp, MLP), (lora.train_unembed, UNEMBED))
    return [name for wanted, names in groups if wanted for name in names]


def adapter_config(base: str, lora: LoraConfig) -> dict[str, object]:
    """The content of PEFT's adapter_config.json for a run's weights."""
    return peft_config(base, lora.rank, target_modules(lora))


def peft_config(base: str, rank: int, modules: list[str]) -> dict[str, object]:
    """The same for adapters on all linear layers whose last name part is one of ``modules``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "inference_mode": True,
    }


def folder_of(root: Path, run_id: str, kind: str, name: str) -> Path:
    """Where the folder of a checkpoint is."""
    return root / run_id.replace(":", "_") / kind / name


class CheckpointFolders:
    """The tree of readable folders under ``root``. Losing it loses nothing: the objects and the store are the truth."""

    def __init__(self, root: Path, objects: ObjectStore) -> None:
        self._root = root
        self._objects = objects

    def write(
        self, run_id: str, kind: str, name: str, base: str, lora: LoraConfig, weights: str, moments: str | None
    ) -> Path:
        """Make the folder, replacing an older one. The objects must be durable already."""
        folder = folder_of(self._root, run_id, kind, name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps(adapter_config(base, lora), indent=2) + "\n")
        os.link(self._objects.persist(weights), folder / "adapter_model.safetensors")
        if moments is not None:
            os.link(self._objects.persist(moments), folder / "optimizer.safetensors")
        return folder

    def remove(self, run_id: str, kind: str, name: str) -> None:
        """Remove the folder of a deleted checkpoint."""
        shutil.rmtree(folder_of(self._root, run_id, kind, name), ignore_errors=True)
