"""Checks of a sampling request, and its resolution: seed, end of sequence and max_tokens are decided here."""

from __future__ import annotations

import math

import numpy as np

from gradserve.compute.catalog import BaseFacts
from gradserve.gateway.bodies import PromptBody, SampleBody, SamplingParamsBody, TensorBody
from gradserve.gateway.validate.models import seed_or_drawn
from gradserve.store.base import SamplingSession
from gradserve.wire.codec import decode_json_tokens, densify
from gradserve.wire.data import Array
from gradserve.wire.errors import Invalid, Unsupported
from gradserve.wire.ops import Sample, SamplingParams

MAX_SAMPLES = 1024
MAX_TOPK = 128
MAX_STOPS = 64
MAX_TARGET_CELLS = 1 << 22


def sample_body(body: SampleBody, sampler: SamplingSession, seq: int, facts: BaseFacts) -> Sample:
    """The Op of a sampling request. Raises Invalid or Unsupported."""
    _refuse_unserved(body)
    if not 1 <= body.num_samples <= MAX_SAMPLES:
        raise _out_of("num_samples", body.num_samples, f"1 to {MAX_SAMPLES}")
    prompt = _prompt(body.prompt, facts)
    length = len(prompt) // 4
    return Sample(
        base=facts.name,
        weights=sampler.weights,
        prompt=prompt,
        num_samples=body.num_samples,
        params=_params(body.sampling_params, length, facts, sampler.id, seq),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=_topk("topk_prompt_logprobs", body.topk_prompt_logprobs, facts),
        topk_sample_logprobs=_topk("topk_sample_logprobs", body.topk_sample_logprobs, facts),
        target_prompt_ids=_targets(body.target_prompt_logprobs, length, facts),
        version=sampler.run_version,
    )


def _refuse_unserved(body: SampleBody) -> None:
    """Fields that would have to be ignored. record_stability_info is taken: no loss here needs what it records."""
    if body.base_model is not None or body.model_path is not None:
        raise without_session()
    if body.prompt_alt_tokens_k:
        raise Unsupported(
            "unsupported.prompt_alt_tokens",
            "prompt_alt_tokens_k is not served.",
            field="prompt_alt_tokens_k",
            fix="Leave it out or send 0.",
        )
    if body.prompt_logprobs_last_n is not None:
        raise Unsupported(
            "unsupported.prompt_logprobs_last_n",
            "prompt_logprobs_last_n is not served.",
            field="prompt_logprobs_last_n",
            fix="Leave it out: the whole prompt is scored.",
        )


def without_session() -> Unsupported:
    """The refusal of a request that names its weights itself."""
    return Unsupported(
        "unsupported.sample_without_session",
        "Samples are taken from sampling sessions only.",
        field="sampling_session_id",
        fix="Open one (create_sampling_session) and send its id, without base_model and model_path.",
    )


def _out_of(field: str, value: object, bound: str, code: str = "sample.range") -> Invalid:
    return Invalid(code, f"{field} is {value}; it must be {bound}.", field=field)


def _prompt(prompt: PromptBody, facts: BaseFacts) -> bytes:
    for index, chunk in enumerate(prompt.chunks):
        if chunk.type != "encoded_text":
            raise Unsupported(
                "unsupported.chunk",
                f"prompt.chunks[{index}] is of type {chunk.type!r}.",
                field=f"prompt.chunks[{index}]",
                index=index,
                fix="This server takes text only: send encoded_text chunks.",
            )
    try:
        tokens = decode_json_tokens([chunk.tokens for chunk in prompt.chunks])
    except OverflowError as error:
        bound = f"made of token ids from 0 to {facts.vocab_size - 1}"
        raise _out_of("prompt", "not", bound, "data.vocabulary") from error
    if not tokens:
        raise Invalid("prompt.empty", "prompt has no tokens.", field="prompt", fix="Send at least one.")
    ids = np.frombuffer(tokens, "<i4")
    bad = (ids < 0) | (ids >= facts.vocab_size)
    if bad.any():
        position = int(np.argmax(bad))
        raise Invalid(
            "data.vocabulary",
            f"prompt contains {ids[position]} at position {position}; "
            f"token ids of {facts.name} are 0 to {facts.vocab_size - 1}.",
            field="prompt",
            index=position,
        )
    return tokens


def _params(given: SamplingParamsBody, length: int, facts: BaseFacts, scope: str, seq: int) -> SamplingParams:
    if not (math.isfinite(given.temperature) and given.temperature >= 0):
        raise _out_of("sampling_params.temperature", given.temperature, "a finite number, at least 0")
    if not 0 < given.top_p <= 1:
        raise _out_of("sampling_params.top_p", given.top_p, "in (0, 1]")
    # 0 means "off" to some servers and "nothing" to others, so it is not taken.
    if given.top_k != -1 and given.top_k < 1:
        raise _out_of("sampling_params.top_k", given.top_k, "-1 (no limit) or at least 1")
    stop_tokens, stop_strings = _stop(given.stop, facts)
    return SamplingParams(
        max_tokens=_max_tokens(given.max_tokens, length, facts),
        seed=seed_or_drawn(given.seed, "sampling_params.seed", scope, seq),
        temperature=given.temperature,
        # More than the vocabulary is the whole of it.
        top_k=min(given.top_k, facts.vocab_size),
        top_p=given.top_p,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
    )


def _max_tokens(given: int | None, length: int, facts: BaseFacts) -> int:
    field = "sampling_params.max_tokens"
    if given is not None and given < 1:
        raise _out_of(field, given, "at least 1")
    wanted = 1 if given is None else given
    if length + wanted > facts.context:
        raise Invalid(
            "sample.context",
            f"Prompt length plus max_tokens exceeds the model's context window: {length} + {wanted} > {facts.context}.",
            field=field,
        )
    return facts.context - length if given is None else given


def _stop(stop: str | list[str | int] | None, facts: BaseFacts) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(token ids, strings) that end a sample. Absent: the model's own end; an empty list: nothing."""
    if stop is None:
        return facts.eos_tokens, ()
    items = [stop] if isinstance(stop, str) else stop
    field = "sampling_params.stop"
    if len(items) > MAX_STOPS:
        raise _out_of(field, f"a list of {len(items)}", f"at most {MAX_STOPS} long", "sample.stop")
    ids = tuple(item for item in items if isinstance(item, int))
    strings = tuple(item for item in items if isinstance(item, str))
    if ids and strings:
        raise _out_of(field, "a mixture", "all strings or all token ids", "sample.stop")
    if "" in strings:
        raise _out_of(field, "or contains an empty string", "made of non-empty ones", "sample.stop")
    for token in ids:
        if not 0 <= token < facts.vocab_size:
            raise _out_of(field, token, f"token ids from 0 to {facts.vocab_size - 1}", "sample.stop")
    return ids, strings


def _topk(field: str, value: int, facts: BaseFacts) -> int:
    most = min(MAX_TOPK, facts.vocab_size)
    if not 0 <= value <= most:
        raise _out_of(field, value, f"0 to {most}")
    return value


def _targets(tensor: TensorBody | None, length: int, facts: BaseFacts) -> Array | None:
    """The ids to score at prompt positions 1.., dense int64 [length - 1, K] with -1 for empty cells."""
    if tensor is None:
        return None
    field = "target_prompt_logprobs"
    shape = tuple(tensor.shape or ())
    if tensor.dtype != "int64":
        raise _out_of(f"{field}.dtype", tensor.dtype, "int64", "sample.targets")
    if length < 2 or len(shape) != 2 or shape[0] != length - 1 or not 1 <= shape[1] <= MAX_TARGET_CELLS // length:
        bound = f"[{length - 1}, K] with K up to {MAX_TARGET_CELLS // length}"
        raise _out_of(f"{field}.shape", list(shape), bound, "sample.targets")
    try:
        ids = _dense_ids(tensor, shape)
    except (ValueError, OverflowError) as error:
        raise Invalid("sample.targets", f"{field} does not fit its shape: {error}.", field=field) from error
    if ids.min() < -1 or ids.max() >= facts.vocab_size or ids.max() < 0:
        bound = f"made of token ids up to {facts.vocab_size - 1} (or -1), at least one of them not -1"
        raise _out_of(field, f"from {ids.min()} to {ids.max()}", bound, "sample.targets")
    return Array.of(ids)


def _dense_ids(tensor: TensorBody, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    values = np.array(tensor.data, dtype=np.int64)
    if tensor.sparse_crow_indices is None:
        return values.reshape(shape)
    crow = np.array(tensor.sparse_crow_indices, dtype=np.int64)
    col = np.array(tensor.sparse_col_indices or [], dtype=np.int64)
    return densify(values, crow, col, shape, -1)
