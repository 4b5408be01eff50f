"""How rows are packed, cut and recomputed never shows: N rows together are each alone, one Task is many."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradserve.compute.engine import engine
from gradserve.compute.engine.memory_plan import Plan
from gradserve.compute.tasks import GradTask, InitTask, ReduceTask
from gradserve.wire.ops import LoraConfig
from tests.numerics.lab import Lab, ids, logprobs_of, plain_rows, row, rows_of

ATOL = 1e-5
"""On log-probs of size 1 to 15. Seen: 2.4e-6; how a sum is cut depends on its length and on the CPU."""
GRADIENT_RTOL = 1e-5


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, atol=GRADIENT_RTOL * float(tensor.abs().max()), rtol=0)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_packed_batch_is_each_row_alone(lab: Lab, name: str) -> None:
    weights, rows = lab.adapter(name), plain_rows()
    together = lab.forward(name, weights, rows)
    for index, alone in enumerate(rows):
        np.testing.assert_allclose(together[index], lab.forward(name, weights, [alone])[0], atol=ATOL, rtol=0)


def test_many_tasks_and_their_reduction_are_one_task(lab: Lab) -> None:
    weights, rows = lab.adapter("llama"), plain_rows()
    whole = lab.grad("llama", weights, rows)
    parts = [lab.grad("llama", weights, [part]) for part in rows]
    total = lab.run(ReduceTask("reduce", [part.objects["gradient"] for part in parts])).objects["gradient"]
    close(lab.arrays.get(total), lab.gradient(whole))
    loss = sum(rows_of(part).metrics["loss:sum"] for part in parts)
    assert loss == pytest.approx(rows_of(whole).metrics["loss:sum"], rel=1e-6)
    assert whole.usage.train_tokens == sum(part.usage.train_tokens for part in parts) == 105


@pytest.mark.parametrize("plan", [Plan(False, 16), Plan(True, None), Plan(True, 16)])
def test_saving_memory_changes_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    weights, rows = lab.adapter("qwen2-window"), plain_rows()
    direct = lab.grad("qwen2-window", weights, rows)
    monkeypatch.setattr(engine, "choose", lambda *_: plan)
    saving = lab.grad("qwen2-window", weights, rows)
    close(lab.gradient(saving), lab.gradient(direct))
    for got, want in zip(logprobs_of(rows_of(saving)), logprobs_of(rows_of(direct)), strict=True):
        np.testing.assert_allclose(got, want, atol=ATOL, rtol=0)


def test_forward_only_leaves_no_gradient(lab: Lab) -> None:
    weights, rows = lab.adapter("llama"), plain_rows()
    done = lab.run(GradTask("fwd", "llama", weights, rows, "cross_entropy", {}, backward=False))
    assert done.objects == {}
    assert (done.usage.train_tokens, done.usage.prefill_tokens) == (0, 105)
    trained = lab.grad("llama", weights, rows)
    assert rows_of(done).metrics == rows_of(trained).metrics
    for got, want in zip(logprobs_of(rows_of(done)), logprobs_of(rows_of(trained)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_seed_alone_decides_the_first_weights(lab: Lab) -> None:
    def init(seed: int, **flags: bool) -> str:
        return lab.run(InitTask("init", "llama", LoraConfig(4, seed, **flags))).objects["weights"]

    assert init(3) == init(3)
    assert init(3) != init(4)
    everything, attention = lab.arrays.get(init(3)), lab.arrays.get(init(3, train_mlp=False, train_unembed=False))
    assert attention.keys() < everything.keys()
    for name, tensor in attention.items():
        assert torch.equal(tensor, everything[name])
    for name, tensor in everything.items():
        bound = tensor.shape[1] ** -0.5  # kaiming_uniform(a=sqrt(5)), as nn.Linear and PEFT
        assert tensor.abs().max() == 0 if "lora_B" in name else 0.8 * bound < tensor.abs().max() <= bound


def test_fresh_weights_leave_the_model_unchanged(lab: Lab) -> None:
    fresh = lab.run(InitTask("init", "llama", LoraConfig(4, 0))).objects["weights"]
    zeros = lab.arrays.put({name: torch.zeros_like(tensor) for name, tensor in lab.arrays.get(fresh).items()})
    for got, want in zip(*(lab.forward("llama", weights, plain_rows()) for weights in (fresh, zeros)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_row_may_fill_the_context_but_not_exceed_it(lab: Lab) -> None:
    weights = lab.adapter("llama")
    assert lab.grad("llama", weights, [row(ids(0, 256))]).usage.train_tokens == 256
    failed = lab.fail(GradTask("g", "llama", weights, [row(ids(0, 3)), row(ids(0, 257))], "cross_entropy", {}, True))
    assert failed.kind == "user"
    assert "row 1: a row has 257 tokens; the context is 256" in failed.message
