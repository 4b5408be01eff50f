"""gradserve runs"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from gradserve.cli.source import list_of_runs
from gradserve.cli.words import base_of, used
from gradserve.store.overview import RunOverview

DATA_DIR = click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Read this directory instead of asking GRADSERVE_URL."
)


@click.command(short_help="List runs: steps, tokens, cost.")
@DATA_DIR
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
def runs(data_dir: Path | None, limit: int) -> None:
    """List runs, newest first, with their steps, tokens and cost."""
    found = list_of_runs(data_dir, limit)
    for overview in found.runs:
        click.secho(overview.run.id, bold=True)
        click.echo(f"  {_line(overview)}")
    if not found.runs:
        click.echo("no runs yet")
    if found.page.total > len(found.runs):
        click.echo(f"{found.page.total - len(found.runs)} more; raise --limit to see them")


def _line(overview: RunOverview) -> str:
    run, total = overview.run, overview.total
    trained = "full" if run.lora is None else f"rank {run.lora.rank}"
    return (
        f"{base_of(run)} {trained}  {datetime.fromtimestamp(run.created_at):%Y-%m-%d %H:%M}  v{run.version}  "
        f"{used(total)}  "
        f"{total.compute_ms / 1000:,.1f} s  ${total.amount_usd:.6f}"
    )
