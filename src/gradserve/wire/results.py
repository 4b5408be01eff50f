"""What an Op answers, before it is put into the client's format.

``weights`` is the digest of the adapter that it was computed with, as the worker read it (None: the base alone), and
``version`` its number in its run (of a training result, told by the run's row: workers do not count versions).
"""

from __future__ import annotations

import msgspec

from gradserve.wire.data import Array


class TopK(msgspec.Struct, frozen=True, array_like=True):
    """K best ids and log-probs at each of ``length`` positions: int32 and float32 [length, k]."""

    token_ids: Array
    logprobs: Array


class SampledSequence(msgspec.Struct, frozen=True, array_like=True):
    """One continuation. ``tokens`` int32 [n] and ``logprobs`` float32 [n]; a stop token is part of both.

    Log-probs are of the untempered, unfiltered distribution, whatever the sampling parameters.
    """

    tokens: bytes
    logprobs: bytes
    stopped: bool
    topk: TopK | None = None


class SampleResult(msgspec.Struct, frozen=True):
    """``prompt_logprobs`` is float32 [len(prompt)] with NaN at position 0."""

    sequences: list[SampledSequence]
    prompt_logprobs: bytes | None = None
    topk_prompt: TopK | None = None
    target_prompt_logprobs: Array | None = None
    cached_prompt_tokens: int = 0
    weights: str | None = None
    version: int | None = None


class ForwardBackwardResult(msgspec.Struct, frozen=True):
    """``logprobs[i]`` has the shape of row i's target_tokens; metric keys carry their reduction (``loss:sum``)."""

    logprobs: list[Array]
    metrics: dict[str, float]
    weights: str | None = None
    version: int | None = None


class GraphResult(msgspec.Struct, frozen=True):
    """What a graph of a module's parameters gave: its outputs by name, and its scalars (``loss``, metrics)."""

    outputs: dict[str, Array]
    metrics: dict[str, float]
    weights: str | None = None
    version: int | None = None
