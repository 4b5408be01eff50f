"""What a trainer or a task refuses, as one line for people."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click


@contextlib.contextmanager
def refused_in_one_line() -> Iterator[None]:
    """Errors that say what to mend become a ClickException; what is a fault of gradserve's own keeps its traceback."""
    import tinker

    from gradserve.algorithms.training_loop import Diverged
    from gradserve.client.embedded import ServerDidNotStart
    from gradserve.client.extensions import ExtensionError
    from gradserve.rewards.contract import RewardUnusable

    try:
        yield
    except (ValueError, RewardUnusable, Diverged, ServerDidNotStart, ExtensionError, tinker.TinkerError) as error:
        raise click.ClickException(str(error)) from error
