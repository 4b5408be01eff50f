"""Environments small enough to know everything about, and policies to go with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from gradserve.wire.control import EnvSpec

CORRIDOR, CORRIDOR_TOGETHER, RANDOM_WALK = "toys/Corridor-v0", "toys/CorridorTogether-v0", "toys/RandomWalk-v0"
CELLS = 4


class Corridor(gymnasium.Env[Any, Any]):
    """Reward 1 at each step, whatever is done; the observation is the cell, which is the step modulo CELLS.

    It terminates after ``terminates`` steps (0: never); max_episode_steps truncates it.
    """

    observation_space = spaces.Box(0, 1, (CELLS,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, terminates: int = 0) -> None:
        self._terminates, self._at = terminates, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._at = 0
        return self._cell(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._at += 1
        return self._cell(), 1.0, self._at == self._terminates, False, {}

    def _cell(self) -> Any:
        return np.eye(CELLS, dtype=np.float32)[self._at % CELLS]


class CorridorTogether(VectorEnv[Any, Any, Any]):
    """The same, many as one object, reset in the step after an episode's last."""

    def __init__(self, num_envs: int = 1, max_episode_steps: int | None = None, terminates: int = 0) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self._terminates, self._limit = num_envs, terminates, max_episode_steps or 0
        self.single_observation_space, self.single_action_space = Corridor.observation_space, Corridor.action_space
        self._at, self._over = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._at[:], self._over[:] = 0, False
        return np.eye(CELLS, dtype=np.float32)[self._at % CELLS], {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._at = np.where(self._over, 0, self._at + 1)
        moved = ~self._over
        terminated, truncated = (moved & (self._at == limit) for limit in (self._terminates, self._limit))
        self._over = terminated | truncated
        return np.eye(CELLS, dtype=np.float32)[self._at % CELLS], moved.astype(np.float64), terminated, truncated, {}


class RandomWalk(gymnasium.Env[Any, Any]):
    """Position and step, moved by the action and by noise of the environment's own generator; ends beyond 3."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._state = np.array([self.np_random.normal(), 0.0])
        return self._state.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._state += [float(action[0]) + self.np_random.normal(), 1.0]
        return self._state.copy(), float(self._state[0]), bool(abs(self._state[0]) > 3), False, {}


def register() -> None:
    """Makes the toys known to Gymnasium, once."""
    if CORRIDOR not in gymnasium.registry:
        gymnasium.register(CORRIDOR, entry_point=f"{__name__}:Corridor")
        gymnasium.register(
            CORRIDOR_TOGETHER, entry_point=f"{__name__}:Corridor", vector_entry_point=f"{__name__}:CorridorTogether"
        )
        gymnasium.register(RANDOM_WALK, entry_point=f"{__name__}:RandomWalk", max_episode_steps=9)


def corridor(together: bool, terminates: int = 0, limit: int | None = None) -> EnvSpec:
    """A Corridor in either form."""
    return EnvSpec(CORRIDOR_TOGETHER if together else CORRIDOR, {"terminates": terminates}, limit)


def mlp_weights(features: int, outputs: int, box: bool = False, hidden: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """An actor and a critic of one hidden layer; ``box`` adds log deviations."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for net, width in (("actor", outputs), ("critic", 1)):
        for layer, (a, b) in enumerate(((features, hidden), (hidden, width))):
            weights[f"{net}.{layer}.weight"] = torch.randn(b, a, generator=generator) / math.sqrt(a)
            weights[f"{net}.{layer}.bias"] = torch.zeros(b)
    if box:
        weights["log_std"] = torch.full((outputs,), -0.5)
    return weights


def mlp(weights: Mapping[str, Tensor], observations: Tensor) -> dict[str, Tensor]:
    """logits, or mean and log_std, and value."""
    heads = {}
    for net in ("actor", "critic"):
        hidden = torch.tanh(observations @ weights[f"{net}.0.weight"].T + weights[f"{net}.0.bias"])
        heads[net] = hidden @ weights[f"{net}.1.weight"].T + weights[f"{net}.1.bias"]
    if "log_std" in weights:
        return {"mean": heads["actor"], "log_std": weights["log_std"], "value": heads["critic"]}
    return {"logits": heads["actor"], "value": heads["critic"]}


def table(weights: Mapping[str, Tensor], observations: Tensor) -> dict[str, Tensor]:
    """A critic with one number per cell, and indifference about actions."""
    return {"logits": observations[:, :2] * 0, "value": observations @ weights["v"]}
