"""gradserve fork RUN --at STEP"""

from __future__ import annotations

import click

from gradserve.cli.remote import URL, ask, run_route, step_or_name


@click.command(short_help="Name a step of a run, to begin another run with it.")
@click.argument("run_id")
@click.option("--at", "at", required=True, metavar="STEP|NAME", help="An optimizer step, or a checkpoint of the run.")
@click.option("--name", help="Name of the checkpoint; default: fork-STEP.")
@URL
def fork(run_id: str, at: str, name: str | None, url: str) -> None:
    """Name step --at of RUN_ID, computed again if it is not kept, so that other runs can begin with it."""
    body = {"name": name or f"fork-{at}", "version": step_or_name(at), "fork": True}
    found = ask(url, run_route(run_id, "/name"), body)
    click.echo(f"step {found['version']} is {found['path']}; a run that begins with it:")
    click.echo(f'  service.create_training_client_from_state_with_optimizer("{found["path"]}").result()')
