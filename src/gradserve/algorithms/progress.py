"""How far a training is: one line at a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

Show = Callable[[Mapping[str, float]], None]


@contextlib.contextmanager
def progress_line(what: str, total: int | None, done: int, shown: Mapping[str, str]) -> Iterator[Show]:
    """A function to call with each step's metrics; of ``total`` steps (None: nobody knows) ``done`` are behind.

    ``shown`` are the metrics to show, with their labels.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _quiet
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _quiet
        return
    now = TextColumn("{task.fields[now]}")
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        now,
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total, completed=done, now="")

        def show(metrics: Mapping[str, float]) -> None:
            text = " · ".join(f"{label} {metrics[name]:.4g}" for name, label in shown.items() if name in metrics)
            progress.update(task, advance=1, now=text)

        yield show


def _quiet(metrics: Mapping[str, float]) -> None:
    """Nobody looks."""
