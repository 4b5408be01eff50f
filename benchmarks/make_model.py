"""Write the random Qwen3 models that the baselines were measured with, each with a small tokenizer.

    python -m benchmarks.make_model DIRECTORY      # DIRECTORY/tiny: 1.1M parameters, DIRECTORY/mid: 36M

float32. The speed of a server's own work shows on the tiny one, that of its arithmetic on the mid one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT = 4096

SHAPES = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "mid": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Special tokens, then one token for each byte, then words that stand for nothing, up to ``vocab_size``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet]
    words += [f"<{i}>" for i in range(len(words), vocab_size)]
    inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=SPECIAL[2], pad_token=SPECIAL[0])


def write(directory: Path, shape: dict[str, int]) -> None:
    """Model and tokenizer; the same bytes each time."""
    words = tokenizer(shape["vocab_size"])
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_theta=1_000_000.0,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(directory)
    words.save_pretrained(directory)


def main() -> None:
    """Both, into the directory given."""
    for name, shape in SHAPES.items():
        write(Path(sys.argv[1]) / name, shape)


if __name__ == "__main__":
    main()
