"""Rewards to use as they are: each a factory, so that they run in a process that can be killed."""

from gradserve.rewards.ready.answers import exact, final_answer, math, numeric
from gradserve.rewards.ready.reasoning_gym_adapter import reasoning_gym, reasoning_gym_rows
from gradserve.rewards.ready.shape import format_tags, json_schema, keyword, length, regex
from gradserve.rewards.ready.verifiers_adapter import verifiers, verifiers_rows

__all__ = [
    "exact",
    "final_answer",
    "format_tags",
    "json_schema",
    "keyword",
    "length",
    "math",
    "numeric",
    "reasoning_gym",
    "reasoning_gym_rows",
    "regex",
    "verifiers",
    "verifiers_rows",
]
