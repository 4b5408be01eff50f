"""Gradients and moments carry the digest of the weights that they belong to, and are refused by any others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from gradserve.compute.engine.origin import Origin
from gradserve.compute.tasks import Done, OptimTask, ReduceTask, SampleTask
from gradserve.wire.ops import AdamParams
from tests.numerics.lab import Lab, ask, ids, plain_rows, rows_of, sample_of


class Steps:
    """Two versions of one adapter, each with a gradient taken at it; the second has moments."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.old = lab.adapter("llama")
        self.old_gradient = lab.grad("llama", self.old, plain_rows(1)).objects["gradient"]
        done = lab.run(OptimTask("o", self.old, None, [self.old_gradient], AdamParams()))
        self.new, self.moments = done.objects["weights"], done.objects["moments"]
        self.new_gradient = lab.grad("llama", self.new, plain_rows(2)).objects["gradient"]

    def forged(self, digest: str, origin: Origin | None) -> str:
        """The same tensors under another claim."""
        return self.lab.arrays.put(self.lab.arrays.get(digest), origin)


@pytest.fixture
def steps(lab: Lab) -> Steps:
    return Steps(lab)


def test_what_the_files_say(steps: Steps) -> None:
    arrays, store = steps.lab.arrays, steps.lab.store
    assert arrays.read(steps.new_gradient).origin == Origin(steps.new, "llama")
    assert arrays.read(steps.moments).origin == Origin(steps.new)
    assert arrays.read(steps.new).origin is None
    with safe_open(store.path(steps.old_gradient), framework="np") as file:
        assert file.metadata() == {"origin": f'{{"weights":"{steps.old}","base":"llama"}}'}


def test_results_say_which_weights_made_them(steps: Steps) -> None:
    lab = steps.lab
    assert rows_of(lab.grad("llama", steps.new, plain_rows())).weights == steps.new
    made = [sample_of(done) for done in lab.sample_tasks([ask("llama", ids(0, 4), w) for w in (steps.old, None)])]
    assert [sample.weights for sample in made] == [steps.old, None]


def test_a_step_refuses_a_gradient_of_other_weights(steps: Steps) -> None:
    good = OptimTask("o", steps.new, steps.moments, [steps.new_gradient], AdamParams())
    assert isinstance(steps.lab.engine.run(good), Done)
    before = {file.name for file in steps.lab.store.fast.iterdir()}
    for gradients in ([steps.old_gradient], [steps.new_gradient, steps.old_gradient]):
        failed = steps.lab.fail(OptimTask("o", steps.new, steps.moments, gradients, AdamParams()))
        assert failed.kind == "mismatch"
        assert f"gradient {steps.old_gradient} belongs to weights {steps.old}, not to {steps.new}" in failed.message
    assert {file.name for file in steps.lab.store.fast.iterdir()} == before


def test_a_forged_claim_is_a_different_object(steps: Steps) -> None:
    """The claim is part of the bytes and so of the name: whoever changes it changes the digest that the Task names."""
    forged = steps.forged(steps.old_gradient, Origin(steps.new, "llama"))
    assert forged != steps.old_gradient
    nameless = steps.forged(steps.new_gradient, None)
    failed = steps.lab.fail(OptimTask("o", steps.new, None, [nameless], AdamParams()))
    assert (failed.kind, "unknown" in failed.message) == ("mismatch", True)


def test_a_step_refuses_moments_of_other_weights(steps: Steps) -> None:
    failed = steps.lab.fail(OptimTask("o", steps.old, steps.moments, [steps.old_gradient], AdamParams()))
    assert failed.kind == "mismatch"
    assert f"moments {steps.moments} belongs to weights {steps.new}, not to {steps.old}" in failed.message


def test_a_reduction_refuses_a_mix_and_keeps_the_claim(steps: Steps) -> None:
    lab = steps.lab
    second = lab.grad("llama", steps.new, plain_rows(3)).objects["gradient"]
    total = lab.run(ReduceTask("r", [steps.new_gradient, second])).objects["gradient"]
    assert lab.arrays.read(total).origin == Origin(steps.new, "llama")
    for mix in ([steps.new_gradient, steps.old_gradient], [steps.forged(steps.new_gradient, None), second]):
        failed = lab.fail(ReduceTask("r", mix))
        assert (failed.kind, "not all taken at the same weights" in failed.message) == ("mismatch", True)


def test_the_same_claim_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    """safetensors writes several keys of metadata in a random order; one key leaves it no choice."""
    code = (
        "import sys, torch; from gradserve.compute.engine.arrays import Arrays;"
        "from gradserve.compute.engine.origin import Origin; from gradserve.compute.objects import ObjectStore;"
        "from pathlib import Path; p = Path(sys.argv[1]);"
        "a = Arrays(ObjectStore(p, p), torch.device('cpu'));"
        "print(a.put({'b': torch.ones(3), 'a': torch.zeros(2)}, Origin('0' * 64, 'llama')))"
    )
    runs = [subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True) for _ in range(3)]
    assert len({run.stdout for run in runs}) == 1, [run.stderr for run in runs]
    assert len(runs[0].stdout.strip()) == 64


def test_samples_of_a_task_carry_the_version_that_was_asked_for(lab: Lab) -> None:
    import msgspec

    op = msgspec.structs.replace(ask("llama", ids(0, 4), lab.adapter("llama")), version=7)
    lab.sampler.add(SampleTask("s", op))
    outcomes = []
    while lab.sampler.busy:
        outcomes += lab.sampler.step()
    (done,) = outcomes
    assert isinstance(done, Done)
    assert (sample_of(done).weights, sample_of(done).version) == (op.weights, 7)
