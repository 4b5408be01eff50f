"""Rows of an evaluation that the training data has too."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from gradserve.data.errors import DataError
from gradserve.data.row import Row

Kind = Literal["exact", "normalised", "ngram"]
_STRENGTH: dict[Kind, int] = {"exact": 3, "normalised": 2, "ngram": 1}


@dataclass(frozen=True)
class Overlap:
    """A row of the evaluation and the first row of the training data that overlaps with it most strongly."""

    kind: Kind
    eval_index: int
    train_index: int
    eval_row: Row
    train_row: Row
    shared: str
    """The text that both have: all of it, or the first n-gram, in normalised words."""


def contamination(
    train: Iterable[Row], eval: Iterable[Row], key: str | Callable[[Row], str], n: int = 13
) -> list[Overlap]:
    """At most one for each row of ``eval``, in its order; ``eval`` is kept in memory, ``train`` is read once.

    key: the column or the function that gives a row's text. exact: the same text; normalised: the same words, without
    case and punctuation; ngram: ``n`` words in a row are the same (13 as in GPT-3, arXiv:2005.14165, appendix C).
    """
    if n < 1:
        raise DataError("n is a number of words, from 1")
    text_of = _text_of(key)
    rows = list(eval)
    index = _Index([text_of(row) for row in rows], n)
    best: dict[int, Overlap] = {}
    for train_index, train_row in enumerate(train):
        for eval_index, kind, shared in index.matches(text_of(train_row)):
            before = best.get(eval_index)
            if before is None or _STRENGTH[kind] > _STRENGTH[before.kind]:
                best[eval_index] = Overlap(kind, eval_index, train_index, rows[eval_index], train_row, shared)
    return [best[eval_index] for eval_index in sorted(best)]


def normalised(text: str) -> list[str]:
    """Words of letters and digits, in lower case, after Unicode's NFKC."""
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold())


class _Index:
    """Where each text, list of words and n-gram of the evaluation is."""

    def __init__(self, texts: list[str], n: int) -> None:
        self._n = n
        self._exact: defaultdict[str, set[int]] = defaultdict(set)
        self._normalised: defaultdict[str, set[int]] = defaultdict(set)
        self._ngrams: defaultdict[str, set[int]] = defaultdict(set)
        for index, text in enumerate(texts):
            words = normalised(text)
            self._exact[text].add(index)
            if words:
                self._normalised[" ".join(words)].add(index)
            for ngram in _ngrams(words, n):
                self._ngrams[ngram].add(index)

    def matches(self, text: str) -> Iterator[tuple[int, Kind, str]]:
        words = normalised(text)
        joined = " ".join(words)
        for index in self._exact.get(text, ()):
            yield index, "exact", text
        for index in self._normalised.get(joined, ()):
            yield index, "normalised", joined
        for ngram in _ngrams(words, self._n):
            for index in self._ngrams.get(ngram, ()):
                yield index, "ngram", ngram


def _ngrams(words: list[str], n: int) -> Iterator[str]:
    return (" ".join(words[start : start + n]) for start in range(len(words) - n + 1))


def _text_of(key: str | Callable[[Row], str]) -> Callable[[Row], str]:
    def text_of(row: Row) -> str:
        try:
            text = key(row) if callable(key) else row[key]
        except KeyError as error:
            raise DataError(f"a row has no column {error}; it has {', '.join(row)}") from error
        if not isinstance(text, str):
            raise DataError(
                f"the text to compare is of type {type(text).__name__}; give key= a function that makes a str"
            )
        return text

    return text_of
