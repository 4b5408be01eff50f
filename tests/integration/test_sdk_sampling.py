"""The public SDK over a real socket: sampling, and its agreement with training."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from gradserve.client.embedded import EmbeddedServer
from tests.sdk import client, datum, logprobs, prompt, sequences, supervised, train

BOUND = 1e-5
"""|sampler - trainer| in log-prob, tiny models, fp32."""


@pytest.fixture(scope="module")
def run(server: EmbeddedServer) -> tinker.TrainingClient:
    """A run whose adapter matters: large enough steps that base and adapter disagree."""
    made = client(server.url).create_lora_training_client(base_model="tiny", rank=8, seed=5).result()
    train(made, supervised(4), steps=3, learning_rate=3e-2)
    return made


@pytest.fixture(scope="module")
def sampler(run: tinker.TrainingClient) -> tinker.SamplingClient:
    """An unnamed sampling client of that run."""
    return run.save_weights_and_get_sampling_client().result()


def params(**given: object) -> types.SamplingParams:
    return types.SamplingParams(**{"max_tokens": 8, "seed": 1, **given})


def forward_logprobs(run: tinker.TrainingClient, tokens: list[int]) -> list[float]:
    """The trainer's log-probs of tokens[1:]."""
    result = run.forward(
        [datum(tokens[:-1], target_tokens=tokens[1:], weights=[1.0] * (len(tokens) - 1))], "cross_entropy"
    )
    return [float(value) for value in logprobs(result.result())[0]]


def test_sampled_logprobs_equal_the_trainers(run: tinker.TrainingClient, sampler: tinker.SamplingClient) -> None:
    for row in sequences(4, seed=2):
        result = sampler.sample(prompt(row), 2, params(max_tokens=12, stop=[])).result()
        for sequence in result.sequences:
            assert sequence.stop_reason == "length"
            assert len(sequence.tokens) == 12
            assert sequence.logprobs is not None
            expected = forward_logprobs(run, [*row, *sequence.tokens])[len(row) - 1 :]
            np.testing.assert_allclose(sequence.logprobs, expected, atol=BOUND)


def test_compute_logprobs_equals_the_trainers(run: tinker.TrainingClient, sampler: tinker.SamplingClient) -> None:
    row = sequences(1, seed=8, shortest=20)[0]
    scores = sampler.compute_logprobs(prompt(row)).result()
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], forward_logprobs(run, row), atol=BOUND)  # type: ignore[arg-type]


def test_the_sampler_keeps_the_weights_it_was_made_from(run: tinker.TrainingClient, url: str) -> None:
    other = client(url).create_lora_training_client(base_model="tiny", rank=8, seed=6).result()
    train(other, supervised(4), steps=1, learning_rate=3e-2)
    frozen = other.save_weights_and_get_sampling_client().result()
    before = frozen.compute_logprobs(prompt([30, 40, 50, 60])).result()
    train(other, supervised(4), steps=2, learning_rate=3e-2)
    assert frozen.compute_logprobs(prompt([30, 40, 50, 60])).result() == before
    after = other.save_weights_and_get_sampling_client().result().compute_logprobs(prompt([30, 40, 50, 60])).result()
    assert after != before


def test_named_unnamed_and_base_samplers(run: tinker.TrainingClient, sampler: tinker.SamplingClient, url: str) -> None:
    service = client(url)
    path = run.save_weights_for_sampler("named").result().path
    assert path == f"tinker://{run.model_id}/sampler_weights/named"
    tokens = prompt([33, 44, 55, 66, 77])
    named = service.create_sampling_client(model_path=path).result().compute_logprobs(tokens).result()
    assert named == sampler.compute_logprobs(tokens).result()
    base = service.create_sampling_client(base_model="tiny").result().compute_logprobs(tokens).result()
    assert base != named
    state = run.save_state("also-samples").result().path
    assert service.create_sampling_client(model_path=state).result().compute_logprobs(tokens).result() == named


def test_seeds(sampler: tinker.SamplingClient) -> None:
    tokens = prompt([50, 51, 52])

    def draw(seed: int | None) -> list[list[int]]:
        result = sampler.sample(tokens, 4, params(seed=seed, max_tokens=10, stop=[])).result()
        return [list(sequence.tokens) for sequence in result.sequences]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)
    assert len({tuple(tokens) for tokens in draw(3)}) == 4


def test_greedy_is_the_most_likely_token(sampler: tinker.SamplingClient) -> None:
    result = sampler.sample(prompt([60, 61, 62]), 1, params(temperature=0.0, stop=[]), topk_sample_logprobs=3).result()
    sequence = result.sequences[0]
    assert sequence.topk_logprobs is not None
    for token, logprob, best in zip(sequence.tokens, sequence.logprobs or [], sequence.topk_logprobs, strict=True):
        assert best is not None
        assert best[0][0] == token
        assert best[0][1] == pytest.approx(logprob, abs=1e-6)


def test_prompt_and_topk_logprobs(sampler: tinker.SamplingClient) -> None:
    row = [70, 71, 72, 73, 74]
    result = sampler.sample(
        prompt(row), 1, params(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=4
    ).result()
    assert result.prompt_logprobs is not None
    assert result.topk_prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.topk_prompt_logprobs) == 5
    for token, logprob, best in zip(row[1:], result.prompt_logprobs[1:], result.topk_prompt_logprobs[1:], strict=True):
        assert best is not None
        values = [value for _, value in best]
        assert values == sorted(values, reverse=True)
        assert len(best) == 4
        assert logprob is not None
        assert dict(best).get(token, logprob) == pytest.approx(logprob, abs=1e-6)
        assert logprob <= values[0] + 1e-6


def test_stop_tokens_are_returned(sampler: tinker.SamplingClient) -> None:
    free = sampler.sample(prompt([80, 81]), 1, params(max_tokens=20, stop=[])).result().sequences[0]
    stop = free.tokens[5]
    first = free.tokens.index(stop)
    stopped = sampler.sample(prompt([80, 81]), 1, params(max_tokens=20, stop=[stop])).result().sequences[0]
    assert list(stopped.tokens) == list(free.tokens[: first + 1])
    assert stopped.stop_reason == "stop"
    assert stopped.logprobs is not None
    assert len(stopped.logprobs) == first + 1


def test_stop_strings(sampler: tinker.SamplingClient, run: tinker.TrainingClient) -> None:
    tokenizer = run.get_tokenizer()
    free = sampler.sample(prompt([90, 91]), 1, params(max_tokens=30, stop=[])).result().sequences[0]
    text = tokenizer.decode(free.tokens)
    stop = text[4:6]
    stopped = sampler.sample(prompt([90, 91]), 1, params(max_tokens=30, stop=stop)).result().sequences[0]
    assert stopped.stop_reason == "stop"
    assert list(stopped.tokens) == list(free.tokens[: len(stopped.tokens)])
    assert stop in tokenizer.decode(stopped.tokens)
    assert stop not in tokenizer.decode(stopped.tokens[:-1])


def test_two_hundred_samples_at_once(sampler: tinker.SamplingClient) -> None:
    rows = sequences(200, seed=12)
    futures = [sampler.sample(prompt(row), 1, params(seed=n, max_tokens=6, stop=[])) for n, row in enumerate(rows)]
    results = [future.result() for future in futures]
    assert all(len(result.sequences[0].tokens) == 6 for result in results)
    alone = sampler.sample(prompt(rows[150]), 1, params(seed=150, max_tokens=6, stop=[])).result()
    assert alone.sequences[0].tokens == results[150].sequences[0].tokens


def test_a_prompt_of_one_token_and_one_that_fills_the_context(sampler: tinker.SamplingClient) -> None:
    assert len(sampler.sample(prompt([21]), 1, params(max_tokens=3, stop=[])).result().sequences[0].tokens) == 3
    full = sampler.sample(prompt([30] * 511), 1, params(max_tokens=1, stop=[])).result().sequences[0]
    assert (len(full.tokens), full.stop_reason) == (1, "length")
    unlimited = sampler.sample(prompt([30] * 500), 1, types.SamplingParams(seed=1, stop=[])).result().sequences[0]
    assert (len(unlimited.tokens), unlimited.stop_reason) == (12, "length")


def test_the_second_turn_finds_the_first_and_the_bill_agrees(run: tinker.TrainingClient, url: str) -> None:
    """26 + 30 tokens, the last of which has no keys and values yet: 48 in full blocks of 16."""
    other = client(url).create_lora_training_client(base_model="tiny", rank=8, seed=7).result()
    sampling = other.save_weights_and_get_sampling_client().result()
    opening = sequences(1, seed=21, shortest=26, longest=26)[0]
    first = sampling.sample(prompt(opening), 1, params(max_tokens=30, stop=[])).result()
    assert first.prompt_cache_hit_tokens == 0
    turn = [*opening, *first.sequences[0].tokens, 40, 41, 42]
    second = sampling.sample(prompt(turn), 1, params(max_tokens=4, stop=[])).result()
    assert second.prompt_cache_hit_tokens == 48

    answer = httpx.get(f"{url}/api/v1/gradserve/runs/{other.model_id}?lines=100", headers={"X-API-Key": "tml-test"})
    bill = [line for line in answer.json()["lines"] if line["kind"] == "sample"]
    assert [(line["prefill_tokens"], line["cached_tokens"], line["sample_tokens"]) for line in bill] == [
        (26, 0, 30),
        (11, 48, 4),
    ]


def test_every_sample_has_a_sequence_id_of_its_own(sampler: tinker.SamplingClient) -> None:
    results = [sampler.sample(prompt([25, 26]), 3, params()).result() for _ in range(2)]
    ids = [sequence.sequence_id for result in results for sequence in result.sequences]
    assert all(ids)
    assert len(set(ids)) == 6


def test_the_samplers_tokenizer_loads_without_a_hub(sampler: tinker.SamplingClient) -> None:
    tokenizer = sampler.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("hi there")) == "hi there"
