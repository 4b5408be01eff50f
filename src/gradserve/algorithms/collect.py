"""Groups of episodes from a sampling client, scored: what a reinforcement learner learns from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tinker
from tinker import types

from gradserve.episodes.environment import EnvironmentConfig, SingleTurn
from gradserve.episodes.episode import Episode, Message, StopReason, Turn
from gradserve.episodes.plain import Template
from gradserve.episodes.play import PlayParams, Sampled, play
from gradserve.rewards.contract import Failure, Sample
from gradserve.rewards.runner import RewardRunner

Group = list[Episode]

_ROWS_APART, _EPISODES_APART = 100_003, 1_000_003
"""Between the seeds of rows, and of episodes of one row."""


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled; ``max_tokens`` of one reply."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    def params(self, stop: Sequence[int], seed: int, max_tokens: int | None = None) -> types.SamplingParams:
        """The SDK's."""
        return types.SamplingParams(
            max_tokens=self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=list(stop),
            seed=seed % (1 << 31),
        )


@dataclass(frozen=True)
class Policy:
    """The weights of one version, and how they are sampled; what ``play`` asks."""

    sampler: tinker.SamplingClient
    sampling: Sampling
    version: int

    async def sample(self, prompt: Sequence[int], *, max_tokens: int, stop: Sequence[int], seed: int | None) -> Sampled:
        """One reply."""
        params = self.sampling.params(stop, seed or 0, max_tokens)
        found = await self.sampler.sample(types.ModelInput.from_ints(list(prompt)), 1, params)
        sequence = found.sequences[0]
        return Sampled(tuple(sequence.tokens), _logprobs(sequence), _reason(sequence), self.version)


class Collector:
    """Plays rows and scores what came of them.

    Single-turn rows (environment SingleTurn) are sampled as one request a group, so that the server prefills a prompt
    once. ``rewards`` None: the environment's own rewards count.
    """

    def __init__(
        self,
        template: Template,
        environment: EnvironmentConfig,
        rewards: RewardRunner | None,
        system_prompt: str | None = None,
    ) -> None:
        self._template, self._environment, self._rewards = template, environment, rewards
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def groups(self, policy: Policy, rows: Sequence[Mapping[str, Any]], count: int, seed: int) -> list[Group]:
        """``count`` scored episodes of each row, all in flight together; equal seeds give equal episodes.

        An episode that has no reward has a ``failure``. Raises RowUnusable and what the service raises.
        """
        if self._environment.make is SingleTurn and self._environment.max_context_tokens is None:
            groups = self._single_turn(policy, rows, count, seed)
        else:
            groups = asyncio.run(self._played(policy, rows, count, seed))
        return self._scored(groups)

    def _single_turn(self, policy: Policy, rows: Sequence[Mapping[str, Any]], count: int, seed: int) -> list[Group]:
        asked = [[*self._system, *SingleTurn().start(row)] for row in rows]
        prompts = [self._template.prompt(messages) for messages in asked]
        futures = [
            policy.sampler.sample(
                types.ModelInput.from_ints(list(ids)),
                count,
                policy.sampling.params(self._template.stop, seed + index * _ROWS_APART),
            )
            for index, ids in enumerate(prompts)
        ]
        return [
            [self._episode(row, messages, ids, sequence, policy.version) for sequence in future.result().sequences]
            for row, messages, ids, future in zip(rows, asked, prompts, futures, strict=True)
        ]

    def _episode(
        self,
        row: Mapping[str, Any],
        asked: Sequence[Message],
        ids: tuple[int, ...],
        sequence: types.SampledSequence,
        version: int,
    ) -> Episode:
        turn = Turn(ids, tuple(sequence.tokens), _logprobs(sequence), version, _reason(sequence))
        return Episode(row, (turn,), (*asked, self._template.reply(turn.tokens)))

    async def _played(self, policy: Policy, rows: Sequence[Mapping[str, Any]], count: int, seed: int) -> list[Group]:
        jobs = [
            play(
                policy,
                self._template,
                row,
                self._environment,
                PlayParams(policy.sampling.max_tokens, seed + index * _ROWS_APART + number * _EPISODES_APART),
            )
            for index, row in enumerate(rows)
            for number in range(count)
        ]
        episodes = await asyncio.gather(*jobs)
        return [list(episodes[start : start + count]) for start in range(0, len(episodes), count)]

    def _scored(self, groups: list[Group]) -> list[Group]:
        waiting = [episode for group in groups for episode in group if _is_unscored(episode)]
        if self._rewards is None:
            if waiting:
                raise ValueError("an episode ended without a reward: give reward_func, or a reward in a Step")
            return groups
        results = iter(self._rewards.score([sample_of(episode) for episode in waiting]))
        return [
            [_with(episode, next(results)) if _is_unscored(episode) else episode for episode in group]
            for group in groups
        ]


def sample_of(episode: Episode) -> Sample:
    """What the reward is given: the prompt, the last reply's text, the row's answer and its state or other columns."""
    row = episode.row
    state = row["state"] if "state" in row else {key: row[key] for key in row if key not in ("prompt", "answer")}
    prompt = row.get("prompt", list(episode.messages[:-1]))
    return Sample(prompt, episode.messages[-1].get("content") or "", row.get("answer"), state or None)


def _is_unscored(episode: Episode) -> bool:
    return episode.failure is None and episode.reward is None


def _with(episode: Episode, result: Any) -> Episode:
    if isinstance(result, Failure):
        return replace(episode, failure=result)
    return replace(episode, reward=result.value, parts=result.parts)


def _logprobs(sequence: types.SampledSequence) -> tuple[float, ...]:
    if sequence.logprobs is None:
        raise RuntimeError("the service gave no log-probs of its samples, which a policy gradient needs")
    return tuple(sequence.logprobs)


def _reason(sequence: types.SampledSequence) -> StopReason:
    return "length" if sequence.stop_reason == "length" else "stop"
