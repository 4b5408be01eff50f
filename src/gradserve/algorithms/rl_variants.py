"""The group-relative algorithms by name: what an advantage is, how tokens are weighed, which loss of the protocol.

grpo     Shao et al. 2024, arXiv:2402.03300: advantages over the group's standard deviation, mean over a sequence's
         tokens, then over sequences; clipped ratios
dr_grpo  Liu et al. 2025, arXiv:2503.20783: no division by the deviation, and by a constant length
gspo     Zheng et al. 2025, arXiv:2507.18071: ratios of whole sequences
cispo    MiniMax 2025, arXiv:2506.13585: clipped ratios as weights, every token keeps its gradient; mean over tokens
dapo     Yu et al. 2025, arXiv:2503.14476: a wider clip above, mean over the batch's tokens, groups that are all
         right or all wrong are sampled again, a penalty on answers near the token limit
ppo      Schulman et al. 2017, arXiv:1707.06347, with a value head, see critic; needs a gradserve server
reinforce  the plain policy gradient, importance-sampled, with the group's mean as baseline
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Variant:
    """``advantage``, ``normalisation``: names of rollouts/advantages.py; ``loss`` with ``config``: of the protocol."""

    advantage: Literal["grpo", "dr_grpo", "rloo"]
    normalisation: Literal["sequence", "constant", "token"]
    loss: str
    config: Mapping[str, float] = field(default_factory=dict)
    dynamic_sampling: bool = False
    overlong_penalty: bool = False
    critic: bool = False


def _clip(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": 1 - low, "clip_high_threshold": 1 + high}


VARIANTS: Mapping[str, Variant] = {
    "grpo": Variant("grpo", "sequence", "ppo", _clip(0.2, 0.2)),
    "dr_grpo": Variant("dr_grpo", "constant", "ppo", _clip(0.2, 0.2)),
    # The paper's section 5.1; ratios of sequences are near 1, so the clip is narrow.
    "gspo": Variant("grpo", "sequence", "gspo", _clip(3e-4, 4e-4)),
    "cispo": Variant("grpo", "token", "cispo"),
    "dapo": Variant("grpo", "token", "ppo", _clip(0.2, 0.28), dynamic_sampling=True, overlong_penalty=True),
    "ppo": Variant("dr_grpo", "token", "ppo", critic=True),
    "reinforce": Variant("dr_grpo", "token", "importance_sampling"),
}
