"""Sampling throughput: 16 prompts sent at once, 4 samples of up to 64 tokens each, from an adapter just trained."""

from __future__ import annotations

import time
from typing import Any

import tinker
from tinker import types

from .common import REPLY_LIMIT_S, Target, random_tokens, ready, spread, supervised_batch, training_client

PROMPTS, SAMPLES, NEW_TOKENS, PROMPT_LENGTH = 16, 4, 64, 32
REPETITIONS = 3


def measure(target: Target) -> dict[str, Any]:
    """Tokens per second over the repetitions after the first, which is reported on its own."""
    client = training_client(target)
    client.forward_backward(supervised_batch(4, 64, target.vocab), "cross_entropy").result(timeout=REPLY_LIMIT_S)
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=REPLY_LIMIT_S)
    began = time.perf_counter()
    sampler = ready(client.save_weights_and_get_sampling_client())
    ready_s = time.perf_counter() - began
    prompts = [types.ModelInput.from_ints(t) for t in random_tokens(PROMPTS, PROMPT_LENGTH, target.vocab, seed=1)]
    rounds = [sample_all(sampler, prompts, seed) for seed in range(1 + REPETITIONS)]
    (_, first_s), steady = rounds[0], rounds[1:]
    return {
        "shape": f"{PROMPTS}x{SAMPLES}x{NEW_TOKENS}",
        "weights_ready_s": round(ready_s, 3),
        "first_s": round(first_s, 3),
        "round_s": spread([seconds for _, seconds in steady]),
        "tokens": steady[-1][0],
        "tokens_per_s": spread([tokens / seconds for tokens, seconds in steady], digits=1),
    }


def sample_all(sampler: tinker.SamplingClient, prompts: list[types.ModelInput], seed: int) -> tuple[int, float]:
    """Tokens received and seconds taken; every token must come with its log-probability."""
    params = types.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=seed)
    began = time.perf_counter()
    futures = [sampler.sample(prompt, SAMPLES, params) for prompt in prompts]
    answers = [future.result(timeout=REPLY_LIMIT_S) for future in futures]
    seconds = time.perf_counter() - began
    sequences = [sequence for answer in answers for sequence in answer.sequences]
    if len(sequences) != len(prompts) * SAMPLES:
        raise RuntimeError(f"{len(sequences)} sequences instead of {len(prompts) * SAMPLES}")
    if any(sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens) for sequence in sequences):
        raise RuntimeError("a sequence came without a log-probability for each token")
    return sum(len(sequence.tokens) for sequence in sequences), seconds
