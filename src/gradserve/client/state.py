"""The client's own state of a run: up to 1 MiB that gradserve keeps with it and with its checkpoints.

What a script needs to go on where it stopped and the server can't know: the position of a data loader, the state of a
learning-rate schedule, a random generator's.
"""

from __future__ import annotations

from urllib.parse import quote

from tinker import TrainingClient

from gradserve.client.connect import LOCAL_KEY
from gradserve.client.extensions import send


def set_client_state(training_client: TrainingClient, state: bytes) -> None:
    """Keep ``state`` (at most 1 MiB) with the run; ``save_state`` calls from now on carry it. Empty bytes forget it.

    Raises ExtensionError when the server refuses.
    """
    _call("PUT", training_client, "", state)


def get_client_state(training_client: TrainingClient, path: str | None = None) -> bytes:
    """The run's state as it was kept last, or the one that the checkpoint at ``path`` carries; empty if there is none.

    A run that began with a checkpoint begins with its state. Raises ExtensionError.
    """
    return _call("GET", training_client, "" if path is None else f"?path={quote(path)}", None)


def _call(method: str, training_client: TrainingClient, query: str, body: bytes | None) -> bytes:
    holder = training_client.holder
    key = holder._api_key or LOCAL_KEY
    route = f"runs/{quote(training_client.model_id, safe=':')}/client_state{query}"
    return send(method, holder._base_url, f"gradserve/{route}", key, body)
