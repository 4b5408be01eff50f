"""Groups of scored episodes as the rows that a policy-gradient loss is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tinker import types

from gradserve.algorithms.datums import datum
from gradserve.algorithms.rl_variants import Variant
from gradserve.algorithms.rollouts.advantages import advantages, is_informative, token_weights
from gradserve.algorithms.rollouts.corrections import importance_weights, weight_metrics
from gradserve.episodes.episode import Episode

Floats = NDArray[np.float64]


@dataclass
class PolicyBatch:
    """The episodes that have something to teach, with an advantage [N] for each token; 0 where nothing was sampled.

    ``weights`` are factors [N] of the loss: losses of the protocol are sums over tokens, and these make the variant's
    mean of it. ``anchors`` [N] are the log-probs that ratios are taken against: the sampler's, at first.
    """

    variant: Variant
    episodes: list[Episode] = field(default_factory=list)
    advantages: list[Floats] = field(default_factory=list)
    weights: list[Floats] = field(default_factory=list)
    anchors: list[Floats] = field(default_factory=list)

    @classmethod
    def of(cls, groups: Sequence[Sequence[Episode]], variant: Variant, most_tokens: int) -> PolicyBatch:
        """Without episodes that failed and groups whose rewards are all equal; the means are over all that are scored.

        So a batch with little to teach moves little. ``most_tokens`` is what an episode may sample.
        """
        batch = cls(variant)
        worth = advantages(groups, variant.advantage)
        weights = token_weights(groups, variant.normalisation, most_tokens)
        for group, of_group, weight_of in zip(groups, worth, weights, strict=True):
            if not is_informative(group):
                continue
            for episode, advantage, weight in zip(group, of_group, weight_of, strict=True):
                if advantage is not None and weight:
                    mask = episode_mask(episode)
                    batch.episodes.append(episode)
                    batch.advantages.append(advantage * mask)
                    batch.weights.append(weight * mask)
                    batch.anchors.append(np.array(episode.logprobs, dtype=np.float64))
        return batch

    def data(self) -> list[types.Datum]:
        """For the variant's loss."""
        rows = []
        for episode, advantage, weight, anchor in zip(
            self.episodes, self.advantages, self.weights, self.anchors, strict=True
        ):
            more = {"sequence_ratio_mask": episode.mask} if self.variant.loss == "gspo" else {}
            rows.append(datum(episode.tokens, logprobs=anchor, advantages=advantage * weight, **more))
        return rows

    def corrected(self, trainer: Sequence[Floats], kind: str, cap: float) -> dict[str, float]:
        """Weigh tokens by ``trainer`` [N] over the sampler's log-probs, and anchor ratios at the trainer's; metrics."""
        found = [
            importance_weights(kind, logprobs, episode.logprobs, episode.mask, cap)
            for episode, logprobs in zip(self.episodes, trainer, strict=True)
        ]
        self.weights = [weight * each.weights for weight, each in zip(self.weights, found, strict=True)]
        self.anchors = [
            logprobs * episode_mask(episode) for episode, logprobs in zip(self.episodes, trainer, strict=True)
        ]
        return weight_metrics(found)

    def shifted(self, values: Sequence[Floats]) -> list[Floats]:
        """``values`` [N] of the episodes at the positions [N - 1] that predict their tokens."""
        return [each[1:] for each in values]


def episode_mask(episode: Episode) -> Floats:
    """[N], 1 at sampled tokens."""
    return np.array(episode.mask, dtype=np.float64)
