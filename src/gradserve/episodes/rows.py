"""A row of training data as tokens and weights: what a trainer trains on and ``gradserve data show`` prints."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from gradserve.episodes.chat import ChatTemplate, OnRewrite, Train, are_messages
from gradserve.episodes.errors import RowUnusable
from gradserve.episodes.tokens import Rendered, in_pieces

FORMS = (("messages",), ("prompt", "completion"), ("text",))
"""Columns that make a row; ``tools`` may stand beside messages. Others are not read."""


def rendered(
    row: Mapping[str, Any],
    template: ChatTemplate | Any,
    *,
    train: Train = "assistant",
    on_rewrite: OnRewrite | None = None,
) -> list[Rendered]:
    """The row's tokens and weights; more than one only where a conversation is split.

    >>> rendered({"prompt": "2+2=", "completion": "4"}, tokenizer)

    ``messages`` go through the chat template. ``prompt`` and ``completion`` are texts as they are, the completion and
    an end of sequence trained on; of ``text`` all is. ``template`` is a tokenizer, for which ``on_rewrite`` may be
    given (default: refuse), or a ChatTemplate, which has its own. Raises RowUnusable and TemplateUnusable.
    """
    if on_rewrite is not None and isinstance(template, ChatTemplate):
        raise ValueError("on_rewrite is the ChatTemplate's own: give it there")
    form = _form_of(row)
    if form != ("messages",):
        tokenizer = template.tokenizer if isinstance(template, ChatTemplate) else template
        return [_plain(tokenizer, *(_text_of(row, column) for column in form))]
    chat = template if isinstance(template, ChatTemplate) else ChatTemplate(template, on_rewrite=on_rewrite or "refuse")
    return chat.training_rows(_messages_of(row), train, row.get("tools"))


def _form_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    there = [form for form in FORMS if all(row.get(column) is not None for column in form)]
    if len(there) == 1:
        return there[0]
    accepted = "messages, or prompt and completion, or text"
    if not there:
        raise RowUnusable(f"the row has the columns {', '.join(row) or 'none'}; trained on are {accepted}: rename them")
    both = " as well as ".join(" and ".join(form) for form in there)
    raise RowUnusable(f"the row has {both}, and which to train on is not said; it is one of {accepted}: drop the rest")


def _text_of(row: Mapping[str, Any], column: str) -> str:
    if not isinstance(row[column], str):
        raise RowUnusable(
            f"{column} is a {type(row[column]).__name__}, not a text; a conversation goes into the column messages"
        )
    return str(row[column])


def _messages_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if not are_messages(row["messages"]):
        raise RowUnusable('messages is not a list of {"role": ..., "content": ...}')
    return list(row["messages"])


def _plain(tokenizer: Any, before: str, completion: str | None = None) -> Rendered:
    """A prompt and its completion, or one text; the end of sequence is added when the text does not bring it."""
    end = tokenizer.eos_token_id
    if end is None:
        raise RowUnusable(
            "the tokenizer has no end-of-sequence token, without which the model would not learn to stop; "
            "set tokenizer.eos_token"
        )
    texts = [before] if completion is None else [before, before + completion]
    pieces = in_pieces(tokenizer, texts, special=True)
    given = 1 if completion is None else max(len(pieces[0]), 1)  # nothing predicts the first token
    tokens = list(itertools.chain(*pieces))
    if tokens[-1:] != [end]:
        tokens.append(end)
    if len(tokens) <= given:
        raise RowUnusable("there is no text to train on in the row")
    return Rendered(tuple(tokens), tuple([0.0] * given + [1.0] * (len(tokens) - given)))
