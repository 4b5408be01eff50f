"""Truncation is bootstrapped, termination is not: an MDP whose values are known in closed form.

Every step gives 1 and gamma is 0.9. Where nothing terminates, V = 1 / (1 - gamma) = 10 in every cell, however often an
episode is cut. Where the episode terminates after step 3, V of cell k is 1 + 0.9 + ... (3 - k terms).
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from gradserve.compute.engine.control.gae import advantages
from gradserve.compute.engine.control.ppo import Batch, ppo_update
from gradserve.compute.engine.control.rollout import Tensors, rollout
from gradserve.wire.control import EnvSpec, PPOConfig, RolloutSpec, SpaceSpec
from tests.numerics.control.toys import corridor, table

GAMMA = 0.9
CUT = torch.full((4,), 10.0)
TERMINATED = torch.tensor([2.71, 1.9, 1.0, 0.0])
"""By cell; the last is never acted on: the episode ends there, and nothing is worth anything."""
TWO = SpaceSpec("discrete", nvec=(2,))

# A cut after 5 steps, not 3, so that every cell is acted on: what a cell is worth can only be learned there.
CASES = [
    pytest.param({"limit": 5}, CUT, id="truncated"),
    pytest.param({"terminates": 3}, TERMINATED, id="terminated"),
    pytest.param({"terminates": 3, "limit": 3}, TERMINATED, id="both at once"),
]
FORMS = pytest.mark.parametrize("together", [False, True], ids=["one by one", "as one object"])


def collected(env: EnvSpec, weights: Tensors, steps: int) -> Tensors:
    return rollout(table, weights, RolloutSpec(env, 2, steps, seed=0, gamma=GAMMA), 0, None)[0]


@FORMS
@pytest.mark.parametrize(("ends", "truth"), CASES)
@pytest.mark.parametrize("steps", [2, 3, 4, 11], ids=lambda n: f"{n} steps")
def test_the_true_values_leave_no_advantage(
    together: bool, ends: dict[str, int], truth: torch.Tensor, steps: int
) -> None:
    """Where a rollout stops, between any two steps of an episode, does not matter either."""
    config = PPOConfig(gamma=GAMMA, gae_lambda=0.95)
    batch = Batch.of([collected(corridor(together, **ends), {"v": truth}, steps)], config)
    assert batch.advantages.abs().max() < 1e-5
    assert torch.allclose(batch.returns, batch.values, atol=1e-5)


def test_treating_a_cut_as_an_end_would_show() -> None:
    """The check above can fail: with the other truth the advantages are large."""
    trajectory = collected(corridor(False, limit=3), {"v": CUT}, 6)
    assert trajectory["truncated"].any()
    following = np.where(trajectory["truncated"], 0, trajectory["next_values"])
    rewards, values = trajectory["rewards"].numpy(), trajectory["values"].numpy()
    wrong = advantages(rewards, values, following, trajectory["truncated"].numpy(), GAMMA, 0.95)
    assert wrong.min() < -8


@FORMS
@pytest.mark.parametrize(("ends", "truth"), CASES)
def test_the_critic_learns_the_closed_form(together: bool, ends: dict[str, int], truth: torch.Tensor) -> None:
    weights, moments = {"v": torch.zeros(4)}, None
    env = corridor(together, **ends)
    config = PPOConfig(gamma=GAMMA, gae_lambda=0.9, epochs=10, minibatch_size=64, max_grad_norm=0)
    for update in range(60):
        slower = msgspec.structs.replace(config, learning_rate=0.5 * 0.92**update)
        trajectory = collected(env, weights, 16)
        weights, moments, _ = ppo_update(table, weights, moments, [trajectory], slower, update, TWO)
    assert torch.allclose(weights["v"][:3], truth[:3], atol=0.05), weights["v"]


@FORMS
def test_no_transition_is_made_of_a_reset(together: bool) -> None:
    """An environment that resets in a step of its own does not move in it: the step is marked, and not learned from."""
    spec = RolloutSpec(corridor(together, terminates=3), 2, 12, seed=0)
    trajectory, _, stats = rollout(table, {"v": CUT}, spec, 0, None)
    moved = trajectory["valid"][:, 0].tolist()
    assert moved == ([True, True, True, False] * 3 if together else [True] * 12)
    assert stats.lengths == (3,) * (6 if together else 8)
    assert stats.returns == (3.0,) * len(stats.lengths)
    assert stats.env_steps == sum(moved) * 2
    assert len(Batch.of([trajectory], PPOConfig()).returns) == stats.env_steps
