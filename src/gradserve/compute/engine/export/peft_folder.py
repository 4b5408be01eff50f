"""A checkpoint as a PEFT folder: its own bytes under PEFT's names, and an adapter_config.json.

An adapter on the head is called ``base_model.model.lm_head``, with ``lm_head`` among the target modules, tied
embeddings or not: peft 0.19 to 0.21 lays it over the head alone and leaves the embedding as it is. vLLM 0.32 applies it
to the models that declare it (llama, qwen3); others (mistral, qwen2) refuse the adapter with a clear error.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from gradserve.compute.checkpoints import adapter_config, pretty
from gradserve.compute.engine import tensorfile
from gradserve.compute.engine.export.parity import load_model
from gradserve.compute.engine.lora import VALUE_HEAD
from gradserve.compute.exports import CannotExport, DType, Source

WEIGHTS = "adapter_model.safetensors"
HEAD = "value_head.safetensors"


def dtype_of(source: Source, asked: DType | None) -> DType:
    """float32, as trained. Raises CannotExport for another, and for weights that are no adapter."""
    if source.lora is None:
        raise CannotExport(
            f"{source.path} holds all parameters of {source.base.name}, not an adapter: there is no PEFT form of it. "
            "It is merged already; use --format merged or gguf."
        )
    if asked not in (None, "float32"):
        raise CannotExport(
            f"a PEFT export is the checkpoint's own file, byte for byte, in float32: leave --dtype {asked} out."
        )
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise CannotExport("the parity check of a PEFT export needs peft: pip install 'gradserve[export]'.") from error
    return "float32"


def write(source: Source, dtype: DType, folder: Path) -> list[str]:
    """Write the folder; returns what its user should know."""
    assert source.lora is not None
    notes = []
    if source.lora.value_head:
        notes.append(_apart(source.weights, folder))
    else:
        shutil.copyfile(source.weights, folder / WEIGHTS)
    (folder / "adapter_config.json").write_bytes(pretty(adapter_config(source.base.name, source.lora)))
    if not source.lora.train_unembed:
        return notes
    return [
        *notes,
        "lm_head carries an adapter: vLLM applies it to llama and qwen3 models and refuses it for mistral and qwen2. "
        "With tied embeddings do not call peft's merge_and_unload, which would change the embedding too: "
        "export --format merged instead.",
    ]


def _apart(weights: Path, folder: Path) -> str:
    """The adapter and the value head in files of their own: PEFT has no place for the latter."""
    tensors, metadata = tensorfile.load(weights, torch.device("cpu"))
    for file, inside in ((WEIGHTS, False), (HEAD, True)):
        kept = {name: tensor for name, tensor in tensors.items() if name.startswith(VALUE_HEAD) == inside}
        (folder / file).write_bytes(tensorfile.dump(kept, metadata))
    return f"the value head is in {HEAD}: value = hidden @ weight[0] + bias, of what the output layer reads."


def load(source: Source, folder: Path) -> Any:
    """The base with the adapter, as peft loads it."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")  # said in our own words above
        return PeftModel.from_pretrained(load_model(Path(source.base.path)), folder).eval()
