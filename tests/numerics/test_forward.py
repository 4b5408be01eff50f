"""Packed, padding-free log-probs are those of plain transformers, for every family, with and without adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gradserve.compute.catalog import FAMILIES
from gradserve.compute.engine.attention import PackedLayout
from tests.numerics import reference
from tests.numerics.lab import Lab, ids, plain_rows

ATOL = 1e-5
"""On log-probs of size 1 to 15; float32 sums in another order."""

ALL = [*FAMILIES, *(f"{family}-window" for family in FAMILIES if family != "llama")]


@pytest.mark.parametrize("name", ALL)
def test_log_probs_equal_plain_transformers(lab: Lab, name: str) -> None:
    rows = plain_rows()
    weights = lab.adapter(name, rank=2)
    zero = lab.arrays.put({k: torch.zeros_like(v) for k, v in lab.arrays.get(weights).items()})
    with torch.no_grad():
        expected = reference.logprobs(reference.load(lab.models[name]), rows)
    for got, want in zip(lab.forward(name, zero, rows), expected, strict=True):
        np.testing.assert_allclose(got, want.numpy(), atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", ALL)
def test_log_probs_with_an_adapter_equal_peft(lab: Lab, name: str, tmp_path: Path) -> None:
    rows = plain_rows(seed=1)
    weights = lab.adapter(name, rank=4)
    model = reference.load_peft(lab.models[name], lab.store.path(weights), tmp_path / "peft", rank=4)
    with torch.no_grad():
        expected = reference.logprobs(model, rows)
    for got, want in zip(lab.forward(name, weights, rows), expected, strict=True):
        np.testing.assert_allclose(got, want.numpy(), atol=ATOL, rtol=0)


def test_the_window_matters(lab: Lab) -> None:
    """Otherwise the window tests above would prove nothing."""
    base, tokens = lab.base("mistral-window"), torch.from_numpy(ids(0, 60).astype(np.int64))
    whole = base.hidden(tokens, torch.arange(60), PackedLayout([60]))
    later = base.hidden(tokens[30:], torch.arange(30, 60), PackedLayout([30]))
    blind = base.hidden(tokens[10:], torch.arange(10, 60), PackedLayout([50]))
    assert not torch.allclose(whole[30:], later, atol=1e-2)
    # Two layers of a window of 24 reach back 46 tokens: the last position cannot know of the first ten.
    torch.testing.assert_close(whole[-1], blind[-1], atol=ATOL, rtol=0)


def test_rows_without_an_adapter_are_the_base_bit_for_bit(lab: Lab) -> None:
    base = lab.base("llama")
    assert set(base.targets) >= {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"}
    tokens, layout = torch.from_numpy(ids(0, 20).astype(np.int64)), PackedLayout([20])
    hidden = base.hidden(tokens, torch.arange(20), layout)
    plain = reference.load(lab.models["llama"], "sdpa").model(input_ids=tokens[None], use_cache=False)
    assert torch.equal(hidden, plain.last_hidden_state[0])
