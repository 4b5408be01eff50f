"""gradserve train FILE"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradserve.cli.refused import refused_in_one_line

if TYPE_CHECKING:
    from gradserve.algorithms.tasks.task import Task
    from gradserve.algorithms.trainer import Trainer
    from gradserve.algorithms.training_loop import Event

_SHOWN = 3
"""Metrics of a step's line, where the trainer does not say which."""
_ASIDE = ("_low", "_high", "_count")
"""Endings of what belongs to another metric of an evaluation."""


@click.command(short_help="Train what a task file says; see gradserve init.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in the log folder.")
@click.option("--as-code", is_flag=True, help="Print the same training as Python, and do nothing.")
@click.option("--set", "changes", multiple=True, metavar="TABLE.KEY=VALUE", help="Instead of what FILE says.")
@click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Where metrics and checkpoints go.")
def train(file: Path, resume: bool, as_code: bool, changes: tuple[str, ...], log_dir: Path | None) -> None:
    """Train what FILE says: a task.toml, or the manifest.json that a training left in its log folder.

    The server is the one at GRADSERVE_URL; without it one is started for the training.
    """
    from gradserve.algorithms.tasks.task import load

    if log_dir is not None:
        changes = (*changes, f"trainer.log_dir={str(log_dir.resolve())!r}")
    with refused_in_one_line():
        task = load(file, changes)
        if as_code:
            click.echo(task.code(), nl=False)
        elif task.starts_with == "fit":
            _fit(task, resume)
        elif resume:
            raise click.UsageError(
                f"{task.name} has no log folder to go on from: give [trainer] resume = 'tinker://...'"
            )
        else:
            _train(task)


def _fit(task: Task, resume: bool) -> None:
    from gradserve.algorithms.tasks.training import ready

    _refuse_a_folder_in_use(task, resume)
    training = ready(task)
    click.echo(f"{task.name} of {task.told('model')} by {task.trainer.__name__}")
    for line in training.plan.lines():
        click.echo(f"  {line}")
    with training.trainer() as trainer:
        fitted = training.fit(trainer, resume, [_Lines()])
        if fitted.stopped:
            click.echo(f"ended before its last epoch: {fitted.stopped}")
        if fitted.evaluations:
            click.echo("evaluations, first and last: " + _first_and_last(fitted.evaluations))
        _print_bill(trainer)
        click.echo(f"checkpoint: {fitted.path}")
        click.echo(f"log: {fitted.log_dir.resolve()}")


def _train(task: Task) -> None:
    """Of a trainer that has ``train``: a control policy's."""
    from gradserve.algorithms.tasks.calls import made

    click.echo(f"{task.name} of {task.constructor.keywords.get('env_config')} by {task.trainer.__name__}")
    with task.constructor() as trainer:
        trainer.train(**made(task.fit), callback=None if _at_a_terminal() else _print_epoch)
        played = trainer.evaluate()
        click.echo(f"evaluation: episode_return {played['episode_return']:.4g} in {len(played['returns'])} episodes")
        click.echo(f"checkpoint: {trainer.save('final', overwrite=True)}")
        click.echo(f"look again: gradserve run {trainer.run_id}")


def _refuse_a_folder_in_use(task: Task, resume: bool) -> None:
    folder = task.told("log_dir")
    if resume and folder is None:
        raise click.UsageError("--resume goes on in a log folder: name it with --log-dir, or [trainer] log_dir")
    if not resume and folder is not None and (Path(folder) / "checkpoints.jsonl").exists():
        raise click.UsageError(f"{folder} has a training already: go on with --resume, or give another --log-dir")


class _Lines:
    """A callback that prints a line for each step where there is no progress bar, and for each evaluation."""

    only_looks = True

    def __call__(self, event: Event) -> None:
        if event.kind == "evaluation":
            click.echo(f"evaluation at step {event.step}: {_in_words(event.metrics)}")
        elif event.kind == "step" and not _at_a_terminal():
            shown = event.trainer.shown or dict.fromkeys(list(event.metrics)[:_SHOWN])
            click.echo(f"step {event.step}, epoch {event.epoch}: " + _in_words(event.metrics, shown))


def _print_epoch(metrics: dict[str, float]) -> None:
    """A line for each epoch, where nobody sees the progress bar."""
    click.echo(_in_words(metrics, ("epoch", "env_steps", "episode_return", "approx_kl")))


def _at_a_terminal() -> bool:
    return sys.stderr.isatty()


def _first_and_last(evaluations: list[dict[str, float]]) -> str:
    first, last = evaluations[0], evaluations[-1]
    names = [name for name in last if name.startswith("eval/") and not name.endswith(_ASIDE)]
    return ", ".join(f"{name} {first[name]:.4g} -> {last[name]:.4g}" for name in names if name in first)


def _in_words(metrics: Any, shown: Any = None) -> str:
    names = metrics if shown is None else [name for name in shown if name in metrics]
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in names)


def _print_bill(trainer: Trainer) -> None:
    """Where the server is a gradserve, which tells it."""
    from gradserve.client.bills import bill_of
    from gradserve.client.extensions import ExtensionError

    try:
        total = bill_of(trainer.run)
    except ExtensionError:
        click.echo("bill: this server does not tell it")
        return
    click.echo(
        f"bill: ${total['amount_usd']} = {total['train_tokens']:,} trained, {total['prefill_tokens']:,} prefilled, "
        f"{total['sample_tokens']:,} sampled tokens"
    )
