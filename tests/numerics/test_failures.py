"""What goes wrong fails its own Task, says whose fault it is, and touches no neighbour."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradserve.compute.engine import train
from gradserve.compute.engine.memory import is_out_of_memory
from gradserve.compute.tasks import Done, Failed, GradTask, InitTask, SampleTask
from gradserve.wire.data import Array, Row, as_tokens
from gradserve.wire.ops import LoraConfig
from tests.numerics.lab import Lab, all_tokens, ask, ids, plain_rows, row


def task(weights: str, rows: list[Row], loss: str = "cross_entropy") -> GradTask:
    return GradTask("g", "llama", weights, rows, loss, {}, backward=True)


def ones(count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.ones(count, dtype=np.float32)


@pytest.mark.parametrize(
    ("rows", "loss", "message"),
    [
        ([], "cross_entropy", "there are no rows"),
        ([row(ids(0, 4))], "sft", "unknown loss 'sft'"),
        ([row(ids(0, 4)), row(ids(0, 4), weights=ones(3))], "cross_entropy", "row 1: 'weights' has shape"),
        ([row(ids(0, 4), logprobs=ones(4))], "ppo", "the loss ppo needs 'advantages'"),
        (
            [row(ids(0, 4), logprobs=ones(4), advantages=ones(4)), row(ids(0, 4), logprobs=ones(4))],
            "ppo",
            "row 1: some",
        ),
        ([Row(as_tokens([1, 2]), {})], "cross_entropy", "row 0: the loss needs 'target_tokens'"),
        ([row(np.array([1, 320], np.int32))], "cross_entropy", "model_input has ids outside 0..319"),
        ([row(ids(0, 2), target_tokens=np.array([0, -1]))], "cross_entropy", "target_tokens has ids outside"),
        ([row(ids(0, 4), weights=np.full(4, np.inf, np.float32))], "cross_entropy", "the loss is"),
        ([row(ids(0, 4), logprobs=-1e4 * ones(4), advantages=ones(4))], "importance_sampling", "the loss is"),
    ],
)
def test_what_the_caller_can_mend(lab: Lab, rows: list[Row], loss: str, message: str) -> None:
    failed = lab.fail(task(lab.adapter("llama"), rows, loss))
    assert failed.kind == "user"
    assert message in failed.message
    assert failed.traceback == ""
    assert failed.peak_rss_bytes > 1 << 20


def test_a_gradient_that_is_not_finite_is_refused(lab: Lab) -> None:
    """The loss is finite, its derivative is not: 3e38 * lp with lp near 0 overflows only in the backward pass."""
    rows = [row(ids(0, 4), weights=np.array([3e38, -3e38, 0, 0], np.float32), target_tokens=np.zeros(4, np.int64))]
    failed = lab.fail(task(lab.adapter("llama"), rows))
    assert (failed.kind, "not finite" in failed.message or "the loss is" in failed.message) == ("user", True)


def test_ours_to_mend(lab: Lab) -> None:
    failed = lab.fail(task("0" * 64, plain_rows()))
    assert failed.kind == "internal"
    assert "ObjectMissing" in failed.message
    assert "Traceback" in failed.traceback


def test_an_unknown_base(lab: Lab) -> None:
    failed = lab.fail(InitTask("i", "gpt-9", LoraConfig(4, 0)))
    assert (failed.kind, failed.message) == ("user", "this worker has no base model 'gpt-9'")


def test_out_of_memory_is_told_apart(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))

    def hungry(*_: object) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(train, "pack", hungry)
    assert lab.fail(task(lab.adapter("llama"), plain_rows())).kind == "out_of_memory"


def test_weights_that_are_nan_fail_alone(lab: Lab) -> None:
    """The slots that a broken sequence leaves behind must not poison who comes next."""
    good = lab.adapter("llama")
    broken = lab.arrays.put({name: tensor * math.nan for name, tensor in lab.arrays.get(good).items()})
    ops = [ask("llama", ids(index, 20), good, seed=index, max_tokens=30 + index) for index in range(4)]
    expected = all_tokens(lab.sample(ops))
    bad = [ask("llama", ids(9, 40), broken, n=3, max_tokens=30), ask("llama", ids(9, 40), broken, max_tokens=1)]
    for index, op in enumerate([ops[0], bad[0], ops[1], bad[1], ops[2], ops[3]]):
        lab.sampler.add(SampleTask(str(index), op))
    outcomes = {}
    while lab.sampler.busy:
        outcomes.update({outcome.task_id: outcome for outcome in lab.sampler.step()})
    failed = [outcome for outcome in outcomes.values() if isinstance(outcome, Failed)]
    assert {(f.task_id, f.kind) for f in failed} == {("1", "user"), ("3", "user")}
    done = [outcomes[index] for index in ("0", "2", "4", "5")]
    assert all_tokens([d.sample for d in done if isinstance(d, Done) and d.sample is not None]) == expected
    assert all_tokens(lab.sample(ops)) == expected


def test_a_pass_that_raises_fails_its_requests_and_the_sampler_goes_on(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = ask("llama", ids(0, 8), n=2, max_tokens=6)
    expected = all_tokens(lab.sample([op]))
    lab.sampler.add(SampleTask("a", op))
    lab.sampler.step()
    with monkeypatch.context() as patch:
        patch.setattr(lab.base("llama"), "hidden", lambda *_: torch.empty(1 << 60))
        lab.sampler.add(SampleTask("b", op))
        outcomes = lab.sampler.step()
    assert {(o.task_id, o.kind) for o in outcomes if isinstance(o, Failed)} == {
        ("a", "out_of_memory"),
        ("b", "out_of_memory"),
    }
    assert not lab.sampler.busy
    assert all_tokens(lab.sample([op])) == expected


def test_bad_prompts(lab: Lab) -> None:
    for prompt, message in ((ids(0, 0), "no tokens"), (np.array([400], np.int32), "ids outside")):
        lab.sampler.add(SampleTask("s", ask("llama", prompt)))
        (failed,) = lab.sampler.step()
        assert isinstance(failed, Failed)
        assert (failed.kind, message in failed.message) == ("user", True)
    lab.sampler.add(SampleTask("s", ask("llama", ids(0, 3), weights="0" * 64)))
    (failed,) = lab.sampler.step()
    assert isinstance(failed, Failed)
    assert failed.kind == "internal"


def test_an_object_that_is_no_adapter(lab: Lab) -> None:
    digest = lab.arrays.put({"step": torch.zeros(())})
    assert lab.fail(task(digest, plain_rows())).kind == "user"
    assert isinstance(Array.of(np.zeros(1, np.float32)), Array)
