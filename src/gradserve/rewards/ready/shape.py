"""Ready rewards for the form of a completion; they need no answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from gradserve.rewards.contract import Reward
from gradserve.rewards.naming import factory
from gradserve.rewards.ready.extras import need


@factory
def regex(pattern: str, whole: bool = False) -> Reward:
    """1.0 when ``pattern`` (of Python's re) is found in the completion, or with ``whole`` matches all of it."""
    compiled = re.compile(pattern)

    def reward(completion: str) -> float:
        return float(bool(compiled.fullmatch(completion) if whole else compiled.search(completion)))

    return reward


@factory
def format_tags(tags: Sequence[str] = ("think", "answer")) -> Reward:
    """1.0 when the completion is ``<think>...</think> <answer>...</answer>``, each tag once, in order; else 0.0."""
    if not tags:
        raise ValueError("give at least one tag")
    blocks = (f"<{tag}>.*</{tag}>" for tag in map(re.escape, tags))
    pattern = re.compile(r"\s*" + r"\s*".join(blocks) + r"\s*", re.DOTALL)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]

    def reward(completion: str) -> float:
        once = all(completion.count(mark) == 1 for mark in marks)
        return float(once and pattern.fullmatch(completion) is not None)

    return reward


@factory
def json_schema(schema: dict[str, Any]) -> Reward:
    """1.0 when the completion is JSON that the JSON Schema allows, else 0.0; the parts are ``parses`` and ``valid``.

    The JSON may stand in one Markdown code block. Needs the extra "schema"; nothing is fetched, so that a ``$ref`` to
    another document is an error.
    """
    jsonschema = need("jsonschema", "schema")
    registry = need("referencing", "schema").Registry()
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    validator = kind(schema, registry=registry)

    def reward(completion: str) -> dict[str, float]:
        try:
            document = json.loads(_outside_code_block(completion), parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return {"total": 0.0, "parses": 0.0, "valid": 0.0}
        valid = float(validator.is_valid(document))
        return {"total": valid, "parses": 1.0, "valid": valid}

    return reward


@factory
def length(limit: int, margin: int = 0, unit: Literal["characters", "words"] = "words") -> Reward:
    """1.0 up to ``limit`` units, then falling evenly to 0.0 at ``limit + margin``."""
    if limit < 0 or margin < 0 or unit not in ("characters", "words"):
        raise ValueError(f"limit {limit}, margin {margin}, unit {unit!r}: give numbers from 0, characters or words")

    def reward(completion: str) -> float:
        over = (len(completion) if unit == "characters" else len(completion.split())) - limit
        if over <= 0:
            return 1.0
        return max(0.0, 1.0 - over / margin) if margin else 0.0

    return reward


@factory
def keyword(words: Sequence[str], forbidden: Sequence[str] = (), ignore_case: bool = True) -> Reward:
    """The share of ``words`` that stand in the completion as whole words, 0.0 when one of ``forbidden`` does."""
    if not words or not all([*words, *forbidden]):
        raise ValueError("give at least one word, and no empty ones")
    flags = re.IGNORECASE if ignore_case else re.NOFLAG

    def found(words: Sequence[str], completion: str) -> int:
        return sum(bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", completion, flags)) for word in words)

    def reward(completion: str) -> float:
        return 0.0 if found(forbidden, completion) else found(words, completion) / len(words)

    return reward


def _outside_code_block(text: str) -> str:
    """The inside of a text that is one fenced block, else the text."""
    stripped = text.strip()
    if not (stripped.startswith("```") and stripped.endswith("```") and "\n" in stripped):
        return stripped
    return stripped.partition("\n")[2].removesuffix("```")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
