"""A policy acts in a group of environments: trajectories for an update.

A trajectory is a dict of tensors, T steps of n environments:

    observations [T, n, ...]  as the policy saw them (float32, normalised if asked; images uint8)
    actions      [T, n, A]    float32 columns, not clipped
    logprobs     [T, n]       of those actions under the policy that drew them
    values       [T, n]       the critic's of the observations
    next_values  [T, n]       the critic's of what the transitions led to; 0 where that is terminal
    rewards      [T, n]       normalised if asked
    terminated, truncated, valid [T, n]   bool; what is not valid is no transition
    observed.mean, observed.var [features], observed.count   float64 moments of the raw observations, if asked

An environment group's state is tensors under ``env.<group>.``: its Anchors (see environments), the steps since the
run began, sums of the running episodes, the reward normaliser's moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradserve.compute.engine.control.actor import Actor, Policy, as_arrays, normaliser_for
from gradserve.compute.engine.control.distributions import ActionDistribution
from gradserve.compute.engine.control.environments import Anchors, Bools, Group, Ints
from gradserve.compute.engine.control.live import LiveGroups
from gradserve.compute.engine.control.noise import action_noise
from gradserve.compute.engine.control.normalise import Doubles, Moments, RewardNormaliser
from gradserve.compute.engine.control.spaces import Floats
from gradserve.wire.control import EpisodeStats, RolloutSpec, validate_rollout
from gradserve.wire.errors import Invalid

Tensors = dict[str, Tensor]

OBSERVED = "observed."
_REWARD = "reward."


def rollout(
    policy: Policy,
    weights: Mapping[str, Tensor],
    spec: RolloutSpec,
    group: int,
    state: Mapping[str, Tensor] | None,
    live: LiveGroups | None = None,
) -> tuple[Tensors, Tensors, EpisodeStats]:
    """``spec.steps`` steps of one group: the trajectory, the group's new state, and the episodes that ended.

    ``state`` is None or lacks the group's names at its first rollout; other names in it are ignored. ``live`` is
    where groups wait between rollouts: with it or without, the result is the same. Raises Invalid for a spec, an
    environment or a policy that does not fit.
    """
    validate_rollout(spec)
    if not 0 <= group < spec.groups:
        raise Invalid("bad_control", f"group {group} of {spec.groups}.", field="group")
    live = live if live is not None else LiveGroups(capacity=0)
    members, prefix = spec.members(group), f"env.{group}."
    own = {name.removeprefix(prefix): tensor for name, tensor in (state or {}).items() if name.startswith(prefix)}
    anchors = _anchors(own, len(members))
    envs = live.take(spec.env, spec.seed, members, anchors)
    before = _State.of(own, spec, envs, anchors)
    actor = Actor(policy, weights, envs.action_space, normaliser_for(weights, spec, envs.observation_space))
    with torch.no_grad():
        trajectory, after, stats = _collect(actor, spec, members, envs, before)
    live.keep(spec.env, spec.seed, members, after.anchors, envs)
    return trajectory, {prefix + name: tensor for name, tensor in after.tensors().items()}, stats


def _anchors(own: Tensors, n: int) -> Anchors | None:
    if not own:
        return None
    if len(own["returns"]) != n:
        detail = f"the state is of {len(own['returns'])} environments, the rollout asks for {n}."
        raise Invalid("bad_control", detail, field="num_envs", fix="Keep num_envs and envs_per_task during a run.")
    return Anchors(own["episodes"].numpy(), own["lengths"].numpy(), own["actions"].numpy())


@dataclass
class _State:
    """What a group remembers between rollouts.

    ``steps`` since the run began; ``returns`` and ``return_lengths`` [n] of the running episodes; ``reward``
    normalises rewards, if asked.
    """

    anchors: Anchors
    steps: int
    returns: Doubles
    return_lengths: Ints
    reward: RewardNormaliser | None

    @classmethod
    def of(cls, own: Tensors, spec: RolloutSpec, envs: Group, anchors: Anchors | None) -> _State:
        """At the begin of a rollout: what ``own`` holds, but environments that ran for too long start anew."""
        n = len(envs.observation)
        reward = RewardNormaliser(own, _REWARD, n, spec.gamma, spec.clip_reward) if spec.normalise_rewards else None
        if anchors is None:
            return cls(Anchors.fresh(envs.streams, envs.width), 0, np.zeros(n), np.zeros(n, np.int64), reward)
        state = cls(
            anchors, int(own["steps"]), own["returns"].numpy().copy(), own["return_lengths"].numpy().copy(), reward
        )
        stale = anchors.lengths >= spec.anchor_steps
        if stale.any():
            state._start_anew(stale, envs)
        return state

    def _start_anew(self, streams: Bools, envs: Group) -> None:
        self.anchors = self.anchors.restarted(streams)
        envs.restore(self.anchors)
        which = np.repeat(streams, len(self.returns) // len(streams))
        self.returns[which], self.return_lengths[which] = 0, 0
        if self.reward:
            self.reward.restart(which)

    def tensors(self) -> Tensors:
        """All of it, as ``of`` reads it."""
        arrays: dict[str, Any] = {
            "episodes": self.anchors.episodes,
            "lengths": self.anchors.lengths,
            "actions": self.anchors.actions,
            "steps": np.array(self.steps),
            "returns": self.returns,
            "return_lengths": self.return_lengths,
        }
        reward = self.reward.tensors() if self.reward else {}
        return {name: torch.from_numpy(array) for name, array in arrays.items()} | reward


def _collect(
    actor: Actor, spec: RolloutSpec, members: range, envs: Group, before: _State
) -> tuple[Tensors, _State, EpisodeStats]:
    taken = _act(actor, spec, members, envs, before.steps)
    ended = taken.terminated | taken.truncated
    stats = _episodes(taken.rewards, ended, taken.valid, before)
    rewards = taken.rewards
    if before.reward:
        rewards = np.stack([before.reward(*at) for at in zip(rewards, ended, taken.valid, strict=True)])
    trajectory = {
        "observations": torch.from_numpy(taken.seen),
        "actions": torch.from_numpy(taken.actions),
        "logprobs": _log_probs(actor.distribution, taken),
        "values": torch.from_numpy(taken.values),
        "next_values": torch.from_numpy(_next_values(actor, envs.observation, taken)),
        "rewards": torch.from_numpy(rewards.astype(np.float32)),
        "terminated": torch.from_numpy(taken.terminated),
        "truncated": torch.from_numpy(taken.truncated),
        "valid": torch.from_numpy(taken.valid),
    }
    if spec.normalise_observations:
        trajectory |= Moments.of(taken.raw[taken.valid]).tensors(OBSERVED)
    chunk = taken.actions.reshape(spec.steps, envs.streams, envs.width)
    anchors = before.anchors.after(chunk, envs.restarts(ended))
    after = replace(before, anchors=anchors, steps=before.steps + spec.steps)
    return trajectory, after, stats


@dataclass
class _Taken:
    """T steps of n environments.

    ``raw`` are the observations before normalisation (``seen`` itself if there is none), ``outputs`` the
    distribution's at each step, ``cut`` the observations in which episodes were truncated, in their order.
    """

    raw: NDArray[Any]
    seen: NDArray[Any]
    actions: Floats
    values: Floats
    rewards: Doubles
    terminated: Bools
    truncated: Bools
    valid: Bools
    outputs: list[dict[str, Tensor]]
    cut: list[NDArray[Any]]


def _act(actor: Actor, spec: RolloutSpec, members: range, envs: Group, first_step: int) -> _Taken:
    T, n = spec.steps, len(members)
    noise = action_noise(spec.seed, members, first_step, T, actor.distribution.draws)
    seen = np.empty((T, *envs.observation.shape), envs.observation.dtype)
    taken = _Taken(
        raw=np.empty_like(seen) if spec.normalise_observations else seen,
        seen=seen,
        actions=np.empty((T, n, envs.action_space.size), np.float32),
        values=np.empty((T, n), np.float32),
        rewards=np.empty((T, n)),
        terminated=np.empty((T, n), np.bool_),
        truncated=np.empty((T, n), np.bool_),
        valid=np.empty((T, n), np.bool_),
        outputs=[],
        cut=[],
    )
    for t in range(T):
        taken.raw[t] = envs.observation
        taken.seen[t] = actor.see(envs.observation)
        outputs, taken.values[t] = actor(taken.seen[t])
        taken.outputs.append(outputs)
        taken.actions[t] = actor.distribution.sample(as_arrays(outputs), noise[t])
        step = envs.step(taken.actions[t])
        taken.rewards[t], taken.terminated[t], taken.truncated[t] = step.reward, step.terminated, step.truncated
        taken.valid[t] = step.valid
        if step.truncated.any():
            taken.cut.append(step.final_observation[step.truncated & ~step.terminated])
    return taken


def _next_values(actor: Actor, last: NDArray[Any], taken: _Taken) -> Floats:
    """The critic's values of what each transition ended in, 0 where that is terminal: asked for all at once."""
    ends = np.concatenate([last, *taken.cut])
    _, found = actor(actor.see(ends))
    n = len(last)
    following = np.concatenate([taken.values[1:], found[None, :n]])
    following[taken.truncated & ~taken.terminated] = found[n:]
    following[taken.terminated] = 0
    return following


def _log_probs(distribution: ActionDistribution, taken: _Taken) -> Tensor:
    """[T, n]"""
    T, n, columns = taken.actions.shape
    # What does not depend on the state has one row for all.
    outputs = {
        name: torch.cat([found[name] for found in taken.outputs]) if first.dim() == 2 else first
        for name, first in taken.outputs[0].items()
    }
    actions = torch.from_numpy(taken.actions.reshape(T * n, columns))
    return distribution.log_prob(outputs, actions).view(T, n)


def _episodes(rewards: Doubles, ended: Bools, valid: Bools, state: _State) -> EpisodeStats:
    """What ended; the sums of what runs on go into ``state``."""
    returns: list[float] = []
    lengths: list[int] = []
    for reward, end, moved in zip(rewards, ended, valid, strict=True):
        state.returns += reward * moved
        state.return_lengths += moved
        if end.any():
            returns += state.returns[end].tolist()
            lengths += state.return_lengths[end].tolist()
            state.returns[end], state.return_lengths[end] = 0, 0
    return EpisodeStats(tuple(returns), tuple(lengths), int(valid.sum()))
