"""Tiny random models of every supported family.

>>> directory = build_tiny(tmp_path / "llama")          # config, safetensors, tokenizer, generation_config
>>> read_facts("tiny", directory).context
512
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

EOS = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", EOS)
MERGES = (
    ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("Ġ", "a"), ("o", "n"), ("r", "e"), ("e", "r"),
    ("a", "n"), ("Ġ", "s"), ("o", "r"), ("e", "n"), ("Ġ", "w"), ("a", "t"), ("i", "s"), ("n", "d"),
    ("Ġ", "o"), ("in", "g"), ("e", "s"), ("o", "u"), ("Ġ", "c"), ("a", "l"), ("i", "t"), ("e", "d"),
    ("a", "r"), ("s", "t"), ("Ġ", "b"), ("l", "e"), ("Ġa", "nd"), ("Ġ", "f"), ("l", "l"), ("u", "s"),
    ("as", "s"), ("us", "er"), ("i", "st"), ("ass", "ist"), ("assist", "an"), ("assistan", "t"),
)  # fmt: skip
"""A few merges, so that tokens are not simply bytes; those that reuse an unknown part are skipped."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny(
    directory: Path,
    family: str = "llama",
    seed: int = 0,
    vocab_size: int = 320,
    layers: int = 2,
    hidden: int = 64,
    context: int = 512,
    tie: bool = True,
    window: int | None = None,
) -> Path:
    """Write a random model of 4 query and 2 key/value heads into ``directory``, and return it.

    ``window`` is a sliding attention window in tokens (mistral, qwen2, qwen3, smollm3); None switches it off.
    The same arguments write the same weights. Takes a fraction of a second and under 1 MB at the defaults.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(context)
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=context,
        tie_word_embeddings=tie,
        bos_token_id=None,
        pad_token_id=tokenizer.convert_tokens_to_ids(SPECIAL[0]),
        eos_token_id=tokenizer.eos_token_id,
        **_family_config(family, window, layers),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def byte_tokenizer(context: int = 512) -> Any:
    """About 300 ids: 256 bytes, a few merges, then the special tokens."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for left, right in MERGES:
        if left in tokens and right in tokens and left + right not in tokens:
            merges.append((left, right))
            tokens.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=SPECIAL[0],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _family_config(family: str, window: int | None, layers: int) -> dict[str, Any]:
    """A window on every second layer where the family allows a choice; every second smollm3 layer has no rope."""
    if family == "mistral":
        return {"sliding_window": window}
    own: dict[str, Any] = {"no_rope_layer_interval": 2} if family == "smollm3" else {}
    if window is not None and family != "llama":
        kinds = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
        own |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0, "layer_types": kinds}
    return own


def _randomise(model: Any) -> None:
    """Weights large enough that logits differ by tokens and positions; norms and biases away from 1 and 0."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
