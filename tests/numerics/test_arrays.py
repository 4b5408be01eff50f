"""Thousands of adapters registered, hundreds in memory: loaded when a request names them, forgotten under a bound."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from gradserve.compute.engine import tensorfile
from gradserve.compute.engine.arrays import CACHE_BYTES, Arrays, cache_bytes
from gradserve.compute.engine.engine import Engine
from gradserve.compute.engine.sampler import Sampler
from gradserve.compute.objects import ObjectMissing
from gradserve.compute.tasks import Done, GradTask, Outcome, Progress, SampleTask
from tests.numerics.lab import CPU, Lab, all_tokens, ask, ids, plain_rows, sample_of

REGISTERED, HELD = 2000, 200


def register(lab: Lab, count: int) -> list[str]:
    """Adapters that differ in B, on attention only."""
    template = lab.arrays.get(lab.adapter("llama", rank=1, train_mlp=False, train_unembed=False))
    generator = torch.Generator().manual_seed(0)
    return [
        lab.arrays.put(
            {name: t if "lora_A" in name else torch.randn(t.shape, generator=generator) for name, t in template.items()}
        )
        for _ in range(count)
    ]


def test_two_thousand_adapters_and_room_for_two_hundred(lab: Lab) -> None:
    digests = register(lab, REGISTERED)
    size = sum(tensor.nbytes for tensor in lab.arrays.read(digests[0]).tensors.values())
    arrays = Arrays(lab.store, CPU, cache_bytes=HELD * size + size // 2)
    engine, sampler = Engine(lab.bases, arrays), Sampler(lab.bases, arrays, 1 << 26, 512)
    draw = random.Random(0)
    for number in range(REGISTERED):  # every one is asked for once
        arrays.get(digests[number])
        assert arrays.counts.objects == min(number + 1, HELD)
        assert arrays.counts.bytes <= HELD * size
    assert (arrays.counts.misses, arrays.counts.hits) == (REGISTERED, 0)

    for _ in range(3):  # mixed requests: new adapters and some that are still there, in one pass
        chosen = [*draw.sample(digests[:-HELD], 6), *draw.sample(digests[-20:], 2)]
        hits = arrays.counts.hits
        tasks = [
            GradTask(f"g{n}", "llama", digest, plain_rows(n, (16, 5)), "cross_entropy", {}, backward=True)
            for n, digest in enumerate(chosen)
        ]
        for task, outcome in zip(tasks, engine.run_together(tasks), strict=True):
            assert isinstance(outcome, Done)
            assert outcome.objects == lab.run(task).objects
        assert arrays.counts.hits == hits + 2
        ops = [ask("llama", ids(n, 9), digest, seed=n, max_tokens=4) for n, digest in enumerate(chosen)]
        for number, op in enumerate(ops):
            sampler.add(SampleTask(str(number), op))
        sampled: dict[str, Outcome | Progress] = {}
        while sampler.busy:
            sampled |= {outcome.task_id: outcome for outcome in sampler.step()}
        results = [sample_of(done) for done in (sampled[str(n)] for n in range(len(ops))) if isinstance(done, Done)]
        assert all_tokens(results) == all_tokens(lab.sample(ops))
        assert arrays.counts.bytes <= HELD * size
    with pytest.raises(ObjectMissing):
        arrays.get("0" * 64)


def test_one_that_is_larger_than_the_cache_is_used_and_not_kept(lab: Lab) -> None:
    weights = lab.adapter("llama")
    arrays = Arrays(lab.store, CPU, cache_bytes=1000)
    assert arrays.get(weights).keys() == lab.arrays.get(weights).keys()
    assert (arrays.counts.objects, arrays.counts.bytes) == (0, 0)


def test_the_bound_is_a_share_of_the_memory() -> None:
    assert cache_bytes(80 << 20) == 10 << 20
    assert cache_bytes(1 << 40) == cache_bytes(None) == CACHE_BYTES


def test_files_are_those_of_the_library(tmp_path: Path) -> None:
    """Byte for byte, whatever the types, the order and the strides; and its files can be read."""
    tensors = {
        "z.half": torch.randn(3, 5).to(torch.float16),
        "b.step": torch.tensor(3.0),
        "a.turned": torch.randn(4, 6).t(),
        "ids": torch.arange(7),
        "brain": torch.randn(2, 2).to(torch.bfloat16),
        "none": torch.zeros(0, 4),
    }
    data = bytes(tensorfile.dump(tensors))
    assert data == save({name: tensor.contiguous() for name, tensor in tensors.items()})
    file = tmp_path / "x.safetensors"
    file.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"}))
    found = tensorfile.load(file, CPU)[0]
    assert found.keys() == load(data).keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    found["b.step"].add_(1)
    assert tensorfile.load(file, CPU)[0]["b.step"] == 3.0, "the file must not change with the tensor"
