"""What may be asked of a control run, field by field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gradserve.wire.control import (
    MAX_ENVS,
    EnvSpec,
    PPOConfig,
    RolloutSpec,
    validate_env,
    validate_ppo,
    validate_rollout,
)
from gradserve.wire.control_defaults import TUNED, ControlDefaults, defaults_for
from gradserve.wire.errors import Invalid

GOOD = RolloutSpec(EnvSpec("CartPole-v1"), 8, 32, seed=0)


def test_good_ones_pass() -> None:
    validate_env(EnvSpec("phys2d/CartPole-v1", {"gravity": -9.0, "desc": ["SF", "HG"], "slippery": None}, 200))
    validate_rollout(GOOD)
    validate_ppo(PPOConfig())


@pytest.mark.parametrize(
    ("env", "field"),
    [
        (EnvSpec("os:system-v0"), "env.id"),
        (EnvSpec("./CartPole-v1"), "env.id"),
        (EnvSpec("CartPole v1"), "env.id"),
        (EnvSpec("CartPole-v1\n"), "env.id"),
        (EnvSpec(""), "env.id"),
        (EnvSpec("GymV26Environment-v0"), "env.id"),
        (EnvSpec("A-v0", max_episode_steps=0), "env.max_episode_steps"),
        (EnvSpec("A-v0", {"render_mode": "human"}), "env.kwargs.render_mode"),
        (EnvSpec("A-v0", {"xml_file": "a.xml"}), "env.kwargs.xml_file"),
        (EnvSpec("A-v0", {"max_episode_steps": 3}), "env.kwargs.max_episode_steps"),
        (EnvSpec("A-v0", {"disable_env_checker": True}), "env.kwargs.disable_env_checker"),
        (EnvSpec("A-v0", {"map": "../secret"}), "env.kwargs.map"),
        (EnvSpec("A-v0", {"map": ["S", "C:\\x"]}), "env.kwargs.map"),
        (EnvSpec("A-v0", {"x": float("nan")}), "env.kwargs.x"),
        (EnvSpec("A-v0", {"x": [0] * 5000}), "env.kwargs.x"),
        (EnvSpec("A-v0", {str(i): 0 for i in range(65)}), "env.kwargs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_environments_that_are_refused(env: EnvSpec, field: str) -> None:
    with pytest.raises(Invalid) as refused:
        validate_env(env)
    assert refused.value.field == field
    assert refused.value.fix


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_envs", 0),
        ("num_envs", MAX_ENVS + 1),
        ("steps", 0),
        ("steps", 1 << 20),
        ("envs_per_task", 0),
        ("anchor_steps", 0),
        ("gamma", 1.1),
        ("gamma", float("nan")),
        ("clip_observation", 0.0),
        ("clip_reward", float("inf")),
    ],
)
def test_rollouts_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(Invalid) as refused:
        validate_rollout(msgspec.structs.replace(GOOD, **{field: value}))
    assert refused.value.field == field


def test_the_product_of_environments_and_steps_is_bounded() -> None:
    with pytest.raises(Invalid, match=r"num_envs \* steps"):
        validate_rollout(msgspec.structs.replace(GOOD, num_envs=4096, steps=2048))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_range", 0.0),
        ("clip_range_vf", -1.0),
        ("ent_coef", -0.1),
        ("vf_coef", float("nan")),
        ("max_grad_norm", -1.0),
        ("gamma", -0.1),
        ("gae_lambda", 2.0),
        ("epochs", 0),
        ("epochs", 1001),
        ("minibatch_size", 0),
        ("target_kl", 0.0),
        ("learning_rate", 0.0),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
    ],
)
def test_updates_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(Invalid) as refused:
        validate_ppo(msgspec.structs.replace(PPOConfig(), **{field: value}))
    assert refused.value.field == field
    assert refused.value.fix


def test_environments_are_cut_into_groups() -> None:
    spec = msgspec.structs.replace(GOOD, num_envs=10, envs_per_task=4)
    assert [list(spec.members(group)) for group in range(spec.groups)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_what_is_unknown_is_refused_when_decoded() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"id": "A-v0", "wrappers": []}, EnvSpec)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"id": "A-v0", "kwargs": {"x": {"y": 1}}}, EnvSpec)


@pytest.mark.parametrize("name", ["CartPole-v1", "LunarLander-v3", "HalfCheetah-v5", "NoSuchThing-v0"])
def test_defaults_are_of_the_environment_and_may_be_asked_for(name: str) -> None:
    found = defaults_for(name)
    validate_ppo(found.ppo)
    validate_rollout(RolloutSpec(EnvSpec(name), found.num_envs, found.steps, seed=0))
    assert (found == ControlDefaults()) == (name == "NoSuchThing-v0")


def test_all_defaults_are_valid() -> None:
    for name, found in TUNED.items():
        validate_ppo(found.ppo)
        validate_rollout(RolloutSpec(EnvSpec(name), found.num_envs, found.steps, seed=0))


def test_a_few_defaults_as_the_zoo_has_them() -> None:
    """hyperparams/ppo.yml, read off by eye."""
    cartpole, lander, cheetah = (defaults_for(name) for name in ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v5"))
    assert (cartpole.ppo.gamma, cartpole.ppo.gae_lambda, cartpole.linear) == (0.98, 0.8, True)
    assert (lander.num_envs, lander.steps, lander.ppo.minibatch_size, lander.ppo.ent_coef) == (16, 1024, 64, 0.01)
    assert (cheetah.ppo.learning_rate, cheetah.hidden, cheetah.log_std) == (2.0633e-05, (256, 256), -2.0)
