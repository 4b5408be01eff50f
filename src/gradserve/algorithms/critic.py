"""PPO with a value head: each token's advantage is measured against what the model itself expected.

The loss is a graph that runs beside the weights, where the values are: generalised advantage estimation is in it, so
advantages are those of the values under the weights of the update (Andrychowicz et al. 2021, arXiv:2006.05990, advise
to compute them anew for each pass), and one request does a whole update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tinker import types

from gradserve.algorithms.datums import datum
from gradserve.algorithms.rollouts.advantages import is_scored
from gradserve.episodes.episode import Episode

if TYPE_CHECKING:
    from torch import Tensor

    from gradserve.compiler.losses import Loss

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CriticConfig:
    """``clip`` bounds ratios to 1 ± clip; ``value_weight`` is of the squared error of values (PPO, arXiv:1707.06347,
    equations 7 and 9, without clipping of values). ``gamma`` and ``gae_lambda``: arXiv:1506.02438, equation 16.
    """

    clip: float = 0.2
    value_weight: float = 0.5
    gamma: float = 1.0
    gae_lambda: float = 0.95

    def __post_init__(self) -> None:
        for name in ("gamma", "gae_lambda"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number above 0, at most 1")
        if not 0 < self.clip < 1 or self.value_weight < 0:
            raise ValueError("clip is between 0 and 1, value_weight at least 0")

    @classmethod
    def of(cls, given: Mapping[str, float]) -> CriticConfig:
        """From loss_config. Raises ValueError for a name it does not have."""
        unknown = sorted(set(given) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"ppo has no setting {unknown[0]!r}: it has {', '.join(cls.__dataclass_fields__)}")
        return cls(**given)


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    values: Tensor,
    rewards: Tensor,
    sampled: Tensor,
    order: Tensor,
    follows: Tensor,
    successor: Tensor,
    clip: float = 0.2,
    value_weight: float = 0.5,
    gamma: float = 1.0,
    decay: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """All [B, T]. ``sampled`` is 1 at the policy's tokens, ``order`` counts them within an episode, ``successor`` is
    the position of the next one, where ``follows`` is 1. ``decay`` is log(gamma·lambda).
    """
    count = sampled.sum()
    known = values.detach()
    errors = (rewards + gamma * follows * known.gather(1, successor) - known) * sampled
    apart = order.unsqueeze(1) - order.unsqueeze(2)  # [B, T, T]: how many tokens u comes after t
    reach = (decay * apart.clamp(min=0.0)).exp() * (apart >= 0) * sampled.unsqueeze(1)
    advantages = (reach * errors.unsqueeze(1)).sum(2) * sampled
    returns = advantages + known * sampled
    centred = (advantages - advantages.sum() / count) * sampled
    whitened = centred / (centred.square().sum() / count + 1e-8).sqrt()
    ratio = ((logprobs - old_logprobs) * sampled).exp()
    gain = (ratio * whitened).minimum(ratio.clamp(1 - clip, 1 + clip) * whitened)
    missed = ((values * sampled - returns).square()).sum() / count
    spread = ((returns - returns.sum() / count) * sampled).square().sum() / count
    return -(gain * sampled).sum() / count + value_weight * missed, {
        "value_error": missed,
        "explained_variance": 1 - missed / (spread + 1e-8),
    }


def loss_of(config: CriticConfig) -> Loss:
    """The graph for a gradserve server. Raises CaptureError."""
    from gradserve.compiler.losses import loss

    decay = math.log(config.gamma * config.gae_lambda)
    settings: dict[str, Any] = {
        "clip": config.clip,
        "value_weight": config.value_weight,
        "gamma": config.gamma,
        "decay": decay,
    }
    captured: Any = loss(ppo, inputs={"successor": "int64[token]"}, **settings)
    return captured  # type: ignore[no-any-return]


def data_of(episodes: Sequence[Episode], penalties: Sequence[Floats] | None = None) -> list[types.Datum]:
    """Rows of scored episodes. An episode's reward comes with its last token; ``penalties`` [N] are taken from each."""
    rows = []
    for number, episode in enumerate(episodes):
        mask = np.array(episode.mask)
        places = np.flatnonzero(mask)
        rewards = np.zeros(len(mask))
        rewards[places[-1]] = episode.reward or 0.0
        if penalties is not None:
            rewards -= penalties[number] * mask
        follows = mask.copy()
        follows[places[-1]] = 0.0
        successor = np.zeros(len(mask), dtype=np.int64)
        successor[places[:-1]] = places[1:] - 1  # the first token of the row has no position of its own
        row = datum(
            episode.tokens,
            logprobs=episode.logprobs,
            rewards=rewards,
            sampled=mask,
            order=np.cumsum(mask),
            follows=follows,
        )
        row.loss_fn_inputs["successor"] = types.TensorData.from_numpy(successor[1:])
        rows.append(row)
    return rows


def trained_on(groups: Sequence[Sequence[Episode]]) -> list[Episode]:
    """All that are scored and have a token."""
    return [episode for group in groups for episode in group if is_scored(episode) and episode.sampled]


def metrics_of(found: Mapping[str, float]) -> dict[str, Any]:
    """The loss's own, by the names of tracking."""
    plain = {name.partition(":")[0]: value for name, value in found.items()}
    return {
        "policy/value_error": plain["value_error"],
        "policy/explained_variance": plain["explained_variance"],
        "loss": plain["loss"],
    }
