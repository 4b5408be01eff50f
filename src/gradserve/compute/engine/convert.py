"""GGUF -> a Hugging Face directory: ``python -m gradserve.compute.engine.convert FILE.gguf OUT_DIR``.

Everything is dequantised to float32 once, so that a later start takes a second. The directory appears whole or
not at all.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def convert(file: Path, out: Path) -> None:
    """Write model, tokenizer, chat template and generation config of ``file`` into ``out`` (must not exist)."""
    temporary = out.with_name(f"{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        _write(file, temporary)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(file: Path, directory: Path) -> None:
    source = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    _forget_quantisation(model)
    model.generation_config = _generation_config(model, tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _forget_quantisation(model: Any) -> None:
    """The loader leaves a quantisation config on a model that is fully dequantised; saving would then refuse."""
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False
    model.config._name_or_path = ""


def _generation_config(model: Any, tokenizer: Any) -> GenerationConfig:
    """Only the token ids: a GGUF file says where a text ends, but not how one should sample."""
    eos = model.config.eos_token_id if model.config.eos_token_id is not None else tokenizer.eos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return GenerationConfig(eos_token_id=eos, pad_token_id=pad, bos_token_id=tokenizer.bos_token_id)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Convert a GGUF file to a Hugging Face directory.")
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    convert(arguments.file, arguments.out)


if __name__ == "__main__":
    main()
