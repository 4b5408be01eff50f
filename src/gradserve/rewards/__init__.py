"""Rewards: what one is (contract), how it is named (naming), run (runner) and checked (check), and ready ones.

contract   Sample -> Outcome | Failure
naming     a function <-> the name under which another process finds it
child      the process that calls it
process    a handle on one such process
runner     many samples over several processes, with retries and counts
check      what ``gradserve reward test`` finds out
ready/     exact, numeric, math, regex, format_tags, json_schema, length, keyword; reasoning_gym, verifiers
"""

from gradserve.rewards.contract import Failure, FailureKind, Outcome, Reward, RewardUnusable, Sample
from gradserve.rewards.naming import factory
from gradserve.rewards.ready import (
    exact,
    final_answer,
    format_tags,
    json_schema,
    keyword,
    length,
    math,
    numeric,
    reasoning_gym,
    reasoning_gym_rows,
    regex,
    verifiers,
    verifiers_rows,
)
from gradserve.rewards.runner import RewardCounts, RewardRunner

__all__ = [
    "Failure",
    "FailureKind",
    "Outcome",
    "Reward",
    "RewardCounts",
    "RewardRunner",
    "RewardUnusable",
    "Sample",
    "exact",
    "factory",
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
