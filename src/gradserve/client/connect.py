"""``gradserve.connect()``: a tinker ServiceClient, on a server of one's own or on a remote one."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, Literal

import tinker

from gradserve.client.embedded import EmbeddedServer

LOCAL_KEY = "tml-local"


class EmbeddedServiceClient(tinker.ServiceClient):
    """A ServiceClient whose server ends with it: at ``close``, at the end of a ``with`` block, or when the client
    and everything made from it are gone."""

    def __init__(self, server: EmbeddedServer, **kwargs: Any) -> None:
        super().__init__(base_url=server.url, api_key=LOCAL_KEY, **kwargs)
        self.server = server
        # Training and sampling clients share the holder and may outlive this object.
        self._stop_server = weakref.finalize(self.holder, server.stop)

    def close(self, status: Literal["success", "errored", "interrupted"], detail: str | None = None) -> Any:
        """Finish the session, then stop the server. See tinker.ServiceClient.close."""
        finished = super().close(status, detail)
        finished.result()
        self._stop_server()
        return finished


def connect(
    url: str | None = None,
    *,
    api_key: str | None = None,
    models: dict[str, str] | None = None,
    data_dir: str | Path | None = None,
    **kwargs: Any,
) -> tinker.ServiceClient:
    """Connect to the server at ``url`` or $GRADSERVE_URL; without either, start one in the background.

    ``models`` (name -> directory, .gguf file, package; an empty dict: none is needed) and ``data_dir`` are for a
    server started here; with a remote one they are refused. ``api_key`` is for a remote server (default
    $TINKER_API_KEY, else tml-local). Everything else goes to tinker.ServiceClient. Raises ServerDidNotStart with what
    the server said.
    """
    url = url or os.environ.get("GRADSERVE_URL")
    if url is None:
        if api_key is not None:
            raise ValueError("api_key is for a remote server: give url or set GRADSERVE_URL too")
        server = EmbeddedServer(models, Path(data_dir) if data_dir is not None else None)
        return EmbeddedServiceClient(server, **kwargs)
    if models or data_dir is not None:
        raise ValueError(f"models and data_dir belong to the server, and {url} is already running: leave them out")
    key = api_key or os.environ.get("TINKER_API_KEY") or LOCAL_KEY
    return tinker.ServiceClient(base_url=url, api_key=key, **kwargs)
