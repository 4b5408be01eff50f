"""gradserve import ADAPTER_DIR"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import click

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TIMEOUT_S = 600


@click.command("import", short_help="Make a PEFT adapter a checkpoint to train on from.")
@click.argument("adapter_dir", type=click.Path(path_type=Path))
@click.option("--base", required=True, metavar="NAME", help="The server's name of the model that it was trained on.")
@click.option("--name", help="Last part of the checkpoint's path (default: imported).")
@click.option("--url", help="The server (default: GRADSERVE_URL).")
def import_(adapter_dir: Path, base: str, name: str | None, url: str | None) -> None:
    """Send the PEFT adapter in ADAPTER_DIR to a server, and print the path of the checkpoint that it becomes.

    The SDK's create_training_client_from_state(path) trains on from it. It has no optimizer moments: they start fresh.
    """
    from gradserve.client.extensions import ExtensionError, call

    url = url or os.environ.get("GRADSERVE_URL")
    if not url:
        raise click.ClickException(
            "an import goes to a running server, which alone writes to its data directory: start one with gradserve "
            "serve and give its address by --url or GRADSERVE_URL"
        )
    body = _body(adapter_dir, base, name)
    try:
        answer = call(url, "gradserve/import", os.environ.get("TINKER_API_KEY", "tml-local"), body, _TIMEOUT_S)
    except ExtensionError as error:
        raise click.ClickException(str(error)) from error
    found = json.loads(answer)
    if found["notice"] is not None:
        click.echo(f"note: {found['notice']}", err=True)
    click.echo(found["path"])


def _body(folder: Path, base: str, name: str | None) -> dict[str, Any]:
    config, weights = folder / _CONFIG, folder / _WEIGHTS
    for file in (config, weights):
        if not file.is_file():
            raise click.ClickException(f"{folder} is no PEFT adapter that can be imported: there is no {file.name}")
    try:
        body = {"base": base, "config": json.loads(config.read_bytes())}
    except ValueError as error:
        raise click.ClickException(f"{config} is not JSON: {error}") from error
    named = {} if name is None else {"name": name}
    return body | named | {"weights": base64.b64encode(weights.read_bytes()).decode()}
