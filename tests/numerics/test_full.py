"""Full-parameter training equals plain transformers and torch.optim.AdamW, and disturbs nobody on the same base."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradserve.compute.catalog import FAMILIES
from gradserve.compute.engine import sampler as sampling
from gradserve.compute.engine.engine import Engine
from gradserve.compute.engine.origin import Origin
from gradserve.compute.tasks import Done, GradTask, InitTask, OptimTask, ReduceTask, SampleTask
from gradserve.wire.data import Row
from gradserve.wire.losses import LOSSES
from gradserve.wire.ops import AdamParams
from tests.models import build_tiny
from tests.numerics import reference
from tests.numerics.lab import Lab, all_tokens, ask, ids, logprobs, logprobs_of, plain_rows, row, rows_of, tokens
from tests.numerics.test_gradients import GRADIENT_TOLERANCE, LOSS_ATOL_PER_TOKEN, assert_gradients_equal, loss_rows

WEIGHT_ATOL = 1e-5
"""After three steps of 1e-3. Adam divides by the gradient's own size: at a small eps noise in tiny gradients would be
as large as a step, so eps is 1e-2 where the gradients are our own; the step itself is compared to the bit."""
LOGPROB_ATOL = 1e-5

TIED, UNTIED = "llama", "qwen3"


def fresh(lab: Lab, base: str) -> str:
    """Version 0 of a run that trains all parameters."""
    return lab.run(InitTask("init", base, None)).objects["weights"]


def full_grad(weights: str, base: str, rows: list[Row], *pass_rows: int, loss: str = "cross_entropy") -> GradTask:
    return GradTask("grad", base, weights, rows, loss, {}, True, pass_rows)


def trained(lab: Lab, base: str, seed: int = 0) -> str:
    """A version after one large step, so that it is far from the base."""
    weights = fresh(lab, base)
    gradient = lab.run(full_grad(weights, base, plain_rows(seed), 5)).objects["gradient"]
    adam = AdamParams(learning_rate=0.02)
    return lab.run(OptimTask("step", weights, None, [gradient], adam)).objects["weights"]


def named_gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("base", [TIED, UNTIED])
def test_version_0_is_the_base_with_tied_tensors_once(lab: Lab, base: str) -> None:
    weights = lab.arrays.get(fresh(lab, base))
    wanted = dict(reference.load(lab.models[base]).named_parameters())
    assert weights.keys() == wanted.keys()
    assert ("lm_head.weight" in weights) == (base == UNTIED)
    for name, parameter in wanted.items():
        assert torch.equal(weights[name], parameter), name
    assert fresh(lab, base) == fresh(lab, base)


@pytest.mark.parametrize("base", [*FAMILIES, "mistral-window", "smollm3-window"])
def test_gradients_of_each_family(lab: Lab, base: str) -> None:
    rows = plain_rows()
    done = lab.run(full_grad(fresh(lab, base), base, rows, 2, 1, 2))
    model = reference.load(lab.models[base])
    lps = reference.logprobs(model, rows)
    torch.autograd.backward(reference.loss("cross_entropy", rows, lps, {}))
    for got, want in zip(logprobs_of(rows_of(done)), lps, strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), atol=LOGPROB_ATOL, rtol=0)
    assert_gradients_equal(lab.gradient(done), named_gradients(model))
    assert done.usage.train_tokens == 105


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_each_loss(lab: Lab, loss: str) -> None:
    rows = loss_rows(lab, TIED, loss)
    done = lab.run(full_grad(fresh(lab, TIED), TIED, rows, len(rows), loss=loss))
    model = reference.load(lab.models[TIED])
    total = reference.loss(loss, rows, reference.logprobs(model, rows), dict(LOSSES[loss].config))
    torch.autograd.backward(total)
    tolerance = LOSS_ATOL_PER_TOKEN * sum(part.length for part in rows)
    assert rows_of(done).metrics["loss:sum"] == pytest.approx(total.item(), abs=tolerance)
    assert_gradients_equal(lab.gradient(done), named_gradients(model))


@pytest.mark.parametrize("base", [TIED, UNTIED])
@pytest.mark.parametrize("adam", [
    AdamParams(learning_rate=1e-3, eps=1e-2),
    AdamParams(learning_rate=1e-3, eps=1e-2, weight_decay=0.1, grad_clip_norm=0.5, beta1=0.8, beta2=0.99),
])  # fmt: skip
def test_three_steps_equal_torch(lab: Lab, base: str, adam: AdamParams) -> None:
    weights, moments = fresh(lab, base), None
    model = reference.load(lab.models[base])
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay,
    )  # fmt: skip
    for step in range(3):
        rows = plain_rows(seed=step)
        optimizer.zero_grad()
        torch.autograd.backward(reference.loss("cross_entropy", rows, reference.logprobs(model, rows), {}))
        limit = adam.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()

        gradients = [
            lab.run(full_grad(weights, base, part, *passes)).objects["gradient"]
            for part, passes in ((rows[:2], (1, 1)), (rows[2:], (3,)))
        ]
        done = lab.run(OptimTask("step", weights, moments, gradients, adam))
        assert done.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        weights, moments = done.objects["weights"], done.objects["moments"]
    got = lab.arrays.get(weights)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), atol=WEIGHT_ATOL, rtol=0, msg=name)


@pytest.mark.parametrize("adam", [AdamParams(), AdamParams(weight_decay=0.2, eps=1e-8, grad_clip_norm=0.3)])
def test_the_step_itself_is_torchs_to_the_bit(lab: Lab, adam: AdamParams) -> None:
    """Given the same gradients; decay pulls at every parameter, norms and embeddings too."""
    weights, moments = fresh(lab, UNTIED), None
    twin = {name: tensor.clone().requires_grad_() for name, tensor in sorted(lab.arrays.get(weights).items())}
    optimizer = torch.optim.AdamW(
        twin.values(),
        lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay,
        foreach=False,
    )  # fmt: skip
    for step in range(3):
        gradient = lab.run(full_grad(weights, UNTIED, plain_rows(step), 5)).objects["gradient"]
        for name, parameter in twin.items():
            parameter.grad = lab.arrays.get(gradient)[name].clone()
        if adam.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(twin.values(), adam.grad_clip_norm, foreach=False)
        optimizer.step()
        done = lab.run(OptimTask("step", weights, moments, [gradient], adam))
        weights, moments = done.objects["weights"], done.objects["moments"]
    assert all(torch.equal(lab.arrays.get(weights)[name], parameter) for name, parameter in twin.items())
    assert moments is not None
    assert lab.arrays.get(moments)["step"] == 3


def test_passes_are_a_matter_of_memory_only(lab: Lab) -> None:
    weights, rows = trained(lab, TIED), plain_rows()
    whole = lab.gradient(lab.run(full_grad(weights, TIED, rows, 5)))
    parts = lab.gradient(lab.run(full_grad(weights, TIED, rows, 1, 1, 1, 1, 1)))
    alone = [lab.run(full_grad(weights, TIED, [part], 1)).objects["gradient"] for part in rows]
    total = lab.arrays.get(lab.run(ReduceTask("sum", alone)).objects["gradient"])
    for name, tensor in whole.items():
        tolerance = GRADIENT_TOLERANCE * float(tensor.abs().max())
        torch.testing.assert_close(parts[name], tensor, atol=tolerance, rtol=0)
        torch.testing.assert_close(total[name], tensor, atol=tolerance, rtol=0)


def test_the_same_task_gives_the_same_digests(lab: Lab) -> None:
    weights = trained(lab, TIED)
    task = full_grad(weights, TIED, plain_rows(), 2, 3)
    gradient = lab.run(task).objects["gradient"]
    assert lab.run(task).objects["gradient"] == gradient
    step = OptimTask("step", weights, None, [gradient], AdamParams(grad_clip_norm=0.1))
    assert lab.run(step).objects == lab.run(step).objects


def test_neither_the_base_nor_adapters_on_it_notice(lab: Lab) -> None:
    """Everything in turn on one base, and each alone, equal to the bit; no gradient reaches the frozen parameters."""
    rows = plain_rows()
    adapter, zeros, version = lab.adapter(TIED), fresh(lab, TIED), trained(lab, TIED)

    def adapted() -> str:
        return lab.grad(TIED, adapter, rows).objects["gradient"]

    def full(weights: str) -> str:
        return lab.run(full_grad(weights, TIED, rows, 5)).objects["gradient"]

    alone = adapted(), full(zeros), full(version)
    assert len(set(alone)) == 3
    for _ in range(2):
        assert (adapted(), full(zeros), full(version)) == alone
    model = lab.base(TIED)
    for name, parameter in reference.load(lab.models[TIED]).named_parameters():
        assert torch.equal(model.parameters.tensors()[name], parameter)
    assert all(p.grad is None and not p.requires_grad for p in model._model.parameters())


def test_sampling_many_versions_at_once_equals_each_alone(lab: Lab) -> None:
    versions = [None, lab.adapter(TIED), trained(lab, TIED), trained(lab, TIED, seed=3)]
    asked = [
        ask(TIED, ids(index, 4 + index), weights, n=2, seed=index, max_tokens=10)
        for index, weights in enumerate(versions * 2)
    ]
    together = all_tokens(lab.sample(asked))
    alone = [found for op in asked for found in all_tokens(lab.sample([op], lab.another_sampler()))]
    assert together == alone
    assert len({tuple(found) for found in together}) == len(together)


def test_the_sampler_says_what_the_trainer_says(lab: Lab) -> None:
    """Log-probs of sampled tokens and of the prompt, scored again by a forward pass on the same version."""
    for base in (TIED, UNTIED):
        version, prompt = trained(lab, base), ids(5, 9)
        (result,) = lab.sample([ask(base, prompt, version, n=3, max_tokens=12, prompt_logprobs=True)])
        for sequence in result.sequences:
            whole = np.concatenate([prompt, tokens(sequence)]).astype(np.int32)
            scored = logprobs_of(
                rows_of(lab.run(GradTask("f", base, version, [row(whole)], "cross_entropy", {}, False, (1,))))
            )[0]
            np.testing.assert_allclose(logprobs(sequence), scored[len(prompt) - 1 : -1], atol=LOGPROB_ATOL, rtol=0)
            assert result.prompt_logprobs is not None
            scores = np.frombuffer(result.prompt_logprobs, "<f4")[1:]
            np.testing.assert_allclose(scores, scored[: len(prompt) - 1], atol=LOGPROB_ATOL, rtol=0)


def test_a_version_is_dropped_when_its_last_request_ends(lab: Lab) -> None:
    lab.sample([ask(TIED, ids(0, 4), trained(lab, TIED)), ask(TIED, ids(0, 4))])
    assert list(lab.sampler._lanes) == [TIED]
    assert not any(weights for weights in lab.sampler._adapters)


def test_a_version_may_need_more_cache_than_its_share(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FULL_LANE_SHARE", 1 << 20)
    version = trained(lab, TIED)
    asked = [ask(TIED, ids(0, 30), version, n=4, seed=2, max_tokens=100)]
    assert all_tokens(lab.sample(asked, lab.another_sampler(kv_bytes=1 << 20))) == all_tokens(lab.sample(asked))


def test_parameters_of_another_model_are_refused(lab: Lab, tmp_path: Path) -> None:
    other = Lab(tmp_path / "other", {"wide": build_tiny(tmp_path / "wide", hidden=32)})
    foreign = lab.arrays.put(other.arrays.get(fresh(other, "wide")))
    failed = lab.fail(full_grad(foreign, TIED, plain_rows(), 5))
    assert (failed.kind, "embed_tokens" in failed.message) == ("user", True)
    lab.sampler.add(SampleTask("s", ask(TIED, ids(0, 4), foreign)))
    (outcome,) = lab.sampler.step()
    assert outcome == failed.__class__("s", "user", failed.message, "", outcome.peak_rss_bytes)  # type: ignore[union-attr]
    assert not lab.sampler.busy


def test_what_is_not_finite_is_refused_and_leaves_nothing(lab: Lab) -> None:
    weights = trained(lab, TIED)
    bad = [row(ids(0, 6), weights=np.full(6, np.inf, np.float32))]
    before = sorted(lab.store.fast.iterdir())
    failed = lab.fail(full_grad(weights, TIED, bad, 1))
    assert (failed.kind, "not" in failed.message or "inf" in failed.message) == ("user", True)
    assert sorted(lab.store.fast.iterdir()) == before
    good = lab.run(full_grad(weights, TIED, plain_rows(), 5))
    assert all(bool(tensor.isfinite().all()) for tensor in lab.gradient(good).values())


def test_passes_over_an_adapter_are_refused(lab: Lab) -> None:
    failed = lab.fail(GradTask("g", TIED, lab.adapter(TIED), plain_rows(), "cross_entropy", {}, True, (2, 3)))
    assert "pass_rows" in failed.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_base_in_half_precision_all_parameters_are_float32(lab: Lab, tmp_path: Path, dtype: torch.dtype) -> None:
    """The run starts from the base as the worker holds it, and computes in float32; adapters beside it stay as ever."""
    half = Lab(tmp_path / "half", lab.models, dtype=dtype)
    weights, rows = fresh(half, TIED), plain_rows()
    assert {tensor.dtype for tensor in half.arrays.get(weights).values()} == {torch.float32}
    model = reference.load(lab.models[TIED])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    adapter = half.adapter(TIED)
    before = half.grad(TIED, adapter, rows).objects["gradient"]
    done = half.run(full_grad(weights, TIED, rows, 2, 3))
    torch.autograd.backward(reference.loss("cross_entropy", rows, reference.logprobs(model, rows), {}))
    assert_gradients_equal(half.gradient(done), named_gradients(model))
    (result,) = half.sample([ask(TIED, ids(5, 9), weights, max_tokens=12)])
    whole = np.concatenate([ids(5, 9), tokens(result.sequences[0])]).astype(np.int32)
    scored = reference.logprobs(model, [row(whole)])[0].detach().numpy()
    np.testing.assert_allclose(logprobs(result.sequences[0]), scored[8:-1], atol=LOGPROB_ATOL, rtol=0)
    assert half.grad(TIED, adapter, rows).objects["gradient"] == before


def test_between_two_passes_the_base_is_itself_and_the_pause_is_free(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' samples may be drawn there, and the run's gradient is the same as without."""
    weights, rows, seen = trained(lab, TIED), plain_rows(), []
    task = full_grad(weights, TIED, rows, 2, 1, 2)
    alone = lab.run(task).objects["gradient"]
    op = ask(TIED, ids(1, 6), None, max_tokens=4)
    wanted = all_tokens(lab.sample([op]))

    clock = [0]  # ns; stands still but for the pauses

    def between() -> None:
        seen.append(all_tokens(lab.sample([op])))
        clock[0] += 10**9

    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock[0])
    shared = Engine(lab.bases, lab.arrays, between=between).run(task)
    assert isinstance(shared, Done)
    assert seen == [wanted, wanted]
    assert shared.objects["gradient"] == alone
    assert (clock[0], shared.usage.compute_us) == (2 * 10**9, 0), "the pauses are not on this Task's account"


def test_with_adapters_in_one_call_each_gets_what_it_gets_alone(lab: Lab) -> None:
    weights, adapter, rows = trained(lab, TIED), lab.adapter(TIED), plain_rows()
    tasks = [
        GradTask("a", TIED, adapter, rows, "cross_entropy", {}, True),
        full_grad(weights, TIED, rows, 5),
        GradTask("b", TIED, adapter, rows[:2], "cross_entropy", {}, True),
    ]
    together = lab.engine.run_together(tasks)
    for task, outcome in zip(tasks, together, strict=True):
        assert isinstance(outcome, Done)
        assert outcome.objects == lab.run(task).objects


def test_gradients_and_moments_say_whose_they_are(lab: Lab) -> None:
    weights = fresh(lab, TIED)
    gradient = lab.run(full_grad(weights, TIED, plain_rows(), 5)).objects["gradient"]
    assert lab.arrays.read(gradient).origin == Origin(weights, TIED)
    done = lab.run(OptimTask("step", weights, None, [gradient], AdamParams()))
    assert lab.arrays.read(done.objects["moments"]).origin == Origin(done.objects["weights"])
    assert lab.arrays.read(done.objects["weights"]).origin is None
    failed = lab.fail(OptimTask("step", done.objects["weights"], done.objects["moments"], [gradient], AdamParams()))
    assert failed.kind == "mismatch"
