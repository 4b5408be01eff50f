"""What PPOTrainer is told: keywords over the defaults of an environment, as one frozen record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gradserve.algorithms.schedules import linear, value_at
from gradserve.wire.control import EnvSpec, PPOConfig, RolloutSpec
from gradserve.wire.control_defaults import ControlDefaults

SCHEDULED = ("learning_rate", "clip_range")
"""PPO's settings that may change from epoch to epoch."""
_SEVERAL = 8
"""Environments side by side where the defaults do not fit the batch: a pass of the policy costs the same for a few."""


class PPOSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``num_envs`` environments for ``steps`` steps are one epoch's batch; the other fields are RolloutSpec's, and
    ``ppo`` is PPOConfig without what ``learning_rate`` and ``clip_range`` say for each epoch."""

    num_envs: int
    steps: int
    ppo: PPOConfig
    learning_rate: Any
    clip_range: Any
    seed: int = 0
    envs_per_task: int = 64
    normalise_observations: bool = False
    normalise_rewards: bool = False
    clip_observation: float = 10.0
    clip_reward: float = 10.0
    anchor_steps: int = 2048

    def rollout(self, env: EnvSpec) -> RolloutSpec:
        """An epoch's rollout."""
        same = {name: getattr(self, name) for name in RolloutSpec.__struct_fields__ if name in _OWN}
        return RolloutSpec(env=env, gamma=self.ppo.gamma, **same)

    def update(self, done: float) -> PPOConfig:
        """The update when the fraction ``done`` of all epochs is behind."""
        return msgspec.structs.replace(self.ppo, **{name: value_at(getattr(self, name), done) for name in SCHEDULED})

    def changed(self, batch: int | None, given: Mapping[str, Any]) -> PPOSettings:
        """With the keywords ``given`` instead, and ``batch`` transitions. Raises ValueError."""
        own, of_ppo = _apart(given)
        if batch is not None:
            own["num_envs"], own["steps"] = _divided(batch, own.get("num_envs", self.num_envs))
        settings = msgspec.structs.replace(self, ppo=msgspec.structs.replace(self.ppo, **of_ppo), **own)
        lost = [name for name in SCHEDULED if getattr(settings, name) is None]
        if lost:
            raise ValueError(f"{lost[0]} was a function, which is not stored: give it again")
        return settings

    def storable(self) -> PPOSettings:
        """Without functions, which can't be stored."""
        lost = {name: None for name in SCHEDULED if callable(getattr(self, name))}
        return msgspec.structs.replace(self, **lost)


_OWN = frozenset(PPOSettings.__struct_fields__) - {"ppo"}
KINDS: Mapping[str, Any] = {
    field.name: field.type
    for record in (PPOConfig, PPOSettings)
    for field in msgspec.structs.fields(record)
    if field.name not in ("ppo", "steps")
}
"""The settings with their types."""


def refuse_unknown(given: Iterable[str]) -> None:
    """Raises TypeError for a keyword that is no setting, with those that are."""
    unknown = sorted(set(given) - set(KINDS))
    if unknown:
        raise TypeError(f"PPOTrainer has no setting {unknown[0]!r}; it has {', '.join(sorted(KINDS))}")


def settings_of(defaults: ControlDefaults, batch: int | None, given: Mapping[str, Any]) -> PPOSettings:
    """The keywords ``given`` over ``defaults``, with ``batch`` transitions per epoch.

    Raises ValueError for sizes that do not fit, and for a schedule that can't be read.
    """
    own, of_ppo = _apart(given)
    tuned: dict[str, float] = {name: getattr(defaults.ppo, name) for name in SCHEDULED}
    usual = {name: linear(value) if defaults.linear else value for name, value in tuned.items()}
    num_envs, steps = _sizes(defaults, batch, own.pop("num_envs", None))
    settings = PPOSettings(
        num_envs=num_envs,
        steps=steps,
        ppo=msgspec.structs.replace(defaults.ppo, **of_ppo),
        **{"normalise_observations": defaults.normalise, "normalise_rewards": defaults.normalise, **usual, **own},
    )
    settings.update(0.0)
    return settings


def _apart(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of PPOSettings, and of its ``ppo``."""
    own = {name: value for name, value in given.items() if name in _OWN}
    return own, {name: value for name, value in given.items() if name not in _OWN}


def _sizes(defaults: ControlDefaults, batch: int | None, num_envs: int | None) -> tuple[int, int]:
    """How many environments, for how many steps each."""
    if batch is None:
        return num_envs or defaults.num_envs, defaults.steps
    return _divided(batch, num_envs or _number_of_envs(defaults, batch))


def _divided(batch: int, num_envs: int) -> tuple[int, int]:
    if batch < 1 or num_envs < 1 or batch % num_envs:
        raise ValueError(f"rollout_batch_size {batch} is no multiple of num_envs {num_envs}")
    return num_envs, batch // num_envs


def _number_of_envs(defaults: ControlDefaults, batch: int) -> int:
    """As many as leave the defaults' steps as they are; where that can't be, a few that divide the batch."""
    if batch % defaults.steps == 0:
        return batch // defaults.steps
    most = max(defaults.num_envs, _SEVERAL)
    return max((count for count in range(1, most + 1) if batch % count == 0), default=1)
