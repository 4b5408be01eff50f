"""What the server would refuse, said before anything is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradserve.wire.errors import Invalid


@contextlib.contextmanager
def as_value_errors() -> Iterator[None]:
    """Invalid, whose parts are for problem documents, becomes a ValueError with detail and cure."""
    try:
        yield
    except Invalid as error:
        raise ValueError(error.problem().detail) from error
