"""Rewards that the reward's own processes load by name."""

from __future__ import annotations

from gradserve.episodes.environment import Step


def digits(completion: str) -> float:
    """The share of the completion's characters that are digits."""
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)


def breaks_on_vowels(completion: str) -> dict[str, float]:
    """Crashes for about half of what a random model says; else a reward in two parts."""
    if any(vowel in completion for vowel in "aeiou"):
        raise RuntimeError("a vowel")
    return {"digits": digits(completion), "length": len(completion) / 100}


class Twice:
    """Two turns; each reply earns the share of its digits."""

    def start(self, row: dict[str, str]) -> list[dict[str, str]]:
        self.turns = 0
        return [{"role": "user", "content": row["prompt"]}]

    def reply(self, message: dict[str, str]) -> Step:
        self.turns += 1
        earned = digits(message["content"])
        if self.turns == 2:
            return Step(done=True, reward=earned)
        return Step([{"role": "user", "content": "more"}], reward=earned)
