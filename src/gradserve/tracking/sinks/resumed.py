"""The name under which a service knows a run, kept in the run's folder so that a resumed one finds it."""

from __future__ import annotations

from collections.abc import Callable

from gradserve.tracking.sinks import Begin


def run_id(begin: Begin, service: str, make: Callable[[], str]) -> str:
    file = begin.folder / f"{service}-run.txt"
    if begin.resume_step is not None and file.exists():
        return file.read_text().strip()
    made = make()
    file.write_text(made + "\n")
    return made
