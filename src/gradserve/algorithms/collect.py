"""Groups of episodes from a sampling client, scored: what a reinforcement learner learns from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tinker
from tinker import types

from gradserve.data.errors import DataError
from gradserve.episodes.chat import ChatTemplate
from gradserve.episodes.environment import EnvironmentSpec
from gradserve.episodes.episode import Episode, Message, StopReason, Turn
from gradserve.episodes.play import Completion, play
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


class Collector:
    """Plays rows and scores what came of them; safe to use from one thread at a time.

    ``environment`` None: one reply to each row's ``prompt``, which is a text (a user's message, with ``chat``) or a
    list of messages. ``rewards`` None: the environment's own rewards count.
    """

    def __init__(
        self,
        template: ChatTemplate,
        environment: EnvironmentSpec | None,
        rewards: RewardRunner | None,
        chat: bool = True,
        system_prompt: str | None = None,
    ) -> None:
        self._template, self._environment, self._rewards = template, environment, rewards
        self._chat, self._system_prompt = chat, system_prompt

    def groups(
        self,
        sampler: tinker.SamplingClient,
        rows: Sequence[Mapping[str, Any]],
        count: int,
        sampling: Sampling,
        version: int,
        seed: int,
    ) -> list[Group]:
        """``count`` scored episodes of each row, all in flight together."""
        if self._environment is None:
            groups = self._single_turn(sampler, rows, count, sampling, version, seed)
        else:
            groups = asyncio.run(self._played(sampler, rows, count, sampling, version, seed))
        return self._scored(groups)

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """What a single-turn row asks. Raises DataError for a row without a prompt."""
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, Sequence) or not prompt:
            raise DataError(
                f"a row needs 'prompt', a text or a list of messages; this one has {', '.join(map(repr, row))}"
            )
        system = [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]
        return [*system, *prompt]

    def _prompt_ids(self, row: Mapping[str, Any]) -> tuple[int, ...]:
        if self._chat:
            return self._template.prompt(self.messages(row))
        if not isinstance(row.get("prompt"), str):
            raise DataError("without chat a row's 'prompt' is a text")
        return tuple(self._template.tokenizer.encode((self._system_prompt or "") + row["prompt"]))

    def _single_turn(
        self,
        sampler: tinker.SamplingClient,
        rows: Sequence[Mapping[str, Any]],
        count: int,
        sampling: Sampling,
        version: int,
        seed: int,
    ) -> list[Group]:
        stop = self._template.stop if self._chat else self._template.eos
        prompts = [self._prompt_ids(row) for row in rows]
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(list(ids)), count, sampling.params(stop, seed + index * _ROWS_APART)
            )
            for index, ids in enumerate(prompts)
        ]
        return [
            [self._episode(row, ids, sequence, version) for sequence in future.result().sequences]
            for row, ids, future in zip(rows, prompts, futures, strict=True)
        ]

    def _episode(
        self, row: Mapping[str, Any], ids: tuple[int, ...], sequence: types.SampledSequence, version: int
    ) -> Episode:
        turn = Turn(ids, tuple(sequence.tokens), _logprobs(sequence), version, _reason(sequence))
        reply: Message = (
            self._template.reply(turn.tokens)
            if self._chat
            else {
                "role": "assistant",
                "content": self._template.tokenizer.decode(list(turn.tokens), skip_special_tokens=True),
            }
        )
        asked = self.messages(row) if self._chat else [{"role": "user", "content": row["prompt"]}]
        return Episode(row, (turn,), (*asked, reply))

    async def _played(
        self,
        sampler: tinker.SamplingClient,
        rows: Sequence[Mapping[str, Any]],
        count: int,
        sampling: Sampling,
        version: int,
        seed: int,
    ) -> list[Group]:
        assert self._environment is not None
        spec, remote = self._environment, _Remote(sampler, sampling, self._template.stop, version)
        jobs = [
            play(remote, self._template, row, spec, seed + index * _ROWS_APART + number * _EPISODES_APART)
            for index, row in enumerate(rows)
            for number in range(count)
        ]
        episodes = await asyncio.gather(*jobs)
        return [list(episodes[start : start + count]) for start in range(0, len(episodes), count)]

    def _scored(self, groups: list[Group]) -> list[Group]:
        if self._rewards is None:
            return groups
        waiting = [episode for group in groups for episode in group if episode.failure is None]
        results = iter(self._rewards.score([sample_of(episode) for episode in waiting]))
        return [
            [_with(episode, next(results)) if episode.failure is None else episode for episode in group]
            for group in groups
        ]


class _Remote:
    """The policy of one version, for ``play``."""

    def __init__(self, sampler: tinker.SamplingClient, sampling: Sampling, stop: Sequence[int], version: int) -> None:
        self._sampler, self._sampling, self._stop, self._version = sampler, sampling, stop, version

    async def sample(self, prompt: Sequence[int], max_tokens: int | None, seed: int) -> Completion:
        params = self._sampling.params(self._stop, seed, max_tokens)
        found = await self._sampler.sample_async(types.ModelInput.from_ints(list(prompt)), 1, params)
        sequence = found.sequences[0]
        return Completion(tuple(sequence.tokens), _logprobs(sequence), _reason(sequence), self._version)


def sample_of(episode: Episode) -> Sample:
    """What the reward is given: the conversation before the last reply, that reply's text, the row's own columns."""
    row = episode.row
    state = row["state"] if "state" in row else {key: row[key] for key in row if key not in ("prompt", "answer")}
    completion = episode.messages[-1].get("content") or ""
    prompt = row.get("prompt", list(episode.messages[:-1]))
    return Sample(prompt, completion, row.get("answer"), state or None)


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
