"""A checkpoint as one GGUF file, merged: weights under ggml's names, the facts of the architecture, the tokenizer.

Layout and keys: github.com/ggml-org/ggml, docs/gguf.md. Only what can be checked is written: an architecture that
transformers does not read back, or a feature that GGUF's readers compute otherwise, is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from gradserve.compute.engine.export import gguf_tokenizer, merged
from gradserve.compute.engine.export.parity import load_model
from gradserve.compute.exports import CannotExport, DType, Source

FILE = "model.gguf"

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF's name of each family that is written. Mistral without a window is Llama to GGUF's readers."""

_FILE_TYPES = {"float32": gguf.LlamaFileType.ALL_F32, "float16": gguf.LlamaFileType.MOSTLY_F16}


def dtype_of(source: Source, asked: DType | None) -> DType:
    """float32 from a float32 base, float16 from a smaller one, unless asked otherwise.

    Raises CannotExport for a model that can't be written rightly.
    """
    config = AutoConfig.from_pretrained(source.base.path, local_files_only=True)
    reason = unwritable(config)
    if reason is not None:
        raise CannotExport(f"{source.base.name} can't be exported as GGUF: {reason}. Use --format merged.")
    gguf_tokenizer.read(_tokenizer(source), config.vocab_size)
    dtype = asked or ("float32" if merged.dtype_of(source, None) == "float32" else "float16")
    if dtype not in _FILE_TYPES:
        raise CannotExport(f"GGUF is written in float32 or float16, not in {dtype}.")
    return dtype


def unwritable(config: Any) -> str | None:
    """Why a model of this config would be computed wrongly by GGUF's readers, or can't be checked; None: it is fine."""
    family = config.model_type
    if family not in ARCHITECTURES:
        return f"plain transformers does not read {family} from GGUF, so the result could not be checked"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope != "default":
        return f"its rope_type is {rope!r}, which transformers does not read from GGUF"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        return f"it attends over a window of {window} tokens, which GGUF's {ARCHITECTURES[family]} does not have"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}, and GGUF's readers compute silu"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return f"it has biases that GGUF's {ARCHITECTURES[family]} does not have"
    return None


def write(source: Source, dtype: DType, folder: Path) -> list[str]:
    """Write the file; returns what its user should know."""
    model, notes = merged.merge(source)
    config = model.config
    writer = gguf.GGUFWriter(folder / FILE, ARCHITECTURES[config.model_type])
    _describe(writer, source, config, dtype)
    gguf_tokenizer.add(writer, _tokenizer(source), config.vocab_size)
    for name, tensor in _tensors(model, config, getattr(torch, dtype)):
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf_tokenizer.compare(_tokenizer(source), AutoTokenizer.from_pretrained(folder, gguf_file=FILE))
    return notes


def load(source: Source, folder: Path) -> Any:
    """The model as transformers reads it from the file alone.

    The size of a head is taken from the file's metadata by hand: transformers 5 overlooks it for qwen2 and qwen3, and
    would take the one of the models that were published.
    """
    config = AutoConfig.from_pretrained(folder, gguf_file=FILE)
    head = gguf.GGUFReader(folder / FILE).get_field(gguf.Keys.Attention.KEY_LENGTH.format(arch=config.model_type))
    if head is not None:
        config.head_dim = head.contents()
    return load_model(folder, gguf_file=FILE, config=config)


def _tokenizer(source: Source) -> Any:
    return AutoTokenizer.from_pretrained(source.base.path, local_files_only=True)


def _describe(writer: gguf.GGUFWriter, source: Source, config: Any, dtype: DType) -> None:
    """Every fact that a reader needs to build the model, and where it comes from."""
    head = _head_size(config)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(f"{source.base.name}, trained with gradserve")
    writer.add_description(source.path)
    writer.add_file_type(_FILE_TYPES[dtype])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _head_size(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _tensors(model: Any, config: Any, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """ggml's name and content of every parameter; a tied head is left out, and vectors stay float32.

    Raises CannotExport when a value does not fit into ``dtype``.
    """
    architecture = ARCHITECTURES[config.model_type]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = []
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if architecture == "llama":
            tensor = _permuted(name, tensor, config)
        if tensor.dim() > 1:
            tensor = tensor.to(dtype)
        if not tensor.isfinite().all():
            raise CannotExport(f"{name} has values that float16 can't hold: choose --dtype float32.")
        found.append((names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.contiguous()))
    return found


def _permuted(name: str, weight: Tensor, config: Any) -> Tensor:
    """Queries and keys of llama: GGUF's rotary embedding turns neighbours (2i, 2i + 1), transformers' (i, i + half)."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
