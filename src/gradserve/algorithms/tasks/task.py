"""A task file: tables of keywords, checked before anything starts.

[task]        trainer = "rl" and model = "smollm2-135m-instruct"
[data]        train and eval: a path or URL, or a table with source and Dataset's keywords
[trainer]     keywords of the trainer's constructor
[fit]         keywords of its fit
[budget]      max_steps, max_minutes, max_usd
[early_stop]  keywords of EarlyStop

A manifest.json has the same tables, and what became of them in [record].
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradserve.algorithms.tasks.calls import Call, imports, written
from gradserve.algorithms.tasks.keywords import (
    MISSING,
    Keyword,
    constructor_keywords,
    fit_keywords,
    fit_records,
    fits,
    in_words,
    is_path,
    starts_with,
)
from gradserve.algorithms.tasks.manifest import refuse_unnamed
from gradserve.algorithms.tasks.trainers import TaskError, name_of, nearest, trainer_class
from gradserve.data.dataset import Dataset

Table = Mapping[str, Any]

_IN_A_FILE = re.compile(r"[^:]+\.py:\w+")
"""A function or class of a file, as rewards and environments are named."""


@dataclass(frozen=True)
class Task:
    """``constructor`` makes the trainer; its method ``starts_with``, told ``fit``, trains.

    ``tables`` are the file's, with absolute paths. ``record`` is a manifest's, empty for other files.
    """

    trainer: type[Any]
    constructor: Call
    starts_with: str
    fit: Mapping[str, Any]
    tables: Mapping[str, Table]
    record: Table = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The trainer's, as in the file."""
        return name_of(self.trainer)

    def told(self, keyword: str) -> Any:
        """What the constructor or ``fit`` will get for it: the file's value, else the default. Raises KeyError."""
        for given in (self.constructor.keywords, self.fit):
            if keyword in given:
                return given[keyword]
        known = dict(constructor_keywords(self.trainer))
        for table in fit_keywords(self.trainer).values():
            known.update(table)
        return known[keyword].default

    def code(self) -> str:
        """The same training as Python that runs as it is."""
        lines = sorted({*self.constructor.imports(), *imports(self.fit)})
        fitting = written(f"trained = trainer.{self.starts_with}", self.fit).replace("\n", "\n    ")
        # Rewards and environments may be run in processes of their own, which import this file again.
        body = f"with {self.constructor.code()} as trainer:\n    {fitting}".replace("\n", "\n    ")
        return "\n".join(lines) + f'\n\nif __name__ == "__main__":\n    {body}\n'


def load(path: str | Path, changes: Iterable[str] = ()) -> Task:
    """Read a TOML file or a manifest.json; ``changes`` are like ``trainer.learning_rate=1e-4``. Raises TaskError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise TaskError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise TaskError(f"{path} can't be read: {error}") from error
    for change in changes:
        _change(tables, change)
    try:
        refuse_unnamed(tables)
        return task_of(tables, path.resolve().parent)
    except TaskError as error:
        raise TaskError(f"{path}: {error}") from error


def task_of(tables: Mapping[str, Any], folder: Path) -> Task:
    """Of a file's tables; relative paths in them are relative to ``folder``. Raises TaskError."""
    tables = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()}
    record = tables.pop("record", {})
    head = tables.pop("task", {})
    for name, table in {"task": head, **tables}.items():
        if not isinstance(table, Mapping):
            raise TaskError(f"{name} stands outside of a table: write it below [task], [trainer] or [fit]")
    if "trainer" not in head:
        raise TaskError("[task] trainer is missing; " + nearest("", ["rl", "sft", "dpo", "reward", "distill", "ppo"]))
    trainer = trainer_class(str(head["trainer"]))
    of_fit, records = fit_keywords(trainer), fit_records(trainer)
    known = {**{name: keywords for name, keywords in of_fit.items() if keywords}, "trainer": {}}
    for name in tables:
        if name not in known:
            raise TaskError(f"there is no table [{name}] for trainer {head['trainer']!r}; {nearest(name, known)}")
    constructor = _constructor(trainer, head, tables.get("trainer", {}), folder)
    data = _data(of_fit["data"], tables.get("data", {}), constructor, trainer, folder)
    fit = {**data, **_checked("fit", tables.get("fit", {}), of_fit["fit"], folder)}
    fit |= _checked("budget", tables.get("budget", {}), of_fit["budget"], folder)
    for name in tables.keys() - {"trainer", "data", "fit", "budget"}:
        fit[name] = _record(name, tables[name], records[name], of_fit[name], folder)
    target = f"{trainer.__module__}:{trainer.__qualname__}"
    return Task(trainer, Call(target, constructor), starts_with(trainer), fit, {"task": head, **tables}, record)


def _constructor(trainer: type[Any], head: Table, table: Table, folder: Path) -> dict[str, Any]:
    known = constructor_keywords(trainer)
    of_head = {"trainer": Keyword("trainer", str, MISSING)}
    if "model" in known:
        of_head["model"] = known.pop("model")
    else:
        known.pop("model", None)
    found = _checked("task", head, of_head, folder)
    found.pop("trainer")
    return {**found, **_checked("trainer", table, known, folder)}


def _data(
    known: Mapping[str, Keyword], table: Table, constructor: Table, trainer: type[Any], folder: Path
) -> dict[str, Any]:
    """``train`` and ``eval`` as sources, or as calls of Dataset."""
    short = {name.removesuffix("_data"): keyword for name, keyword in known.items()}
    _refuse_unknown("data", table, short)
    _refuse_missing("data", table, short)
    found: dict[str, Any] = {}
    for name, value in table.items():
        table_name = f"data.{name}"
        if not isinstance(value, Mapping):
            value = {"source": value}
        keywords = constructor_keywords(Dataset)
        _refuse_missing(table_name, value, keywords)
        if not isinstance(value["source"], str):
            raise TaskError(f"[{table_name}] source is {value['source']!r}; give a path or a URL")
        told = {"source": _source(value["source"], folder)}
        told |= _checked(table_name, {key: each for key, each in value.items() if key != "source"}, keywords, folder)
        if name == "train" and len(told) > 1:
            # As Trainer.fit does with rows that are no Dataset yet.
            told.setdefault("shuffle_seed", constructor.get("seed", constructor_keywords(trainer)["seed"].default))
        found[f"{name}_data"] = told["source"] if len(told) == 1 else Call("gradserve.data.dataset:Dataset", told)
    return found


def _record(name: str, table: Table, made: type[Any], known: Mapping[str, Keyword], folder: Path) -> Call:
    _refuse_missing(name, table, known)
    return Call(f"{made.__module__}:{made.__qualname__}", _checked(name, table, known, folder))


def _checked(table: str, given: Table, known: Mapping[str, Keyword], folder: Path) -> dict[str, Any]:
    """With paths made absolute. Raises TaskError for what is unknown, missing, or of another kind."""
    writable = {name: keyword for name, keyword in known.items() if in_words(keyword.kind) not in ("", "'none'")}
    _refuse_unknown(table, given, writable)
    if table in ("task", "trainer"):
        _refuse_missing(table, given, known)
    return {name: _value(f"[{table}] {name}", value, writable[name].kind, folder) for name, value in given.items()}


def _value(where: str, value: Any, kind: Any, folder: Path) -> Any:
    if value == "none" and fits(None, kind) and not fits("none", kind):
        return None
    if not fits(value, kind):
        raise TaskError(f"{where} is {value!r}; give {in_words(kind)}")
    if isinstance(value, str) and is_path(kind):
        return str(folder / value)
    return _with_files(value, folder)


def _with_files(value: Any, folder: Path) -> Any:
    """``reward.py:right`` is a file's, wherever the training is started from."""
    if isinstance(value, str) and _IN_A_FILE.fullmatch(value):
        return str(folder / value)
    if isinstance(value, Mapping):
        return {name: _with_files(each, folder) for name, each in value.items()}
    return value


def _source(source: str, folder: Path) -> str:
    return source if "://" in source else str(folder / Path(source).expanduser())


def _refuse_unknown(table: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            raise TaskError(f"[{table}] has no key {name!r}; {nearest(name, known)}")


def _refuse_missing(table: str, given: Table, known: Mapping[str, Keyword]) -> None:
    for name, keyword in known.items():
        if keyword.default is MISSING and name not in given:
            raise TaskError(f"[{table}] {name} is missing: {in_words(keyword.kind) or 'it must be given'}")


def _change(tables: dict[str, Any], change: str) -> None:
    """Of ``a.b=1e-4``; what is no TOML value is a text."""
    place, equals, text = change.partition("=")
    names = place.strip().split(".")
    if not equals or len(names) < 2 or not all(names):
        raise TaskError(f"--set {change}: write table.key=value, like trainer.learning_rate=1e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for name in names[:-1]:
        tables = tables.setdefault(name, {})
        if not isinstance(tables, dict):
            raise TaskError(f"--set {change}: {name} is no table")
    tables[names[-1]] = value
