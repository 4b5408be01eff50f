"""The public losses by name: what inputs and settings each takes. The formulas live in compute/engine/losses.py."""

from __future__ import annotations

import msgspec


class LossSpec(msgspec.Struct, frozen=True):
    """``required`` and ``optional`` name the per-token inputs, float32 [N] unless ``wide`` allows [N, K].

    ``config`` maps each accepted setting to its default.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: dict[str, float] = {}
    wide: bool = False
    note: str = ""


IGNORED_INPUTS = frozenset({"mask"})
"""Inputs that clients attach for their own use. They are dropped; masks are expressed by zero weights."""

_RATIO = ("target_tokens", "logprobs", "advantages")
_CLIP_INPUTS = ("clip_low_threshold", "clip_high_threshold")

LOSSES: dict[str, LossSpec] = {
    spec.name: spec
    for spec in (
        LossSpec("cross_entropy", ("target_tokens",), ("weights",), wide=True),
        LossSpec("importance_sampling", _RATIO),
        LossSpec("ppo", _RATIO, _CLIP_INPUTS, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        LossSpec("cispo", _RATIO, _CLIP_INPUTS, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        LossSpec("dro", _RATIO, (), {"beta": 0.05}),
        LossSpec(
            "gspo",
            (*_RATIO, "sequence_ratio_mask"),
            _CLIP_INPUTS,
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        ),
        LossSpec(
            "stable_reinforce",
            _RATIO,
            (),
            {"kl_coeff": 0.01},
            note=(
                "stable_reinforce here is gradserve's documented stand-in (truncated importance sampling with a "
                "squared log-ratio penalty): the original formula is not public. See docs/reference/losses.md."
            ),
        ),
    )
}

COMPUTED = frozenset({"logprobs", "mask", "lengths", "entropy", "topk_logprobs", "hidden", "values"})
"""Inputs of a graph over a batch that the server fills; every other one is a key of the rows' inputs."""
ALIASES = {"old_logprobs": "logprobs"}
"""What such a graph calls an input, and what the rows call it: the sampler's log-probs."""


def computed(over: str) -> frozenset[str]:
    """The inputs that the server fills. The public SDK's losses, over rows, get ``logprobs`` alone."""
    return COMPUTED if over == "batch" else frozenset({"logprobs"})


def key_of(name: str, over: str) -> str:
    """What the rows call an input of a graph."""
    return ALIASES.get(name, name) if over == "batch" else name
