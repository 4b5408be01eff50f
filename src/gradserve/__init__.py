"""gradserve: serves gradients. ``gradserve.connect()`` gives a tinker ServiceClient; see README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradserve.client.connect import connect
    from gradserve.client.full import create_full_training_client

__version__ = "0.1.0"
__all__ = ["__version__", "connect", "create_full_training_client"]


def __getattr__(name: str) -> Any:
    # The tinker SDK takes a second to import; only those who call it pay for it.
    if name == "connect":
        from gradserve.client.connect import connect

        return connect
    if name == "create_full_training_client":
        from gradserve.client.full import create_full_training_client

        return create_full_training_client
    raise AttributeError(f"module 'gradserve' has no attribute {name!r}")
