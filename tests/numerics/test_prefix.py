"""What was computed for an earlier request is used again, exactly where it may be, and never shows in the results."""

from __future__ import annotations

import numpy as np
import pytest

from gradserve.compute.engine.prefix import BLOCK
from gradserve.compute.engine.sampler import Sampler
from gradserve.compute.tasks import Done, Failed, Progress, SampleTask, Usage
from gradserve.wire.ops import Sample
from tests.numerics.lab import Lab, all_tokens, ask, floats, ids, logprobs, sample_of, tokens

BATCHING_ATOL = 1e-5
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Layers x (key, value) x heads x head size x float32 of the test models."""


def counts(usage: Usage) -> tuple[int, int, int]:
    return usage.prefill_tokens, usage.cached_tokens, usage.sample_tokens


def assert_as_without_cache(lab: Lab, op: Sample, done: Done) -> None:
    (fresh,) = lab.sample_tasks([op], lab.another_sampler())
    assert fresh.usage.cached_tokens == 0
    assert all_tokens([sample_of(done)]) == all_tokens([sample_of(fresh)])
    for mine, theirs in zip(sample_of(done).sequences, sample_of(fresh).sequences, strict=True):
        np.testing.assert_allclose(logprobs(mine), logprobs(theirs), atol=BATCHING_ATOL, rtol=0)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_the_turns_of_an_episode(lab: Lab, name: str) -> None:
    """Each turn finds the last one, prompt and answer, but for its last token and what does not fill a block."""
    weights, sampler, prompt = lab.adapter(name), lab.another_sampler(), ids(0, 21)
    known = 0
    for turn in range(3):
        op = ask(name, prompt, weights, seed=turn, max_tokens=30)
        (done,) = lab.sample_tasks([op], sampler)
        assert counts(done.usage) == (len(prompt) - known, known, 30)
        assert sample_of(done).cached_prompt_tokens == known
        assert_as_without_cache(lab, op, done)
        answer = np.array(tokens(sample_of(done).sequences[0]), dtype=np.int32)
        known = (len(prompt) + len(answer) - 1) // BLOCK * BLOCK
        prompt = np.concatenate([prompt, answer, ids(turn + 1, 9)])


def test_other_weights_never_hit(lab: Lab) -> None:
    sampler = lab.another_sampler()
    for weights in (None, lab.adapter("llama", seed=1), lab.adapter("llama", seed=2)):
        op = ask("llama", ids(0, 50), weights, max_tokens=5)
        first, again = lab.sample_tasks([op], sampler)[0], lab.sample_tasks([op], sampler)[0]
        assert counts(first.usage) == (50, 0, 5)
        assert counts(again.usage) == (2, 48, 5)
        assert_as_without_cache(lab, op, again)


def test_a_whole_prompt_that_is_known_still_computes_its_last_token(lab: Lab) -> None:
    sampler = lab.another_sampler()
    op = ask("llama", ids(0, 3 * BLOCK), n=2, max_tokens=6)
    lab.sample_tasks([op], sampler)
    (done,) = lab.sample_tasks([op], sampler)
    assert counts(done.usage) == (BLOCK, 2 * BLOCK, 12)
    assert_as_without_cache(lab, op, done)


def test_requests_in_line_together_prefill_what_they_share_once(lab: Lab) -> None:
    """The later ones wait for the shared blocks only: those that share nothing are not held up."""
    shared = ids(0, 100)
    ops = [ask("llama", np.concatenate([shared, ids(i + 1, 20)]), seed=i, max_tokens=4) for i in range(4)]
    other = ask("llama", ids(9, 30), seed=9, max_tokens=4)
    sampler = lab.another_sampler(pass_tokens=64)
    *together, apart = lab.sample_tasks([*ops, other], sampler)
    assert [done.usage.cached_tokens for done in together] == [0, 96, 96, 96]
    assert sum(done.usage.prefill_tokens for done in together) == 120 + 3 * 24
    assert counts(apart.usage) == (30, 0, 4)
    for op, done in zip([*ops, other], [*together, apart], strict=True):
        assert_as_without_cache(lab, op, done)


def test_scores_are_computed_again_and_charged(lab: Lab) -> None:
    sampler = lab.another_sampler()
    prompt = ids(0, 70)
    lab.sample_tasks([ask("llama", prompt)], sampler)
    (scored,) = lab.sample_tasks([ask("llama", prompt, prompt_logprobs=True, max_tokens=1)], sampler)
    assert counts(scored.usage) == (70, 0, 1)
    targets = np.full((69, 1), -1, dtype=np.int64)
    targets[40:] = 7
    (some,) = lab.sample_tasks([ask("llama", prompt, targets=targets, max_tokens=1)], sampler)
    assert counts(some.usage) == (38, 32, 1)
    (alone,) = lab.sample_tasks([ask("llama", prompt, targets=targets, max_tokens=1)], lab.another_sampler())
    wanted, got = sample_of(alone).target_prompt_logprobs, sample_of(some).target_prompt_logprobs
    assert wanted is not None
    assert got is not None
    np.testing.assert_allclose(floats(got), floats(wanted), atol=BATCHING_ATOL, rtol=0)


def test_the_bound_counts_prefixes_and_drops_the_oldest(lab: Lab) -> None:
    limit = 400
    sampler = lab.another_sampler(kv_bytes=limit * TOKEN_BYTES)
    ops = [ask("llama", ids(index, 50), seed=index, max_tokens=8) for index in range(20)]
    for op in ops:
        sampler.add(SampleTask("x", op))
        while sampler.busy:
            sampler.step()
            assert sampler._lanes["llama"]._kv.used_tokens <= limit
    kv = sampler._lanes["llama"]._kv
    assert kv.live_tokens == 0
    assert 0 < kv.used_tokens <= limit
    (newest,) = lab.sample_tasks([ops[-1]], sampler)
    assert newest.usage.cached_tokens == 48
    (oldest,) = lab.sample_tasks([ops[0]], sampler)
    assert oldest.usage.cached_tokens == 0


def run(sampler: Sampler) -> list[Done | Failed | Progress]:
    messages: list[Done | Failed | Progress] = []
    while sampler.busy:
        messages += sampler.step()
    return messages


def test_cancel_frees_everything_and_leaves_the_others_alone(lab: Lab) -> None:
    sampler = lab.another_sampler(kv_bytes=400 * TOKEN_BYTES, pass_tokens=24)
    ops = [ask("llama", ids(0 if index < 3 else index, 40), seed=index, n=2, max_tokens=20) for index in range(5)]
    for index, op in enumerate(ops):
        sampler.add(SampleTask(str(index), op))
    for _ in range(4):
        sampler.step()
    for victim in ("0", "4"):  # one that others wait for or that decodes, and one still in line
        outcome = sampler.cancel(victim)
        assert isinstance(outcome, Failed)
        assert (outcome.task_id, outcome.kind) == (victim, "cancelled")
        assert sampler.cancel(victim) is None
    done = {message.task_id: message for message in run(sampler)}
    assert sorted(done) == ["1", "2", "3"]
    for key, message in done.items():
        assert isinstance(message, Done)
        assert_as_without_cache(lab, ops[int(key)], message)
    assert sampler._lanes["llama"]._kv.live_tokens == 0
    assert sampler.cancel("unknown") is None


def test_cancelling_the_only_request_leaves_an_idle_sampler(lab: Lab) -> None:
    sampler = lab.another_sampler()
    sampler.add(SampleTask("a", ask("llama", ids(0, 30), max_tokens=50)))
    sampler.step()
    assert sampler.cancel("a") is not None
    assert not sampler.busy
    assert sampler.step() == []


def test_a_stream_is_the_result_in_parts(lab: Lab) -> None:
    sampler = lab.another_sampler(kv_bytes=280 * TOKEN_BYTES)  # some of it is evicted and computed again
    sampler.add(SampleTask("streamed", ask("llama", ids(0, 20), n=3, max_tokens=50), stream=True))
    sampler.add(SampleTask("plain", ask("llama", ids(1, 20), n=3, max_tokens=50)))
    messages = run(sampler)
    parts = [message for message in messages if isinstance(message, Progress)]
    assert {part.task_id for part in parts} == {"streamed"}
    (end,) = (i for i, message in enumerate(messages) if isinstance(message, Done) and message.task_id == "streamed")
    assert not any(isinstance(message, Progress) for message in messages[end:])
    done = messages[end]
    assert isinstance(done, Done)
    for index, sequence in enumerate(sample_of(done).sequences):
        own = [part for part in parts if part.index == index]
        assert all(len(part.tokens) == len(part.logprobs) == 4 for part in own)
        assert b"".join(part.tokens for part in own) == sequence.tokens
        assert b"".join(part.logprobs for part in own) == sequence.logprobs
