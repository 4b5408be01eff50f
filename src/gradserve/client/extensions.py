"""The routes that gradserve has beyond the tinker protocol."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote


class ExtensionError(RuntimeError):
    """The server refused or could not be reached. ``status`` is the HTTP status, None when there was no answer."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


def get(url: str, path: str, api_key: str) -> bytes:
    """GET a route under /api/v1/gradserve. Raises ExtensionError."""
    return call(url, f"gradserve/{path}", api_key)


def call(url: str, path: str, api_key: str, body: dict[str, Any] | None = None, timeout_s: float = 30) -> bytes:
    """GET a route under /api/v1, or POST ``body`` to it as JSON. Raises ExtensionError."""
    data = None if body is None else json.dumps(body).encode()
    return send("GET" if body is None else "POST", url, path, api_key, data, timeout_s)


def send(method: str, url: str, path: str, api_key: str, data: bytes | None = None, timeout_s: float = 600) -> bytes:
    """Any request to a route under /api/v1; what it answers. Raises ExtensionError."""
    headers = {"X-API-Key": api_key, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url.rstrip('/')}/api/v1/{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as error:
        text = detail(error.read())
        raise ExtensionError(f"{request.full_url} answered {error.code}: {text}", error.code) from error
    except urllib.error.URLError as error:
        raise ExtensionError(f"there is no gradserve at {url}: {error.reason}", None) from error


def detail(answer: bytes) -> str:
    """What a problem document says to people; other answers as they are."""
    try:
        return str(json.loads(answer)["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")


def run_path(run_id: str, lines: int = 0) -> str:
    """The route of one run with its newest ``lines`` ledger lines."""
    return f"runs/{quote(run_id, safe=':')}?lines={lines}"


def bill(url: str, run_id: str, api_key: str) -> dict[str, Any]:
    """A run's totals so far: tokens by kind, ``compute_ms`` and ``amount_usd`` as decimal strings."""
    total: dict[str, Any] = json.loads(get(url, run_path(run_id), api_key))["total"]
    return total
