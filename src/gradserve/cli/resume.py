"""gradserve resume RUN"""

from __future__ import annotations

import click

from gradserve.cli.remote import URL, ask, run_route


@click.command(short_help="Name the last complete step of a run, to go on from it.")
@click.argument("run_id")
@click.option("--name", help="Name of the checkpoint; default: resume-STEP.")
@URL
def resume(run_id: str, name: str | None, url: str) -> None:
    """Name the last complete optimizer step of RUN_ID, whose script has died, and say how to go on from it.

    Gradients that were accumulated after that step are not part of it.
    """
    version = ask(url, run_route(run_id, "?lines=0"))["run"]["version"]
    found = ask(url, run_route(run_id, "/name"), {"name": name or f"resume-{version}", "version": version})
    click.echo(f"step {found['version']} is {found['path']}")
    click.echo("  service.create_training_client_from_state_with_optimizer(")
    click.echo(f'      "{found["path"]}").result()')
    if found["checkpoint"]["client_state"] is not None:
        click.echo("  gradserve.get_client_state(training_client) gives back what the script had kept")
