"""What the memory model predicts is what torch's allocator sees, and what cannot fit is refused with the numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from gradserve.compute.available import available_memory
from gradserve.compute.engine import memory_plan
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.engine import Engine
from gradserve.compute.engine.kernels import FAST
from gradserve.compute.engine.lora import init_adapter
from gradserve.compute.engine.memory_plan import PLANS, Dimensions, Pass, Plan, TooLarge, choose, peak_bytes
from gradserve.compute.engine.train import forward_backward, outline, prepare
from gradserve.compute.tasks import Done, Failed, GradTask
from gradserve.wire.ops import LoraConfig
from tests.numerics.lab import CPU, Lab, ids, plain_rows, row

TOLERANCE = 0.10


def base_of(family: str, **sizes: int) -> Base:
    """A model with realistic proportions; only its shape matters here."""
    wanted = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1024,
    } | sizes
    kind = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family]
    config = kind(**wanted, tie_word_embeddings=True, attn_implementation="gradserve")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    return Base("base", "", model, CPU, FAST)


def measured_peak(compute: Callable[[], object]) -> int:
    """Bytes: the highest sum of what torch's allocator handed out and took back."""
    gc.collect()  # what other tests left behind would be given back in the middle of the measurement
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    changes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))


SHAPES: list[tuple[str, dict[str, int], tuple[int, ...], int]] = [
    ("qwen3", {}, (64, 64), 8),
    ("qwen3", {}, (300, 5, 100), 8),
    ("qwen3", {"vocab_size": 8192}, (128,) * 4, 8),
    ("qwen3", {"intermediate_size": 256, "num_hidden_layers": 2}, (128,) * 2, 64),
    ("llama", {"hidden_size": 192, "num_hidden_layers": 6}, (100, 200), 4),
    ("llama", {"num_key_value_heads": 4, "vocab_size": 384}, (256,), 32),
]


@pytest.mark.parametrize(("family", "sizes", "lengths", "rank"), SHAPES)
def test_the_prediction_is_within_a_tenth(
    family: str, sizes: dict[str, int], lengths: tuple[int, ...], rank: int
) -> None:
    base = base_of(family, **sizes)
    weights = init_adapter(base.targets, LoraConfig(rank, 0))
    job = prepare(base, weights, plain_rows(0, lengths), "cross_entropy", {})
    dimensions = Dimensions.of(base.config)
    for backward in (True, False):
        for plan in PLANS if backward else PLANS[:2]:
            forward_backward(base, [job], backward, plan)
            peak = measured_peak(lambda plan=plan, backward=backward: forward_backward(base, [job], backward, plan))  # type: ignore[misc]
            predicted = peak_bytes(dimensions, outline([job], backward), plan)
            assert predicted == pytest.approx(peak, rel=TOLERANCE), f"{plan}, backward {backward}"


WORK = Pass((100, 300), targets=1, rank=8, adapter_values=50_000, head_values=5_000, backward=True)
MODEL = Dimensions(8, 512, 2048, 512, 256, 8, 64, vocab=32768, normed_queries=True)


def test_each_plan_is_chosen_when_it_is_the_fastest_that_fits() -> None:
    needs = [peak_bytes(MODEL, WORK, plan) for plan in PLANS]
    assert choose(MODEL, WORK, None) == PLANS[0]
    for needed in needs:
        fitting = [other for other, bytes_ in zip(PLANS, needs, strict=True) if bytes_ <= needed]
        assert choose(MODEL, WORK, needed) == fitting[0]
    assert choose(MODEL, WORK, needs[3]) == PLANS[3] == Plan(recompute=True, head_positions=256)


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    needed = peak_bytes(MODEL, WORK, PLANS[3])
    with pytest.raises(TooLarge) as caught:
        choose(MODEL, WORK, needed - 1)
    assert caught.value.index == 1
    fits = memory_plan.most_tokens(MODEL, WORK, needed - 1)
    for part in (f"{needed:,} bytes", f"{needed - 1:,} bytes are available", "longest row 300", f"{fits} tokens"):
        assert part in str(caught.value)
    row_of = Pass((fits,), 1, 8, 50_000, 5_000, backward=True)
    assert peak_bytes(MODEL, row_of, PLANS[3]) <= needed - 1
    longer = Pass((fits + 1,), 1, 8, 50_000, 5_000, backward=True)
    assert peak_bytes(MODEL, longer, PLANS[3]) > needed - 1


def test_an_engine_refuses_one_task_and_computes_its_neighbour(lab: Lab) -> None:
    weights = lab.adapter("llama")
    small = GradTask("small", "llama", weights, [row(ids(0, 20))], "cross_entropy", {}, backward=True)
    large = GradTask("large", "llama", weights, plain_rows(1, (3, 250, 9)), "cross_entropy", {}, backward=True)
    job = prepare(lab.base("llama"), lab.arrays.get(weights), small.rows, "cross_entropy", {})
    room = peak_bytes(Dimensions.of(lab.base("llama").config), outline([job], True), PLANS[3])
    tight = Engine(lab.bases, lab.arrays, memory_bytes=room)
    refused, done = tight.run_together([large, small])
    assert isinstance(refused, Failed)
    assert (refused.kind, refused.index, refused.traceback) == ("too_large", 1, "")
    assert f"{room:,} bytes are available" in refused.message
    assert isinstance(done, Done)
    assert done.rows == lab.run(small).rows
    assert np.isfinite(done.rows.metrics["loss:sum"]) if done.rows else False


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    free = available_memory(tmp_path / "no-cgroup")
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_memory(tmp_path) == 2_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == pytest.approx(free, rel=0.5)
