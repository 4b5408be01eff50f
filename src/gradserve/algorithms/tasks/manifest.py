"""The tables of a task, of a trainer that is there: what every ``fit`` leaves in its log folder.

``gradserve train manifest.json`` makes the same training again. What has no name that another process could find (a
lambda, rows in memory) is listed in ``[record] unnamed``; such a manifest is a record only, and is not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from gradserve.algorithms.tasks.keywords import constructor_keywords, fit_keywords
from gradserve.algorithms.tasks.trainers import TRAINERS, TaskError, name_of
from gradserve.data.dataset import Dataset
from gradserve.data.errors import DataError
from gradserve.rewards.contract import RewardUnusable
from gradserve.rewards.naming import reference_to

_READ_AT_MOST_BYTES = 16 << 20
"""Of a file, for the fingerprint of its rows: about a second."""
_OWN = ("service", "log_dir")
"""Of a constructor: where a training is, not what it is."""


def manifest_of(
    trainer: Any, arguments: tuple[Sequence[Any], Mapping[str, Any]], told: Mapping[str, Any]
) -> dict[str, Any]:
    """JSON, of a trainer that has its run.

    ``arguments`` are those of its constructor, positional and by name; ``told`` are those of ``fit``.
    """
    writing = _Writing(type(trainer))
    writing.constructor(arguments)
    for place, keywords in fit_keywords(type(trainer)).items():
        if place == "data":
            for name in keywords:
                writing.rows(name.removesuffix("_data"), told[name])
        elif place in told:  # a record with a table of its own
            if told[place] is not None:
                writing.table(place, dataclasses.asdict(told[place]), _given_fields(told[place]))
        else:
            writing.table(place, told, keywords)
    writing.callbacks(told["callbacks"])
    where = {"run_id": str(trainer.run.model_id), "server": str(trainer.service.holder._base_url)}
    record = {**where, **_versions(), "data": writing.data, "unnamed": writing.unnamed}
    return {**writing.tables, "record": record}


def refuse_unnamed(tables: Mapping[str, Any]) -> None:
    """Raises TaskError for a manifest that can't be run again, unless what lacks a name has been given since."""
    unnamed: Mapping[str, str] = tables.get("record", {}).get("unnamed", {})
    lacking = {place: why for place, why in unnamed.items() if not _is_given(tables, place)}
    if lacking:
        said = "; ".join(f"{place}: {why}" for place, why in lacking.items())
        raise TaskError(
            f"this training can't be run again as it was, for what has no name in the manifest: {said}. Name it with "
            "--set, or run the Python that made it"
        )


def _is_given(tables: Mapping[str, Any], place: str) -> bool:
    table, _, name = place.partition(".")
    return name in tables.get(table, {})


def refuse_other_data(record: Mapping[str, Any], dataset: Dataset) -> None:
    """Raises TaskError when the training rows, or their order, are others than those of the manifest."""
    known: Mapping[str, Any] = record.get("data", {}).get("train", {})
    if "order" in known and known["order"] != _order(dataset):
        raise TaskError("[data] train has other files, sizes or settings than when the manifest was written")
    if known.get("fingerprint") and known["fingerprint"] != dataset.fingerprint():
        raise TaskError("[data] train has other rows than when the manifest was written")


class _Unnamed(Exception):
    """What can't be written; the message says why."""


class _Writing:
    """The tables so far; ``data`` identifies the rows, ``unnamed`` has a reason for each that can't be written."""

    def __init__(self, kind: type[Any]) -> None:
        self.tables: dict[str, dict[str, Any]] = {"task": {"trainer": name_of(kind)}}
        self.data: dict[str, Any] = {}
        self.unnamed: dict[str, str] = {}
        self._kind = kind
        if name_of(kind) not in TRAINERS and ("<" in kind.__qualname__ or kind.__module__ == "__main__"):
            self.unnamed["task.trainer"] = f"{kind.__qualname__} is of {kind.__module__}, which can't be imported"

    def constructor(self, arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> None:
        """With the defaults, which may be others in another version."""
        positional, by_name = arguments
        bound = inspect.signature(self._kind).bind(*positional, **by_name).arguments
        settings = bound.pop("settings", {})
        known = constructor_keywords(self._kind)
        told = {**{name: keyword.default for name, keyword in known.items()}, **bound, **settings}
        self.table("task", told, known.keys() & {"model"})
        self.table("trainer", told, [name for name in known if name not in ("model", *_OWN)])

    def table(self, place: str, told: Mapping[str, Any], names: Iterable[str]) -> None:
        """What was told for these keywords."""
        table = self.tables.setdefault(place, {})
        for name in names:
            with self._noting(f"{place}.{name}"):
                table[name] = _plain(told[name])

    def rows(self, name: str, data: Any) -> None:
        """Of [data]: ``train`` or ``eval``."""
        if data is None:
            return
        with self._noting(f"data.{name}"):
            if name == "train":
                _refuse_begun(data)
            written = self.tables.setdefault("data", {})[name] = _source(data)
            self.data[name] = _identity(data, written)

    def callbacks(self, callbacks: Sequence[Any]) -> None:
        """They may end a training, unless they say that they only look on."""
        acting = [callback for callback in callbacks if not getattr(callback, "only_looks", False)]
        if acting:
            self.unnamed["callbacks"] = f"{acting[0]!r} may end a training, and belongs to the call"

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except _Unnamed as error:
            self.unnamed[what] = str(error)


def _given_fields(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record) if field.init]


def _plain(value: Any) -> Any:
    """As JSON. Raises _Unnamed."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | os.PathLike):
        return _absolute(os.fspath(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if not callable(value):
        raise _Unnamed(repr(value)[:200])
    try:
        reference = reference_to(value)
    except RewardUnusable as error:
        raise _Unnamed(f"{value!r} can't be found by name") from error
    if reference.arguments is not None:
        raise _Unnamed(f"{reference.target} with arguments; name a function that has none")
    return reference.target


def _absolute(text: str) -> str:
    """``reward.py:right`` of the working directory, found from elsewhere too."""
    place, _, name = text.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") and name.isidentifier() else text


def _source(data: Any) -> Any:
    """As [data] has it: a path, or Dataset's keywords."""
    if isinstance(data, str | os.PathLike):
        text = os.fspath(data)
        return text if "://" in text else str(Path(text).expanduser().resolve())
    if not isinstance(data, Dataset):
        raise _Unnamed(f"rows in memory ({type(data).__name__}); write them to a file")
    defaults = constructor_keywords(Dataset)
    told = {
        name: _plain(value) for name, value in data.told.items() if name != "source" and value != defaults[name].default
    }
    # Without shuffle_seed a task file's rows are shuffled by the trainer's seed; those of a Dataset are not.
    return {"source": _source(data.told["source"]), **told, "shuffle_seed": data.told["shuffle_seed"]}


def _refuse_begun(data: Any) -> None:
    """Raises _Unnamed for a dataset that some of its rows have been taken from."""
    place = json.loads(data.position()) if isinstance(data, Dataset) else {"epoch": 0, "taken": 0}
    if place["epoch"] or place["taken"]:
        raise _Unnamed(f"a dataset that stands at row {place['taken']} of epoch {place['epoch']}, not at its beginning")


def _identity(data: Any, written: Any) -> dict[str, Any]:
    """How one sees later that the rows are the same; their fingerprint where reading them once more is cheap."""
    try:
        dataset = data if isinstance(data, Dataset) else Dataset(data)
        source = written.get("source") if isinstance(written, Mapping) else written
        found: dict[str, Any] = {"order": _order(dataset)}
        if isinstance(source, str) and Path(source).is_file() and Path(source).stat().st_size <= _READ_AT_MOST_BYTES:
            found["fingerprint"] = dataset.fingerprint()
    except DataError:  # a row that the training may never come to, or that it will refuse itself
        return {}
    return found


def _order(dataset: Dataset) -> str:
    return str(json.loads(dataset.position())["order"])


def _versions() -> dict[str, str]:
    installed = {name: metadata.version(name) for name in ("gradserve", "tinker", "numpy")}
    return {**installed, "python": platform.python_version(), "platform": platform.platform()}
