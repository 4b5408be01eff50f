"""gradserve init"""

from __future__ import annotations

from pathlib import Path

import click

from gradserve.algorithms.tasks.templates import TEMPLATES
from gradserve.cli.refused import refused_in_one_line


@click.command(short_help="Write a small project to train: a task file, data, a reward.")
@click.option("--template", type=click.Choice(list(TEMPLATES)), required=True, help="What kind of training.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Where to (default: the template's name)."
)
def init(template: str, out: Path | None) -> None:
    """Write a small project that trains on this machine as it is. Its task.toml explains every key."""
    from gradserve.algorithms.tasks.templates import write_project

    folder = out or Path(template)
    with refused_in_one_line():
        files = write_project(template, folder)
    click.echo(f"wrote {', '.join(files)} into {folder}")
    first = "teacher.toml" if "teacher.toml" in files else "task.toml"
    click.echo(f"next: gradserve train {folder / first}")
