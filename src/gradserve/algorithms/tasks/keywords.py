"""What may be told to a trainer, read from the signatures of its class; so a task file has no list of its own to keep.

>>> from gradserve.algorithms.sft import SFTTrainer
>>> constructor_keywords(SFTTrainer)["rank"].default
32
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from gradserve.algorithms.stopping import Budget

MISSING: Any = inspect.Parameter.empty
"""The default of a keyword that has none."""
NOT_IN_FILES = ("callbacks", "resume", "callback")
"""Of ``fit``: what belongs to a call, not to the training."""


@dataclass(frozen=True)
class Keyword:
    """``kind`` is the annotation, evaluated; ``default`` MISSING where it must be given."""

    name: str
    kind: Any
    default: Any


def constructor_keywords(made: Callable[..., Any]) -> dict[str, Keyword]:
    """Of a function, or of a class with those that its ``**settings`` take: its base's, or its ``settings_kinds``."""
    if not isinstance(made, type):
        return _of_function(made)
    found: dict[str, Keyword] = {}
    for owner in made.__mro__:
        if owner is object or "__init__" not in vars(owner):
            continue
        found = {**_of_function(vars(owner)["__init__"]), **found}
        if not _hands_on(vars(owner)["__init__"]):
            break
    of_settings: Mapping[str, Any] = getattr(made, "settings_kinds", {})
    return {**found, **{name: Keyword(name, kind, None) for name, kind in of_settings.items()}}


def fit_records(trainer: type[Any]) -> dict[str, type[Any]]:
    """The keywords of what starts a training that are records, and so have tables of their own: ``early_stop``."""
    of_fit = _of_function(getattr(trainer, starts_with(trainer)))
    found = {name: _record_in(keyword.kind) for name, keyword in of_fit.items()}
    return {name: record for name, record in found.items() if record is not None}


def fit_keywords(trainer: type[Any]) -> dict[str, dict[str, Keyword]]:
    """Of what starts a training, by the table of a task file that they stand in.

    ``data`` for the rows, ``budget`` for limits, a table of its own for each that is a record (``early_stop``), ``fit``
    for the rest.
    """
    limits = {field.name for field in dataclasses.fields(Budget)}
    tables: dict[str, dict[str, Keyword]] = {"data": {}, "fit": {}, "budget": {}}
    records = fit_records(trainer)
    for name, keyword in _of_function(getattr(trainer, starts_with(trainer))).items():
        if name not in (*NOT_IN_FILES, *records):
            table = "data" if name.endswith("_data") else "budget" if name in limits else "fit"
            tables[table][name] = keyword
    return tables | {name: _of_function(record.__init__) for name, record in records.items()}


def starts_with(trainer: type[Any]) -> str:
    """The method that trains."""
    return "fit" if hasattr(trainer, "fit") else "train"


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of TOML or JSON is one of ``kind``: a whole number is a float, a text is a path.

    >>> fits(1, float | None), fits("1", float), fits(True, int)
    (True, False, False)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in inner)
    if (origin or kind) in (collections.abc.Mapping, dict):
        return isinstance(value, dict) and all(fits(each, inner[1]) for each in value.values() if inner)
    if (origin or kind) in (collections.abc.Sequence, list, tuple):
        return isinstance(value, list | tuple) and all(fits(each, inner[0]) for each in value if inner)
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    if is_path(kind):
        return isinstance(value, str)
    return kind in (int, str, types.NoneType) and isinstance(value, kind)


def is_path(kind: Any) -> bool:
    """Whether ``kind`` takes the path of a file."""
    return any(isinstance(each, type) and issubclass(each, os.PathLike) for each in (get_args(kind) or (kind,)))


def in_words(kind: Any) -> str:
    """``kind`` for people; empty when no file can say it.

    >>> in_words(float | None)
    "a number or 'none'"
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(words for words in map(in_words, inner) if words))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if is_path(kind):
        return "a path"
    return _WORDS.get(origin or kind, "")


_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    types.NoneType: "'none'",
    Any: "a value",
    collections.abc.Mapping: "a table",
    dict: "a table",
    collections.abc.Sequence: "a list",
    list: "a list",
    tuple: "a list",
}


def _of_function(function: Callable[..., Any]) -> dict[str, Keyword]:
    names = vars(sys.modules[function.__module__])
    return {
        name: Keyword(name, _evaluated(parameter.annotation, names), parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def _record_in(kind: Any) -> type[Any] | None:
    """The dataclass that is, or is one of, ``kind``."""
    found = [each for each in (get_args(kind) or (kind,)) if dataclasses.is_dataclass(each)]
    return typing.cast("type[Any]", found[0]) if found else None


def _hands_on(function: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())


class _NotInFiles:
    """The kind of a keyword whose annotation is there for type checkers only: an object of a heavy package."""


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """An annotation is text here, and what it names may be imported for type checkers only."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)
    except NameError:
        return _NotInFiles
