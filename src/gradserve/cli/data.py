"""gradserve data check SOURCE, gradserve data show SOURCE"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradserve.cli.shown_rows import ShownRows

if TYPE_CHECKING:
    from gradserve.data.report import Column, Report
    from gradserve.episodes.chat import OnRewrite, Train

_SHOWN = 20
"""Bad rows and duplicates that are listed; all are counted."""


@click.group(short_help="Look at training data before it is paid for.")
def data() -> None:
    """Look at training data before it is paid for."""


_FORMAT = click.option(
    "--format", help="What the files are, if their names don't say: jsonl, csv, parquet, arrow, hdf5, tfrecord."
)
_PART = click.option("--part", default="", help="Of several named parts, e.g. train, the one to read.")


@data.command()
@click.argument("source")
@_FORMAT
@_PART
def check(source: str, format: str | None, part: str) -> None:
    """Read all of SOURCE (a file, folder, glob or URL) and say what is in it; exit code 1 if there are bad rows."""
    from gradserve.data.errors import DataError
    from gradserve.data.report import report

    try:
        found = report(source, format, part)
    except DataError as error:
        raise click.ClickException(str(error)) from error
    _print(found)
    if found.bad:
        raise SystemExit(1)


@data.command()
@click.argument("source")
@click.option(
    "--model",
    help="A configured model's name, or a directory with a tokenizer (default: the one model that is configured).",
)
@click.option("--rows", default=3, show_default=True, type=click.IntRange(0), help="Rows to print; all are checked.")
@click.option(
    "--train",
    type=click.Choice(["assistant", "last"]),
    default="assistant",
    show_default=True,
    help="Of messages: the assistant's turns that are trained on, all or the last one.",
)
@click.option(
    "--on-rewrite",
    type=click.Choice(["refuse", "split"]),
    default="refuse",
    show_default=True,
    help="What becomes of messages whose earlier turns the chat template shows differently later.",
)
@_FORMAT
@_PART
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where converted models are kept.")
def show(
    source: str,
    model: str | None,
    rows: int,
    train: Train,
    on_rewrite: OnRewrite,
    format: str | None,
    part: str,
    data_dir: Path | None,
) -> None:
    """Print rows of SOURCE as tokens of the model, the trained ones green; without colours, between ⟦ and ⟧.

    A row has messages (and tools), prompt and completion, or text. No server is needed. The exit code is 1 if a row
    can't be trained on.
    """
    from gradserve.data.errors import DataError
    from gradserve.data.source import resolve

    try:
        found = resolve(source, format, part)
        shown = ShownRows(_tokenizer(model, data_dir), rows, train, on_rewrite)
        for row in found.scan():
            shown.add(row)
    except DataError as error:
        raise click.ClickException(str(error)) from error
    shown.sum_up()
    if shown.problems:
        raise SystemExit(1)


def _tokenizer(model: str | None, data_dir: Path | None) -> Any:
    """Of a directory, else of a configured model by name. Raises ClickException."""
    from gradserve.compute.catalog import ModelUnusable
    from gradserve.compute.models import DEFAULT_MODELS, find_base
    from gradserve.compute.tokenizers import load_tokenizer
    from gradserve.settings import Settings

    settings = Settings() if data_dir is None else Settings(data_dir=data_dir)
    names = list(settings.models or DEFAULT_MODELS)
    if model is None and len(names) != 1:
        raise click.UsageError(f"whose tokens? Name one with --model: {', '.join(names)}")
    try:
        if model is not None and Path(model).expanduser().is_dir():
            return load_tokenizer(Path(model).expanduser())
        base = find_base(model or names[0], settings.models, settings.data_dir, lambda text: click.echo(text, err=True))
        return load_tokenizer(Path(base.path))
    except ModelUnusable as error:
        raise click.ClickException(str(error)) from error


def _print(found: Report) -> None:
    click.echo(f"{found.rows:,} rows, {len(found.bad):,} bad, {len(found.duplicates):,} duplicates")
    for name, column in found.columns.items():
        click.echo(f"  {name}: {_described(column, found.rows)}")
    for bad in found.bad[:_SHOWN]:
        click.secho(f"bad: {bad.source}, {bad.place}: {bad.reason}; {bad.cure}", fg="red")
    for where, first in found.duplicates[:_SHOWN]:
        click.echo(f"duplicate: {where} is the same as {first}")
    more = max(0, len(found.bad) - _SHOWN) + max(0, len(found.duplicates) - _SHOWN)
    if more:
        click.echo(f"{more:,} more are not listed")


def _described(column: Column, rows: int) -> str:
    kinds = ", ".join(kind if len(column.types) == 1 else f"{kind} ({n:,})" for kind, n in column.types.most_common())
    missing = f"; missing in {rows - column.rows:,} rows" if column.rows < rows else ""
    if not column.lengths:
        return kinds + missing
    middle = statistics.median_low(column.lengths)
    return f"{kinds}; length {min(column.lengths):,} to {max(column.lengths):,}, median {middle:,}{missing}"
