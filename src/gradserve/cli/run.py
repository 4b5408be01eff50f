"""gradserve run ID"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from gradserve.cli.runs import DATA_DIR
from gradserve.cli.source import one_run
from gradserve.cli.words import base_of, used
from gradserve.store.base import Checkpoint, Event, LedgerLine, Run
from gradserve.store.overview import RunDetail


@click.command(short_help="Show one run: its state, checkpoints and bill.")
@click.argument("run_id")
@DATA_DIR
@click.option("--lines", type=click.IntRange(0), default=10, show_default=True, help="Ledger lines to show.")
@click.option("--events", is_flag=True, help="Show what happened to it: lost workers, recoveries, loads, rollbacks.")
def run(run_id: str, data_dir: Path | None, lines: int, events: bool) -> None:
    """Show one run: its state, checkpoints and bill. RUN_ID is as in ``gradserve runs``."""
    detail = one_run(data_dir, run_id, lines)
    if detail is None:
        raise click.ClickException(f"there is no run {run_id!r}; gradserve runs lists them")
    if events:
        for event in detail.events:
            click.echo(f"{_time(event.at)}  {_of_seq(event)}{event.kind.replace('_', ' ')}: {event.detail}")
        if not detail.events:
            click.echo("nothing happened to it")
        return
    _show(detail)


def _of_seq(event: Event) -> str:
    return "" if event.seq is None else f"#{event.seq} "


def _show(detail: RunDetail) -> None:
    run, total = detail.run, detail.total
    click.secho(run.id, bold=True)
    click.echo(f"  base      {base_of(run)}   {_trained(run)}")
    click.echo(f"  started   {_time(run.created_at)}   last request {_time(run.last_request_at)}")
    click.echo(f"  version   {run.version}   weights {(run.weights or 'none')[:16]}")
    if run.corrupted:
        click.secho("  corrupted: start again from a checkpoint", fg="red")
    for checkpoint in detail.checkpoints:
        click.echo(f"  saved     {checkpoint.path}   v{checkpoint.version}, {_saved(checkpoint)}")
    click.echo(
        f"  bill      ${total.amount_usd:f} = {used(total)}, {total.compute_ms / 1000:,.3f} s of compute, "
        f"{total.lines} lines"
    )
    for line in detail.lines:
        click.echo(_line(line))


def _trained(run: Run) -> str:
    lora = run.lora
    if lora is None:
        return "all parameters"
    flags = [name for name in ("attn", "mlp", "unembed") if getattr(lora, f"train_{name}")]
    return f"LoRA rank {lora.rank} on {', '.join(flags)}, seed {lora.seed}"


def _saved(checkpoint: Checkpoint) -> str:
    return f"weights {checkpoint.weights[:16]}, {checkpoint.size_bytes / 2**20:.1f} MiB"


def _line(line: LedgerLine) -> str:
    what = f"#{line.seq:<5} {line.kind:<17}"
    return f"    {_time(line.at)}  {what} {line.compute_ms:>10} ms  ${line.amount_usd:<12f}  {used(line)}"


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
