"""Nothing a worker does writes to a base: forked workers share its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradserve.compute.engine.preload import preload
from gradserve.compute.tasks import BaseSpec, GradTask, InitTask, OptimTask, WorkerSpec
from gradserve.wire.ops import AdamParams
from tests.numerics.lab import Lab, ask, ids, plain_rows


def parameters_of(lab: Lab, name: str) -> dict[str, Any]:
    return dict(lab.base(name)._model.named_parameters())


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_base_is_never_written_to(lab: Lab, name: str, full: bool) -> None:
    """Training, scoring and sampling: equal bytes afterwards, and no in-place operation counted. (Tied and untied.)"""
    parameters = parameters_of(lab, name)
    before = {key: (tensor._version, tensor.detach().clone()) for key, tensor in parameters.items()}
    weights = lab.run(InitTask("init", name, None)).objects["weights"] if full else lab.adapter(name)
    moments = None
    for step in range(2):
        for backward in (False, True):
            task = GradTask("g", name, weights, plain_rows(step), "cross_entropy", {}, backward, (5,) if full else ())
            done = lab.run(task)
        optim = OptimTask("o", weights, moments, [done.objects["gradient"]], AdamParams(learning_rate=0.02))
        weights, moments = (lab.run(optim).objects[part] for part in ("weights", "moments"))
    lab.sample([ask(name, ids(0, 5), weights, n=2), ask(name, ids(1, 9))])
    assert {id(tensor) for tensor in parameters_of(lab, name).values()} == {id(one) for one in parameters.values()}
    for key, (version, value) in before.items():
        assert parameters[key]._version == version, key
        assert torch.equal(parameters[key].detach(), value), key


def worker_spec(models: dict[str, Path], **fields: Any) -> WorkerSpec:
    bases = tuple(BaseSpec(name, str(models[name])) for name in ("llama", "qwen3"))
    return WorkerSpec("w", 1, bases, "fast", "durable", 1 << 26, 512, **fields)


def test_what_is_loaded_is_used_for_equal_specs_only(models: dict[str, Path]) -> None:
    spec = worker_spec(models)
    loaded = preload(spec)
    assert loaded is not None
    assert loaded.bases.keys() == {"llama", "qwen3"}
    assert loaded.fits(worker_spec(models, memory_bytes=1, merge_tokens=7)), "that is no matter of the bases"
    for other in ({"dtype": "bfloat16"}, {"numerics": "batch_invariant"}, {"device": "auto"}):
        assert not loaded.fits(worker_spec(models, **other))


def test_a_base_that_cannot_be_loaded_does_not_keep_the_others_away(models: dict[str, Path], tmp_path: Path) -> None:
    loaded = preload(worker_spec({**models, "qwen3": tmp_path / "nothing"}))
    assert loaded is not None
    assert loaded.bases.keys() == {"llama"}
