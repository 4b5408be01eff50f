"""Episodes against a sampler that replays ids: what it is given, and what becomes of the environment's faults."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from gradserve.episodes.chat import ChatTemplate
from gradserve.episodes.environment import EnvironmentConfig, Step, environment_of
from gradserve.episodes.episode import Episode, Message
from gradserve.episodes.errors import RowUnusable, TemplateUnusable
from gradserve.episodes.play import PlayParams, Sampled, play
from tests.templates import QWEN3, SMOLLM2, with_template

TOKENIZER = with_template(SMOLLM2)
TEMPLATE = ChatTemplate(TOKENIZER)
END = TOKENIZER.eos_token_id


@dataclass
class Replaying:
    """Gives the replies in turn, with log-probs -1, -2, ..., and version 5, 6, ...; keeps what it was asked."""

    replies: Sequence[Sequence[int]]
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def sample(self, prompt: Sequence[int], *, max_tokens: int, stop: Sequence[int], seed: int | None) -> Sampled:
        turn = len(self.prompts)
        self.prompts.append(tuple(prompt))
        self.asked.append({"max_tokens": max_tokens, "stop": list(stop), "seed": seed})
        tokens = self.replies[turn][:max_tokens]
        ended = tokens[-1] in stop
        return Sampled(tokens, [-1.0 - i for i in range(len(tokens))], "stop" if ended else "length", 5 + turn)


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text)
    return found


def letters(text: str) -> list[int]:
    """One token for each character, then the end: ids that the tokenizer itself would never write for "the"."""
    return [TOKENIZER.convert_tokens_to_ids(character) for character in text] + [END]


def played(sampler: Replaying, environment: EnvironmentConfig, **more: Any) -> Episode:
    row = more.pop("row", {"number": 7})
    return asyncio.run(play(sampler, more.pop("template", TEMPLATE), row, environment, PlayParams(**more)))


class Guess:
    """Right answers earn 1; each wrong one costs 0.25."""

    def start(self, row: Mapping[str, Any]) -> list[Message]:
        self.secret, self.seen = str(row["number"]), 0
        return [{"role": "user", "content": "Guess."}]

    async def reply(self, message: Message) -> Step:
        self.seen += 1
        if message["content"] == self.secret:
            return Step(done=True, reward={"right": 1.0, "tries": float(self.seen)})
        return Step([{"role": "user", "content": "No."}], reward={"wrong": -0.25})


def test_tokens_go_in_as_they_came_out() -> None:
    sampler = Replaying([letters("the"), letters("a the"[2:]), letters("7")])
    assert ids("the") != letters("the")[:-1]
    episode = played(sampler, environment_of({"environment": Guess}), seed=3)
    asked = TEMPLATE.prompt([{"role": "user", "content": "Guess."}])
    no = tuple(ids("\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"))
    assert sampler.prompts == [
        asked,
        (*asked, *letters("the"), *no),
        (*asked, *letters("the"), *no, *letters("the"), *no),
    ]
    assert episode.tokens == (*sampler.prompts[2], *letters("7"))
    assert [turn.prompt for turn in episode.turns] == [asked, no, no]
    assert episode.mask == (*[0] * len(asked), *[1] * 4, *[0] * len(no), *[1] * 4, *[0] * len(no), 1, 1)
    assert episode.logprobs[-2:] == (-1.0, -2.0)
    assert [turn.version for turn in episode.turns] == [5, 6, 7]
    assert [message["content"] for message in episode.messages] == ["Guess.", "the", "No.", "the", "No.", "7"]
    assert episode.reward == 0.5 + 3.0  # 2 wrong, 1 right, and the tries
    assert episode.parts == {"wrong": -0.5, "right": 1.0, "tries": 3.0}
    assert len({call["seed"] for call in sampler.asked}) == 3


def test_a_reply_that_was_cut_is_closed_before_the_next_message() -> None:
    sampler = Replaying([ids("the one"), letters("7")])
    episode = played(sampler, environment_of({"environment": Guess}), max_tokens=2)
    first = episode.turns[0]
    assert (first.tokens, first.stop_reason) == (tuple(ids("the one")[:2]), "length")
    assert episode.turns[1].prompt[0] == END  # given, not sampled: of weight 0
    assert not episode.truncated


def test_one_reply_without_an_environment_left_to_the_reward_function() -> None:
    sampler = Replaying([letters("4")])
    episode = played(sampler, environment_of(), row={"prompt": "2+2?", "answer": "4"}, max_tokens=9)
    assert episode.turns[0].prompt == TEMPLATE.prompt([{"role": "user", "content": "2+2?"}])
    assert (episode.reward, episode.parts, episode.failure) == (None, {}, None)
    assert sampler.asked == [{"max_tokens": 9, "stop": [END], "seed": None}]
    assert episode.messages[-1] == {"role": "assistant", "content": "4"}
    with pytest.raises(RowUnusable, match="columns question; an episode begins with prompt"):
        played(sampler, environment_of(), row={"question": "2+2?"})


def test_a_function_that_returns_a_coroutine_is_async() -> None:
    class Wrapped(Guess):
        def reply(self, message: Message) -> Any:
            return super().reply(message)  # not declared async

    assert played(Replaying([letters("7")]), environment_of({"environment": Wrapped})).reward == 2.0


def test_limits_of_turns_and_context_end_an_episode_that_the_environment_has_seen() -> None:
    replies = [letters("no")] * 9
    assert len(played(Replaying(replies), environment_of({"environment": Guess, "max_turns": 3})).turns) == 3
    whole = played(Replaying(replies), environment_of({"environment": Guess, "max_turns": 3}))
    limit = len(whole.tokens) - 1
    config = environment_of({"environment": Guess, "max_turns": 9, "max_context_tokens": limit})
    sampler = Replaying(replies)
    cut = played(sampler, config)
    assert len(cut.tokens) == limit
    assert [call["max_tokens"] for call in sampler.asked][-1] == len(letters("no")) - 1
    assert cut.truncated
    assert cut.parts == {"wrong": -0.75}
    none = played(Replaying(replies), environment_of({"environment": Guess, "max_context_tokens": 5}))
    assert none.turns == ()
    assert none.failure is not None
    assert none.failure.kind == "invalid_value"
    assert "leave no room within max_context_tokens 5" in none.failure.detail


class Calculator:
    """Has two tools; a reply without a call ends it."""

    def __init__(self) -> None:
        self.tools = [self.add, fetch, hang]
        self.total = 0

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.total = a + b
        return self.total

    def start(self, row: Mapping[str, Any]) -> list[Message]:
        return [{"role": "user", "content": "2+2?"}]

    def reply(self, message: Message) -> Step:
        return Step(done=True, reward=float(self.total == 4 and message["content"] == "4"))


async def fetch(url: str) -> dict[str, str]:
    """Fetch a page."""
    return {"url": url}


def hang() -> None:
    """Never answer."""
    threading.Event().wait(60)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_tools_are_called_and_what_goes_wrong_is_said_to_the_model() -> None:
    template = ChatTemplate(with_template(QWEN3))
    calls = (
        call("add", '{"a": 2, "b": 2}') + call("fetch", '{"url": "x"}') + call("add", '{"a": 1}')
        + call("divide", "{}") + call("add", '{"a": [], "b": 1}') + call("hang", "{}") + "<tool_call>{</tool_call>"
    )  # fmt: skip
    sampler = Replaying([[*ids(calls), END], letters("4")])
    config = environment_of({"environment": Calculator, "timeout_s": 1})
    episode = played(sampler, config, template=template, max_tokens=1000)
    answers = [message["content"] for message in episode.messages if message["role"] == "tool"]
    assert answers[:2] == ["4", '{"url": "x"}']
    assert answers[2].startswith("error: add: missing a required argument: 'b'")
    assert answers[3] == "error: there is no tool 'divide'; there are add, fetch, hang"
    assert answers[4].startswith("error: TypeError: can only concatenate list")
    assert answers[5] == "error: hang gave no result within 1 s"
    assert answers[6].startswith("error: a tool call is not JSON")
    assert (episode.reward, episode.failure) == (1.0, None)
    text = template.tokenizer.decode(sampler.prompts[1])
    assert '"description": "Add two numbers."' in text
    assert "<tool_response>\n4\n</tool_response>" in text


def test_a_call_in_the_last_reply_is_not_made_but_seen_by_the_environment() -> None:
    sampler = Replaying([[*ids(call("add", '{"a": 2, "b": 2}')), END]])
    config = environment_of({"environment": Calculator, "max_turns": 1})
    episode = played(sampler, config, template=ChatTemplate(with_template(QWEN3)))
    assert [message["role"] for message in episode.messages] == ["user", "assistant"]
    assert episode.reward == 0.0


def test_tools_whose_answers_have_no_room_leave_the_call_as_the_last_reply() -> None:
    template = ChatTemplate(with_template(QWEN3))
    replies = [[*ids(call("add", '{"a": 2, "b": 2}')), END], letters("4")]
    whole = played(Replaying(replies), environment_of({"environment": Calculator}), template=template)
    room = len(whole.turns[0].prompt) + len(whole.turns[0].tokens) + 5
    config = environment_of({"environment": Calculator, "max_context_tokens": room})
    episode = played(Replaying(replies), config, template=template)
    assert (whole.reward, len(whole.turns)) == (1.0, 2)
    assert (episode.reward, len(episode.turns)) == (0.0, 1)
    assert episode.messages[-1]["tool_calls"]


class Faulty(Guess):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def reply(self, message: Message) -> Any:
        if self.fault == "raises":
            raise SystemExit("the grader is down")
        if self.fault == "gives up":
            raise TimeoutError
        if self.fault == "hangs":
            time.sleep(0.5)
        return {
            "NaN": Step(done=True, reward=float("nan")),
            "no step": 1.0,
            "no messages": Step(),
            "no list": Step("No."),  # type: ignore[arg-type]
        }.get(self.fault)


class FailsLater(Guess):
    async def reply(self, message: Message) -> Step:
        if self.seen:
            raise ConnectionError
        return await super().reply(message)


def test_what_was_earned_before_a_failure_is_no_reward() -> None:
    episode = played(Replaying([letters("no"), letters("7")]), environment_of({"environment": FailsLater}))
    assert episode.failure is not None
    assert (episode.reward, episode.parts, len(episode.turns)) == (None, {}, 2)


class Unborn(Guess):
    def __init__(self) -> None:
        raise OSError("no board")


def test_what_it_cannot_even_begin_with_is_a_failure_by_its_name() -> None:
    episode = played(Replaying([]), environment_of({"environment": Unborn}))
    assert episode.failure is not None
    assert episode.failure.detail.startswith("Unborn raised OSError('no board')")
    assert (episode.turns, episode.reward) == ((), None)


class FaultyAsync(Guess):
    async def reply(self, message: Message) -> Step:
        await asyncio.sleep(60)
        return Step(done=True)


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("raises", "crash", "Faulty.reply raised SystemExit('the grader is down')"),
        ("gives up", "crash", "Faulty.reply raised TimeoutError()"),
        ("hangs", "timeout", "Faulty.reply gave no result within 0.2 s"),
        ("NaN", "invalid_value", "which is not finite"),
        ("no step", "invalid_value", "reply returned 1.0, not a Step"),
        ("no messages", "invalid_value", "a Step that is not done brought ()"),
        ("no list", "invalid_value", "brought 'No.', not a list"),
    ],
)
def test_a_fault_of_the_environment_is_a_failure_and_never_a_reward(fault: str, kind: str, said: str) -> None:
    timeout_s = 0.2 if kind == "timeout" else 20
    config = environment_of({"environment": Faulty, "arguments": {"fault": fault}, "timeout_s": timeout_s})
    episode = played(Replaying([letters("no")]), config)
    assert episode.failure is not None
    assert episode.failure.kind == kind
    assert said in episode.failure.detail
    assert (episode.reward, episode.parts) == (None, {})
    assert len(episode.turns) == 1


def test_other_episodes_go_on_while_one_hangs() -> None:
    async def both() -> list[Episode]:
        hanging = environment_of({"environment": FaultyAsync, "timeout_s": 0.2})
        blocked = environment_of({"environment": Faulty, "arguments": {"fault": "hangs"}, "timeout_s": 0.2})
        well = environment_of({"environment": Guess})
        return await asyncio.gather(
            *(play(Replaying([letters("7")]), TEMPLATE, {"number": 7}, config) for config in (hanging, blocked, well))
        )

    hung, blocked, well = asyncio.run(both())
    assert [episode.failure and episode.failure.kind for episode in (hung, blocked)] == ["timeout", "timeout"]
    assert well.reward == 2.0


def test_what_is_to_be_mended_is_raised() -> None:
    class Broken(Replaying):
        async def sample(self, prompt: Sequence[int], **more: Any) -> Sampled:
            raise ConnectionError("the service is away")

    with pytest.raises(ConnectionError):
        played(Broken([]), environment_of({"environment": Guess}))
    twice = SMOLLM2.replace(
        "{% for", "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}{% for", 1
    )
    with pytest.raises(TemplateUnusable, match="one only"):
        played(
            Replaying([letters("no")]),
            environment_of({"environment": Guess}),
            template=ChatTemplate(with_template(twice)),
        )
