"""Write a tiny Qwen3 model and its tokenizer as a Hugging Face directory.

    python tests/acceptance/make_model.py DIRECTORY

Runs in the acceptance environment, which has torch and transformers. The model knows nothing but how a dialogue looks:
half a minute of training on random words teaches it to end a turn after a few of them, by the token or by the text
with which the recipes' renderers expect it to. An untrained model never writes ``\\n\\nUser:``, so that every answer
would be as long as is allowed and no stop string would ever be met.
"""

from __future__ import annotations

import random
import string
import sys
from collections.abc import Callable
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


STEPS, ROWS, LENGTH, LEARNING_RATE = 500, 8, 256, 1e-2
"""Of the training: a million tokens."""

MOST_WORDS = 8
"""In a turn; half as many on average."""


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


def words(source: random.Random) -> str:
    """A turn's text: a few random words, some of them numbers."""
    letters = [string.ascii_lowercase, string.ascii_letters, string.digits]
    return " ".join(
        "".join(source.choices(source.choice(letters), k=source.randint(1, 8)))
        for _ in range(source.randint(1, MOST_WORDS))
    )


def marked_dialogue(source: random.Random) -> str:
    """Two turns with Qwen's marks, the answer with or without an empty thought."""
    thought = source.choice(["", "<think>\n\n</think>\n\n"])
    return f"<|im_start|>user\n{words(source)}<|im_end|>\n<|im_start|>assistant\n{thought}{words(source)}<|im_end|>\n"


def plain_dialogue(source: random.Random) -> str:
    """Two turns as base models are shown them: ``User: ...``, ``Assistant: ...``."""
    return f"User: {words(source)}\n\nAssistant: {words(source)}\n\n"


def teach_turns(model: Qwen3ForCausalLM, encode: Callable[[str], list[int]]) -> float:
    """Train on dialogues, each row of one kind. Returns the last loss in nats per token."""
    source = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    loss = torch.tensor(torch.nan)
    for _ in range(STEPS):
        batch = torch.tensor([_row(source, encode) for _ in range(ROWS)])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return loss.item()


def _row(source: random.Random, encode: Callable[[str], list[int]]) -> list[int]:
    dialogue = source.choice([marked_dialogue, plain_dialogue])
    ids: list[int] = []
    while len(ids) < LENGTH:
        ids += encode(dialogue(source))
    return ids[:LENGTH]


def main() -> None:
    """Write both into the directory given."""
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer()
    model = tiny_qwen3(tokenizer)
    loss = teach_turns(model, tokenizer.encode)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    print(f"{directory}: {len(tokenizer)} tokens, context {CONTEXT}, loss {loss:.2f}")


if __name__ == "__main__":
    main()
