"""Half-precision bases with float32 adapters: bounded, not exact; what is wrong by more than rounding must show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gradserve.compute.engine import train
from gradserve.compute.engine.machine import Machine, fastest_dtype
from gradserve.compute.tasks import Done, GradTask, WorkerSpec
from gradserve.settings import Settings
from tests.numerics.lab import CPU, Lab, Tensors, ask, ids, logprobs, plain_rows, row, tokens

BOUNDS = {torch.bfloat16: 0.25, torch.float16: 0.03}
"""On log-probs of size 1 to 15 of two layers: a few units in the last place of 8 and of 11 bits."""
ALIKE = {torch.bfloat16: 0.99, torch.float16: 0.9999}
"""Smallest cosine between a gradient and the float32 one."""
HALVES = list(BOUNDS)


def flat(gradient: Tensors) -> torch.Tensor:
    return torch.cat([gradient[key].flatten().double() for key in sorted(gradient)])


def cosine(got: Tensors, want: Tensors) -> float:
    a, b = flat(got), flat(want)
    return float(a @ b / (a.norm() * b.norm()))


@pytest.fixture(params=HALVES, ids=["bfloat16", "float16"])
def half(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path: Path) -> Lab:
    return Lab(tmp_path / "half", models, dtype=request.param)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3"])
def test_log_probs_and_gradients_are_float32s_up_to_rounding(half: Lab, lab: Lab, name: str) -> None:
    rows, dtype = plain_rows(), half.base(name).dtype
    weights, same = half.adapter(name), lab.adapter(name)
    assert weights == same  # adapters are float32 whatever the base is
    for got, want in zip(half.forward(name, weights, rows), lab.forward(name, same, rows), strict=True):
        np.testing.assert_allclose(got, want, atol=BOUNDS[dtype], rtol=0)
    mine, theirs = half.gradient(half.grad(name, weights, rows)), lab.gradient(lab.grad(name, same, rows))
    assert all(tensor.dtype == torch.float32 for tensor in mine.values())
    assert cosine(mine, theirs) > ALIKE[dtype]


def test_sampler_and_trainer_agree(half: Lab) -> None:
    """Many adapters, so that stacked products are used too."""
    dtype = half.base("llama").dtype
    adapters = [half.adapter("llama", seed=seed, rank=2 + seed % 3) for seed in range(7)]
    ops = [ask("llama", ids(seed, 9 + seed), adapters[seed], seed=seed, max_tokens=20) for seed in range(7)]
    for op, result, weights in zip(ops, half.sample(ops), adapters, strict=True):
        (sequence,) = result.sequences
        prompt = np.frombuffer(op.prompt, "<i4")
        whole = np.concatenate([prompt, np.array(tokens(sequence), dtype=np.int32)])
        (want,) = half.forward("llama", weights, [row(whole)])
        np.testing.assert_allclose(logprobs(sequence), want[len(prompt) - 1 : -1], atol=BOUNDS[dtype], rtol=0)


def test_tiny_float16_gradients_do_not_vanish(models: dict[str, Path], tmp_path: Path, lab: Lab) -> None:
    """A weight of 1e-6 makes activations' gradients smaller than float16 can hold."""
    half = Lab(tmp_path / "half", models, dtype=torch.float16)
    weights = half.adapter("llama")
    lab.adapter("llama")
    small = [row(ids(3, 30), weights=np.full(30, 1e-6, dtype=np.float32))]
    got, want = half.gradient(half.grad("llama", weights, small)), lab.gradient(lab.grad("llama", weights, small))
    assert cosine(got, want) > 0.999
    assert float(flat(got).norm()) == pytest.approx(float(flat(want).norm()), rel=0.02)


def test_large_float16_gradients_do_not_overflow(models: dict[str, Path], tmp_path: Path, lab: Lab) -> None:
    half = Lab(tmp_path / "half", models, dtype=torch.float16)
    weights = half.adapter("llama")
    lab.adapter("llama")
    large = [row(ids(3, 30), weights=np.full(30, 300.0, dtype=np.float32))]
    got, want = half.gradient(half.grad("llama", weights, large)), lab.gradient(lab.grad("llama", weights, large))
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor, atol=0.02 * float(tensor.abs().max()), rtol=0)


def test_an_overflow_on_the_way_back_is_computed_again(
    models: dict[str, Path], tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a first target that no float16 model survives; the neighbour in the pass is what it would be alone."""
    half = Lab(tmp_path / "half", models, dtype=torch.float16)
    weights = half.adapter("llama")
    lab.adapter("llama")
    monkeypatch.setattr(train, "_HALF_TARGETS", (2.0**20, 1.0))
    rows = [row(ids(3, 30)), row(ids(4, 20))]
    tasks = [GradTask(str(n), "llama", weights, [part], "cross_entropy", {}, True) for n, part in enumerate(rows)]
    for task, outcome in zip(tasks, half.engine.run_together(tasks), strict=True):
        assert isinstance(outcome, Done)
        want = lab.gradient(lab.grad("llama", weights, task.rows))
        assert cosine(half.gradient(outcome), want) > ALIKE[torch.float16]


def test_auto_takes_what_is_faster_here() -> None:
    assert fastest_dtype(CPU) in (torch.float32, torch.bfloat16)
    spec = WorkerSpec("w", 1, (), "fast", "durable", 1, 1, device="auto", dtype="float16")
    machine = Machine.of(spec)
    assert machine.dtype == torch.float16
    assert machine.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "wrong", [{"dtype": "bfloat16"}, {"device": "cuda"}, {"worker_threads": 2}, {"sampler": "vllm"}]
)
def test_batch_invariant_refuses_what_it_cannot_keep(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="batch_invariant"):
        Settings(numerics="batch_invariant", **wrong)  # type: ignore[arg-type]
    assert Settings(numerics="batch_invariant", workers=2).threads_per_worker == 1
