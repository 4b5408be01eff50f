"""Scores of the prompt are those of a full forward pass, however the prompt was cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradserve.compute.engine.attention import PackedLayout
from gradserve.compute.engine.lora import Adapter, Route
from gradserve.compute.engine.prompts import EMPTY_LOGPROB
from tests.numerics.lab import Floats, Lab, ask, floats, ids, integers, tokens

ATOL = 1e-5
LENGTH, BEST, TARGETS = 45, 4, 3


def full(lab: Lab, base: str, weights: str, prompt: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Floats:
    """log_softmax at every position, [P, V]."""
    model, count = lab.base(base), len(prompt)
    with torch.no_grad(), model.routed([Route(Adapter.of(lab.arrays.get(weights)), slice(0, count))]):
        hidden = model.hidden(torch.from_numpy(prompt.astype(np.int64)), torch.arange(count), PackedLayout([count]))
        return model.logits(hidden).log_softmax(-1).numpy()


@pytest.mark.parametrize("pass_tokens", [512, 16])
@pytest.mark.parametrize("max_tokens", [1, 7])
def test_all_scores(lab: Lab, pass_tokens: int, max_tokens: int) -> None:
    prompt, weights = ids(0, LENGTH), lab.adapter("qwen3")
    wanted = np.random.default_rng(0).integers(-1, 320, (LENGTH - 1, TARGETS))
    wanted[3] = -1
    op = ask(
        "qwen3", prompt, weights, n=2, max_tokens=max_tokens, prompt_logprobs=True, topk_prompt=BEST, targets=wanted
    )
    others = [ask("qwen3", ids(9, 20), max_tokens=12), op, ask("qwen3", ids(8, 33), weights)]
    result = lab.sample(others, lab.another_sampler(pass_tokens=pass_tokens))[1]
    reference = full(lab, "qwen3", weights, prompt)

    assert result.prompt_logprobs is not None
    own = np.frombuffer(result.prompt_logprobs, "<f4")
    assert np.isnan(own[0])
    np.testing.assert_allclose(own[1:], reference[np.arange(LENGTH - 1), prompt[1:]], atol=ATOL, rtol=0)

    assert result.topk_prompt is not None
    best, best_ids = floats(result.topk_prompt.logprobs), integers(result.topk_prompt.token_ids)
    assert result.topk_prompt.token_ids.dtype == "int32"
    assert (best_ids[0].tolist(), best[0].tolist()) == ([0] * BEST, [EMPTY_LOGPROB] * BEST)
    np.testing.assert_allclose(best[1:], np.sort(reference[:-1])[:, : -BEST - 1 : -1], atol=ATOL, rtol=0)
    np.testing.assert_allclose(np.take_along_axis(reference[:-1], best_ids[1:], 1), best[1:], atol=ATOL, rtol=0)

    assert result.target_prompt_logprobs is not None
    got = floats(result.target_prompt_logprobs)
    expected = np.where(wanted < 0, 0, np.take_along_axis(reference[:-1], wanted.clip(min=0), 1))
    np.testing.assert_allclose(got, expected, atol=ATOL, rtol=0)
    assert got.shape == wanted.shape


def test_what_was_not_asked_for_is_absent(lab: Lab) -> None:
    (result,) = lab.sample([ask("llama", ids(0, 4))])
    assert (result.prompt_logprobs, result.topk_prompt, result.target_prompt_logprobs) == (None, None, None)
    assert result.sequences[0].topk is None


def test_a_prompt_of_one_token(lab: Lab) -> None:
    (result,) = lab.sample(
        [ask("llama", ids(0, 1), prompt_logprobs=True, topk_prompt=2, targets=np.zeros((0, 2), np.int64))]
    )
    assert result.prompt_logprobs is not None
    assert np.isnan(np.frombuffer(result.prompt_logprobs, "<f4")).tolist() == [True]
    assert result.target_prompt_logprobs is not None
    assert result.target_prompt_logprobs.shape == (0, 2)


def test_best_of_sampled_positions(lab: Lab) -> None:
    prompt, weights = ids(0, 6), lab.adapter("llama")
    (result,) = lab.sample([ask("llama", prompt, weights, max_tokens=9, topk_sample=5)])
    (sequence,) = result.sequences
    assert sequence.topk is not None
    whole = np.concatenate([prompt, np.array(tokens(sequence), dtype=np.int32)])
    reference = full(lab, "llama", weights, whole)[5:-1]
    assert sequence.topk.logprobs.shape == (9, 5)
    np.testing.assert_allclose(floats(sequence.topk.logprobs), np.sort(reference)[:, :-6:-1], atol=ATOL, rtol=0)
