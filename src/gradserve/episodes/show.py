"""A row as it is trained on, for people: its text in spans of equal weight."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from gradserve.episodes.tokens import Rendered, decode


class Span(NamedTuple):
    """``Span("4<|im_end|>", True)``: a stretch of text, and whether its tokens are trained on."""

    text: str
    trained: bool


def spans(row: Rendered, tokenizer: Any) -> list[Span]:
    """All of the row's text, special tokens by their names; what a terminal would obey is escaped."""
    found: list[Span] = []
    end, shown = 0, 0
    for trained, group in itertools.groupby(weight != 0 for weight in row.weights):
        end += len(list(group))
        text = decode(tokenizer, row.tokens[:end])  # from the start: some tokenizers write a first token differently
        found.append(Span(_printable(text[shown:]), trained))
        shown = len(text)
    return found


def bracketed(row: Rendered, tokenizer: Any) -> str:
    """Without colours: trained spans stand between ⟦ and ⟧."""
    return "".join(f"⟦{span.text}⟧" if span.trained else span.text for span in spans(row, tokenizer))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
