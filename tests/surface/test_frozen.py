"""Public surfaces, frozen: growth is a decision. After deciding, run with GRADSERVE_THAW=1 and commit the files."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.testing import CliRunner

from gradserve.cli import main
from gradserve.settings import Settings
from gradserve.tracking.names import NAMES
from gradserve.wire.losses import LOSSES

FROZEN = Path(__file__).parent / "frozen"


def check(name: str, text: str) -> None:
    file = FROZEN / name
    if os.environ.get("GRADSERVE_THAW"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.read_text() == text, f"{name} changed; if that is wanted: GRADSERVE_THAW=1 and commit"


def test_command_line() -> None:
    context = click.Context(main)
    names = main.list_commands(context)
    helps = [CliRunner().invoke(main, [*command, "--help"]).output for command in [[], *([name] for name in names)]]
    check("cli.txt", "\n".join(helps))


def test_settings() -> None:
    def kind(annotation: object) -> str:
        return getattr(annotation, "__name__", str(annotation))

    lines = [f"{name}: {kind(field.annotation)}" for name, field in Settings.model_fields.items()]
    check("settings.txt", "\n".join(lines) + "\n")


def test_losses() -> None:
    lines = [
        f"{spec.name}: required {', '.join(spec.required)}; optional {', '.join(spec.optional) or '-'}; {spec.config}"
        for spec in LOSSES.values()
    ]
    check("losses.txt", "\n".join(lines) + "\n")


def test_metrics() -> None:
    check("metrics.txt", "".join(f"{name}: {meaning}\n" for name, meaning in NAMES.items()))
