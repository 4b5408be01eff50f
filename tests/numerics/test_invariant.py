"""Batch-invariant numerics: equal to the bit, whatever a row is batched with and however it was computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gradserve.compute.catalog import ModelUnusable
from gradserve.compute.engine.invariant import BatchInvariant, Tiles, _agreeing
from gradserve.compute.engine.kernels import FAST
from gradserve.compute.tasks import Done, GradTask
from gradserve.wire.ops import Sample
from tests.models import build_tiny
from tests.numerics.lab import Floats, Lab, ask, ids, logprobs, logprobs_of, plain_rows, row, rows_of, tokens

FAMILIES = ("llama", "qwen2-window", "qwen3", "mistral-window")
"""Grouped and tied heads, biases, windows shorter than the rows, head norms."""


@pytest.fixture
def exact(models: dict[str, Path], tmp_path: Path) -> Lab:
    return Lab(tmp_path / "objects", models, kernels=BatchInvariant())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rows_log_probs_do_not_depend_on_its_batch(exact: Lab, name: str) -> None:
    weights, rows = exact.adapter(name), plain_rows(lengths=(1, 37, 5, 130, 64, 2, 17))
    together = exact.forward(name, weights, rows)
    backwards = exact.forward(name, weights, rows[::-1])[::-1]
    for index, alone in enumerate(rows):
        (want,) = exact.forward(name, weights, [alone])
        np.testing.assert_array_equal(together[index], want)
        np.testing.assert_array_equal(backwards[index], want)


@pytest.mark.parametrize("name", FAMILIES)
def test_sampler_and_trainer_agree_to_the_bit(exact: Lab, name: str) -> None:
    """Ragged prompts, two adapters and none in one batch; the trainer sees each sequence alone."""
    adapters = [exact.adapter(name, seed=1, rank=4), exact.adapter(name, seed=2, rank=3, train_mlp=False)]
    ops = [
        ask(name, ids(seed, length), adapters[seed % 2], n=2, seed=seed, max_tokens=40)
        for seed, length in enumerate((1, 15, 16, 17, 70, 3))
    ]
    for op, result in zip(ops, exact.sample(ops), strict=True):
        for sequence in result.sequences:
            _same_bits(exact, name, op, tokens(sequence), logprobs(sequence))


def _same_bits(lab: Lab, name: str, op: Sample, drawn: list[int], got: Floats) -> None:
    prompt = np.frombuffer(op.prompt, "<i4")
    whole = np.concatenate([prompt, np.array(drawn, dtype=np.int32)])
    assert op.weights is not None
    (want,) = lab.forward(name, op.weights, [row(whole)])
    np.testing.assert_array_equal(got, want[len(prompt) - 1 : -1])


def test_a_sample_does_not_depend_on_how_it_was_computed(exact: Lab) -> None:
    """Alone, among others, prefilled in pieces of 16, and with so little memory that sequences are recomputed."""
    weights = exact.adapter("llama")
    ops = [ask("llama", ids(seed, 20 + 9 * seed), weights, n=3, seed=seed, max_tokens=60) for seed in range(5)]
    together = exact.sample(ops)
    for sampler in (exact.another_sampler(pass_tokens=16), exact.another_sampler(kv_bytes=1 << 18)):
        for got, want in zip(exact.sample(ops, sampler), together, strict=True):
            assert got.sequences == want.sequences
    for op, want in zip(ops, together, strict=True):
        assert exact.sample([op])[0].sequences == want.sequences


def test_it_is_the_same_model(exact: Lab, lab: Lab) -> None:
    """The mode changes last bits only: log-probs and gradients are the fast mode's."""
    rows = plain_rows()
    weights, same = exact.adapter("qwen2-window"), lab.adapter("qwen2-window")
    assert weights == same
    for got, want in zip(
        exact.forward("qwen2-window", weights, rows), lab.forward("qwen2-window", same, rows), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)
    slow, quick = exact.grad("qwen2-window", weights, rows), lab.grad("qwen2-window", same, rows)
    for name, gradient in lab.gradient(quick).items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(exact.gradient(slow)[name], gradient, atol=1e-5 * scale, rtol=0)


def test_a_vocabulary_that_is_no_multiple_of_16(tmp_path: Path) -> None:
    """The last elements of an array take another road through exp."""
    path = build_tiny(tmp_path / "odd", vocab_size=331)
    lab = Lab(tmp_path / "objects", {"odd": path}, kernels=BatchInvariant())
    weights, rows = lab.adapter("odd"), plain_rows(lengths=(1, 3, 16, 7))
    together = lab.forward("odd", weights, rows)
    for index, alone in enumerate(rows):
        np.testing.assert_array_equal(together[index], lab.forward("odd", weights, [alone])[0])


def test_many_heads_per_key_head() -> None:
    """More query heads than rows of a tile."""
    kernels, draw = BatchInvariant(), torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(heads, 90, 8, generator=draw) for heads in (20, 1, 1))
    got, want = kernels.causal(q, k, v, 0.3, None), FAST.causal(q, k, v, 0.3, None)
    torch.testing.assert_close(got, want)
    assert torch.equal(kernels.causal(q[:, 50:], k, v, 0.3, None), got[50:])


def test_tile_sizes_that_disagree_are_not_mixed() -> None:
    """Every product of the class equals the one made of tiles of 64 only."""
    tiles, draw = Tiles(), torch.Generator().manual_seed(5)
    for inner, outer in ((64, 40), (128, 331), (576, 192)):
        weight, x = torch.randn(outer, inner, generator=draw), torch.randn(437, inner, generator=draw)
        filled = torch.nn.functional.pad(x, (0, 0, 0, 448 - 437))
        want = torch.cat([torch.mm(part, weight.t()) for part in torch.split(filled, 64)])[:437]
        assert torch.equal(tiles.product(x, weight, transposed=True), want)
        assert 64 in _agreeing(weight.t(), (256, 64, 16))


def test_more_than_one_thread_is_refused() -> None:
    torch.set_num_threads(2)
    try:
        with pytest.raises(ModelUnusable, match="worker_threads = 1"):
            BatchInvariant()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3"])
def test_a_gradient_does_not_depend_on_its_pass(exact: Lab, name: str) -> None:
    """Rows of one run and of another, each a Task: in one pass, in another order, alone and after other work."""
    mine, other = exact.adapter(name, seed=1, rank=4), exact.adapter(name, seed=2, rank=8)
    rows = plain_rows(lengths=(37, 130, 1, 64, 16))
    tasks = [
        GradTask(str(index), name, other if index == 3 else mine, [part], "cross_entropy", {}, backward=True)
        for index, part in enumerate(rows)
    ]
    alone = [exact.run(task) for task in tasks]
    for outcomes in (exact.engine.run_together(tasks), exact.engine.run_together(tasks[::-1])[::-1]):
        for got, want in zip(outcomes, alone, strict=True):
            assert isinstance(got, Done)
            assert got.objects == want.objects
            assert got.rows == want.rows
    for task, done in zip(tasks, alone, strict=True):  # the pass with a gradient gives the log-probs of one without
        np.testing.assert_array_equal(logprobs_of(rows_of(done))[0], exact.forward(name, task.weights, task.rows)[0])
