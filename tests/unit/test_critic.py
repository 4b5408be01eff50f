"""PPO's loss with a value head, against loops and hand-worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradserve.algorithms.critic import CriticConfig, data_of, ppo
from gradserve.episodes.episode import Episode, Turn
from tests.sdk import Floats

GAMMA, LAMBDA = 0.9, 0.8


def episode(reward: float, *turns: tuple[int, int]) -> Episode:
    """Turns of (prompt length, reply length)."""
    made = tuple(
        Turn(tuple(range(given)), tuple(range(replied)), tuple([-0.5] * replied), version=0) for given, replied in turns
    )
    return Episode({}, made, reward=reward)


def advantages_by_loop(rewards: list[float], values: list[float]) -> list[float]:
    """Schulman et al. 2016, arXiv:1506.02438: backwards over an episode's own tokens, which ends at the last."""
    found: list[float] = []
    following = 0.0
    for place in reversed(range(len(values))):
        after = values[place + 1] if place + 1 < len(values) else 0.0
        following = rewards[place] + GAMMA * after - values[place] + GAMMA * LAMBDA * following
        found.insert(0, following)
    return found


def test_advantages_are_those_of_the_recursion_over_the_sampled_tokens() -> None:
    episodes = [episode(1.0, (3, 2), (2, 3)), episode(-0.5, (2, 4))]
    data = data_of(episodes)
    longest = max(row.model_input.length for row in data)

    def padded(name: str) -> torch.Tensor:
        rows = [np.asarray(row.loss_fn_inputs[name].tolist()) for row in data]
        return torch.tensor(np.array([np.pad(row, (0, longest - len(row))) for row in rows]))

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, longest, generator=generator, dtype=torch.float64).requires_grad_()
    old = padded("logprobs").double()
    logprobs = (old + 0.1 * torch.randn(2, longest, generator=generator, dtype=torch.float64)).requires_grad_()
    rewards, sampled, order, follows = (padded(name).double() for name in ("rewards", "sampled", "order", "follows"))
    successor = padded("successor").long()
    loss, metrics = ppo(
        logprobs, old, values, rewards, sampled, order, follows, successor, gamma=GAMMA, decay=math.log(GAMMA * LAMBDA)
    )

    advantages, returns, ratios = [], [], []
    for row, each in enumerate(episodes):
        places = [place - 1 for place in np.flatnonzero(each.mask)]
        own = [float(values[row, place].detach()) for place in places]
        found = advantages_by_loop([0.0] * (len(own) - 1) + [each.reward or 0.0], own)
        advantages += found
        returns += [a + v for a, v in zip(found, own, strict=True)]
        ratios += [math.exp(float(logprobs[row, place].detach() - old[row, place])) for place in places]
    array: Floats = np.array(advantages)
    white = (array - array.mean()) / math.sqrt(array.var() + 1e-8)
    gains = [min(r * a, min(max(r, 0.8), 1.2) * a) for r, a in zip(ratios, white, strict=True)]
    errors = array**2  # a return less its value is the advantage
    assert float(loss.detach()) == pytest.approx(-np.mean(gains) + 0.5 * errors.mean(), rel=1e-9)
    assert float(metrics["value_error"].detach()) == pytest.approx(errors.mean(), rel=1e-9)
    assert float(metrics["explained_variance"].detach()) == pytest.approx(1 - errors.mean() / np.var(returns), rel=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert not values.grad[padded("sampled") == 0].any(), "what was given is not judged"


def test_settings_out_of_range_are_refused() -> None:
    assert CriticConfig.of({"gae_lambda": 0.5}).gae_lambda == 0.5
    for given, said in (
        ({"gamma": 0.0}, "gamma is 0.0"),
        ({"clip": 1.5}, "clip is between"),
        ({"lamda": 0.9}, "no setting 'lamda'"),
    ):
        with pytest.raises(ValueError, match=said):
            CriticConfig.of(given)
