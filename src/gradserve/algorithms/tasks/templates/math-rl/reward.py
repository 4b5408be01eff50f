"""What an answer is worth. Called in a process of its own, which is stopped if it takes too long."""

import re


def reward(completion: str, answer: str) -> float:
    """1 for an answer that ends with the right number, half of that if more follows it, else 0."""
    numbers = re.findall(r"\d+", completion)
    if not numbers or numbers[-1] != answer:
        return 0.0
    return 1.0 if re.search(r"\d\.?$", completion.strip()) else 0.5
