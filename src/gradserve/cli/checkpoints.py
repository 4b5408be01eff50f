"""gradserve checkpoints RUN"""

from __future__ import annotations

import time
from datetime import datetime
from decimal import Decimal
from typing import Any

import click

from gradserve.cli.remote import URL, ask, run_route

_SOON_S = 24 * 3600.0


@click.command(short_help="List the steps of a run that can be had again.")
@click.argument("run_id")
@URL
def checkpoints(run_id: str, url: str) -> None:
    """List what is kept of RUN_ID: the checkpoints that were named, and the steps that the server made durable.

    Any step since the oldest of them can be had again too (rollback, fork): it is computed again.
    """
    detail = ask(url, run_route(run_id, "?lines=0"))
    kept = ask(url, run_route(run_id, "/versions"))
    versions = kept["versions"]
    saved = detail["checkpoints"]
    for one in saved:
        click.echo(f"{_line(one)}  {_path(one)}{_expiry(one)}")
    for one in versions:
        click.echo(f"{_line(one)}  (made durable: {one['cause']})")
    run = detail["run"]
    click.echo(f"step {run['version']:>6}  now        {(run['weights'] or 'none')[:12]}  in memory and in the journal")
    click.echo(f"{len(saved)} named, {len(versions)} automatic; {_stored(kept['stored'])}")


def _stored(stored: dict[str, Any]) -> str:
    """The same arrays under several names are stored once."""
    cost, price = Decimal(stored["usd_per_month"]), Decimal(stored["usd_per_gib_month"])
    return f"{stored['bytes'] / 2**20:,.1f} MiB stored, ${cost:f} a month at ${price:f} per GiB (not billed)"


def _line(one: dict[str, Any]) -> str:
    made = datetime.fromtimestamp(one["created_at"])
    return (
        f"step {one['version']:>6}  {made:%m-%d %H:%M}  {one['weights'][:12]}  {one['size_bytes'] / 2**20:>8,.1f} MiB"
    )


def _path(one: dict[str, Any]) -> str:
    return f"tinker://{one['run_id']}/{one['kind']}/{one['name']}"


def _expiry(one: dict[str, Any]) -> str:
    if one["expires_at"] is None:
        return ""
    left = one["expires_at"] - time.time()
    text = f"  expires in {left / 3600:,.1f} h"
    return click.style(text, fg="yellow", bold=True) if left < _SOON_S else text
