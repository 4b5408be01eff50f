"""One update by Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347): trajectories -> new weights.

"Details" are those of Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization"; SB3 is
Stable-Baselines3. The ratio is exp(log pi_new - log pi_old) with the log-probabilities that were stored when the
actions were drawn: they are neither computed again from the weights being trained nor divided.

Bitwise the same for the same arguments on the same machine with the same number of threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradserve.compute.engine.control.actor import VALUE, Policy
from gradserve.compute.engine.control.distributions import ActionDistribution
from gradserve.compute.engine.control.flat import FlatAdam
from gradserve.compute.engine.control.gae import advantages
from gradserve.compute.engine.control.noise import permutation
from gradserve.compute.engine.control.normalise import OBSERVATIONS, Moments
from gradserve.compute.engine.control.rollout import OBSERVED, Tensors
from gradserve.compute.engine.finite import all_finite
from gradserve.wire.control import PPOConfig, SpaceSpec, validate_ppo
from gradserve.wire.errors import Invalid

_KL_SLACK = 1.5
"""How far the KL may exceed its target before the update stops: SB3's factor."""
_FORWARD_ROWS = 4096
"""Rows of one forward pass without gradients."""


def ppo_update(
    policy: Policy,
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Tensor] | None,
    trajectories: Sequence[Mapping[str, Tensor]],
    config: PPOConfig,
    seed: int,
    action_space: SpaceSpec,
    buffers: Collection[str] = (),
) -> tuple[Tensors, Tensors, dict[str, float]]:
    """New weights, Adam's new moments and metrics; nothing given is changed.

    ``trajectories`` are those of all groups (see rollout), in an order that is part of the input. What is trained are
    the weights of floating-point type but ``buffers`` and ``normalise.obs.*``; the latter move on to include the
    trajectories' raw observations. ``moments`` (None at first) may hold other names, which are ignored. ``seed`` fixes
    the order of transitions; give another one at each update. Raises Invalid for a config or a policy that does not
    fit, and when the update leaves a weight that is not finite.
    """
    validate_ppo(config)
    names = sorted(
        name
        for name, weight in weights.items()
        if weight.is_floating_point() and name not in buffers and not name.startswith(OBSERVATIONS)
    )
    adam = FlatAdam(weights, names, moments, config.learning_rate, (config.beta1, config.beta2), config.eps)
    batch = Batch.of(trajectories, config)
    learner = _Learner(policy, dict(weights) | adam.parameters, adam, ActionDistribution(action_space), config)
    for epoch in range(config.epochs):
        if not learner.learn(batch.shuffled(seed, epoch) if len(batch) > config.minibatch_size else batch):
            break
    new = dict(weights) | adam.weights()
    if not all_finite(new[name] for name in names):
        raise Invalid("non_finite", "the update made weights that are not finite; nothing was changed.")
    return new | _observed(weights, trajectories), adam.moments(), learner.metrics(batch)


@dataclass(frozen=True)
class Batch:
    """All transitions of an update, one per row: what was stored, and what follows from it."""

    observations: Tensor
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    @classmethod
    def of(cls, trajectories: Sequence[Mapping[str, Tensor]], config: PPOConfig) -> Batch:
        """Advantages by gae, and returns = advantages + values, the targets of the critic (detail 5)."""
        parts = [_rows_of(trajectory, config) for trajectory in trajectories]
        if not sum(len(part[0]) for part in parts):
            raise Invalid("bad_control", "no transitions to learn from.", field="trajectories", fix="Roll out first.")
        return cls(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def __len__(self) -> int:
        return len(self.returns)

    def shuffled(self, seed: int, epoch: int) -> Batch:
        """The rows in another order."""
        order = torch.from_numpy(permutation(seed, epoch, len(self)))
        return Batch(*(column.index_select(0, order) for column in self._columns()))

    def minibatches(self, size: int) -> Iterator[Batch]:
        """Nearly equal parts of at most ``size`` rows, so that no step is left with a few rows (detail 6)."""
        parts = -(-len(self) // size)
        columns = (torch.tensor_split(column, parts) for column in self._columns())
        return (Batch(*part) for part in zip(*columns, strict=True))

    def _columns(self) -> tuple[Tensor, ...]:
        return self.observations, self.actions, self.logprobs, self.values, self.advantages, self.returns


def _rows_of(trajectory: Mapping[str, Tensor], config: PPOConfig) -> tuple[Tensor, ...]:
    arrays = {
        name: trajectory[name].numpy() for name in ("rewards", "values", "next_values", "terminated", "truncated")
    }
    ended = arrays["terminated"] | arrays["truncated"]
    gained = advantages(
        arrays["rewards"], arrays["values"], arrays["next_values"], ended, config.gamma, config.gae_lambda
    )
    valid = trajectory["valid"]
    stored = (trajectory[name][valid] for name in ("observations", "actions", "logprobs", "values"))
    targets = (torch.from_numpy(array.astype(np.float32))[valid] for array in (gained, gained + arrays["values"]))
    return (*stored, *targets)


class _Learner:
    """Takes optimizer steps on minibatches and remembers what they were like."""

    def __init__(
        self,
        policy: Policy,
        weights: Tensors,
        adam: FlatAdam,
        distribution: ActionDistribution,
        config: PPOConfig,
    ) -> None:
        self._policy, self._weights, self._adam = policy, weights, adam
        self._distribution, self._config = distribution, config
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        self._log_ratios: list[Tensor] = []
        self._stopped = False

    def learn(self, batch: Batch) -> bool:
        """One epoch; False if the KL stopped it."""
        self._log_ratios.clear()
        for part in batch.minibatches(self._config.minibatch_size):
            policy_loss, value_loss, log_ratio = self._losses(part)
            self._log_ratios.append(log_ratio.detach())
            if self._too_far(self._log_ratios[-1]):
                self._stopped = True
                return False
            loss = torch.add(policy_loss, value_loss, alpha=self._config.vf_coef)
            norm = self._adam.step(loss, self._config.max_grad_norm)
            self._steps.append((policy_loss.detach(), value_loss.detach(), norm))
        return True

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Means over all steps; of the KL and the clipping over the last epoch; ``entropy`` after the update.

        ``policy_loss`` has the entropy bonus in it; ``explained_variance`` is 1 - Var(R - V) / Var(R) of stored values.
        """
        means = [float(torch.stack(column).mean()) for column in zip(*self._steps, strict=True)] or [0.0] * 3
        log_ratio = torch.cat(self._log_ratios)
        spread = float(batch.returns.var(correction=0))
        unexplained = float((batch.returns - batch.values).var(correction=0))
        return dict(zip(("policy_loss", "value_loss", "grad_norm"), means, strict=True)) | {
            "approx_kl": float(approximate_kl(log_ratio)),
            "clip_fraction": float(((log_ratio.exp() - 1).abs() > self._config.clip_range).float().mean()),
            "entropy": self._entropy(batch),
            "explained_variance": 1 - unexplained / spread if spread else 0.0,
            "transitions": float(len(batch)),
            "optimizer_steps": float(len(self._steps)),
            "stopped_early": float(self._stopped),
            "learning_rate": self._config.learning_rate,
        }

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The terms of PPO's equation 9 on a minibatch: policy (with the entropy bonus) and value; and log r [n]."""
        found = self._policy(self._weights, batch.observations)
        outputs = self._distribution.outputs(found, len(batch))
        log_ratio = self._distribution.log_prob(outputs, batch.actions) - batch.logprobs
        policy_loss = surrogate(log_ratio, batch.advantages, self._config)
        if self._config.ent_coef:
            policy_loss = policy_loss - self._config.ent_coef * self._distribution.entropy(outputs).mean()
        return policy_loss, squared_error(found[VALUE].reshape(-1), batch, self._config.clip_range_vf), log_ratio

    def _entropy(self, batch: Batch) -> float:
        with torch.no_grad():
            parts = batch.minibatches(_FORWARD_ROWS)
            found = [self._policy(self._weights, part.observations) for part in parts]
            rows = [len(part[VALUE]) for part in found]
            outputs = [self._distribution.outputs(part, n) for part, n in zip(found, rows, strict=True)]
            sums = [self._distribution.entropy(part).mean() * n for part, n in zip(outputs, rows, strict=True)]
            return float(torch.stack(sums).sum()) / len(batch)

    def _too_far(self, log_ratio: Tensor) -> bool:
        target = self._config.target_kl
        return target is not None and float(approximate_kl(log_ratio)) > _KL_SLACK * target


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """E[(r - 1) - log r], an estimate of KL(old | new) that is never negative (k3 of Schulman 2020; detail 12)."""
    return (log_ratio.exp() - 1 - log_ratio).mean()


def surrogate(log_ratio: Tensor, advantages_: Tensor, config: PPOConfig) -> Tensor:
    """-E[min(r A, clip(r, 1 - eps, 1 + eps) A)], PPO's equation 7 (detail 8), r = exp(log pi_new - log pi_old).

    A is brought to mean 0 and deviation 1 over the minibatch, as asked (detail 7; one row has no deviation).
    """
    if config.normalise_advantage and len(advantages_) > 1:
        std, mean = torch.std_mean(advantages_)
        advantages_ = (advantages_ - mean) / (std + 1e-8)
    # For either sign of A, clip(r) A is less than r A only where r A exceeds (1 + sign(A) eps) A: one bound without r
    # (Achiam 2018, "Simplified PPO-Clip objective").
    bound = torch.add(advantages_, advantages_.abs(), alpha=config.clip_range)
    return -torch.minimum(log_ratio.exp() * advantages_, bound).mean()


def squared_error(values: Tensor, batch: Batch, clip_range: float | None) -> Tensor:
    """E[(V - R)^2]; with a clip range the greater, per row, of it and that of V held near the stored value (detail 9).

    No factor of one half, as in SB3: vf_coef of published settings counts on that.
    """
    if clip_range is None:
        return torch.nn.functional.mse_loss(values, batch.returns)
    near = batch.values + (values - batch.values).clamp(-clip_range, clip_range)
    return torch.maximum((values - batch.returns).square(), (near - batch.returns).square()).mean()


def _observed(weights: Mapping[str, Tensor], trajectories: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """The normaliser's buffers after these trajectories; none if they were collected without."""
    seen = [Moments.read(trajectory, OBSERVED, ()) for trajectory in trajectories if OBSERVED + "mean" in trajectory]
    if not seen:
        return {}
    total = Moments.read(weights, OBSERVATIONS, seen[0].mean.shape)
    for moments in seen:
        total = total.merged(moments)
    return total.tensors(OBSERVATIONS)
