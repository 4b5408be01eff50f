"""Where metrics are written: one sink, one file. The invariant: a step that a resumed run repeats is not there twice,
where the sink can take back what it has (JSON lines and TensorBoard can).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class SinkUnusable(Exception):
    """A sink can't be begun: nobody knows its name, its library is missing, or its place is taken."""


@dataclass(frozen=True)
class Begin:
    """What every sink is opened with. ``resume_step`` is the last step to keep; None begins anew."""

    folder: Path
    run_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    resume_step: int | None = None


class Sink(Protocol):
    """Any method may raise: the Tracker warns, counts and goes on."""

    def metrics(self, step: int, time: float, values: Mapping[str, float | None]) -> None:
        """``time`` in seconds since 1970; None stands for a value that is not finite."""

    def text(self, step: int, time: float, name: str, markdown: str) -> None: ...

    def close(self) -> None: ...


ALWAYS = ("jsonl", "tensorboard")

_OPENERS = {
    "jsonl": ("jsonl", "JsonLines"),
    "tensorboard": ("tensorboard", "TensorBoard"),
    "wandb": ("wandb", "WeightsAndBiases"),
    "mlflow": ("mlflow", "open_mlflow"),
}


def open_sink(name: str, begin: Begin) -> Sink:
    """Raises SinkUnusable."""
    if name not in _OPENERS:
        raise SinkUnusable(f"no sink is called {name!r}; there are {', '.join(_OPENERS)}")
    module, opener = _OPENERS[name]
    open_it: Callable[[Begin], Sink] = getattr(importlib.import_module(f"gradserve.tracking.sinks.{module}"), opener)
    try:
        return open_it(begin)
    except SinkUnusable:
        raise
    except Exception as error:  # Whatever the sink's library raises: no login, no server, a folder that is read-only.
        raise SinkUnusable(f"the sink {name} can't be begun: {error!r}") from error
