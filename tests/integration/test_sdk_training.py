"""The public SDK over a real socket: training. Losses are checked by numpy from the log-probs that came back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.sdk import Floats, adam, client, datum, logprobs, sequences, supervised, tensor, train

RTOL = 1e-5


@pytest.fixture
def run(url: str) -> tinker.TrainingClient:
    """A fresh rank-8 run on the tiny model."""
    return client(url).create_lora_training_client(base_model="tiny", rank=8, seed=7).result()


def trained(run: tinker.TrainingClient) -> tinker.TrainingClient:
    """The run after two steps, so that its adapter is not zero any more."""
    train(run, supervised(4), steps=2)
    return run


def ratio_data(seed: int = 3) -> tuple[list[types.Datum], list[Floats], list[Floats]]:
    """Ragged data for the policy-gradient losses: (data, sampler log-probs, advantages)."""
    rng = np.random.default_rng(seed)
    rows = sequences(5, seed)
    q = [rng.normal(-5.5, 0.5, len(row)).astype(np.float32) for row in rows]
    advantages = [rng.normal(0, 1, len(row)).astype(np.float32) for row in rows]
    data = [datum(row, logprobs=x, advantages=a) for row, x, a in zip(rows, q, advantages, strict=True)]
    return data, q, advantages


def importance_sampling(lp: Floats, q: Floats, a: Floats) -> Floats:
    return np.asarray(-np.exp(lp - q) * a)


def ppo(lp: Floats, q: Floats, a: Floats) -> Floats:
    ratio = np.exp(lp - q)
    return np.asarray(-np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a))


def cispo(lp: Floats, q: Floats, a: Floats) -> Floats:
    return np.asarray(-np.clip(np.exp(lp - q), 0.0, 4.0) * lp * a)


def dro(lp: Floats, q: Floats, a: Floats) -> Floats:
    return np.asarray(-(lp * a - 0.5 * 0.05 * (lp - q) ** 2))


@pytest.mark.parametrize("formula", [importance_sampling, ppo, cispo, dro])
def test_policy_losses(run: tinker.TrainingClient, formula: Callable[[Floats, Floats, Floats], Floats]) -> None:
    data, q, advantages = ratio_data()
    result = trained(run).forward_backward(data, formula.__name__).result()  # type: ignore[arg-type]
    expected = sum(float(formula(*row).sum()) for row in zip(logprobs(result), q, advantages, strict=True))
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=RTOL)


def test_gspo(run: tinker.TrainingClient) -> None:
    data, q, advantages = ratio_data()
    masks = [np.arange(len(row)) >= 1 for row in q]
    for item, mask in zip(data, masks, strict=True):
        item.loss_fn_inputs["sequence_ratio_mask"] = tensor(mask, np.float32)
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    result = trained(run).forward_backward(data, "gspo", config).result()
    expected = 0.0
    for lp, old, a, mask in zip(logprobs(result), q, advantages, masks, strict=True):
        s = np.exp((lp - old)[mask].mean())
        expected -= float(np.minimum(s * a, np.clip(s, 0.9, 1.1) * a).sum())
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=RTOL)


def test_stable_reinforce_is_a_stand_in(run: tinker.TrainingClient) -> None:
    data, q, advantages = ratio_data()
    result = trained(run).forward_backward(data, "stable_reinforce", {"kl_coeff": 0.02}).result()
    expected = sum(
        float((-np.minimum(np.exp(lp - old), 4.0) * lp * a + 0.02 * 0.5 * (lp - old) ** 2).sum())
        for lp, old, a in zip(logprobs(result), q, advantages, strict=True)
    )
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=RTOL)


def test_cross_entropy_with_weights_and_soft_targets(run: tinker.TrainingClient) -> None:
    tokens = list(range(30, 42))
    rng = np.random.default_rng(0)
    targets = rng.integers(20, 320, (12, 3))
    weights = rng.random((12, 3)).astype(np.float32)
    hard = datum(tokens, weights=np.linspace(-1, 1, 12))
    soft = types.Datum(
        model_input=hard.model_input,
        loss_fn_inputs={"target_tokens": tensor(targets, np.int64), "weights": tensor(weights, np.float32)},
    )
    result = trained(run).forward_backward([hard, soft], "cross_entropy").result()
    first, second = (np.asarray(output["logprobs"].to_numpy()) for output in result.loss_fn_outputs)
    assert first.shape == (12,)
    assert second.shape == (12, 3)
    expected = -(first * np.linspace(-1, 1, 12)).sum() - (second * weights).sum()
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=RTOL)


def test_forward_does_not_accumulate(run: tinker.TrainingClient) -> None:
    """Trap 2: forward shares the endpoint with forward_backward; only field 6 tells them apart."""
    before = trained(run).forward(supervised(3), "cross_entropy").result()
    step = run.optim_step(adam()).result()
    assert step.metrics is not None
    assert step.metrics["step_skipped"] == 1.0
    after = run.forward(supervised(3), "cross_entropy").result()
    assert [row.tolist() for row in logprobs(before)] == [row.tolist() for row in logprobs(after)]


def test_training_lowers_the_loss(run: tinker.TrainingClient) -> None:
    losses = train(run, supervised(4), steps=8)
    assert losses[-1] < 0.9 * losses[0]


def test_custom_loss_equals_the_built_in_one(url: str) -> None:
    """forward_backward_custom: forward, loss on the client, backward with weights = -gradient."""

    def cross_entropy(data: list[types.Datum], rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.cat(rows).sum(), {"tokens": float(sum(len(row) for row in rows))}

    def after(custom: bool) -> list[Floats]:
        run = client(url).create_lora_training_client(base_model="tiny", rank=8, seed=11).result()
        data = supervised(4, seed=5)
        for _ in range(3):
            if custom:
                result = run.forward_backward_custom(data, cross_entropy).result()
                assert result.metrics["tokens"] == sum(item.model_input.length for item in data)
            else:
                run.forward_backward(data, "cross_entropy").result()
            run.optim_step(adam()).result()
        return logprobs(run.forward(data, "cross_entropy").result())

    for ours, theirs in zip(after(custom=True), after(custom=False), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_more_datums_than_a_chunk_holds(run: tinker.TrainingClient) -> None:
    """2100 datums travel as three requests and come back as one result, in order, with summed metrics."""
    data = [datum(row, weights=[1.0] * 2) for row in sequences(2100, seed=9, shortest=2, longest=2)]
    result = run.forward_backward(data, "cross_entropy").result()
    assert len(result.loss_fn_outputs) == 2100
    total = -sum(float(row.sum()) for row in logprobs(result))
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=RTOL)
    few = run.forward([data[0], data[1500], data[2099]], "cross_entropy").result()
    for one, many in zip(logprobs(few), (logprobs(result)[i] for i in (0, 1500, 2099)), strict=True):
        np.testing.assert_allclose(one, many, atol=1e-5)
    assert run.optim_step(adam()).result().metrics is not None


def test_two_halves_accumulate_to_the_whole(url: str) -> None:
    data = supervised(6, seed=4)

    def after(parts: list[list[types.Datum]]) -> list[Floats]:
        run = client(url).create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
        for _ in range(3):
            for future in [run.forward_backward(part, "cross_entropy") for part in parts]:
                future.result()
            run.optim_step(adam()).result()
        return logprobs(run.forward(data, "cross_entropy").result())

    for whole, halves in zip(after([data]), after([data[:2], data[2:]]), strict=True):
        np.testing.assert_allclose(whole, halves, atol=2e-5)


def test_a_row_of_one_token_and_one_that_fills_the_context(run: tinker.TrainingClient) -> None:
    data = [datum([25], weights=[1.0]), datum([40] * 512, weights=[1.0] * 512)]
    result = run.forward_backward(data, "cross_entropy").result()
    assert [len(row) for row in logprobs(result)] == [1, 512]


def test_rank_seed_and_flags_are_honoured(url: str) -> None:
    service = client(url)
    data = supervised(2)

    def after_a_step(**options: object) -> list[list[float]]:
        run = service.create_lora_training_client(base_model="tiny", **options).result()  # type: ignore[arg-type]
        train(run, data, steps=2)
        return [row.tolist() for row in logprobs(run.forward(data, "cross_entropy").result())]

    reference = after_a_step(rank=8, seed=1)
    assert after_a_step(rank=8, seed=1) == reference
    assert after_a_step(rank=8, seed=2) != reference
    assert after_a_step(rank=4, seed=1) != reference
    for flag in ("train_mlp", "train_attn", "train_unembed"):
        assert after_a_step(rank=8, seed=1, **{flag: False}) != reference


def test_get_info_and_tokenizer(run: tinker.TrainingClient) -> None:
    info = run.get_info()
    assert (info.model_name, info.lora_rank, info.is_lora) == ("tiny", 8, True)
    tokenizer = run.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("hello there")) == "hello there"
