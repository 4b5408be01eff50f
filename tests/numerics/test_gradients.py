"""Loss and gradient of each public loss equal those of transformers + peft + plain torch on a padded batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gradserve.compute.catalog import FAMILIES
from gradserve.wire.data import Row
from gradserve.wire.losses import LOSSES
from tests.numerics import reference
from tests.numerics.lab import LENGTHS, Lab, ids, logprobs_of, row, rows_of

LOSS_ATOL_PER_TOKEN = 2e-6
"""Terms of both signs, so the sum may be small beside what was summed."""
GRADIENT_TOLERANCE = 1e-5
"""max |difference| / max |reference| of each tensor."""

RANK = 4


def loss_rows(lab: Lab, base: str, loss: str) -> list[Row]:
    """Rows with what ``loss`` needs; sampler log-probs near the model's own, so that some ratios are clipped."""
    rows = [row(ids(7 + index, length)) for index, length in enumerate(LENGTHS)]
    own = lab.forward(base, lab.adapter(base, seed=5), rows)
    rng = np.random.default_rng(0)
    made = []
    for index, (length, lp) in enumerate(zip(LENGTHS, own, strict=True)):
        prompt = np.arange(length) < length // 3
        made.append(row(ids(7 + index, length), **_inputs(loss, rng, lp, prompt)))
    return made


def _inputs(
    loss: str,
    rng: np.random.Generator,
    lp: np.ndarray[tuple[int], np.dtype[np.float32]],
    prompt: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    if loss == "cross_entropy":
        return {"weights": np.where(prompt, 0, rng.normal(size=lp.shape)).astype(np.float32)}
    inputs = {
        "logprobs": np.where(prompt, 0, lp + rng.normal(scale=0.3, size=lp.shape)).astype(np.float32),
        "advantages": np.where(prompt, 0, rng.normal(size=lp.shape)).astype(np.float32),
    }
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = (~prompt).astype(np.float32)
    return inputs


def compare(lab: Lab, base: str, rows: list[Row], loss: str, folder: Path, **config: float) -> None:
    """Our Task against the reference; tensors, log-probs and loss."""
    weights = lab.adapter(base, seed=5, rank=RANK)
    done = lab.grad(base, weights, rows, loss, **config)
    model = reference.load_peft(lab.models[base], lab.store.path(weights), folder, RANK)
    lps = reference.logprobs(model, rows)
    total = reference.loss(loss, rows, lps, LOSSES[loss].config | config)
    torch.autograd.backward(total)
    tolerance = LOSS_ATOL_PER_TOKEN * sum(row.length for row in rows)
    assert rows_of(done).metrics["loss:sum"] == pytest.approx(total.item(), abs=tolerance)
    for got, want in zip(logprobs_of(rows_of(done)), lps, strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), atol=1e-5, rtol=0)
    assert_gradients_equal(lab.gradient(done), reference.gradients(model))


def assert_gradients_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, reference_tensor in want.items():
        scale = reference_tensor.abs().max().item()
        assert (got[name] - reference_tensor).abs().max().item() <= GRADIENT_TOLERANCE * max(scale, 1e-3), name


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_each_loss(lab: Lab, loss: str, tmp_path: Path) -> None:
    compare(lab, "llama", loss_rows(lab, "llama", loss), loss, tmp_path / "peft")


@pytest.mark.parametrize("name", [*FAMILIES[1:], "mistral-window", "smollm3-window"])
def test_each_family(lab: Lab, name: str, tmp_path: Path) -> None:
    compare(lab, name, loss_rows(lab, name, "cross_entropy"), "cross_entropy", tmp_path / "peft")


def test_thresholds_per_token_override_the_setting(lab: Lab, tmp_path: Path) -> None:
    rows = []
    for made in loss_rows(lab, "llama", "ppo"):
        tokens = np.frombuffer(made.tokens, "<i4").astype(np.int32)
        inputs = {name: array.numpy() for name, array in made.inputs.items()}
        inputs["clip_low_threshold"] = np.linspace(0.5, 1.0, len(tokens)).astype(np.float32)
        inputs["clip_high_threshold"] = np.linspace(1.0, 1.5, len(tokens)).astype(np.float32)
        rows.append(row(tokens, **inputs))
    compare(lab, "llama", rows, "ppo", tmp_path / "peft", clip_high_threshold=99.0)


def test_soft_targets(lab: Lab, tmp_path: Path) -> None:
    """[N, K] targets with K different from row to row, as in top-K distillation."""
    rng = np.random.default_rng(1)
    rows = []
    for index, width in enumerate((3, 1, 5)):
        tokens = ids(20 + index, 9 + index)
        shape = (len(tokens), width)
        targets = rng.integers(0, 320, shape)
        rows.append(row(tokens, target_tokens=targets, weights=rng.random(shape).astype(np.float32)))
    compare(lab, "llama", rows, "cross_entropy", tmp_path / "peft")


def test_absent_weights_are_ones_also_beside_wider_rows(lab: Lab, tmp_path: Path) -> None:
    rows = [row(ids(1, 6), target_tokens=np.ones((6, 3), dtype=np.int64)), row(ids(2, 4))]
    compare(lab, "llama", rows, "cross_entropy", tmp_path / "peft")


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_only_what_was_asked_for_is_trained(lab: Lab, flags: dict[str, bool], modules: set[str]) -> None:
    weights = lab.adapter("llama", rank=3, **flags)
    gradient = lab.gradient(lab.grad("llama", weights, [row(ids(0, 12))]))
    assert {name.split(".")[-3] for name in gradient} == modules
    assert all(tensor.abs().max() > 0 for tensor in gradient.values())
    assert {tensor.shape[0] for name, tensor in gradient.items() if "lora_A" in name} == {3}
