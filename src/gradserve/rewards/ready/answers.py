"""Ready rewards that compare a completion with the answer. No answer (None) is an error, not a reward of 0."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from gradserve.rewards.contract import Reward
from gradserve.rewards.naming import factory
from gradserve.rewards.ready.extras import need

# Bounded: "1e999999999" is a short text and a number of a gigabyte.
_NUMBER = re.compile(r"[+-]?(\d{1,300}(\.\d{0,300})?|\.\d{1,300})([eE][+-]?\d{1,3})?(\s*/\s*\d{1,300})?")

_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
"""Letters in a row that are not a LaTeX command."""


@factory
def exact(ignore_case: bool = False) -> Reward:
    """1.0 when the completion is the answer, or one of a list of answers, but for white space; else 0.0."""

    def normal(text: Any) -> str:
        words = " ".join(str(text).split())
        return words.casefold() if ignore_case else words

    def reward(completion: str, answer: Any) -> float:
        return float(normal(completion) in {normal(one) for one in _answers(answer)})

    return reward


@factory
def numeric(absolute: float = 0.0, relative: float = 0.0) -> Reward:
    """1.0 when the final answer is the answer's number within ``absolute`` or ``relative`` x |answer|; else 0.0.

    See :func:`final_answer`. Compared as fractions, so that 0.1 + 0.2 is 0.3 and 1/2 is 0.50; commas between thousands,
    a leading $ and a trailing full stop are left out.
    """

    def reward(completion: str, answer: Any) -> float:
        found = _fraction(final_answer(completion))
        return float(found is not None and any(_near(found, _wanted(one)) for one in _answers(answer)))

    def _near(found: Fraction, wanted: Fraction) -> bool:
        return abs(found - wanted) <= max(Fraction(absolute), Fraction(relative) * abs(wanted))

    return reward


@factory
def math() -> Reward:
    """1.0 when the final answer equals the answer as mathematics (``\\frac{1}{2}`` is 0.5), by math-verify; else 0.0.

    See :func:`final_answer`; a completion that marks none must be mathematics without words, since math-verify would
    find a number that a sentence only mentions. Needs the extra "math". math-verify's own time limits are off: what
    sympy can't decide in time is the runner's to end, as a failure and not as a wrong answer.
    """
    verifier = need("math_verify", "math")

    def parsed(text: str) -> Any:
        return verifier.parse(f"${text}$", parsing_timeout=None)

    def reward(completion: str, answer: Any) -> float:
        wanted = [parsed(str(one)) for one in _answers(answer)]
        if not all(wanted):
            raise ValueError(f"math-verify can't read the answer {answer!r}")
        text = final_answer(completion)
        if text == completion.strip() and _WORD.search(text):
            return 0.0
        found = parsed(text)
        return float(any(verifier.verify(gold, found, timeout_seconds=None, raise_on_error=True) for gold in wanted))

    return reward


def final_answer(completion: str) -> str:
    """What is in the last ``\\boxed{}``, else what follows the last ``####`` on its line, else the whole completion.

    Nothing else is searched for: a number that is only mentioned is not an answer.
    """
    if (start := completion.rfind("\\boxed{")) >= 0:
        return _to_closing_brace(completion[start + len("\\boxed{") :]).strip()
    if "####" in completion:
        return (completion.rpartition("####")[2].strip().splitlines() or [""])[0].strip()
    return completion.strip()


def _to_closing_brace(text: str) -> str:
    """Up to the brace that closes one opened before; "" when none does."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return ""


def _answers(answer: Any) -> Iterable[Any]:
    answers = answer if isinstance(answer, list) else [answer]
    if not answers or None in answers:
        raise ValueError(f"the sample has no answer to compare with: {answer!r}")
    return answers


def _wanted(answer: Any) -> Fraction:
    number = _fraction(final_answer(str(answer)))
    if number is None:
        raise ValueError(f"the sample's answer is not a number: {answer!r}")
    return number


def _fraction(text: str) -> Fraction | None:
    bare = re.sub(r"(?<=\d),(?=\d{3})", "", text.strip().removesuffix(".").removeprefix("$"))
    if not _NUMBER.fullmatch(bare):
        return None
    above, _, below = bare.partition("/")
    try:
        return Fraction(above.strip()) / Fraction(below.strip() or 1)
    except ZeroDivisionError:
        return None
