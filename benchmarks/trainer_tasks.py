"""What the trainers are compared on: rows, and rewards that both libraries' scripts use. No dependencies.

addition  asked "What is 3 + 4?", give the sum and nothing after it; SmolLM2-135M rambles at first
digits    answer in digits; a random model gives 4 % of them
chats     one to five questions and answers about sums, of 45 to some 200 tokens of SmolLM2's
"""

from __future__ import annotations

import random
import re
from typing import Any

Rows = list[dict[str, Any]]

SMALLEST, LARGEST = 2, 12
MOST_TURNS = 5


def addition_rows() -> Rows:
    """All sums of two numbers from 2 to 12."""
    numbers = range(SMALLEST, LARGEST + 1)
    return [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in numbers for b in numbers]


def addition_reward(completion: str, answer: str) -> float:
    """1 if the last number is the sum and the completion ends there; 0.5 if it is the sum but more follows; else 0."""
    numbers = re.findall(r"\d+", completion)
    if not numbers or numbers[-1] != answer:
        return 0.0
    return 1.0 if re.search(r"\d\.?$", completion.strip()) else 0.5


def digits_rows() -> Rows:
    """Sixteen questions."""
    return [{"prompt": f"Pick a number of {count} digits.", "answer": ""} for count in range(1, 17)]


def digits_reward(completion: str, answer: str) -> float:
    """The share of the completion's characters that are digits."""
    return sum(character in "0123456789" for character in completion) / max(len(completion), 1)


def chats(seed: int, count: int) -> Rows:
    """``count`` conversations of random lengths; equal seeds give equal ones."""
    draw = random.Random(seed)
    return [{"messages": _chat(draw)} for _ in range(count)]


def _chat(draw: random.Random) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Answer briefly."}]
    for _ in range(draw.randint(1, MOST_TURNS)):
        left, right = draw.randint(SMALLEST, LARGEST), draw.randint(SMALLEST, LARGEST)
        why = f" Take {left}, then count {right} further." * draw.randint(0, 2)
        messages += [
            {"role": "user", "content": f"What is {left} + {right}?"},
            {"role": "assistant", "content": f"{left} + {right} = {left + right}.{why}"},
        ]
    return messages


ROWS = {"addition": addition_rows, "digits": digits_rows}
REWARDS = {"addition": addition_reward, "digits": digits_reward}
