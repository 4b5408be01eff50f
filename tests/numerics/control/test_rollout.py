"""Rollouts: whoever collects them, in whatever order, with live environments or replayed ones, gets the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradserve.compute.engine.control.evaluate import evaluate
from gradserve.compute.engine.control.live import LiveGroups
from gradserve.compute.engine.control.rollout import Tensors, rollout
from gradserve.wire.control import EnvSpec, EpisodeStats, RolloutSpec
from gradserve.wire.errors import Invalid
from tests.numerics.control.toys import CORRIDOR, RANDOM_WALK, corridor, mlp, mlp_weights, table

CARTPOLE = RolloutSpec(EnvSpec("CartPole-v1"), 6, 20, seed=3, envs_per_task=2, normalise_rewards=True)
WALK = RolloutSpec(EnvSpec(RANDOM_WALK), 5, 13, seed=3, envs_per_task=2, normalise_rewards=True)
SPECS = pytest.mark.parametrize("spec", [CARTPOLE, WALK], ids=["as one object", "one by one"])

Collected = tuple[list[Tensors], Tensors, list[EpisodeStats]]


def weights_for(spec: RolloutSpec) -> Tensors:
    return mlp_weights(4, 2) if spec is CARTPOLE else mlp_weights(2, 1, box=True)


def collect(spec: RolloutSpec, order: list[list[int]], live: list[LiveGroups | None]) -> Collected:
    """One rollout of all groups per entry of ``order``; group g at entry i by worker (g + i) of those in ``live``."""
    state: Tensors = {}
    trajectories, stats = [], []
    for i, groups in enumerate(order):
        found = {}
        for group in groups:
            worker = live[(group + i) % len(live)]
            found[group] = rollout(mlp, weights_for(spec), spec, group, state, worker)
        for group in range(spec.groups):
            trajectory, new, ended = found[group]
            state |= new
            trajectories.append(trajectory)
            stats.append(ended)
    return trajectories, state, stats


def same(a: Collected, b: Collected) -> bool:
    pairs = [*zip(a[0], b[0], strict=True), (a[1], b[1])]
    return a[2] == b[2] and all(
        x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x) for x, y in pairs
    )


@SPECS
def test_the_same_trajectories_for_any_workers_in_any_order(spec: RolloutSpec) -> None:
    forward, backward = [0, 1, 2], [2, 1, 0]
    one = collect(spec, [forward] * 4, [LiveGroups()])
    three = collect(spec, [backward, forward, backward, forward], [LiveGroups(), LiveGroups(), LiveGroups()])
    forgetful = collect(spec, [forward] * 4, [None])
    assert sum(len(stats.returns) for stats in one[2]) > 3
    assert same(one, three)
    assert same(one, forgetful)


@SPECS
def test_groups_start_differently(spec: RolloutSpec) -> None:
    trajectories, _, _ = collect(spec, [[0, 1, 2]], [None])
    starts = torch.cat([trajectory["observations"][0] for trajectory in trajectories])
    assert len(torch.unique(starts, dim=0)) == spec.num_envs


@SPECS
def test_live_groups_spare_replays_and_a_lost_one_is_replayed(spec: RolloutSpec) -> None:
    live = LiveGroups()
    collect(spec, [[0, 1, 2]] * 3, [live])
    assert live.replayed_steps == 0
    moving = [LiveGroups(), LiveGroups()]
    collect(spec, [[0, 1, 2]] * 3, list(moving))
    assert sum(worker.replayed_steps for worker in moving) > 0


def test_a_full_cache_closes_the_oldest() -> None:
    live = LiveGroups(capacity=2)
    _, state, _ = collect(CARTPOLE, [[0, 1, 2]], [live])
    for group in (1, 2):
        rollout(mlp, weights_for(CARTPOLE), CARTPOLE, group, state, live)
    assert live.replayed_steps == 0
    rollout(mlp, weights_for(CARTPOLE), CARTPOLE, 0, state, live)
    assert live.replayed_steps == CARTPOLE.steps


@SPECS
def test_the_same_task_twice(spec: RolloutSpec) -> None:
    """A Task that was done, and is done again from the state before it: the live group has moved on by then."""
    live = LiveGroups()
    _, state, _ = collect(spec, [[0, 1, 2]], [live])
    first = rollout(mlp, weights_for(spec), spec, 0, state, live)
    again = rollout(mlp, weights_for(spec), spec, 0, state, live)
    assert same(([first[0]], first[1], [first[2]]), ([again[0]], again[1], [again[2]]))


def test_two_rollouts_are_one_of_twice_the_length() -> None:
    long = RolloutSpec(WALK.env, 2, 26, seed=3)
    short = RolloutSpec(WALK.env, 2, 13, seed=3)
    whole, end, stats = rollout(mlp, weights_for(WALK), long, 0, None)
    first, middle, before = rollout(mlp, weights_for(WALK), short, 0, None)
    second, end_too, after = rollout(mlp, weights_for(WALK), short, 0, middle)
    for name in ("observations", "actions", "rewards", "terminated", "truncated"):
        assert torch.equal(whole[name], torch.cat([first[name], second[name]])), name
    assert stats.returns == before.returns + after.returns
    assert all(torch.equal(end[name], end_too[name]) for name in end)


def test_a_stream_that_ran_for_too_long_starts_anew_between_rollouts() -> None:
    """The state of an endless episode would grow for ever. Its last values were bootstrapped, so nothing is lost."""
    for together in (False, True):
        spec = RolloutSpec(corridor(together), 2, 6, seed=0, anchor_steps=6)
        weights = {"v": torch.arange(4.0)}
        first, state, _ = rollout(table, weights, spec, 0, None)
        assert first["next_values"][-1].tolist() == [2.0, 2.0]  # cell 6 % 4
        second, state, stats = rollout(table, weights, spec, 0, state)
        assert torch.equal(first["observations"], second["observations"])  # from cell 0 again
        assert len(state["env.0.actions"]) == 6 * (1 if together else 2)
        assert stats.returns == ()


def test_stats_count_the_environment_s_own_rewards_and_steps() -> None:
    spec = RolloutSpec(EnvSpec(CORRIDOR, {"terminates": 3}), 2, 8, seed=0, normalise_rewards=True)
    trajectory, state, stats = rollout(table, {"v": torch.zeros(4)}, spec, 0, None)
    assert stats == EpisodeStats((3.0,) * 4, (3,) * 4, 16)
    assert not torch.equal(trajectory["rewards"], torch.ones(8, 2))
    assert rollout(table, {"v": torch.zeros(4)}, spec, 0, state)[2].lengths == (3,) * 6


def test_evaluation_plays_each_episode_once_from_its_own_seed() -> None:
    env, weights = EnvSpec(RANDOM_WALK), weights_for(WALK)
    few, many = (evaluate(mlp, weights, env, episodes, seed=9) for episodes in (5, 20))
    assert len(many.returns) == 20
    np.testing.assert_allclose(many.returns[:5], few.returns, rtol=1e-6)
    assert len(set(many.returns)) == 20
    assert many.lengths[:5] == few.lengths
    assert len(set(many.lengths)) > 1
    assert max(many.lengths) <= 9
    assert evaluate(mlp, weights, env, 20, seed=9) == many
    drawn = evaluate(mlp, weights, env, 20, seed=9, deterministic=False)
    assert drawn.returns != many.returns


def test_evaluation_of_a_vector_environment_counts_first_episodes_only() -> None:
    for together in (False, True):
        stats = evaluate(table, {"v": torch.zeros(4)}, corridor(together, terminates=3), 3, seed=0)
        assert (stats.returns, stats.lengths) == ((3.0,) * 3, (3,) * 3)


def test_a_state_of_other_environments_is_refused() -> None:
    _, state, _ = rollout(mlp, weights_for(WALK), WALK, 0, None)
    wider = RolloutSpec(WALK.env, 5, 13, seed=3, envs_per_task=3)
    with pytest.raises(Invalid, match="the state is of 2 environments, the rollout asks for 3"):
        rollout(mlp, weights_for(WALK), wider, 0, state)


def test_a_policy_without_a_critic_is_refused() -> None:
    with pytest.raises(Invalid, match="value: a policy gives"):
        rollout(lambda weights, seen: {"logits": seen[:, :2]}, {}, CARTPOLE, 0, None)
