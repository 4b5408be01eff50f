"""gradserve rollouts FILE"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gradserve.algorithms.rollouts.store import Conditions, Order, RolloutStore, Sample, Summary


@click.command(short_help="Look at what a training sampled, the worst and the best first.")
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--step", type=int, help="Of this step alone.")
@click.option("--failed", is_flag=True, help="Only those without a reward, and why.")
@click.option("--min-reward", type=float, help="Only rewards from here.")
@click.option("--max-reward", type=float, help="Only rewards up to here.")
@click.option("--sort", type=click.Choice(["step", "worst", "best"]), help="One list in this order.")
@click.option("--limit", type=click.IntRange(1), default=5, show_default=True, help="Samples in a list.")
@click.option("--json", "as_json", is_flag=True, help="One object a line, with all of the text.")
def rollouts(
    file: Path,
    step: int | None,
    failed: bool,
    min_reward: float | None,
    max_reward: float | None,
    sort: Order | None,
    limit: int,
    as_json: bool,
) -> None:
    """Show samples of FILE, a training's rollouts.sqlite or the folder it is in; a training may be writing to it.

    Without --sort, --failed or --json: the worst and the best by reward.
    """
    from gradserve.algorithms.rollouts.store import RolloutFileError, RolloutStore

    conditions: Conditions = {
        "step": step,
        "min_reward": min_reward,
        "max_reward": max_reward,
        "failed": True if failed else None,
    }
    try:
        with RolloutStore(file / "rollouts.sqlite" if file.is_dir() else file, read_only=True) as store:
            if as_json:
                _print_json(store.samples(order=sort or "step", limit=limit, **conditions))
            else:
                _print(store, conditions, sort or ("step" if failed else None), limit)
    except RolloutFileError as error:
        raise click.ClickException(str(error)) from error


def _print_json(samples: list[Sample]) -> None:
    for sample in samples:
        click.echo(json.dumps(dataclasses.asdict(sample), ensure_ascii=False))


def _print(store: RolloutStore, conditions: Conditions, sort: Order | None, limit: int) -> None:
    summary = store.summary(**conditions)
    click.echo(_said(summary))
    orders: list[Order] = [sort] if sort else ["worst", "best"]
    for order in orders:
        samples = store.samples(order=order, limit=limit, **conditions)
        if samples and sort != "step":
            click.secho(f"\n{order}", bold=True)
        for sample in samples:
            _print_sample(sample)


def _said(summary: Summary) -> str:
    text = f"{summary.samples:,} samples of {summary.steps:,} steps, {summary.failed:,} failed"
    if summary.mean_reward is None:
        return text
    return f"{text}; reward {summary.mean_reward:.4g} on average, {summary.min_reward:g} to {summary.max_reward:g}"


def _print_sample(sample: Sample) -> None:
    click.echo(
        f"\nstep {sample.step}, group {sample.group}, sample {sample.sample}: {_earned(sample)}; {_made(sample)}"
    )
    columns = {name: value for name, value in json.loads(sample.row).items() if name != "prompt"}
    row = json.dumps(columns, ensure_ascii=False)
    for name, text in (("prompt", sample.prompt), ("completion", sample.completion), ("row", row)):
        click.echo(f"  {name:10}  {_line(text)}")


def _earned(sample: Sample) -> str:
    if sample.failure is not None:
        last = (sample.failure_detail or "").strip().rpartition("\n")[2]  # of a traceback: the error
        return f"failed, {sample.failure}: {_line(last)}"
    if sample.reward is None:
        return "no reward"
    parts = ", ".join(f"{_line(name)} {value:g}" for name, value in sample.parts.items())
    return f"reward {sample.reward:g}" + (f" ({parts})" if parts else "")


def _made(sample: Sample) -> str:
    if sample.version is None:
        return "no reply"
    turns = f" in {sample.turns} turns" if sample.turns > 1 else ""
    cut = ", cut at the limit" if sample.stop_reason == "length" else ""
    return f"{sample.sampled_tokens:,} tokens{turns} by version {sample.version}{cut}"


def _line(text: str) -> str:
    """One line of the terminal: control characters are shown, not sent to it."""
    from gradserve.rewards.check import printable

    width = max(40, shutil.get_terminal_size().columns - 16)
    shown = printable(text)
    return shown if len(shown) <= width else f"{shown[: width - 3]}..."
