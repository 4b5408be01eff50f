"""The client's own state of a run: up to 1 MiB that gradserve keeps with it and with its checkpoints.

What a script needs to go on where it stopped and the server can't know: the position of a data loader, the state of a
learning-rate schedule, a random generator's.
"""

from __future__ import annotations

from urllib.parse import quote

from tinker import TrainingClient
from tinker.lib.internal_client_holder import InternalClientHolder

from gradserve.client.connect import LOCAL_KEY
from gradserve.client.extensions import send


def set_client_state(training_client: TrainingClient, state: bytes) -> None:
    """Keep ``state`` (at most 1 MiB) with the run; ``save_state`` calls from now on carry it. Empty bytes forget it.

    Raises ExtensionError when the server refuses.
    """
    put_state(training_client.holder, training_client.model_id, state)


def get_client_state(training_client: TrainingClient, path: str | None = None) -> bytes:
    """The run's state as it was kept last, or the one that the checkpoint at ``path`` carries; empty if there is none.

    A run that began with a checkpoint begins with its state. Raises ExtensionError.
    """
    return state_of(training_client.holder, training_client.model_id, path)


def put_state(holder: InternalClientHolder, run_id: str, state: bytes) -> None:
    """``set_client_state`` for any run of a client's."""
    _call("PUT", holder, run_id, "", state)


def state_of(holder: InternalClientHolder, run_id: str, path: str | None = None) -> bytes:
    """``get_client_state`` for any run of a client's."""
    return _call("GET", holder, run_id, "" if path is None else f"?path={quote(path)}", None)


def _call(method: str, holder: InternalClientHolder, run_id: str, query: str, body: bytes | None) -> bytes:
    key = holder._api_key or LOCAL_KEY
    route = f"runs/{quote(run_id, safe=':')}/client_state{query}"
    return send(method, str(holder._base_url), f"gradserve/{route}", key, body)
