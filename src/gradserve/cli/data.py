"""gradserve data check SOURCE"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gradserve.data.report import Column, Report

_SHOWN = 20
"""Bad rows and duplicates that are listed; all are counted."""


@click.group(short_help="Look at training data before it is paid for.")
def data() -> None:
    """Look at training data before it is paid for."""


@data.command()
@click.argument("source")
@click.option(
    "--format", help="What the files are, if their names don't say: jsonl, csv, parquet, arrow, hdf5, tfrecord."
)
@click.option("--part", default="", help="Of several named parts, e.g. train, the one to read.")
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
