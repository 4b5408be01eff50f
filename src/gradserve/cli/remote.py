"""Commands that change something ask the server that owns the data; it is the only one that writes."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote

import click
import msgspec

from gradserve.client.extensions import ExtensionError, call

URL = click.option(
    "--url", envvar="GRADSERVE_URL", default="http://127.0.0.1:8000", show_default=True, help="The server to ask."
)


_PATIENCE_S = 600.0
"""A step that is not kept is computed again first."""


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """What a route under /api/v1/gradserve answers to a GET, or to a POST of ``body``; a refusal ends the command."""
    try:
        key = os.environ.get("TINKER_API_KEY", "tml-local")
        return msgspec.json.decode(call(url, f"gradserve/{path}", key, body, _PATIENCE_S))
    except ExtensionError as error:
        raise click.ClickException(str(error)) from error


def run_route(run_id: str, rest: str = "") -> str:
    """The route of a run."""
    return f"runs/{quote(run_id, safe=':')}{rest}"


def step_or_name(text: str) -> int | str:
    """What the user means by STEP|NAME."""
    return int(text) if text.isdigit() else text
