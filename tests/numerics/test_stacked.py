"""Many adapters with a few rows each share batched products: each row still gets its own adapter's result."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradserve.compute.engine import stacked
from gradserve.compute.engine.attention import PackedLayout
from gradserve.compute.engine.lora import Adapter, Routing, route
from tests.numerics.lab import CPU, Lab, ids

RTOL = 1e-5


def mixed_adapters(lab: Lab, count: int) -> list[Adapter]:
    """Ranks from 1 to 5; some train attention only, some the MLP only, some no unembedding."""
    flags = [{}, {"train_attn": False}, {"train_mlp": False}, {"train_unembed": False}]
    digests = [lab.adapter("llama", seed=seed, rank=1 + seed % 5, **flags[seed % 4]) for seed in range(count)]
    return [Adapter.of(lab.arrays.get(digest)) for digest in digests]


def logits(lab: Lab, runs: list[tuple[Adapter | None, int]]) -> torch.Tensor:
    base, total = lab.base("llama"), sum(count for _, count in runs)
    tokens = torch.from_numpy(ids(7, total).astype(np.int64))
    positions = torch.cat([torch.arange(count) for _, count in runs])
    with torch.no_grad(), base.routed(route(runs, CPU)):
        return base.logits(base.hidden(tokens, positions, PackedLayout([count for _, count in runs])))


def test_each_row_has_its_own_adapter(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine small groups, one too large to stack and rows without adapter, against one product per adapter."""
    adapters = mixed_adapters(lab, 10)
    runs: list[tuple[Adapter | None, int]] = [(adapter, 1 + index % 4) for index, adapter in enumerate(adapters[:9])]
    runs += [(None, 3), (adapters[9], stacked.SMALL + 4), (adapters[0], 2)]
    used: list[Routing] = []
    build = stacked.Groups.of

    def counted(stack: stacked.Stack, routes: Routing, device: torch.device) -> stacked.Groups:
        used.append(routes)
        return build(stack, routes, device)

    monkeypatch.setattr(stacked.Groups, "of", counted)
    together = logits(lab, runs)
    assert [len(routes) for routes in used] == [9]
    monkeypatch.setattr("gradserve.compute.engine.lora.ENOUGH", 1000)
    alone = logits(lab, runs)
    assert len(used) == 1
    torch.testing.assert_close(together, alone, atol=RTOL * float(alone.abs().max()), rtol=0)
    assert not torch.allclose(alone, logits(lab, [(None, count) for _, count in runs]), atol=1e-2)


def test_a_stack_is_kept_while_it_serves(lab: Lab) -> None:
    adapters = mixed_adapters(lab, 8)
    stack = stacked.Stack(adapters)
    routes = route([(adapter, 1) for adapter in adapters], CPU)
    assert stack.serves(routes)
    assert stack.serves(routes[:4])
    assert not stack.serves(routes[:3])  # mostly dead weight
    assert not stack.serves(route([(mixed_adapters(lab, 1)[0], 1)], CPU))
