"""A tokenizer in GGUF: byte-level BPE, whose way of splitting text into words GGUF only knows by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import gguf

from gradserve.compute.exports import CannotExport

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_ENDINGS + r"|\p{N}{1,3}" + _REST: "llama-bpe", _ENDINGS + r"|\p{N}" + _REST: "qwen2"}
"""GGUF's names of the patterns that Llama 3 and Qwen 2 (and 3) split text by."""

TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "def add(a, b):\n    return a + b  # 1234567\n\n\n",
    "Größe 12,5 €; 東京タワー; it's  we'LL\tTAB",
)
"""What must give the same ids through both: words, code, digits and spaces in a row, contractions, other scripts."""


@dataclass(frozen=True)
class Vocabulary:
    """``tokens`` and ``types`` by id; an id that the tokenizer does not use is a filler of type UNUSED."""

    tokens: list[str]
    types: list[gguf.TokenType]
    merges: list[str]
    split: str


def read(tokenizer: Any, size: int) -> Vocabulary:
    """The vocabulary of a fast tokenizer for a model of ``size`` logits. Raises CannotExport for another kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CannotExport("the base's tokenizer has no tokenizer.json, from which a GGUF vocabulary is made.")
    definition = json.loads(backend.to_str())
    model = definition["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or definition["decoder"]["type"] != "ByteLevel":
        raise CannotExport(f"GGUF is written for byte-level BPE tokenizers only, not for the base's {model['type']}.")
    if not model["merges"]:
        raise CannotExport("the base's tokenizer merges nothing (it is one of bytes); readers of GGUF want merges.")
    types = dict.fromkeys(model["vocab"].values(), gguf.TokenType.NORMAL)
    words = {id: token for token, id in model["vocab"].items()}
    for added in definition["added_tokens"]:
        words[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    if max(words) >= size:
        raise CannotExport(f"the base's tokenizer has the id {max(words)}, and the model only {size} logits.")
    return Vocabulary(
        [words.get(id, f"[PAD{id}]") for id in range(size)],
        [types.get(id, gguf.TokenType.UNUSED) for id in range(size)],
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        _split(definition),
    )


def add(writer: gguf.GGUFWriter, tokenizer: Any, size: int) -> None:
    """Write it. Raises CannotExport as ``read``."""
    vocabulary = read(tokenizer, size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    for id, put in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if id is not None:
            put(id)
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        templates = [{"name": name, "template": text} for name, text in templates.items()]
    if templates is not None:
        writer.add_chat_template(templates)


def compare(original: Any, read_back: Any) -> None:
    """Raises CannotExport unless both give TEXTS the same ids, chat markup included."""
    markup = "".join(f"{token} x" for token in original.all_special_tokens)
    for text in (*TEXTS, markup):
        if original(text).input_ids != read_back(text).input_ids:
            raise CannotExport(f"the tokenizer in the GGUF file splits {text!r} otherwise than the base's.")


def _split(definition: dict[str, Any]) -> str:
    """GGUF's name of the way a tokenizer splits text. Raises CannotExport for one without a name."""
    normalizer = (definition["normalizer"] or {}).get("type")
    if normalizer not in (None, "NFC"):  # readers of GGUF do not normalise; text is in NFC nearly always
        raise CannotExport(f"the base's tokenizer normalises text by {normalizer}, and GGUF's readers do not.")
    match _steps(definition["pre_tokenizer"] or {}):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return "gpt-2"
        case [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False}]:
            return "smollm"
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if pattern in SPLITS:
            return SPLITS[pattern]
    raise CannotExport("the base's tokenizer splits text in none of the known ways (GPT-2, SmolLM, Llama 3, Qwen).")


def _steps(pre_tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    if pre_tokenizer.get("type") == "Sequence":
        steps: list[dict[str, Any]] = pre_tokenizer["pretokenizers"]
        return steps
    return [pre_tokenizer]
