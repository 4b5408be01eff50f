"""A checkpoint as a folder that people and their libraries can open: links to the durable objects, plus small files.

<data_dir>/checkpoints/<run>/<kind>/<name>/
    adapter_model.safetensors      LoRA tensors under PEFT's names
    adapter_config.json            what peft.PeftModel.from_pretrained needs
or, of a run that trains all parameters,
    model.safetensors              every parameter under its Hugging Face name
    config.json, tokenizer...      the base's own, for transformers' from_pretrained
or, of a module,
    model.safetensors              its parameters and buffers under its own names
    forward.graph.json             its forward pass (docs/reference/graph-ir.md)
and of training checkpoints
    optimizer.safetensors          AdamW moments
and, once it was downloaded, of external weights that were saved with age recipients
    <file>.age                     that file, encrypted to them
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

from gradserve.compute.catalog import Catalog, ModelUnusable
from gradserve.compute.files import copy_whole, naming_full_disk
from gradserve.compute.objects import ObjectStore
from gradserve.wire.ops import LORA_ALPHA, LoraConfig, module_graph

CHECKPOINTS = "checkpoints"
"""The tree's name in the data directory."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = ("lm_head",)

GRAPH_FILE = "forward.graph.json"

_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
_OF_THE_WEIGHTS = ("config.json", "*.index.json")
"""Small files of a model directory that say something about its weight files."""


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


def model_config(base: Path) -> dict[str, object]:
    """The content of config.json for parameters trained from the model in ``base``: the same, but float32."""
    config: dict[str, object] = json.loads((base / "config.json").read_text())
    config.pop("torch_dtype", None)
    return config | {"dtype": "float32"}


def weights_file(lora: LoraConfig | None) -> str:
    """What a weights object is called in a folder."""
    return "model.safetensors" if lora is None else "adapter_model.safetensors"


def small_files(base: str, lora: LoraConfig | None, catalog: Catalog, objects: ObjectStore) -> dict[str, bytes]:
    """The files beside the weights, by name. Raises ModelUnusable when the base's own are needed and not offered."""
    graph = module_graph(base)
    if graph is not None:
        return {GRAPH_FILE: objects.verified_path(graph).read_bytes()}
    if lora is not None:
        return {"adapter_config.json": pretty(adapter_config(base, lora))}
    facts = catalog.get(base)
    if facts is None:
        raise ModelUnusable(f"the base model {base!r} is not offered any more; its config and tokenizer are needed")
    folder = Path(facts.path)
    return companions(folder) | {"config.json": pretty(model_config(folder))}


def companions(base: Path) -> dict[str, bytes]:
    """The small files of a model directory that say nothing of its weights (tokenizer, generation config), by name."""
    found = {file for pattern in _SMALL_FILES for file in base.glob(pattern)}
    return {file.name: file.read_bytes() for file in found if not any(file.match(name) for name in _OF_THE_WEIGHTS)}


def pretty(content: dict[str, object]) -> bytes:
    """JSON for people to read."""
    return (json.dumps(content, indent=2) + "\n").encode()


def folder_of(root: Path, run_id: str, kind: str, name: str) -> Path:
    """Where the folder of a checkpoint is."""
    return root / run_id.replace(":", "_") / kind / name


class CheckpointFolders:
    """The tree of readable folders under ``root``. Losing it loses nothing: the objects and the store are the truth."""

    def __init__(self, root: Path, objects: ObjectStore, catalog: Catalog) -> None:
        self._root = root
        self._objects = objects
        self._catalog = catalog

    def write(
        self, run_id: str, kind: str, name: str, base: str, lora: LoraConfig | None, weights: str, moments: str | None
    ) -> Path:
        """Make the folder, replacing an older one. The objects must be durable already.

        Raises NoRoom when the disk is full; then the older one is as it was.
        """
        target = folder_of(self._root, run_id, kind, name)
        folder = target.with_name(f".{name}.tmp")  # no checkpoint's name starts with a dot
        try:
            with naming_full_disk(self._root):
                self._fill(folder, base, lora, weights, moments)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(target, ignore_errors=True)
        return folder.rename(target)

    def _fill(self, folder: Path, base: str, lora: LoraConfig | None, weights: str, moments: str | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of a writer that was killed
        folder.mkdir(parents=True)
        for file, content in small_files(base, lora, self._catalog, self._objects).items():
            (folder / file).write_bytes(content)
        _link_or_copy(self._objects.persist(weights), folder / weights_file(lora))
        if moments is not None:
            _link_or_copy(self._objects.persist(moments), folder / "optimizer.safetensors")

    def relink(
        self, run_id: str, kind: str, name: str, lora: LoraConfig | None, weights: str, moments: str | None
    ) -> None:
        """Replace files of the folder that are older than the durable objects: these were damaged and made again.

        Raises NoRoom.
        """
        folder = folder_of(self._root, run_id, kind, name)
        for digest, file in ((weights, weights_file(lora)), (moments, "optimizer.safetensors")):
            if digest is not None and self._objects.has_durable(digest):
                _replace_older(self._objects.persist(digest), folder / file)

    def has(self, run_id: str, kind: str, name: str) -> bool:
        """Whether the folder is there."""
        return folder_of(self._root, run_id, kind, name).is_dir()

    def remove(self, run_id: str, kind: str, name: str) -> None:
        """Remove the folder of a deleted checkpoint."""
        shutil.rmtree(folder_of(self._root, run_id, kind, name), ignore_errors=True)


def _replace_older(source: Path, target: Path) -> None:
    if not target.exists() or target.samefile(source) or target.stat().st_mtime_ns > source.stat().st_mtime_ns:
        return
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    _link_or_copy(source, temporary)
    temporary.replace(target)


def _link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file, where the file systems allow that; they may be two, or one without hard links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        copy_whole(source, target)
