"""A checkpoint as a model of its own: W + scale * B A, added in float32, then stored as the base is (or as asked)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradserve.compute.checkpoints import companions
from gradserve.compute.engine import tensorfile
from gradserve.compute.engine.export.parity import CPU, load_model
from gradserve.compute.engine.lora import Adapter, Tensors
from gradserve.compute.engine.parameters import Parameters, is_full
from gradserve.compute.exports import DTYPES, CannotExport, DType, Source

_HEAD = "lm_head"
UNTIED = (
    "lm_head carries an adapter and the base shares it with the embedding: the head is written as a tensor of its own "
    "(tie_word_embeddings is false now)."
)


def dtype_of(source: Source, asked: DType | None) -> DType:
    """The base's own, unless asked otherwise."""
    if asked is not None:
        return asked
    config = json.loads((Path(source.base.path) / "config.json").read_text())
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    for dtype in DTYPES:
        if dtype == stored:
            return dtype
    raise CannotExport(f"the base is stored in {stored}: say in which dtype to write with --dtype.")


def write(source: Source, dtype: DType, folder: Path) -> list[str]:
    """Write model, config and tokenizer; returns what their user should know."""
    model, notes = merge(source)
    model.to(getattr(torch, dtype))
    require_finite(model, dtype)
    model.save_pretrained(folder)
    for name, content in companions(Path(source.base.path)).items():
        (folder / name).write_bytes(content)
    return notes


def load(source: Source, folder: Path) -> Any:
    """The artefact alone: nothing of the base is needed any more."""
    return load_model(folder)


@torch.no_grad()
def merge(source: Source) -> tuple[Any, list[str]]:
    """The base's model with the checkpoint in its parameters, float32, and what its user should know."""
    model = load_model(Path(source.base.path))
    weights, _ = tensorfile.load(source.weights, CPU)
    if is_full(weights):
        _replace(model, weights)
        return model, []
    adapter = Adapter.of(weights)
    notes = _untie(model) if _HEAD in adapter.pairs else []
    for name, (a, b) in adapter.pairs.items():
        model.get_submodule(name).weight += adapter.scale * (b @ a)
    return model, notes


def require_finite(model: Any, dtype: DType) -> None:
    """Raises CannotExport when a parameter does not fit into the dtype that it was converted to."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise CannotExport(f"{name} has values that {dtype} can't hold: choose --dtype float32 or bfloat16.")


def _replace(model: Any, weights: Tensors) -> None:
    Parameters(model).check(weights)
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def _untie(model: Any) -> list[str]:
    if model.lm_head.weight is not model.get_input_embeddings().weight:
        return []
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    return [UNTIED]
