"""What a policy lived through, token by token: token in, token out.

The invariant: ``Episode.tokens`` are the very ids that the policy was given and that it sampled, in that order. Nothing
in it was decoded and encoded again, so what is trained on is what was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from gradserve.rewards.contract import Failure

Message: TypeAlias = Mapping[str, Any]
"""A chat message in the field's usual form: ``role``, ``content``, and for tools ``tool_calls`` or ``name``."""

StopReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True)
class Turn:
    """One reply of the policy.

    ``prompt`` are the ids that came after the previous reply and before this one; ``tokens`` [T] are the sampled ids
    with their ``logprobs`` [T], natural, under the untempered policy. ``version`` is the number of optimizer steps
    behind the weights that sampled it. ``stop_reason`` is ``length`` when the reply was cut.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    stop_reason: StopReason = "stop"

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} tokens have {len(self.logprobs)} log-probs")


@dataclass(frozen=True)
class Episode:
    """All turns of one try at a row of the data, and what it earned.

    ``reward`` is None while it is not scored; ``parts`` are the reward's named numbers. ``failure`` says why there is
    no reward, and then the episode is never trained on. ``messages`` is the whole conversation, for people and rewards.
    """

    row: Mapping[str, Any]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...] = ()
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """[N] ids, prompts and replies in order."""
        return tuple(token for turn in self.turns for token in (*turn.prompt, *turn.tokens))

    @cached_property
    def mask(self) -> tuple[float, ...]:
        """[N], 1 at sampled tokens and 0 at those that the policy was given."""
        return tuple(value for turn in self.turns for value in (*[0.0] * len(turn.prompt), *[1.0] * len(turn.tokens)))

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """[N], of the sampled tokens, 0 elsewhere."""
        return tuple(value for turn in self.turns for value in (*[0.0] * len(turn.prompt), *turn.logprobs))

    @property
    def sampled(self) -> int:
        """How many tokens the policy sampled."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def version(self) -> int:
        """The oldest version that sampled any of it."""
        return min(turn.version for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """Whether its last reply was cut at the token limit."""
        return self.turns[-1].stop_reason == "length"
