"""A task that a 135M-parameter model can learn by reinforcement: give the sum, and nothing else.

The base model of the quickstart knows small sums, but asked in a chat it rambles: most answers never get to the number.
The reward can be checked by a line of code and does not say how to answer; the model has to find that out.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

SMALLEST, LARGEST = 2, 12
HELD_OUT = 12
"""Pairs of numbers, of 66, that are never trained on, in either order."""

_NUMBER = re.compile(r"\d+")
_ENDS_WITH_NUMBER = re.compile(r"\d\.?$")


@dataclass(frozen=True)
class Addition:
    """One problem.

    >>> Addition(3, 4).question
    'What is 3 + 4?'
    """

    left: int
    right: int

    @property
    def question(self) -> str:
        """What the user asks."""
        return f"What is {self.left} + {self.right}?"

    @property
    def prompt(self) -> str:
        """The question in the ChatML format of the model, without a system message."""
        return f"<|im_start|>user\n{self.question}<|im_end|>\n<|im_start|>assistant\n"

    @property
    def row(self) -> dict[str, str]:
        """For RLTrainer: the prompt, and the sum that ``reward`` looks for."""
        return {"prompt": self.prompt, "answer": str(self.left + self.right), "question": self.question}


def reward(completion: str, answer: str) -> float:
    """1 if the last number is the sum and the completion ends there; 0.5 if it is the sum but more follows; else 0.

    >>> [reward(text, "7") for text in ("3 + 4 = 7.", "It is 7 of course", "12")]
    [1.0, 0.5, 0.0]
    """
    numbers = _NUMBER.findall(completion)
    if not numbers or numbers[-1].lstrip("0") != answer:
        return 0.0
    return 1.0 if _ENDS_WITH_NUMBER.search(completion.strip()) else 0.5


def problems(seed: int = 7) -> tuple[list[Addition], list[Addition]]:
    """All sums of two numbers from 2 to 12: (training, held out). A pair and its mirror image are on the same side."""
    numbers = range(SMALLEST, LARGEST + 1)
    pairs = [(left, right) for left in numbers for right in numbers if left <= right]
    random.Random(seed).shuffle(pairs)
    return _both_ways(pairs[HELD_OUT:]), _both_ways(pairs[:HELD_OUT])


def _both_ways(pairs: list[tuple[int, int]]) -> list[Addition]:
    return [Addition(*numbers) for pair in pairs for numbers in sorted({pair, pair[::-1]})]
