"""Several adapters in one differentiable pass: each gets the gradient it would get alone, and no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig

from gradserve.compute.catalog import ModelUnusable
from gradserve.compute.engine.attention import PackedLayout, layout_attention
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.kernels import FAST
from gradserve.compute.engine.lora import Adapter, Route, route
from gradserve.compute.tasks import BaseSpec
from gradserve.wire.errors import Invalid
from tests.numerics.lab import CPU, Lab, ids

RTOL = 1e-5


def leaves(lab: Lab, digest: str) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in lab.arrays.get(digest).items()}


def gradients(
    lab: Lab, runs: list[tuple[int | None, int]], tensors: list[dict[str, torch.Tensor]]
) -> list[torch.Tensor | None]:
    """Of a fixed function of each sequence's logits; a run is (index of the adapter, seed of a 9-token sequence)."""
    base, length = lab.base("llama"), 9
    adapters = [Adapter.of(each) for each in tensors]
    routing = route([(None if a is None else adapters[a], length) for a, _ in runs], CPU)
    tokens = torch.cat([torch.from_numpy(ids(seed, length)).long() for _, seed in runs])
    with base.routed(routing):
        hidden = base.hidden(tokens, torch.arange(length).repeat(len(runs)), PackedLayout([length] * len(runs)))
        total = base.logits(hidden).sin().sum()
    wanted = [tensor for each in tensors for tensor in each.values()]
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


def test_mixed_gradients_are_each_alone(lab: Lab) -> None:
    tensors = [leaves(lab, lab.adapter("llama", seed=1, rank=2)), leaves(lab, lab.adapter("llama", seed=2, rank=8))]
    mixed = gradients(lab, [(0, 1), (1, 2), (None, 3), (0, 4)], tensors)
    first = gradients(lab, [(0, 1), (0, 4)], tensors[:1])
    second = gradients(lab, [(1, 2)], tensors)[len(tensors[0]) :]
    for got, want in zip(mixed, first + second, strict=True):
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got, want, atol=RTOL * float(want.abs().max()), rtol=0)


def test_runs_become_slices_or_indices() -> None:
    one, two = (Adapter({}, 1.0) for _ in range(2))
    routes = route([(one, 2), (None, 1), (two, 3), (two, 1), (one, 2), (None, 4)], CPU)
    assert [part.adapter is expected for part, expected in zip(routes, (one, two), strict=True)] == [True, True]
    assert isinstance(routes[0].rows, torch.Tensor)
    assert routes[0].rows.tolist() == [0, 1, 7, 8]
    assert routes[1] == Route(two, slice(3, 7))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensors: {name: tensor for name, tensor in tensors.items() if "lora_A" in name},
        lambda tensors: {name: tensor[:1] if "q_proj.lora_A" in name else tensor for name, tensor in tensors.items()},
        lambda _: {},
    ],
)
def test_tensors_that_are_no_adapter(
    lab: Lab, spoil: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    with pytest.raises(Invalid):
        Adapter.of(spoil(lab.arrays.get(lab.adapter("llama"))))


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.ones(1)}, {"dropout": 0.1}])
def test_attention_that_would_be_wrong_is_refused(extra: dict[str, object]) -> None:
    q = torch.ones(1, 1, 1, 4)
    with pytest.raises(NotImplementedError, match="not supported"):
        layout_attention(torch.nn.Module(), q, q, q, None, scaling=1.0, layout=PackedLayout([1]), **extra)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "depend on its batch"),
        ({"model_type": "gemma"}, "is not one of llama"),
    ],
)
def test_models_that_would_be_wrong_are_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, object], message: str
) -> None:
    config = LlamaConfig()
    for name, value in change.items():
        monkeypatch.setattr(config, name, value)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: config)
    with pytest.raises(ModelUnusable, match=message):
        Base.load(BaseSpec("m", "/nowhere"), CPU, torch.float32, FAST)
