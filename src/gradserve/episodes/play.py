"""Plays a row's episode: token in, token out.

The invariant: what the sampler is given is always all that it was given before, then all that it sampled, then the ids
of the new messages. Replies are decoded for the environment and never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gradserve.episodes.calls import Failed, bounded
from gradserve.episodes.chat import Tools, are_messages
from gradserve.episodes.environment import Environment, EnvironmentConfig, Step
from gradserve.episodes.episode import Episode, Message, StopReason, Turn
from gradserve.episodes.plain import Template
from gradserve.episodes.tools import Tool, ToolCallRefused, answer, bound, schema_of
from gradserve.rewards.contract import Failure, InvalidValue, outcome_of

_SEEDS_PER_EPISODE = 1009
"""A sample's random numbers begin anew with each request, so each turn needs a seed of its own."""


@dataclass(frozen=True)
class Sampled:
    """``Sampled((7, 2), (-0.1, -0.3), "stop", version=3)``: [T] ids, the end of turn included, and [T] log-probs."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: StopReason
    version: int


class Sampler(Protocol):
    """A policy that continues ids. It knows its own temperature; its errors end the play, they are no Failure."""

    async def sample(
        self, prompt: Sequence[int], *, max_tokens: int, stop: Sequence[int], seed: int | None
    ) -> Sampled: ...


@dataclass(frozen=True)
class PlayParams:
    """``max_tokens`` is of one reply. Equal seeds give equal episodes; None: the server draws."""

    max_tokens: int = 256
    seed: int | None = None


async def play(
    sampler: Sampler,
    template: Template,
    row: Mapping[str, Any],
    environment: EnvironmentConfig,
    params: PlayParams = PlayParams(),
) -> Episode:
    """One try at a row. What the environment or its limits do wrong becomes the episode's ``failure``.

    An episode whose first prompt has no room within ``max_context_tokens`` has no turns and the failure
    ``invalid_value``. Raises what the sampler raises, TemplateUnusable, RowUnusable and EnvironmentUnusable: these are
    to be mended, not to be counted.
    """
    playing = _Playing(sampler, template, row, environment, params)
    try:
        await playing.to_the_end()
    except Failed as failed:
        return playing.episode(failed.failure)
    return playing.episode()


@dataclass
class _Playing:
    sampler: Sampler
    template: Template
    row: Mapping[str, Any]
    config: EnvironmentConfig
    params: PlayParams
    messages: list[Message] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)

    async def to_the_end(self) -> None:
        world = await bounded(self.config.make, timeout_s=self.config.timeout_s)
        tools: Sequence[Tool] = tuple(getattr(world, "tools", ()))
        schemas = [schema_of(tool) for tool in tools] or None
        self.messages += _messages(await bounded(world.start, self.row, timeout_s=self.config.timeout_s), "start")
        given = self.template.prompt(self.messages, schemas)
        if not self._room(given):
            raise Failed(
                Failure(
                    "invalid_value",
                    f"the prompt's {len(given)} tokens leave no room within max_context_tokens "
                    f"{self.config.max_context_tokens}; leave such rows out, or allow more",
                )
            )
        while given:
            message = await self._take_turn(given)
            given = await self._what_follows(message, world, tools, schemas)

    async def _take_turn(self, given: tuple[int, ...]) -> Message:
        self.context += given
        max_tokens = min(self.params.max_tokens, self._room(()))
        seed = None if self.params.seed is None else self.params.seed * _SEEDS_PER_EPISODE + len(self.turns)
        sampled = await self.sampler.sample(
            tuple(self.context), max_tokens=max_tokens, stop=self.template.stop, seed=seed
        )
        self.turns.append(
            Turn(given, tuple(sampled.tokens), tuple(sampled.logprobs), sampled.version, sampled.stop_reason)
        )
        self.context += sampled.tokens
        self.messages.append(self.template.reply(sampled.tokens))
        return self.messages[-1]

    async def _what_follows(
        self, message: Message, world: Environment, tools: Sequence[Tool], schemas: Tools | None
    ) -> tuple[int, ...]:
        """The ids of the next prompt; () when the episode is over."""
        last = len(self.turns) >= self.config.max_turns
        if tools and not last and (answers := await self._answers(message, tools)):
            given = self._continuation(answers, schemas)
            if self._room(given):
                self.messages += answers
                return given
            last = True  # there is no room to go on from the answers, so the calls were the last reply
        step = await bounded(world.reply, message, timeout_s=self.config.timeout_s)
        self._add(step)
        if step.done or last:
            return ()
        new = _messages(step.messages, "a Step that is not done")
        given = self._continuation(new, schemas)
        self.messages += new
        return given if self._room(given) else ()

    async def _answers(self, message: Message, tools: Sequence[Tool]) -> list[Message]:
        """To the message's calls in their order; what goes wrong with one is its answer, for the model to see."""
        answers = [await self._answer(call, tools) for call in message.get("tool_calls", ())]
        return answers + [answer("", f"error: {fault}") for fault in message.get("malformed_tool_calls", ())]

    async def _answer(self, call: Mapping[str, Any], tools: Sequence[Tool]) -> Message:
        name = call["function"]["name"]
        try:
            tool, arguments = bound(tools, call)
            return answer(name, await bounded(tool, timeout_s=self.config.timeout_s, **arguments))
        except ToolCallRefused as refused:
            return answer(name, f"error: {refused}")
        except Failed as failed:
            error = failed.error
            said = failed.failure.detail if error is None else f"{type(error).__name__}: {error}"
            return answer(name, f"error: {said}")

    def _continuation(self, new: Sequence[Message], schemas: Tools | None) -> tuple[int, ...]:
        return self.template.continuation(self.turns[-1].tokens, self.messages, new, schemas)

    def _room(self, given: Sequence[int]) -> int:
        """Tokens that a reply may have after ``given``."""
        limit = self.config.max_context_tokens
        return self.params.max_tokens if limit is None else max(0, limit - len(self.context) - len(given))

    def _add(self, step: object) -> None:
        if not isinstance(step, Step):
            raise Failed(Failure("invalid_value", f"reply returned {step!r}, not a Step"))
        if step.reward is None:
            return
        try:
            outcome = outcome_of(step.reward)
        except InvalidValue as error:
            raise Failed(Failure("invalid_value", f"a Step's reward: {error}")) from error
        self.reward = (self.reward or 0.0) + outcome.value
        for name, value in outcome.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value

    def episode(self, failure: Failure | None = None) -> Episode:
        return Episode(
            self.row,
            tuple(self.turns),
            tuple(self.messages),
            None if failure else self.reward,
            {} if failure else dict(self.parts),
            failure,
        )


def _messages(given: Any, what: str) -> list[Message]:
    if not are_messages(given):
        raise Failed(
            Failure("invalid_value", f'{what} brought {given!r}, not a list of {{"role": ..., "content": ...}}')
        )
    return list(given)
