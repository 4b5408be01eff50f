"""gradserve: serves gradients. ``gradserve.connect()`` gives a tinker ServiceClient; see README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradserve.client.connect import connect
    from gradserve.client.full import create_full_training_client
    from gradserve.client.state import get_client_state, set_client_state

__version__ = "0.1.0"
__all__ = ["__version__", "connect", "create_full_training_client", "get_client_state", "set_client_state"]

_HOMES = {
    "connect": "connect",
    "create_full_training_client": "full",
    "get_client_state": "state",
    "set_client_state": "state",
}
"""Where in gradserve.client each name is."""


def __getattr__(name: str) -> Any:
    # The tinker SDK takes a second to import; only those who call it pay for it.
    if name in _HOMES:
        return getattr(importlib.import_module(f"gradserve.client.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gradserve' has no attribute {name!r}")
