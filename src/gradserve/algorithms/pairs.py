"""Rows of preferences: a prompt with an answer that was chosen and one that was rejected, as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradserve.data.errors import DataError
from gradserve.episodes.chat import ChatTemplate
from gradserve.episodes.rows import rendered
from gradserve.episodes.tokens import Rendered

Conversation = list[Mapping[str, Any]]


@dataclass(frozen=True)
class Pair:
    """Two rows whose weights are 1 on the answer and 0 on what both have in common."""

    chosen: Rendered
    rejected: Rendered


def pair_of(row: Mapping[str, Any], template: ChatTemplate | Any) -> Pair:
    """The row's pair.

    >>> pair_of({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, tokenizer)

    A ``prompt`` that is a text goes with answers that are texts, all as they are. Messages go through the chat
    template: a prompt that is a list of them, with answers that are a text, a message or a list of messages; or no
    prompt, and two whole conversations, which are trained on from where they part. Raises DataError for other rows,
    RowUnusable and TemplateUnusable as rendered does.
    """
    for column in ("chosen", "rejected"):
        if row.get(column) is None:
            raise DataError(f"a row of preferences has chosen and rejected; this one has {', '.join(row) or 'nothing'}")
    if isinstance(row.get("prompt"), str):
        return Pair(*(_plain(row, column, template) for column in ("chosen", "rejected")))
    chosen, rejected = (conversation(row, column) for column in ("chosen", "rejected"))
    common = _common(chosen, rejected)
    if common == min(len(chosen), len(rejected)):
        raise DataError(f"chosen and rejected do not part, so neither is better: {str(row)[:200]}")
    return Pair(*(_chat(messages, common, template) for messages in (chosen, rejected)))


def conversation(row: Mapping[str, Any], column: str) -> Conversation:
    """The prompt's messages, if there are any, and those of ``column``, which may be a text."""
    answer = row[column]
    before = row.get("prompt") or []
    if isinstance(answer, str):
        if not before:
            raise DataError(f"{column} is a text without a prompt before it: {str(row)[:200]}")
        answer = {"role": "assistant", "content": answer}
    return [*before, *([answer] if isinstance(answer, Mapping) else answer)]


def _plain(row: Mapping[str, Any], column: str, template: ChatTemplate | Any) -> Rendered:
    if not isinstance(row[column], str):
        raise DataError(
            f"prompt is a text and {column} is not; give a list of messages as the prompt: {str(row)[:200]}"
        )
    return rendered({"prompt": row["prompt"], "completion": row[column]}, template)[0]


def _chat(messages: Sequence[Mapping[str, Any]], common: int, template: ChatTemplate | Any) -> Rendered:
    """Trained on the assistant's messages after the first ``common`` ones."""
    silent = [{**m, "weight": 0} if m.get("role") == "assistant" else m for m in messages[:common]]
    parts = rendered({"messages": [*silent, *messages[common:]]}, template)
    if len(parts) != 1:
        raise DataError("a conversation of a pair can't be split: compare answers of one turn")
    return parts[0]


def _common(one: Conversation, other: Conversation) -> int:
    """How many messages both begin with."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if dict(mine) != dict(theirs):
            break
        count += 1
    return count
