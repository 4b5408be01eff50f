"""Packages that only one reward needs."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str, extra: str) -> Any:
    """Import ``module``. Raises ModuleNotFoundError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this reward needs {module}: pip install 'gradserve[{extra}]'", name=error.name
        ) from error
