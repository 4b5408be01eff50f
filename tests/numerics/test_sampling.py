"""Samples come from the model that trains, and nothing about how they were batched shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradserve.compute.catalog import FAMILIES
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.kernels import FAST
from gradserve.compute.engine.lane import Lane
from gradserve.compute.engine.scores import _TargetLogprobs
from gradserve.compute.engine.sequences import Sequence, Stem
from gradserve.compute.tasks import Done, Failed, SampleTask
from gradserve.wire.ops import Sample
from tests.numerics import reference
from tests.numerics.lab import Lab, all_tokens, ask, floats, ids, integers, logprobs, row, sample_of, tokens

SAMPLER_TRAINER_ATOL = 1e-5
"""|log-prob of the sampler - log-prob of the trainer| on the tiny models, float32. Seen: up to 6e-6, by CPU."""

BATCHING_ATOL = 1e-5
"""|log-prob - log-prob of the same token under other batching|."""

ALL = [*FAMILIES, *(f"{family}-window" for family in FAMILIES if family != "llama")]


@pytest.mark.parametrize("name", ALL)
def test_greedy_is_transformers_generate(lab: Lab, name: str) -> None:
    prompts = [ids(index, length) for index, length in enumerate((1, 3, 17, 40))]
    got = lab.sample([ask(name, prompt, temperature=0.0, max_tokens=40) for prompt in prompts])
    model = reference.load(lab.models[name], "sdpa")
    for prompt, result in zip(prompts, got, strict=True):
        out = model.generate(
            torch.from_numpy(prompt.astype(np.int64))[None], do_sample=False, max_new_tokens=40, eos_token_id=None
        )
        assert tokens(result.sequences[0]) == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ALL)
def test_log_probs_are_the_trainers(lab: Lab, name: str) -> None:
    weights = lab.adapter(name)
    prompts = [ids(index, length) for index, length in enumerate((2, 11, 30))]
    results = lab.sample([ask(name, prompt, weights, n=2, max_tokens=50) for prompt in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        for sequence in result.sequences:
            whole = np.concatenate([prompt, np.array(tokens(sequence), dtype=np.int32)])
            trained = lab.forward(name, weights, [row(whole)])[0][len(prompt) - 1 : -1]
            np.testing.assert_allclose(logprobs(sequence), trained, atol=SAMPLER_TRAINER_ATOL, rtol=0)


def mixed(lab: Lab, count: int) -> list[Sample]:
    """Requests of every kind: three adapters and none, ragged prompts, several samples, various settings."""
    adapters = [None, lab.adapter("llama", seed=1), lab.adapter("llama", seed=2, rank=8), lab.adapter("llama", seed=3)]
    return [
        ask(
            "llama",
            ids(index, 1 + 7 * (index % 9)),
            adapters[index % 4],
            n=1 + index % 3,
            seed=index,
            max_tokens=5 + 9 * (index % 5),
            temperature=(0.0, 1.0, 0.7)[index % 3],
            top_p=(1.0, 0.9)[index % 2],
        )
        for index in range(count)
    ]


def assert_same(lab: Lab, ops: list[Sample], **limits: int) -> None:
    """Each request alone gives what all of them give together under ``limits``."""
    together = lab.sample(ops, lab.another_sampler(**limits))
    for op, result in zip(ops, together, strict=True):
        (alone,) = lab.sample([op])
        assert all_tokens([alone]) == all_tokens([result])
        for mine, theirs in zip(alone.sequences, result.sequences, strict=True):
            np.testing.assert_allclose(logprobs(mine), logprobs(theirs), atol=BATCHING_ATOL, rtol=0)


def test_alone_or_among_twenty_others_with_other_adapters(lab: Lab) -> None:
    assert_same(lab, mixed(lab, 21))


def test_prefill_in_small_pieces(lab: Lab) -> None:
    assert_same(lab, mixed(lab, 8), pass_tokens=16)


def test_one_token_per_pass(lab: Lab) -> None:
    assert_same(lab, mixed(lab, 3), pass_tokens=1)


@pytest.fixture
def evictions(monkeypatch: pytest.MonkeyPatch) -> list[Lane]:
    """One entry for each time that a sequence or stem lost its memory."""
    seen: list[Lane] = []
    evict = Lane._evict

    def noted(lane: Lane, holder: Sequence | Stem) -> None:
        seen.append(lane)
        evict(lane, holder)

    monkeypatch.setattr(Lane, "_evict", noted)
    return seen


TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Layers x (key, value) x heads x head size x float32 of the test models."""


@pytest.mark.parametrize("tokens_that_fit", [1, 280, 400])
def test_preemption(lab: Lab, evictions: list[Lane], tokens_that_fit: int) -> None:
    """A cache that holds nothing (then sequences go one by one), two short sequences, or a few."""
    assert_same(lab, mixed(lab, 12), kv_bytes=tokens_that_fit * TOKEN_BYTES)
    assert evictions


def test_windows_under_preemption_and_pieces(lab: Lab, evictions: list[Lane]) -> None:
    ops = [ask("mistral-window", ids(index, 5 + 20 * index), seed=index, n=2, max_tokens=40) for index in range(4)]
    assert_same(lab, ops, kv_bytes=300 * TOKEN_BYTES, pass_tokens=24)
    assert evictions


def test_very_different_lengths_in_very_little_memory(lab: Lab, evictions: list[Lane]) -> None:
    """Everything ends and is as alone; the bound is exceeded only by a request that holds all there is."""
    lengths = (200, 3, 90, 17, 150, 1, 60, 240, 33, 5, 120, 8)
    adapters = [None, lab.adapter("llama", seed=1), lab.adapter("llama", seed=2)]
    ops = [
        ask("llama", ids(i % 5, length), adapters[i % 3], n=1 + i % 4, seed=i, max_tokens=(30, 4, 70)[i % 3])
        for i, length in enumerate(lengths)
    ]
    limit = 420
    sampler = lab.another_sampler(kv_bytes=limit * TOKEN_BYTES, pass_tokens=40)
    for index, op in enumerate(ops):
        sampler.add(SampleTask(str(index), op))
    done = {}
    while sampler.busy:
        done.update({outcome.task_id: outcome for outcome in sampler.step()})
        lane = sampler._lanes["llama"]
        assert lane._kv.used_tokens <= limit or len({holder.request for holder in lane._holders()}) == 1
    assert evictions
    for index, op in enumerate(ops):
        (alone,), outcome = lab.sample([op], lab.another_sampler()), done[str(index)]
        assert isinstance(outcome, Done)
        assert outcome.usage.prefill_tokens + outcome.usage.cached_tokens == lengths[index]
        assert all_tokens([alone]) == all_tokens([sample_of(outcome)])


def test_a_long_prompt_does_not_stall_a_short_one(lab: Lab) -> None:
    """Of a pass of 32 tokens the long one gets half: 15 passes, in which the short one comes and goes."""
    sampler = lab.another_sampler(pass_tokens=32)
    sampler.add(SampleTask("long", ask("llama", ids(0, 240), max_tokens=1)))
    sampler.add(SampleTask("short", ask("llama", ids(1, 16), max_tokens=5)))
    ended = [[outcome.task_id for outcome in sampler.step()] for _ in range(5)]
    assert ended == [[], [], [], [], ["short"]]
    passes = 5
    while sampler.busy:
        sampler.step()
        passes += 1
    assert passes == 5 + (240 - (16 + 4 * 31) + 31) // 32  # alone it takes what nobody else needs


def test_the_log_prob_of_a_draw_is_the_trainers_arithmetic(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """From equal logits to the bit, for drawn tokens, the best K of their positions and the prompt's own."""
    seen: list[torch.Tensor] = []
    logits_of = Base.logits

    def noted(base: Base, hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(base, hidden)
        seen.append(logits.clone())  # what comes out is overwritten
        return logits

    monkeypatch.setattr(Base, "logits", noted)
    prompt = ids(0, 9)
    (result,) = lab.sample([ask("llama", prompt, temperature=0.7, max_tokens=20, topk_sample=3, prompt_logprobs=True)])
    (sequence,) = result.sequences

    def trained(logits: torch.Tensor, targets: list[int]) -> list[float]:
        found: torch.Tensor = _TargetLogprobs.apply(logits.clone(), torch.tensor(targets)[:, None], FAST)  # type: ignore[no-untyped-call]
        return found[:, 0].tolist()

    scored, *steps = seen
    assert result.prompt_logprobs is not None
    assert np.frombuffer(result.prompt_logprobs, "<f4")[1:].tolist() == trained(scored, prompt[1:].tolist())
    drawn = [trained(step, [token])[0] for step, token in zip(steps, tokens(sequence), strict=True)]
    assert logprobs(sequence).tolist() == drawn
    assert sequence.topk is not None
    best = zip(steps, integers(sequence.topk.token_ids), strict=True)
    assert floats(sequence.topk.logprobs).tolist() == [trained(step.expand(3, -1), row.tolist()) for step, row in best]


def test_a_request_may_have_more_samples_than_rows_fit_in_a_pass(lab: Lab) -> None:
    assert_same(lab, [ask("llama", ids(0, 12), n=20, max_tokens=6, seed=4)], pass_tokens=16)


def test_samples_of_a_request_differ_and_its_prompt_is_prefilled_once(lab: Lab) -> None:
    (done,) = lab.sample_tasks([ask("llama", ids(0, 30), n=8, max_tokens=10)])
    assert done.sample is not None
    assert len({tuple(tokens(sequence)) for sequence in done.sample.sequences}) == 8
    assert (done.usage.prefill_tokens, done.usage.sample_tokens, done.usage.cached_tokens) == (30, 80, 0)
    assert done.usage.compute_us > 0


def test_the_seed_is_the_sample(lab: Lab) -> None:
    def draw(seed: int) -> list[list[int]]:
        return all_tokens(lab.sample([ask("llama", ids(0, 5), n=3, seed=seed, max_tokens=12)]))

    assert draw(11) == draw(11)
    assert draw(11) != draw(12)


def test_all_the_context_may_be_used(lab: Lab) -> None:
    """Beyond the cache's bound too: a single sequence is always admitted."""
    op = ask("llama", ids(0, 200), max_tokens=1000)
    (result,) = lab.sample([op], lab.another_sampler(kv_bytes=1))
    assert len(tokens(result.sequences[0])) == 56
    assert not result.sequences[0].stopped


def test_a_prompt_that_fills_the_context_gives_one_token(lab: Lab) -> None:
    (result,) = lab.sample([ask("llama", ids(0, 256), max_tokens=1, prompt_logprobs=True)])
    assert len(tokens(result.sequences[0])) == 1
    (failed,) = failures(lab, ask("llama", ids(0, 257), max_tokens=1))
    assert failed == ("user", "the prompt has 257 tokens; the context is 256")


def failures(lab: Lab, op: Sample) -> list[tuple[str, str]]:
    lab.sampler.add(SampleTask("bad", op))
    outcomes = lab.sampler.step()
    assert not lab.sampler.busy
    return [(outcome.kind, outcome.message) for outcome in outcomes if isinstance(outcome, Failed)]


def test_two_bases_at_once(lab: Lab) -> None:
    ops = [ask(name, ids(index, 9), seed=index, max_tokens=20) for index, name in enumerate(["llama", "qwen3"] * 3)]
    together = all_tokens(lab.sample(ops))
    assert together == [sequence for op in ops for sequence in all_tokens(lab.sample([op]))]


def test_frequencies_over_many_samples(lab: Lab) -> None:
    """4000 draws of one next token against the softmax, after gathering rare tokens (chi-square, fixed seed)."""
    prompt, draws = ids(3, 6), 4000
    weights = lab.adapter("llama")
    results = lab.sample([ask("llama", prompt, weights, n=draws, max_tokens=1, seed=1, topk_sample=320)])
    best = results[0].sequences[0].topk
    assert best is not None
    order, expected = best.token_ids.numpy()[0], np.exp(best.logprobs.numpy()[0].astype(np.float64)) * draws
    assert expected.sum() == pytest.approx(draws, rel=1e-5)
    counts = np.bincount([drawn[0] for drawn in all_tokens(results)], minlength=320)[order]
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    degrees = len(wanted) - 1
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)
