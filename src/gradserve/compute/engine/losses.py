"""The public losses as functions of per-token log-probs. Sources of the formulas are in the docstrings.

Letters: lp = log-prob of the target under the weights being trained; q = input ``logprobs`` (the sampler's);
A = ``advantages``; r = exp(lp - q). A loss returns one term per token; the loss is their *sum*, never a mean.
Tokens are packed: [N] over all rows of a batch; ``lengths`` says where rows end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradserve.wire.errors import Invalid
from gradserve.wire.losses import LOSSES

RATIO_CAP = 4.0
"""Truncation of the importance ratio in stable_reinforce."""


@dataclass(frozen=True)
class Batch:
    """What a loss sees. ``lp`` is [N, K] for cross_entropy and [N] for the others; inputs have the shape of ``lp``."""

    lp: Tensor
    inputs: dict[str, Tensor]
    config: dict[str, float]
    lengths: list[int]

    def bound(self, name: str) -> Tensor:
        """A clipping threshold: the per-token input where given, else the setting."""
        given = self.inputs.get(name)
        return given if given is not None else torch.tensor(self.config[name], device=self.lp.device)

    @property
    def ratio_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """lp, q, A."""
        return self.lp, self.inputs["logprobs"], self.inputs["advantages"]


def cross_entropy(batch: Batch) -> Tensor:
    """-w lp; absent weights are ones. K > 1 targets per token are a soft distribution in w (distillation)."""
    weights = batch.inputs.get("weights")
    return -batch.lp if weights is None else -weights * batch.lp


def importance_sampling(batch: Batch) -> Tensor:
    """-r A: REINFORCE corrected for the sampler's distribution (Kahn and Marshall 1953; tinker docs)."""
    lp, q, advantages = batch.ratio_inputs
    return -(lp - q).exp() * advantages


def ppo(batch: Batch) -> Tensor:
    """-min(r A, clamp(r, lo, hi) A) (Schulman et al. 2017, arXiv:1707.06347). lo and hi are ratios, not epsilons."""
    lp, q, advantages = batch.ratio_inputs
    return _clipped((lp - q).exp(), advantages, batch)


def cispo(batch: Batch) -> Tensor:
    """-stopgrad(clamp(r, lo, hi)) lp A (MiniMax-M1 2025, arXiv:2506.13585): clipped tokens keep a gradient."""
    lp, q, advantages = batch.ratio_inputs
    ratio = (lp - q).detach().exp()
    return -torch.clamp(ratio, *_bounds(batch)) * lp * advantages


def dro(batch: Batch) -> Tensor:
    """-(lp A - beta/2 (lp - q)^2) (Richemond et al. 2024, arXiv:2405.19107)."""
    lp, q, advantages = batch.ratio_inputs
    return -(lp * advantages - 0.5 * batch.config["beta"] * (lp - q).square())


def gspo(batch: Batch) -> Tensor:
    """PPO's clipping on a ratio per sequence (Zheng et al. 2025, arXiv:2507.18071, the token variant).

    s = exp(mean over M of (stopgrad(lp) - q)) with M = tokens of the row whose ``sequence_ratio_mask`` is not 0;
    each token's ratio has the value s and the gradient of its own lp. A row with an empty M has s = 1.
    """
    lp, q, advantages = batch.ratio_inputs
    mask = (batch.inputs["sequence_ratio_mask"] != 0).to(lp.dtype)
    total = _row_sums((lp.detach() - q) * mask, batch.lengths)
    count = _row_sums(mask, batch.lengths).clamp(min=1)
    s = _spread((total / count).exp(), batch.lengths)
    return _clipped(s * (lp - lp.detach()).exp(), advantages, batch)


def stable_reinforce(batch: Batch) -> Tensor:
    """-stopgrad(min(r, 4)) lp A + kl_coeff/2 (lp - q)^2.

    gradserve's stand-in: the original is not public. Truncated importance sampling (Ionides 2008; Espeholt et al.
    2018, arXiv:1802.01561) with the k2 estimator of KL to the sampler (Schulman 2020, "Approximating KL divergence").
    """
    lp, q, advantages = batch.ratio_inputs
    ratio = (lp - q).detach().exp().clamp(max=RATIO_CAP)
    return -ratio * lp * advantages + 0.5 * batch.config["kl_coeff"] * (lp - q).square()


Loss = Callable[[Batch], Tensor]

FUNCTIONS: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}


def settings(loss: str, config: dict[str, float]) -> dict[str, float]:
    """``config`` over the loss's defaults. Raises Invalid for an unknown loss or setting."""
    if loss not in FUNCTIONS:
        raise Invalid("unknown_loss", f"unknown loss {loss!r}; there are {', '.join(FUNCTIONS)}", field="loss_fn")
    defaults = LOSSES[loss].config
    unknown = sorted(set(config) - set(defaults))
    if unknown:
        raise Invalid("unknown_setting", f"loss {loss} has no setting {unknown[0]!r}", field="loss_fn_config")
    return defaults | config


def metrics(loss: str, batch: Batch, terms: Tensor) -> dict[str, float]:
    """Numbers for the client; the part after ":" says how those of several Tasks combine (mean: by rows)."""
    found = {"loss:sum": terms.detach().double().sum().item()}
    if loss == "cross_entropy":
        weights = batch.inputs.get("weights")
        found["weights:sum"] = float(batch.lp.numel()) if weights is None else weights.double().sum().item()
        return found
    return found | _ratio_metrics(batch)


def _ratio_metrics(batch: Batch) -> dict[str, float]:
    """Per row: the mean over its tokens with an advantage; then the mean over rows, so that Tasks combine exactly.

    Prompt tokens carry placeholder log-probs and advantage 0: they would only blur the picture. A row in which no
    token has an advantage counts as on-policy (ratio 1, kl 0).
    """
    lp, q, advantages = batch.ratio_inputs
    live = advantages != 0
    gap = torch.where(live, lp.detach() - q, 0.0)
    ratio = gap.exp()
    found = {
        "ratio:mean": _mean_of_rows(ratio, live, batch.lengths, empty=1.0),
        "ratio:min": ratio.min().item(),
        "ratio:max": ratio.max().item(),
        "kl_sample_train:mean": _mean_of_rows(-gap, live, batch.lengths, empty=0.0),
    }
    if "clip_low_threshold" in batch.config:
        low, high = _bounds(batch)
        clipped = live & ((ratio < low) | (ratio > high))
        found["clip_fraction:mean"] = _mean_of_rows(clipped.to(ratio.dtype), live, batch.lengths, empty=0.0)
    return found


def _mean_of_rows(values: Tensor, live: Tensor, lengths: list[int], empty: float) -> float:
    counts = _row_sums(live.to(values.dtype), lengths)
    means = _row_sums(torch.where(live, values, 0.0), lengths) / counts.clamp(min=1)
    return torch.where(counts > 0, means, empty).double().mean().item()


def _bounds(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.bound("clip_low_threshold"), batch.bound("clip_high_threshold")


def _clipped(ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    return -torch.minimum(ratio * advantages, torch.clamp(ratio, *_bounds(batch)) * advantages)


def _row_sums(values: Tensor, lengths: list[int]) -> Tensor:
    """[N] -> [rows]"""
    return torch.stack([part.sum() for part in torch.split(values, lengths)])


def _spread(rows: Tensor, lengths: list[int]) -> Tensor:
    """[rows] -> [N]"""
    return rows.repeat_interleave(torch.tensor(lengths, device=rows.device))
