"""gradserve lineage RUN"""

from __future__ import annotations

from datetime import datetime

import click

from gradserve.cli.remote import URL, ask, run_route


@click.command(short_help="Show where the weights of a run come from.")
@click.argument("run_id")
@URL
def lineage(run_id: str, url: str) -> None:
    """Show from which runs and checkpoints RUN_ID descends, its own turns, and the runs that began with it."""
    found = ask(url, run_route(run_id, "/lineage"))
    line = found["ancestors"]
    click.echo(f"{line[-1]['base']} (base)")
    for depth, ancestor in enumerate(reversed(line), 1):
        known = "" if ancestor["known"] else "  (not yours)"
        previous = line[len(line) - depth + 1]["path"] if depth > 1 else None
        via = f"  began with {previous}" if previous else ""
        click.echo(f"{'  ' * depth}{ancestor['run_id']}  step {ancestor['version']}{via}{known}")
    for turn in found["turns"]:
        click.echo(f"    {datetime.fromtimestamp(turn['at']):%m-%d %H:%M:%S}  {turn['kind']}: {turn['detail']}")
    for child in found["children"]:
        click.echo(f"{'  ' * (len(line) + 1)}-> {child}")
