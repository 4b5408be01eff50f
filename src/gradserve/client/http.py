"""Requests to one server over one kept-open connection, sent again until they are answered.

For the routes beyond the public protocol; what goes through the public SDK has its own retries. Every request names its
own identity (run, seq), so that sending it twice does it once.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from gradserve.client.extensions import ExtensionError, detail

PATIENCE_S = 300.0
"""How long a server may be away: as long as the public SDK waits for one."""
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
_TRANSIENT = frozenset({409, 429, 500, 502, 503, 504})


class Connection:
    """Belongs to a client; threads may share it, their requests go one after another."""

    def __init__(self, url: str, api_key: str, timeout_s: float = 90.0) -> None:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)
        self._root = parts.path.rstrip("/") + "/api/v1/"
        self._headers = {"X-API-Key": api_key}
        self._lock = threading.Lock()

    def get(self, path: str) -> bytes:
        """The body of the answer. Raises as ``post``."""
        return self._answered("GET", path, None, "application/json")[2]

    def post(self, path: str, body: bytes, content_type: str = "application/json") -> tuple[int, str, bytes]:
        """Status, content type and body of the answer. Raises ExtensionError when there is none, or it is a refusal.

        408 is returned: a long poll that found nothing yet.
        """
        return self._answered("POST", path, body, content_type)

    def _answered(self, method: str, path: str, body: bytes | None, content_type: str) -> tuple[int, str, bytes]:
        headers = {**self._headers, "Content-Type": content_type}
        give_up_at = time.monotonic() + PATIENCE_S
        for attempt in range(1 << 30):
            try:
                status, kind, answer = self._send(method, path, body, headers)
                problem = None
            except (OSError, http.client.HTTPException) as error:
                status, kind, answer = 0, "", b""
                problem = ExtensionError(f"there is no answer from the server: {error!r}", None)
            if 200 <= status < 300 or status == 408:
                return status, kind, answer
            if problem is None:
                problem = ExtensionError(f"{path} answered {status}: {detail(answer)}", status)
            if (status and status not in _TRANSIENT) or time.monotonic() > give_up_at:
                raise problem
            time.sleep(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)])
        raise AssertionError("unreachable")

    def post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer to a JSON body."""
        _, _, answer = self.post(path, json.dumps(body).encode())
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """Close the connection; the next request would open it again."""
        with self._lock:
            self._connection.close()

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, str, bytes]:
        with self._lock:
            try:
                self._connection.request(method, self._root + path, body, headers)
                response = self._connection.getresponse()
                return response.status, response.headers.get("Content-Type", ""), response.read()
            except BaseException:
                self._connection.close()
                raise
