"""Texts as ids, so that ids that are there already stay as they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradserve.episodes.errors import TemplateUnusable


@dataclass(frozen=True)
class Rendered:
    """A row as it is trained on: ``Rendered((9, 4, 7, 2), (0.0, 0.0, 1.0, 1.0))``.

    ``tokens`` [N], ``weights`` [N]: 1 on what the model is trained to give, its end of turn included, 0 elsewhere. A
    weight is of the token itself; whoever shifts to targets moves both by one.
    """

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def trained(self) -> int:
        """How many tokens are trained on."""
        return sum(weight != 0 for weight in self.weights)


def encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """[N] ids; special tokens are what the text says, and with ``special`` those that begin every sequence too."""
    ids: list[int] = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    return ids


def in_pieces(tokenizer: Any, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
    """The ids of growing texts, each a prefix of the next: [[N0], [N1], ...], what each one adds to those before it.

    Together they are the ids of the last text; each text's ids are then a prefix of the next one's. Only where the
    tokenizer would join what lies on both sides of a cut to one token are the sides encoded apart: a model that is
    given the first side never samples such a token.
    """
    pieces = [encode(tokenizer, texts[0], special=special)]
    pieces += [encode(tokenizer, later[len(earlier) :]) for earlier, later in itertools.pairwise(texts)]
    if list(itertools.chain(*pieces)) == encode(tokenizer, texts[-1], special=special):
        return pieces
    tokens, cuts = pieces[0], [0, len(pieces[0])]
    for earlier, later in itertools.pairwise(texts):
        tokens = _extended(tokenizer, tokens, earlier, later, special)
        cuts.append(len(tokens))
    return [tokens[begin:end] for begin, end in itertools.pairwise(cuts)]


def _extended(tokenizer: Any, tokens: list[int], before: str, after: str, special: bool) -> list[int]:
    whole = encode(tokenizer, after, special=special)
    if whole[: len(tokens)] == tokens:
        return whole
    apart = [*tokens, *encode(tokenizer, after[len(before) :])]
    if decode(tokenizer, apart) != decode(tokenizer, whole):  # e.g. a space that the tokenizer puts before each text
        raise TemplateUnusable(
            f"{before[-40:]!r} and {after[len(before) :][:40]!r} can't be encoded one after the other without "
            "changing the text; begin the second with a character that the tokenizer does not join to the first"
        )
    return apart


def decode(tokenizer: Any, tokens: Sequence[int], *, special: bool = True) -> str:
    """The text as it is, special tokens as their names or, without ``special``, left out."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Ids and names of the tokens that are control, not text."""
    return {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
