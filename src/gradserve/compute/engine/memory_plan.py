"""How much memory a training pass will take, before it is taken. Arithmetic only.

Counted are float32 values per packed token that live at the worst moment, above the frozen weights. Letters: d hidden,
f intermediate, q = H D and k = Hkv D the widths of queries and keys, V vocabulary, R rank. A layer keeps for its
backward pass:

    norms           2 inputs and 2 outputs                                  4 d
    attention       q, k, v after rotation, its output twice                3 q + 2 k
                    with norms of q and k also their inputs                 q + k
    MLP             gate, up and their product                              3 f
    adapters        A x of seven modules                                    7 R

and its own backward pass holds three more f for a moment. The head keeps V per position (log-softmax over the logits),
or, taken in chunks and computed again, V for the positions of one chunk. The test that holds this against measured
peaks (tests/numerics/test_memory_plan.py) allows a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FLOAT = 4
"""Bytes of a value."""
ADAPTED = 7
"""Modules of a layer that can carry an adapter."""
CHUNK = 256
"""Positions of the head taken together when it is taken in chunks."""
LOGITS_AT_ONCE = 1 << 16
"""Logits whose log-softmax is taken together (logprobs.log_softmax_): 256 KiB."""


class TooLarge(Exception):
    """A pass that does not fit however it is computed. ``index`` is the longest row."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True)
class Dimensions:
    """What of a model decides its activations."""

    layers: int
    hidden: int
    intermediate: int
    query: int
    key: int
    heads: int
    head_size: int
    vocab: int
    normed_queries: bool

    @classmethod
    def of(cls, config: Any) -> Dimensions:
        """From a transformers configuration of a supported family."""
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            query=heads * size,
            key=key_heads * size,
            heads=heads,
            head_size=size,
            vocab=config.vocab_size,
            normed_queries=config.model_type == "qwen3",
        )


@dataclass(frozen=True)
class Pass:
    """What is to be computed. ``targets`` are K, ``adapter_values`` the size of all gradients, ``head_values`` of those
    of the head alone."""

    lengths: tuple[int, ...]
    targets: int
    rank: int
    adapter_values: int
    head_values: int
    backward: bool

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Plan:
    """How to compute a pass. ``head_positions`` None: the head in one piece."""

    recompute: bool
    head_positions: int | None


PLANS = (Plan(False, None), Plan(False, CHUNK), Plan(True, None), Plan(True, CHUNK))
"""The fastest first: a head computed twice costs less than layers computed twice."""


def choose(model: Dimensions, work: Pass, room_bytes: int | None) -> Plan:
    """The fastest plan that fits into ``room_bytes`` (None: into anything). Raises TooLarge."""
    for plan in PLANS:
        if room_bytes is None or peak_bytes(model, work, plan) <= room_bytes:
            return plan
    assert room_bytes is not None
    needed = peak_bytes(model, work, PLANS[-1])
    longest = max(work.lengths)
    raise TooLarge(
        f"This needs {needed:,} bytes ({work.tokens} tokens in one pass, its longest row {longest}) and "
        f"{room_bytes:,} bytes are available: about {most_tokens(model, work, room_bytes)} tokens would fit.",
        work.lengths.index(longest),
    )


def most_tokens(model: Dimensions, work: Pass, room_bytes: int) -> int:
    """Tokens of the longest single row that would fit."""
    low, high = 0, work.tokens
    while low < high:
        middle = (low + high + 1) // 2
        shorter = Pass((middle,), work.targets, work.rank, work.adapter_values, work.head_values, work.backward)
        if peak_bytes(model, shorter, PLANS[-1]) <= room_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def peak_bytes(model: Dimensions, work: Pass, plan: Plan) -> int:
    """The most that the pass holds at one moment, above the model's weights."""
    tokens = max(work.tokens, 1)
    head_positions = min(tokens, plan.head_positions or tokens)
    block = min(LOGITS_AT_ONCE, tokens * model.vocab)
    logits = head_positions * model.vocab
    if not work.backward:
        layer = tokens * (5 * model.hidden + 2 * model.head_size + max(2 * model.intermediate, 4 * model.query))
        return FLOAT * max(layer, tokens * model.hidden + logits + block)
    layer = tokens * _layer_values(model, work.rank)
    kept = tokens * (2 * model.hidden + 2 * model.head_size + 3 * work.targets)
    kept += model.layers * (tokens * model.hidden if plan.recompute else layer)
    moment = tokens * 3 * model.intermediate
    at_head = kept + logits + max(block, head_positions * model.hidden + work.head_values)
    in_last_layer = kept + (layer if plan.recompute else 0) + moment + work.head_values
    in_first_layer = layer + moment + work.adapter_values
    written = 2 * work.adapter_values  # the gradients and the bytes of the file that they become
    return FLOAT * max(at_head, in_last_layer, in_first_layer, written)


def _layer_values(model: Dimensions, rank: int) -> int:
    attention = 3 * model.query + 2 * model.key + model.heads
    if model.normed_queries:
        attention += model.query + model.key + 2 * model.heads
    return 4 * model.hidden + attention + 3 * model.intermediate + ADAPTED * rank
