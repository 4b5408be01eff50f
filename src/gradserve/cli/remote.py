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


def ask(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that a route under /api/v1/gradserve answers; a refusal ends the command with its words."""
    try:
        data = None if body is None else msgspec.json.encode(body)
        return msgspec.json.decode(call(method, url, path, os.environ.get("TINKER_API_KEY", "tml-local"), data))
    except ExtensionError as error:
        raise click.ClickException(words(error)) from error


def run_route(run_id: str, rest: str = "") -> str:
    """The route of a run."""
    return f"runs/{quote(run_id, safe=':')}{rest}"


def step_or_name(text: str) -> int | str:
    """What the user means by STEP|NAME."""
    return int(text) if text.isdigit() else text


def words(error: ExtensionError) -> str:
    """The problem document's own words, if there is one."""
    start = str(error).find("{")
    try:
        return str(msgspec.json.decode(str(error)[start:])["detail"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return str(error)
