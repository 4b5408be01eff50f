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

from gradserve.compute.engine.control.distributions import ActionDistribution
from gradserve.compute.engine.control.flat import FlatAdam
from gradserve.compute.engine.control.gae import advantages
from gradserve.compute.engine.control.noise import permutation
from gradserve.compute.engine.control.normalise import OBSERVATIONS, Moments
from gradserve.compute.engine.control.rollout import OBSERVED, VALUE, Policy, Tensors
from gradserve.compute.engine.finite import all_finite
from gradserve.wire.control import PPOConfig, SpaceSpec, validate_ppo
from gradserve.wire.errors import Invalid

_KL_SLACK = 1.5
"""How far the KL may exceed its target before the update stops: SB3's factor."""


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

    ``trajectories`` are those of all groups (see rollout), in an order that is part of the input. What is trained are the
    weights of floating-point type but ``buffers`` and ``normalise.obs.*``; the latter move on to include the
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
    loss = _Loss(policy, dict(weights) | adam.parameters, ActionDistribution(action_space), config)
    records: list[Tensor] = []
    stopped = False
    for indices in _minibatches(seed, len(batch.returns), config):
        adam.zero_grad()
        total, record = loss(batch.rows(indices))
        if config.target_kl is not None and float(record[_KL]) > _KL_SLACK * config.target_kl:
            stopped = True
            break
        total.backward()  # type: ignore[no-untyped-call]
        records.append(torch.cat([record, adam.step(config.max_grad_norm)[None]]))
    new = dict(weights) | adam.weights()
    if not all_finite(new[name] for name in names):
        raise Invalid("non_finite", "the update made weights that are not finite; nothing was changed.")
    new |= _observed(weights, trajectories)
    return new, adam.moments(), _metrics(records, batch, stopped, config)


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

    def rows(self, indices: Tensor) -> Batch:
        """Those rows."""
        return Batch(
            self.observations[indices],
            self.actions[indices],
            self.logprobs[indices],
            self.values[indices],
            self.advantages[indices],
            self.returns[indices],
        )


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


def _minibatches(seed: int, length: int, config: PPOConfig) -> Iterator[Tensor]:
    """Each epoch's rows in an order of its own, cut into nearly equal parts of at most ``minibatch_size`` (detail 6)."""
    parts = -(-length // config.minibatch_size)
    for epoch in range(config.epochs):
        yield from torch.from_numpy(permutation(seed, epoch, length)).tensor_split(parts)


_POLICY, _VALUE, _ENTROPY, _KL, _CLIPPED, _NORM = range(6)
_NAMES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


class _Loss:
    """PPO's equation 9 on a minibatch."""

    def __init__(self, policy: Policy, weights: Tensors, distribution: ActionDistribution, config: PPOConfig) -> None:
        self._policy, self._weights, self._distribution, self._config = policy, weights, distribution, config

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The scalar to minimise, and the metrics of _NAMES but the last as a vector without gradient."""
        config = self._config
        found = self._policy(self._weights, batch.observations)
        outputs = self._distribution.outputs(found, len(batch.returns))
        logprobs, entropies = self._distribution.log_prob_and_entropy(outputs, batch.actions)
        policy_loss, log_ratio, ratio = surrogate(logprobs, batch, config)
        value_loss = squared_error(found[VALUE].reshape(-1), batch, config.clip_range_vf)
        entropy = entropies.mean()
        total = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        with torch.no_grad():
            kl = (ratio - 1 - log_ratio).mean()
            clipped = ((ratio - 1).abs() > config.clip_range).float().mean()
            return total, torch.stack([policy_loss, value_loss, entropy, kl, clipped])


def surrogate(logprobs: Tensor, batch: Batch, config: PPOConfig) -> tuple[Tensor, Tensor, Tensor]:
    """-E[min(r A, clip(r, 1 - eps, 1 + eps) A)], PPO's equation 7 (detail 8); log r [n] and r [n].

    ``logprobs`` [n] are those of the weights being trained. A is brought to mean 0 and deviation 1 over the minibatch, as
    asked (detail 7; of one row there is none to bring).
    """
    advantage = batch.advantages
    if config.normalise_advantage and len(advantage) > 1:
        std, mean = torch.std_mean(advantage)
        advantage = (advantage - mean) / (std + 1e-8)
    log_ratio = logprobs - batch.logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean(), log_ratio, ratio


def squared_error(values: Tensor, batch: Batch, clip_range: float | None) -> Tensor:
    """E[(V - R)^2]; with a clip range the greater, per row, of it and that of V held near the stored value (detail 9).

    No factor of one half, as in SB3: vf_coef of published settings counts on that.
    """
    error = (values - batch.returns).square()
    if clip_range is not None:
        near = batch.values + (values - batch.values).clamp(-clip_range, clip_range)
        error = torch.maximum(error, (near - batch.returns).square())
    return error.mean()


def _observed(weights: Mapping[str, Tensor], trajectories: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """The normaliser's buffers after these trajectories; none if they were collected without."""
    seen = [Moments.read(trajectory, OBSERVED, ()) for trajectory in trajectories if OBSERVED + "mean" in trajectory]
    if not seen:
        return {}
    total = Moments.read(weights, OBSERVATIONS, seen[0].mean.shape)
    for moments in seen:
        total = total.merged(moments)
    return total.tensors(OBSERVATIONS)


def _metrics(records: list[Tensor], batch: Batch, stopped: bool, config: PPOConfig) -> dict[str, float]:
    """Means over the steps that were taken; ``explained_variance`` is 1 - Var(R - V) / Var(R) before the update."""
    means = torch.stack(records).mean(dim=0).tolist() if records else [0.0] * len(_NAMES)
    spread = float(batch.returns.var(correction=0))
    unexplained = float((batch.returns - batch.values).var(correction=0))
    return dict(zip(_NAMES, means, strict=True)) | {
        "explained_variance": 1 - unexplained / spread if spread else 0.0,
        "optimizer_steps": float(len(records)),
        "transitions": float(len(batch.returns)),
        "stopped_early": float(stopped),
        "learning_rate": config.learning_rate,
    }
