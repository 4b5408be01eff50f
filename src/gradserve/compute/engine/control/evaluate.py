"""Episodes that nobody learns from: how good a policy is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gradserve.compute.engine.control.actor import Actor, Policy, as_arrays, normaliser_for
from gradserve.compute.engine.control.environments import Anchors, Group, MakeGroup, make_group
from gradserve.compute.engine.control.noise import action_noise
from gradserve.wire.control import EnvSpec, EpisodeStats, RolloutSpec, validate_rollout
from gradserve.wire.errors import Invalid

_TOGETHER = 16
"""Episodes that run side by side."""
_ENDLESS = 1_000_000
"""Steps after which an episode is taken for one that never ends."""


def evaluate(
    policy: Policy,
    weights: Mapping[str, Tensor],
    env: EnvSpec,
    episodes: int,
    seed: int,
    deterministic: bool = True,
    normalise_observations: bool = False,
    clip_observation: float = 10.0,
    make: MakeGroup = make_group,
) -> EpisodeStats:
    """Whole episodes, number i with the seed (seed, i): by the likeliest actions, or by drawn ones.

    ``make`` makes the environments: those of a user's own class are not registered.

    Observations are normalised by the weights' moments, which stay as they are; rewards never are. Raises Invalid for
    an episode that does not end within a million steps.
    """
    found: list[EpisodeStats] = []
    spec = RolloutSpec(
        env, 1, 1, seed, normalise_observations=normalise_observations, clip_observation=clip_observation
    )
    validate_rollout(spec)
    with torch.no_grad():
        for first in range(0, episodes, _TOGETHER):
            members = range(first, min(first + _TOGETHER, episodes))
            envs = make(env, seed, members)
            try:
                actor = Actor(policy, weights, envs.action_space, normaliser_for(weights, spec, envs.observation_space))
                found.append(_play(actor, envs, seed, members, deterministic))
            finally:
                envs.close()
    return EpisodeStats(
        tuple(value for part in found for value in part.returns),
        tuple(length for part in found for length in part.lengths),
        sum(part.env_steps for part in found),
    )


def _play(actor: Actor, envs: Group, seed: int, members: range, deterministic: bool) -> EpisodeStats:
    """The first episode of each; those that are done go on meanwhile, uncounted but for what they cost."""
    n = len(members)
    envs.restore(Anchors.fresh(envs.streams, envs.width))
    returns, lengths, running, spent = np.zeros(n), np.zeros(n, np.int64), np.ones(n, np.bool_), 0
    for t in range(_ENDLESS):
        outputs = as_arrays(actor(actor.see(envs.observation))[0])
        distribution = actor.distribution
        if deterministic:
            actions = distribution.mode(outputs)
        else:
            actions = distribution.sample(outputs, action_noise(seed, members, t, 1, distribution.draws)[0])
        step = envs.step(actions)
        returns += step.reward * running
        lengths += running
        spent += int(step.valid.sum())
        running &= ~(step.terminated | step.truncated)
        if not running.any():
            return EpisodeStats(tuple(returns.tolist()), tuple(lengths.tolist()), spent)
    fix = "Send env.max_episode_steps."
    raise Invalid("endless_episode", f"an episode ran for {_ENDLESS} steps.", field="env.max_episode_steps", fix=fix)
