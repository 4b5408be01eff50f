"""gradserve rollback RUN --to STEP|NAME"""

from __future__ import annotations

import click

from gradserve.cli.remote import URL, ask, run_route, step_or_name


@click.command(short_help="Make an earlier step of a run its current one.")
@click.argument("run_id")
@click.option("--to", "to", required=True, metavar="STEP|NAME", help="An optimizer step, or a checkpoint of the run.")
@URL
def rollback(run_id: str, to: str, url: str) -> None:
    """Make step --to of RUN_ID its current one, with the optimizer's moments; its training client goes on from there.

    Accumulated gradients are dropped. Steps after it stay in the journal, and can be forked until they expire.
    """
    run = ask(url, run_route(run_id, "/rollback"), {"version": step_or_name(to)})["run"]
    click.echo(f"{run['id']} is at step {run['version']}, weights {(run['weights'] or '')[:16]}")
