"""Rows with more tokens than a training allows: refused by name, or left out and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gradserve.data.errors import DataError


@dataclass
class Overlong:
    """``max_length`` None allows all. ``skipped`` counts what ``mode`` skip has left out so far."""

    max_length: int | None
    mode: Literal["refuse", "skip"] = "refuse"
    skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.mode not in ("refuse", "skip"):
            raise ValueError(f"overlong is {self.mode!r}: give 'refuse' or 'skip'")

    def admits(self, tokens: int, what: str, row: Mapping[str, Any]) -> bool:
        """Whether ``what`` (a row, a pair) of so many tokens is trained on. Raises DataError where it is refused."""
        if self.max_length is None or tokens <= self.max_length:
            return True
        if self.mode == "refuse":
            raise DataError(
                f"a {what} has {tokens} tokens and max_length is {self.max_length}: {str(row)[:200]}; "
                f"raise max_length, or leave such {what}s out with overlong='skip'"
            )
        self.skipped += 1
        return False
