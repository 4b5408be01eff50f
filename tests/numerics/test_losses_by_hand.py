"""Each loss on a few tokens, worked out by hand. Probabilities are chosen so that the logarithms cancel.

Legend: r = exp(lp - q), A = advantage. Terms are per token; the loss is their sum.
"""

from __future__ import annotations

from math import exp, log, sqrt

import pytest
import torch
from torch import Tensor

from gradserve.compute.engine.losses import FUNCTIONS, Batch, metrics, settings
from gradserve.wire.errors import Invalid
from gradserve.wire.losses import LOSSES

TOLERANCE = 1e-6
LN2 = log(2.0)


def evaluate(
    loss: str,
    lp: list[float],
    lengths: list[int] | None = None,
    config: dict[str, float] | None = None,
    **inputs: list[float],
) -> tuple[list[float], list[float], dict[str, float]]:
    """Terms, d(sum of terms)/d lp, and metrics."""
    leaf = torch.tensor(lp, requires_grad=True)
    tensors: dict[str, Tensor] = {name: torch.tensor(values) for name, values in inputs.items()}
    batch = Batch(leaf, tensors, settings(loss, config or {}), lengths or [len(lp)])
    terms = FUNCTIONS[loss](batch)
    (gradient,) = torch.autograd.grad(terms.sum(), leaf)
    return terms.tolist(), gradient.tolist(), metrics(loss, batch, terms)


def near(values: list[float]) -> object:
    return pytest.approx(values, abs=TOLERANCE)


def test_every_public_loss_has_a_function() -> None:
    assert set(FUNCTIONS) == set(LOSSES)


def test_cross_entropy() -> None:
    terms, gradient, found = evaluate("cross_entropy", [-1.0, -2.0, -3.0], weights=[1.0, 0.0, -0.5])
    assert terms == near([1.0, 0.0, -1.5])
    assert gradient == near([-1.0, 0.0, 0.5])
    assert found == {"loss:sum": pytest.approx(-0.5), "weights:sum": pytest.approx(0.5)}


def test_cross_entropy_without_weights_counts_every_token_once() -> None:
    terms, gradient, found = evaluate("cross_entropy", [-1.0, -2.0])
    assert (terms, gradient) == (near([1.0, 2.0]), near([-1.0, -1.0]))
    assert found["weights:sum"] == 2.0


def test_importance_sampling() -> None:
    # r = 2 and 1/2: -r A = -2 * 3 and -0.5 * -4; d/dlp is the term itself, since dr/dlp = r.
    terms, gradient, found = evaluate(
        "importance_sampling", [-1.0, -1.0], logprobs=[-1.0 - LN2, -1.0 + LN2], advantages=[3.0, -4.0]
    )
    assert terms == near([-6.0, 2.0])
    assert gradient == near([-6.0, 2.0])
    assert found["loss:sum"] == pytest.approx(-4.0)
    assert found["ratio:mean"] == pytest.approx(1.25)
    assert found["ratio:min"] == pytest.approx(0.5)
    assert found["ratio:max"] == pytest.approx(2.0)


def test_ppo_clips_on_the_side_that_would_gain() -> None:
    # r = 2 (above 1.2) and 1/2 (below 0.8), each with A = 1 and A = -1.
    terms, gradient, found = evaluate(
        "ppo",
        [-1.0, -1.0, -1.0, -1.0],
        logprobs=[-1.0 - LN2, -1.0 - LN2, -1.0 + LN2, -1.0 + LN2],
        advantages=[1.0, -1.0, 1.0, -1.0],
    )
    assert terms == near([-1.2, 2.0, -0.5, 0.8])
    assert gradient == near([0.0, 2.0, -0.5, 0.0])
    assert found["clip_fraction:mean"] == 1.0


def test_ppo_takes_thresholds_per_token() -> None:
    terms, _, _ = evaluate(
        "ppo", [-1.0, -1.0], logprobs=[-1.0 - LN2] * 2, advantages=[1.0, 1.0],
        clip_low_threshold=[0.5, 0.5], clip_high_threshold=[1.5, 9.0],
    )  # fmt: skip
    assert terms == near([-1.5, -2.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    # r = 8, clipped to 4: -4 lp A with gradient -4 A; r = 1/2 stays.
    terms, gradient, _ = evaluate("cispo", [-1.0, -2.0], logprobs=[-1.0 - 3 * LN2, -2.0 + LN2], advantages=[1.0, 2.0])
    assert terms == near([4.0, 2.0])
    assert gradient == near([-4.0, -1.0])


def test_dro() -> None:
    # -(lp A - beta/2 (lp - q)^2) with beta 0.05: -(-2 - 0.025) and -(3 - 0.1); d/dlp = -A + beta (lp - q).
    terms, gradient, _ = evaluate("dro", [-1.0, -3.0], logprobs=[-2.0, -1.0], advantages=[2.0, -1.0])
    assert terms == near([2.025, -2.9])
    assert gradient == near([-1.95, 0.9])


def test_gspo_has_one_ratio_per_row() -> None:
    # Row 1: lp - q = ln 2 twice, 5 outside the mask -> s = 2, clipped to 1.2. Row 2: no mask -> s = 1.
    terms, gradient, _ = evaluate(
        "gspo",
        [-1.0, -1.0, -1.0, -1.0],
        lengths=[3, 1],
        logprobs=[-6.0, -1.0 - LN2, -1.0 - LN2, -9.0],
        advantages=[0.0, 1.0, -1.0, 1.0],
        sequence_ratio_mask=[0.0, 1.0, 1.0, 0.0],
    )
    assert terms == near([0.0, -1.2, 2.0, -1.0])
    assert gradient == near([0.0, 0.0, 2.0, -1.0])


def test_gspo_takes_the_geometric_mean() -> None:
    terms, _, _ = evaluate(
        "gspo", [-1.0, -1.0], config={"clip_low_threshold": 0.0, "clip_high_threshold": 9.0},
        logprobs=[-1.0 - LN2, -1.0], advantages=[1.0, 1.0], sequence_ratio_mask=[1.0, 1.0],
    )  # fmt: skip
    assert terms == near([-sqrt(2.0), -sqrt(2.0)])


def test_stable_reinforce() -> None:
    # r = 2: 2 * 1 * 3 + 0.005 ln2^2; r = e^2 > 4: 4 * 1 * 1 + 0.005 * 4. d/dlp = -min(r, 4) A + 0.01 (lp - q).
    terms, gradient, _ = evaluate("stable_reinforce", [-1.0, -1.0], logprobs=[-1.0 - LN2, -3.0], advantages=[3.0, 1.0])
    assert terms == near([6.0 + 0.005 * LN2**2, 4.02])
    assert gradient == near([-6.0 + 0.01 * LN2, -3.98])


def test_tokens_without_advantage_stay_out_of_the_diagnostics() -> None:
    _, _, found = evaluate(
        "importance_sampling",
        [-5.0, -1.0, -4.0],
        lengths=[2, 1],
        logprobs=[0.0, -1.0 - LN2, 0.0],
        advantages=[0.0, 1.0, 0.0],
    )
    # Row 1 has one live token with ratio 2, row 2 none (counts as 1).
    assert found["ratio:mean"] == pytest.approx(1.5)
    assert found["kl_sample_train:mean"] == pytest.approx(-LN2 / 2)
    assert exp(LN2) == pytest.approx(found["ratio:max"])


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(Invalid, match="no setting 'epsilon'"):
        settings("ppo", {"epsilon": 0.2})
    with pytest.raises(Invalid, match="unknown loss"):
        settings("ppo2", {})
