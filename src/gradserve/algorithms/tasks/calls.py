"""A call as data, so that what is run and what is printed as Python can't be two things.

>>> made = Call("fractions:Fraction", {"numerator": 1, "denominator": 2})
>>> made()
Fraction(1, 2)
>>> print(made.code())
Fraction(
    numerator=1,
    denominator=2,
)
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """Of ``module:Name`` with these keywords, whose values are plain or calls."""

    target: str
    keywords: Mapping[str, Any]

    def __call__(self, **more: Any) -> Any:
        """Make it."""
        place, _, name = self.target.partition(":")
        return getattr(importlib.import_module(place), name)(**made(self.keywords), **more)

    def imports(self) -> Iterator[str]:
        """The import lines that its code needs."""
        yield "from {} import {}".format(*self.target.split(":"))
        yield from imports(self.keywords)

    def code(self) -> str:
        """As Python."""
        return written(self.target.partition(":")[2], self.keywords)


def made(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """With the calls made."""
    return {name: value() if isinstance(value, Call) else value for name, value in keywords.items()}


def imports(keywords: Mapping[str, Any]) -> Iterator[str]:
    """Of the calls among them."""
    for value in keywords.values():
        if isinstance(value, Call):
            yield from value.imports()


def written(name: str, keywords: Mapping[str, Any]) -> str:
    """``name(keyword=value, ...)``, one keyword on a line."""
    lines = [f"{key}={_literal(value)}," for key, value in keywords.items()]
    inside = "\n".join(lines).replace("\n", "\n    ")
    return f"{name}(\n    {inside}\n)" if lines else f"{name}()"


def _literal(value: Any) -> str:
    if isinstance(value, Call):
        return value.code()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a text of JSON is one of Python, in the usual quotes
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)
