"""Write a tiny random Qwen3 model and its tokenizer as a Hugging Face directory.

    python tests/acceptance/make_model.py DIRECTORY

Runs in the acceptance environment, which has torch and transformers. The numbers mean nothing: what is tested is that
every request of the recipes is understood and answered.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTEXT = 8192

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Invisible in decoded text."""

MARKERS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
]
"""The Qwen renderers expect each of these to be one token."""

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and Qwen's special tokens: 268 in all, so that any text can be encoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_qwen3(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Two layers, 64 wide, float32. No id outside the tokenizer's vocabulary can be sampled."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_theta=1_000_000.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).float()


def main() -> None:
    """Write both into the directory given."""
    directory = Path(sys.argv[1])
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(directory)
    tiny_qwen3(tokenizer).save_pretrained(directory)
    print(f"{directory}: {len(tokenizer)} tokens, context {CONTEXT}")


if __name__ == "__main__":
    main()
