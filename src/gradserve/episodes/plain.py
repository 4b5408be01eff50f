"""Messages as nothing but their text, for base models that have no chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gradserve.episodes.chat import Tools
from gradserve.episodes.episode import Message
from gradserve.episodes.errors import TemplateUnusable
from gradserve.episodes.tokens import decode, encode


class Template(Protocol):
    """What playing needs to know of a model's language: ChatTemplate, or PlainText."""

    @property
    def stop(self) -> list[int]: ...

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> tuple[int, ...]: ...

    def reply(self, tokens: Sequence[int]) -> Message: ...

    def continuation(
        self,
        sampled: Sequence[int],
        messages: Sequence[Message],
        new: Sequence[Message],
        tools: Tools | None = None,
    ) -> tuple[int, ...]: ...


class PlainText:
    """The texts of the messages, one after the other, without roles; a reply ends at the end of sequence.

    >>> PlainText(tokenizer).prompt([{"role": "user", "content": "2 + 2 ="}])   # tokenizer.encode("2 + 2 =")
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        self.stop: list[int] = [] if eos is None else [eos]
        """The tokenizer's end of sequence, if it has one."""

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> tuple[int, ...]:
        """[N] ids of the texts, with what the tokenizer puts before every sequence."""
        return tuple(encode(self.tokenizer, _text(messages, tools), special=True))

    def reply(self, tokens: Sequence[int]) -> Message:
        """The assistant's message that was sampled as ``tokens``."""
        return {"role": "assistant", "content": decode(self.tokenizer, tokens, special=False)}

    def continuation(
        self,
        sampled: Sequence[int],
        messages: Sequence[Message],
        new: Sequence[Message],
        tools: Tools | None = None,
    ) -> tuple[int, ...]:
        """[K] ids of the new messages' texts; the reply, cut or ended, stays as it was sampled."""
        return tuple(encode(self.tokenizer, _text(new, tools)))


def _text(messages: Sequence[Message], tools: Tools | None) -> str:
    if tools:
        raise TemplateUnusable("tools need a chat template, by which a model is told of them")
    return "".join(str(message["content"]) for message in messages)
