"""A model's chat template between messages and ids, checked where it could train or prompt wrongly.

The invariant, asserted for every turn that is trained on: the ids of the conversation before the turn, with the
generation prompt, are a prefix of the ids with the turn, and those of all that follows. So a turn is trained on in
exactly the context in which it would be sampled. A template that breaks it (Qwen3's leaves out the <think> of earlier
turns) is refused, or each turn becomes a row of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

from gradserve.episodes.episode import Message
from gradserve.episodes.errors import RowUnusable, TemplateUnusable
from gradserve.episodes.replies import message_of
from gradserve.episodes.tokens import Rendered, decode, encode, in_pieces, special_tokens

Train: TypeAlias = Literal["assistant", "last"]
"""Which of the assistant's turns are trained on: all, or only the last one."""

OnRewrite: TypeAlias = Literal["refuse", "split"]

Tools: TypeAlias = Sequence[Mapping[str, Any] | Callable[..., Any]]
"""JSON schemas of functions, as chat templates take them."""

_MARK = "REPLY-2f6b0c1e-STANDS-HERE"
"""Stands for a reply whose ids are there already, to find what a template writes after it."""


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer, e.g. of ``training_client.get_tokenizer()``.

    >>> template = ChatTemplate(tokenizer)
    >>> prompt = template.prompt([{"role": "user", "content": "2+2?"}])         # ids, ready to sample from
    >>> template.reply(sampled)                                                 # {"role": "assistant", ...}
    >>> [row] = template.training_rows([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])

    ``on_rewrite``: what becomes of a conversation whose earlier turns the template shows differently later: it is
    refused with TemplateUnusable, or split into one row a turn. ``arguments`` go to the template:
    ``{"enable_thinking": False}``. Raises TemplateUnusable when the tokenizer has no template, or one that ends
    an assistant's turn with no special token: a model could not learn from it where to stop.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        on_rewrite: OnRewrite = "refuse",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if on_rewrite not in ("refuse", "split"):
            raise ValueError(f"on_rewrite is 'refuse' or 'split', not {on_rewrite!r}")
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateUnusable(
                "this tokenizer has no chat template, so messages can't become tokens. Train on rows of prompt and "
                "completion or of text, or give it one: tokenizer.chat_template = '{% for message in messages %}...'"
            )
        self.tokenizer = tokenizer
        self._on_rewrite = on_rewrite
        self._arguments = dict(arguments or {})
        self._special = special_tokens(tokenizer)
        self.end_of_turn = self._end_of_turn()
        """The id with which the template ends an assistant's turn."""
        eos = tokenizer.eos_token_id
        self.stop = [self.end_of_turn] if eos in (None, self.end_of_turn) else [self.end_of_turn, eos]
        """The ids that end a reply: the template's end of turn, and the tokenizer's end of sequence."""

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> tuple[int, ...]:
        """[N] ids of the conversation with the generation prompt: what the model's next reply is sampled from."""
        return tuple(encode(self.tokenizer, self._text(messages, tools, generation_prompt=True)))

    def _end_of_turn(self) -> int:
        about = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _MARK}]
        after = self._after_mark(about, None, generation_prompt=False)
        control = {*self._special, self.tokenizer.eos_token_id}
        ends = [token for token in encode(self.tokenizer, after) if token in control]
        if not ends:
            raise TemplateUnusable(
                f"the chat template ends an assistant's turn with {after!r}, which has no special token: a model "
                "trained with it would not learn to stop. Add the tokenizer's end-of-sequence token to the template."
            )
        return ends[0]

    @cached_property
    def _structure(self) -> list[str]:
        """The special tokens with which the template builds turns: a text with one in it would begin or end one."""
        about = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
        text = self._text(about, None, generation_prompt=True)
        return [name for name in self._special.values() if name in text]

    def reply(self, tokens: Sequence[int]) -> Message:
        """The assistant's message that was sampled as ``tokens``; see replies.message_of for its tool calls."""
        ended = bool(tokens) and tokens[-1] in self.stop
        return message_of(decode(self.tokenizer, tokens[: len(tokens) - ended], special=False))

    def continuation(
        self,
        sampled: Sequence[int],
        messages: Sequence[Message],
        new: Sequence[Message],
        tools: Tools | None = None,
    ) -> tuple[int, ...]:
        """[K] ids to put after ``sampled`` so that ``new`` messages and the next generation prompt follow.

        ``messages`` ends with the assistant's message that was sampled. Nothing that is there is encoded again; a
        reply that was cut, or that ended with another token than the template's end of turn, is closed by it first.
        Raises TemplateUnusable when what the template writes after a reply depends on more than what follows it.
        """
        if not messages or messages[-1].get("role") != "assistant" or not new:
            raise ValueError("a continuation is of new messages after one of the assistant's")
        history = [*messages[:-1], {**messages[-1], "content": _MARK}]
        alone = self._after_mark(history, tools, generation_prompt=False)
        following = self._after_mark([*history, *new], tools, generation_prompt=True)
        if not following.startswith(alone):
            raise TemplateUnusable(
                f"the chat template ends the assistant's turn (message {len(messages)}) with {_shown(alone)} when it "
                f"is the last, and with {_shown(following)} when others follow; so nothing can be appended to its "
                "tokens"
            )
        close = alone.rfind(str(self.tokenizer.convert_ids_to_tokens(self.end_of_turn)))
        ids = encode(self.tokenizer, following[max(close, 0) :])
        if close < 0 or ids[0] != self.end_of_turn:
            raise TemplateUnusable(
                f"the chat template ends message {len(messages)} (assistant) with {_shown(alone)}, without the end of "
                f"turn that it writes elsewhere; so nothing can be appended to its tokens"
            )
        closed = bool(sampled) and sampled[-1] == self.end_of_turn
        return tuple(ids[1:] if closed else ids)

    def training_rows(
        self, messages: Sequence[Message], train: Train = "assistant", tools: Tools | None = None
    ) -> list[Rendered]:
        """One row that trains the assistant's turns, or, of a conversation that must be split, one for each turn.

        Its tokens are the template's of all messages up to the last turn that is trained; what would follow teaches
        nothing and is left out. A message with ``"weight": 0`` is not trained on. Raises TemplateUnusable, or
        RowUnusable when there is nothing to train on or a text has a special token's name in it.
        """
        self._refuse_control_in_text(messages)
        turns = _trained_turns(messages, train)
        contexts = [self._text(messages[:turn], tools, generation_prompt=True) for turn in turns]
        texts = [self._text(messages[: turn + 1], tools, generation_prompt=False) for turn in turns]
        for turn, context, text in zip(turns, contexts, texts, strict=True):
            if not text.startswith(context):
                raise TemplateUnusable(_no_generation_prompt(turn, context, text))
        rewritten = next((i for i in range(1, len(turns)) if not contexts[i].startswith(texts[i - 1])), None)
        if rewritten is None:
            return [self._row(contexts, texts)]
        if self._on_rewrite == "refuse":
            raise TemplateUnusable(_rewriting(turns, rewritten, texts[rewritten - 1], contexts[rewritten]))
        return [self._row([context], [text]) for context, text in zip(contexts, texts, strict=True)]

    def _row(self, contexts: Sequence[str], texts: Sequence[str]) -> Rendered:
        """Of turns of which each one's text is a prefix of the next one's context."""
        pieces = in_pieces(self.tokenizer, [text for pair in zip(contexts, texts, strict=True) for text in pair])
        weights: list[float] = []
        for given, turn in zip(pieces[::2], pieces[1::2], strict=True):
            own = self._own(turn)
            weights += [0.0] * len(given) + [1.0] * own + [0.0] * (len(turn) - own)
        return Rendered(tuple(itertools.chain(*pieces)), tuple(weights))

    def _own(self, turn: Sequence[int]) -> int:
        """How many tokens of a turn the model gives itself: up to its end; the template's line break is behind it."""
        ends = [place for place, token in enumerate(turn) if token in self.stop]
        if not ends:
            raise TemplateUnusable(
                f"the chat template shows an assistant's turn as {_shown(decode(self.tokenizer, turn))}, without an "
                "end of turn: trained on it, the model would not learn to stop"
            )
        return ends[-1] + 1

    def _refuse_control_in_text(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages, 1):
            content = message.get("content")
            found = [name for name in self._structure if isinstance(content, str) and name in content]
            if found:
                raise RowUnusable(
                    f"message {number} ({message.get('role')}) has {found[0]!r} in its text, which would become a "
                    "control token; take it out (the template writes its own)"
                )

    def _after_mark(self, messages: Sequence[Message], tools: Tools | None, *, generation_prompt: bool) -> str:
        text = self._text(messages, tools, generation_prompt=generation_prompt)
        if text.count(_MARK) != 1:
            raise TemplateUnusable(
                f"the chat template does not show the text of an assistant's message as it is, once: {_shown(text)}"
            )
        return text.partition(_MARK)[2]

    def _text(self, messages: Sequence[Message], tools: Tools | None, *, generation_prompt: bool) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._arguments,
            )
        except Exception as error:  # whatever the template's own code raises
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateUnusable(f"the chat template refuses messages of {roles or 'nobody'}: {error}") from error
        return text


def are_messages(given: object) -> bool:
    """Whether it is a list, not empty, of messages with roles."""
    return (
        isinstance(given, list | tuple)
        and bool(given)
        and all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in given)
    )


def _trained_turns(messages: Sequence[Message], train: Train) -> list[int]:
    if train not in ("assistant", "last"):
        raise ValueError(f"train is 'assistant' (all of its turns) or 'last', not {train!r}")
    for number, message in enumerate(messages, 1):
        if message.get("weight") not in (None, 0, 1):
            raise RowUnusable(f"message {number} has the weight {message['weight']!r}; it is 0 or 1")
    turns = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    turns = [place for place in (turns[-1:] if train == "last" else turns) if messages[place].get("weight") != 0]
    if not turns:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise RowUnusable(f"there is no assistant's message to train on among {roles or 'no messages'}")
    return turns


def _no_generation_prompt(turn: int, context: str, text: str) -> str:
    was, shown = _first_difference(context, text)
    return (
        f"message {turn + 1} (assistant): the chat template asks for it with {was}, and shows it as {shown}. It would "
        "be trained on in another context than that in which it is sampled, and split rows would not mend that. Give "
        "ChatTemplate the arguments with which both agree (e.g. {'enable_thinking': False}), or another template."
    )


def _rewriting(turns: Sequence[int], later: int, text: str, context: str) -> str:
    was, became = _first_difference(text, context)
    return (
        f"message {turns[later - 1] + 1} (assistant): the chat template shows the conversation up to it as {was}, but "
        f"as {became} when message {turns[later] + 1} (assistant) is asked for. In one row, turns would be trained on "
        "in contexts in which they are never sampled. on_rewrite='split' makes each turn a row in its own context; "
        "train='last' trains on the last turn only."
    )


def _first_difference(one: str, other: str) -> tuple[str, str]:
    """Both texts from shortly before the place where they part."""
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, place - 30)
    return _shown(one[begin:]), _shown(other[begin:])


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:97]}...")
