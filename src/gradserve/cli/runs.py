"""gradserve runs"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from gradserve.cli.source import list_of_runs

DATA_DIR = click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Read this directory instead of asking GRADSERVE_URL."
)


@click.command(short_help="List runs: steps, tokens, cost.")
@DATA_DIR
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
def runs(data_dir: Path | None, limit: int) -> None:
    """List runs, newest first, with their steps, tokens and cost."""
    from rich.console import Console
    from rich.table import Table

    found = list_of_runs(data_dir, limit)
    table = Table(box=None, header_style="bold")
    for name in ("run", "base", "started", "version"):
        table.add_column(name, overflow="fold")
    for name in ("trained", "prefilled", "sampled", "compute", "cost"):
        table.add_column(name, justify="right")
    for overview in found.runs:
        run, total = overview.run, overview.total
        table.add_row(
            run.id,
            run.base,
            f"{datetime.fromtimestamp(run.created_at):%Y-%m-%d %H:%M}",
            f"v{run.version}",
            f"{total.train_tokens:,}",
            f"{total.prefill_tokens:,}",
            f"{total.sample_tokens:,}",
            f"{total.compute_ms / 1000:,.1f} s",
            f"${total.amount_usd:.6f}",
        )
    Console(emoji=False).print(table)  # a run id holds ":train:", which rich would draw as a tram
    if found.page.total > len(found.runs):
        click.echo(f"{found.page.total - len(found.runs)} more; raise --limit to see them")
