"""Groups of scored episodes as the rows that a policy-gradient loss is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tinker import types

from gradserve.algorithms.advantages import group_advantages, soft_overlong_penalty, token_weight
from gradserve.algorithms.datums import datum
from gradserve.algorithms.rl_variants import Variant
from gradserve.episodes.episode import Episode

Floats = NDArray[np.float64]


@dataclass
class PolicyBatch:
    """The episodes that have something to teach, with an advantage [N] for each token; 0 where nothing was sampled.

    ``weights`` are factors [N] of the loss: losses of the protocol are sums over tokens, and these make the variant's
    mean of it. ``anchors`` [N] are the log-probs that ratios are taken against.
    """

    variant: Variant
    episodes: list[Episode] = field(default_factory=list)
    advantages: list[Floats] = field(default_factory=list)
    weights: list[Floats] = field(default_factory=list)
    anchors: list[Floats] = field(default_factory=list)

    @classmethod
    def of(cls, groups: Sequence[Sequence[Episode]], variant: Variant, max_tokens: int) -> PolicyBatch:
        """Episodes that failed are left out, then groups whose rewards are all equal, which teach nothing.

        Means are over all episodes that have a reward, so that a batch with little to teach moves little.
        """
        scored = [[each for each in group if each.failure is None and each.turns] for group in groups]
        everyone = [each for group in scored for each in group]
        tokens = sum(each.sampled for each in everyone)
        batch = cls(variant)
        for group in scored:
            rewards = np.array([each.reward for each in group], dtype=np.float64)
            if variant.overlong_penalty:
                rewards += [soft_overlong_penalty(each.sampled, max_tokens) for each in group]
            for each, advantage in zip(group, group_advantages(rewards, variant.advantage), strict=True):
                if np.ptp(rewards) == 0:
                    continue
                mask = np.array(each.mask)
                weight = token_weight(variant.normalisation, each.sampled, len(everyone), tokens, max_tokens)
                batch.episodes.append(each)
                batch.advantages.append(advantage * mask)
                batch.weights.append(weight * mask)
                batch.anchors.append(np.array(each.logprobs, dtype=np.float64))
        return batch

    def data(self) -> list[types.Datum]:
        """For the variant's loss."""
        rows = []
        for each, advantage, weight, anchor in zip(
            self.episodes, self.advantages, self.weights, self.anchors, strict=True
        ):
            more = {"sequence_ratio_mask": each.mask} if self.variant.loss == "gspo" else {}
            rows.append(datum(each.tokens, logprobs=anchor, advantages=advantage * weight, **more))
        return rows

    def masks(self) -> list[Floats]:
        """[N - 1] each, of the positions that predict a sampled token."""
        return [np.array(each.mask[1:]) for each in self.episodes]
