"""Groups of environments: which may be made, and that a replay is the live group, bit for bit."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve.compute.engine.control.environments import Anchors, Group, Step, make_group, spaces_of
from gradserve.wire.control import EnvSpec
from gradserve.wire.errors import Invalid
from tests.numerics.control.toys import CORRIDOR, CORRIDOR_TOGETHER, RANDOM_WALK

MEMBERS = range(3, 6)
STEPS = 150

REPLAYED = [
    *("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"),
    *("FrozenLake-v1", "Blackjack-v1", RANDOM_WALK, CORRIDOR_TOGETHER),
    *("LunarLander-v3", "LunarLanderContinuous-v3", "BipedalWalker-v3"),
    *("HalfCheetah-v5", "Hopper-v5", "Ant-v5", "InvertedPendulum-v5"),
]


def started(env: EnvSpec, anchors: Anchors | None = None, members: range = MEMBERS) -> Group:
    """Skips the test where the environment's package is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium and MuJoCo warn about their own future
        try:
            group = make_group(env, 11, members)
        except Invalid as error:
            if error.code == "missing_extra":
                pytest.skip(error.detail)
            raise
        group.restore(anchors or Anchors.fresh(group.streams, group.width))
    return group


def draws(group: Group, steps: int, seed: int = 0) -> NDArray[Any]:
    """Actions that change slowly, so that walkers get somewhere: [steps, n, A]."""
    draw, space = np.random.default_rng(seed), group.action_space
    shape = (steps, len(group.observation), space.size)
    if space.kind == "box":
        return np.tanh(draw.normal(size=shape).cumsum(0) / 3).astype(np.float32)
    return draw.integers(0, space.nvec, shape).astype(np.float32)


def equal(a: Step, b: Step) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_is_the_live_group(name: str) -> None:
    """Another object, reset with the seeds and given the actions again, goes on with the same bits."""
    live = started(EnvSpec(name))
    actions = draws(live, STEPS)
    ended = np.array([step.terminated | step.truncated for step in map(live.step, actions)])
    anchors = Anchors.fresh(live.streams, live.width)
    for part, ends in zip(np.split(actions, [7, 60]), np.split(ended, [7, 60]), strict=True):
        anchors = anchors.after(part.reshape(len(part), live.streams, live.width), live.restarts(ends))
    replayed = started(EnvSpec(name), anchors)
    assert np.array_equal(live.observation, replayed.observation)
    for again in draws(live, STEPS, seed=1):
        assert equal(live.step(again), replayed.step(again))


def test_environments_one_by_one_do_not_depend_on_their_company() -> None:
    env = EnvSpec(RANDOM_WALK)
    together, alone = started(env), started(env, members=range(4, 5))
    for actions in draws(together, 40):
        all_, one = together.step(actions), alone.step(actions[1:2])
        assert all(np.array_equal(x[1:2], y) for x, y in zip(all_, one, strict=True))


def test_each_episode_and_each_environment_starts_differently() -> None:
    group = started(EnvSpec(RANDOM_WALK))
    starts = [group.observation.copy()]
    for actions in draws(group, 60):
        step = group.step(actions)
        ended = step.terminated | step.truncated
        starts.append(step.observation[ended])
    positions = np.concatenate(starts)[:, 0]
    assert len(positions) > 15
    assert len(np.unique(positions)) == len(positions)


def test_the_last_observation_of_an_episode_is_not_the_first_of_the_next() -> None:
    group = started(EnvSpec(CORRIDOR, {"terminates": 3}))
    for _ in range(3):
        step = group.step(np.zeros((3, 1), np.float32))
    assert step.terminated.all()
    assert step.final_observation.argmax(1).tolist() == [3, 3, 3]
    assert step.observation.argmax(1).tolist() == [0, 0, 0]


def test_anchors_keep_the_actions_since_the_last_reset() -> None:
    taken = np.arange(6, dtype=np.float32).reshape(3, 2, 1)  # stream 0: 0 2 4, stream 1: 1 3 5
    anchors = Anchors.fresh(2, 1).after(taken, np.array([[False, False], [True, False], [False, False]]))
    assert [part.ravel().tolist() for part in anchors.by_stream()] == [[4], [1, 3, 5]]
    assert anchors.episodes.tolist() == [1, 0]
    again = anchors.after(taken[:1], np.array([[False, True]]))
    assert [part.ravel().tolist() for part in again.by_stream()] == [[4, 0], []]
    anew = again.restarted(np.array([True, False]))
    assert [part.ravel().tolist() for part in anew.by_stream()] == [[], []]
    assert anew.episodes.tolist() == [2, 1]


@pytest.mark.parametrize("terminates", [2, 5])
def test_settings_and_the_time_limit_reach_the_environment(terminates: int) -> None:
    for name in (CORRIDOR, CORRIDOR_TOGETHER):
        group = started(EnvSpec(name, {"terminates": terminates}, max_episode_steps=3))
        step = group.step(np.zeros((3, 1), np.float32))
        for _ in range(min(terminates, 3) - 1):
            step = group.step(np.zeros((3, 1), np.float32))
        assert step.terminated.all() == (terminates == 2)
        assert step.truncated.all() == (terminates == 5)


def test_spaces_are_told() -> None:
    observations, actions = spaces_of(EnvSpec("CartPole-v1"))
    assert (observations.features, actions.num_logits, actions.num_means) == (4, 2, 0)


@pytest.mark.parametrize(
    "env",
    [
        EnvSpec("os:CartPole-v1"),
        EnvSpec("CartPole-v999"),
        EnvSpec("CartPole-v1", {"render_mode": "human"}),
        EnvSpec("CartPole-v1", {"no_such_setting": 1}),
        EnvSpec("GymV21Environment-v0", {"env_id": "os:x"}),
    ],
    ids=lambda env: f"{env.id} {sorted(env.kwargs)}",
)
def test_what_may_not_be_made_is_refused(env: EnvSpec) -> None:
    with pytest.raises(Invalid) as refused:
        make_group(env, 0, range(1))
    assert (refused.value.field or "").startswith("env.")
    assert refused.value.fix


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(Invalid, match="gymnasium is not installed") as refused:
        make_group(EnvSpec("CartPole-v1"), 0, range(1))
    assert "gradserve[control]" in (refused.value.fix or "")


def test_a_missing_package_of_an_environment_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**settings: Any) -> gymnasium.Env[Any, Any]:
        raise gymnasium.error.DependencyNotInstalled("Box2D is not installed")

    monkeypatch.setitem(
        gymnasium.registry, "toys/Broken-v0", gymnasium.envs.registration.EnvSpec("toys/Broken-v0", entry_point=broken)
    )
    with pytest.raises(Invalid, match="Box2D is not installed") as refused:
        make_group(EnvSpec("toys/Broken-v0"), 0, range(1))
    assert "gradserve[box2d]" in (refused.value.fix or "")
