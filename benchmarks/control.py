"""Control policies by the engine's own functions, without the service: scores, and CPU seconds against a plain script.

Settings are wire/control_defaults.py's; an evaluation is 20 whole episodes by the likeliest actions, with seeds that
training never used. One thread. Processor seconds are of training alone; evaluations are not in them.

    python -m benchmarks.control CartPole-v1 --seeds 3 --out FILE        # also the plain script, in turns
    python -m benchmarks.control Pendulum-v1 LunarLander-v3 --seeds 1 --fraction 0.1

A published score is rl-zoo3's (benchmark.md: one trained agent each, MuJoCo tasks of version 3, LunarLander of 2).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import torch
from torch import Tensor

from gradserve.compute.engine.control.actor import Policy
from gradserve.compute.engine.control.environments import spaces_of
from gradserve.compute.engine.control.evaluate import evaluate
from gradserve.compute.engine.control.live import LiveGroups
from gradserve.compute.engine.control.ppo import ppo_update
from gradserve.compute.engine.control.rollout import rollout
from gradserve.wire.control import EnvSpec, PPOConfig, RolloutSpec
from gradserve.wire.control_defaults import ControlDefaults, defaults_for

from .run import conditions

PUBLISHED = {
    "CartPole-v1": 500.0,
    "Pendulum-v1": -172.2,
    "Acrobot-v1": -73.5,
    "LunarLander-v3": 242.1,
    "MountainCar-v0": -110.4,
    "MountainCarContinuous-v0": 88.3,
    "HalfCheetah-v5": 5819.1,
    "Hopper-v5": 2410.4,
    "Swimmer-v5": 281.6,
    "Walker2d-v5": 3478.8,
    "Ant-v5": 1327.2,
    "BipedalWalker-v3": 213.3,
}
EPISODES = 20
CHECKS = 20
"""Evaluations during a training, evenly spread."""

Tensors = dict[str, Tensor]


@dataclass
class Training:
    """What a run of one seed did: (environment steps, processor seconds of training, mean return) at each check."""

    checks: list[tuple[int, float, float]] = field(default_factory=list)

    def report(self, published: float | None) -> dict[str, Any]:
        """Final score, and from which check on the published one was held to the end."""
        missed = [i for i, check in enumerate(self.checks) if published is None or check[2] < published]
        held = self.checks[missed[-1] + 1 if missed else 0 :]
        steps, seconds, score = self.checks[-1]
        return {
            "score": round(score, 1),
            "env_steps": steps,
            "cpu_s": round(seconds, 2),
            "held_from_steps": held[0][0] if held else None,
            "held_from_cpu_s": round(held[0][1], 2) if held else None,
            "curve": [[at, round(cpu, 2), round(mean, 1)] for at, cpu, mean in self.checks],
        }


def initial(env: EnvSpec, settings: ControlDefaults, seed: int) -> Tensors:
    """Actor and critic, apart: orthogonal matrices, gains sqrt(2), at the ends 0.01 and 1; biases 0 (detail 2)."""
    observations, actions = spaces_of(env)
    outputs = actions.num_logits + actions.num_means
    generator = torch.Generator().manual_seed(seed)
    weights: Tensors = {}
    for net, width, gain in (("actor", outputs, 0.01), ("critic", 1, 1.0)):
        sizes = [observations.features, *settings.hidden, width]
        for layer, (inputs, neurons) in enumerate(itertools.pairwise(sizes)):
            matrix = torch.empty(neurons, inputs)
            last = layer == len(settings.hidden)
            torch.nn.init.orthogonal_(matrix, gain if last else math.sqrt(2), generator=generator)
            weights[f"{net}.{layer}.weight"], weights[f"{net}.{layer}.bias"] = matrix, torch.zeros(neurons)
    if actions.num_means:
        weights["log_std"] = torch.full((actions.num_means,), settings.log_std)
    return weights


def multilayer(settings: ControlDefaults, box: bool) -> Policy:
    """The policy of those weights as a function, as a graph's interpreter would be."""
    activation = torch.tanh if settings.activation == "tanh" else torch.relu
    layers = len(settings.hidden)

    def head(weights: Mapping[str, Tensor], net: str, x: Tensor) -> Tensor:
        for layer in range(layers):
            x = activation(torch.addmm(weights[f"{net}.{layer}.bias"], x, weights[f"{net}.{layer}.weight"].t()))
        return torch.addmm(weights[f"{net}.{layers}.bias"], x, weights[f"{net}.{layers}.weight"].t())

    def policy(weights: Mapping[str, Tensor], observations: Tensor, /) -> Mapping[str, Tensor]:
        actions, value = head(weights, "actor", observations), head(weights, "critic", observations)
        if box:
            return {"mean": actions, "log_std": weights["log_std"], "value": value}
        return {"logits": actions, "value": value}

    return policy


def annealed(settings: ControlDefaults, done: float) -> PPOConfig:
    """The update's settings when the fraction ``done`` of all steps is behind."""
    if not settings.linear:
        return settings.ppo
    left = max(1 - done, 1e-6)
    return msgspec.structs.replace(
        settings.ppo, learning_rate=settings.ppo.learning_rate * left, clip_range=settings.ppo.clip_range * left
    )


def updates(env: EnvSpec, settings: ControlDefaults, seed: int, total_steps: int) -> Iterator[tuple[int, Tensors]]:
    """The engine's functions in a loop, as a worker would call them: steps so far and weights after each update."""
    spec = RolloutSpec(
        env,
        settings.num_envs,
        settings.steps,
        seed,
        normalise_observations=settings.normalise,
        normalise_rewards=settings.normalise,
        gamma=settings.ppo.gamma,
    )
    action_space, live = spaces_of(env)[1], LiveGroups()
    policy, weights = multilayer(settings, bool(action_space.num_means)), initial(env, settings, seed)
    moments: Tensors | None = None
    state: Tensors = {}
    steps = update = 0
    while steps < total_steps:
        trajectories = []
        for group in range(spec.groups):
            trajectory, new, stats = rollout(policy, weights, spec, group, state, live)
            trajectories.append(trajectory)
            state |= new
            steps += stats.env_steps
        config = annealed(settings, steps / total_steps)
        weights, moments, _ = ppo_update(policy, weights, moments, trajectories, config, update, action_space)
        update += 1
        yield steps, weights
    live.close()


def train(env: EnvSpec, settings: ControlDefaults, seed: int, total_steps: int) -> Training:
    """All updates of one seed, with evaluations between them."""
    found, spent = Training(), 0.0
    policy = multilayer(settings, bool(spaces_of(env)[1].num_means))
    began = time.process_time()
    for steps, weights in updates(env, settings, seed, total_steps):
        spent += time.process_time() - began
        if steps * CHECKS // total_steps > len(found.checks):
            played = evaluate(
                policy, weights, env, EPISODES, seed=1_000_000 + seed, normalise_observations=settings.normalise
            )
            found.checks.append((steps, spent, sum(played.returns) / EPISODES))
        began = time.process_time()
    return found


class _PlainPolicy(torch.nn.Module):
    """The same actor and critic as modules."""

    def __init__(self, features: int, actions: int, settings: ControlDefaults) -> None:
        super().__init__()
        self.actor, self.critic = (self._net(features, settings, *end) for end in ((actions, 0.01), (1, 1.0)))

    @staticmethod
    def _net(features: int, settings: ControlDefaults, outputs: int, gain: float) -> torch.nn.Sequential:
        layers: list[torch.nn.Module] = []
        for width in settings.hidden:
            layers += [torch.nn.Linear(features, width), torch.nn.Tanh()]
            torch.nn.init.orthogonal_(layers[-2].weight, math.sqrt(2))  # type: ignore[arg-type]
            features = width
        last = torch.nn.Linear(features, outputs)
        torch.nn.init.orthogonal_(last.weight, gain)
        for layer in (*layers, last):
            if isinstance(layer, torch.nn.Linear):
                torch.nn.init.zeros_(layer.bias)
        return torch.nn.Sequential(*layers, last)


def plain_cartpole(settings: ControlDefaults, seed: int, total_steps: int) -> Iterator[None]:
    """The same algorithm as one would write it in a script, with torch.distributions and torch.optim.Adam.

    Yields after each update, so that it can take turns with ours.
    """
    torch.manual_seed(seed)
    ppo, T, n = settings.ppo, settings.steps, settings.num_envs
    envs: Any = gymnasium.make_vec("CartPole-v1", n, vectorization_mode="vector_entry_point")
    policy = _PlainPolicy(4, 2, settings)
    adam = torch.optim.Adam(policy.parameters(), ppo.learning_rate, (ppo.beta1, ppo.beta2), ppo.eps)
    seen = torch.from_numpy(envs.reset(seed=seed)[0])
    resetting, steps = torch.zeros(n, dtype=torch.bool), 0
    while steps < total_steps:
        observations, actions = torch.zeros(T, n, 4), torch.zeros(T, n, dtype=torch.long)
        logprobs, values, rewards = torch.zeros(T, n), torch.zeros(T + 1, n), torch.zeros(T, n)
        terminal, over, valid = (torch.zeros(T, n, dtype=torch.bool) for _ in range(3))
        with torch.no_grad():
            for t in range(T):
                observations[t], valid[t] = seen, ~resetting
                chosen: Any = torch.distributions.Categorical(logits=policy.actor(seen))
                actions[t], values[t] = chosen.sample(), policy.critic(seen)[:, 0]
                logprobs[t] = chosen.log_prob(actions[t])
                found, reward, terminated, truncated, _ = envs.step(actions[t].numpy())
                seen, rewards[t] = torch.from_numpy(found), torch.from_numpy(np.asarray(reward))
                terminal[t], resetting = torch.from_numpy(terminated), torch.from_numpy(terminated | truncated)
                over[t] = resetting
            values[T] = policy.critic(seen)[:, 0]
            advantage, later = torch.zeros(T, n), torch.zeros(n)
            for t in reversed(range(T)):
                delta = rewards[t] + ppo.gamma * values[t + 1] * ~terminal[t] - values[t]
                later = delta + ppo.gamma * ppo.gae_lambda * ~over[t] * later
                advantage[t] = later
        steps += int(valid.sum())
        config = annealed(settings, steps / total_steps)
        for group in adam.param_groups:
            group["lr"] = config.learning_rate
        columns = [x[valid] for x in (observations, actions, logprobs, advantage, advantage + values[:T])]
        for _ in range(ppo.epochs):
            for rows in torch.split(torch.randperm(len(columns[0])), ppo.minibatch_size):
                _plain_step(policy, adam, config, *(column[rows] for column in columns))
        yield
    envs.close()


def _plain_step(
    policy: _PlainPolicy,
    adam: torch.optim.Adam,
    config: PPOConfig,
    observations: Tensor,
    actions: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    returns: Tensor,
) -> None:
    chosen: Any = torch.distributions.Categorical(logits=policy.actor(observations))
    ratio = (chosen.log_prob(actions) - logprobs).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    held = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
    policy_loss = -torch.min(ratio * advantage, held * advantage).mean()
    value_loss = torch.nn.functional.mse_loss(policy.critic(observations)[:, 0], returns)
    adam.zero_grad()
    (policy_loss + config.vf_coef * value_loss - config.ent_coef * chosen.entropy().mean()).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
    adam.step()


def against_plain(settings: ControlDefaults, seed: int, total_steps: int) -> dict[str, float]:
    """Processor seconds of the same training by both, update by update in turns, so that both meet the same machine."""
    runs: dict[str, Iterator[Any]] = {
        "ours": updates(EnvSpec("CartPole-v1"), settings, seed, total_steps),
        "plain": plain_cartpole(settings, seed, total_steps),
    }
    seconds = dict.fromkeys(runs, 0.0)
    over = object()
    while runs:
        for name in list(runs):
            began = time.process_time()
            if next(runs[name], over) is over:
                del runs[name]
            seconds[name] += time.process_time() - began
    return {
        "ours_cpu_s": round(seconds["ours"], 2),
        "plain_cpu_s": round(seconds["plain"], 2),
        "ratio": round(seconds["ours"] / seconds["plain"], 3),
    }


def measure(name: str, seeds: int, fraction: float, batch: int | None) -> dict[str, Any]:
    """All seeds of one environment."""
    env, settings = EnvSpec(name), defaults_for(name)
    if batch is not None:
        settings = msgspec.structs.replace(settings, num_envs=batch // settings.steps)
    total = int(settings.total_steps * fraction)
    runs = []
    for seed in range(seeds):
        runs.append(train(env, settings, seed, total).report(PUBLISHED.get(name)))
        print(name, f"seed {seed}", json.dumps(runs[-1]), flush=True)
    found: dict[str, Any] = {
        "published": PUBLISHED.get(name),
        "settings": msgspec.to_builtins(settings),
        "fraction_of_budget": fraction,
        "runs": runs,
    }
    if name == "CartPole-v1":
        found["against_plain"] = [against_plain(settings, seed, total // 5) for seed in range(seeds)]
        print(name, "against a plain script", json.dumps(found["against_plain"]), flush=True)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the published budget of environment steps")
    parser.add_argument("--batch", type=int, help="transitions per update, by more environments")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(name, asked.seeds, asked.fraction, asked.batch) for name in asked.environments}
    if asked.out:
        asked.out.write_text(json.dumps({"conditions": conditions(), "control": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
