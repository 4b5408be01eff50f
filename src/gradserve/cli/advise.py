"""gradserve advise FILE"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradserve.cli.refused import refused_in_one_line

if TYPE_CHECKING:
    from gradserve.algorithms.tasks.review import Compared, Model
    from gradserve.algorithms.tasks.task import Task


@click.command(short_help="Explain a task file's numbers, and warn of what will go wrong.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--set", "changes", multiple=True, metavar="TABLE.KEY=VALUE", help="Instead of what FILE says.")
def advise(file: Path, changes: tuple[str, ...]) -> None:
    """Say what is advised for FILE's trainer and model, and why; what FILE sets, what it leaves, and what looks wrong.

    Nothing is trained. Facts of the model come from the server at GRADSERVE_URL, else from the models of this machine,
    else from its name.
    """
    from gradserve.algorithms.tasks.review import Model, compared, defaults, warnings
    from gradserve.algorithms.tasks.task import load
    from gradserve.algorithms.tasks.training import ready

    with refused_in_one_line():
        task = load(file, changes)
        plan = ready(task).plan if task.starts_with == "fit" else None
        model = _model(task) if plan is not None else Model("")
        click.echo(f"{task.name} of {_in_words(model)}" if plan is not None else f"{task.name}, a control policy")
        for line in plan.lines() if plan is not None else ():
            click.echo(f"  {line}")
        for found in compared(task, model):
            _print(found)
        left = ", ".join(f"{name} {value!r}" for name, value in defaults(task).items() if value is not None)
        click.echo(f"left at the defaults: {left or 'nothing'}")
        if plan is None:
            click.echo("other settings are those of rl-baselines3-zoo for the environment")
        found_wrong = list(warnings(task, model, plan))
    for warning in found_wrong:
        click.secho(f"warning: {warning}", fg="yellow")
    if not found_wrong:
        click.echo("nothing looks wrong")


def _print(found: Compared) -> None:
    advice = found.advice
    here = f"{found.value} {'in the file' if found.is_set else 'by default'}"
    click.echo(f"{advice.keyword}: {here}; advised {advice.value:g}, {advice.low:g} to {advice.high:g}")
    click.echo(f"  {advice.because}")
    click.echo(f"  [{advice.source}]")


def _in_words(model: Model) -> str:
    size = f"{model.parameters / 1e6:,.0f} million parameters" if model.parameters else "of unknown size"
    context = f", context {model.context:,} tokens" if model.context else ""
    return f"{model.name} ({size}{context})"


def _model(task: Task) -> Model:
    from gradserve.algorithms.tasks.review import Model

    name = str(task.told("model"))
    if url := os.environ.get("GRADSERVE_URL"):
        return _on_the_server(url, name)
    try:
        return _on_this_machine(name)
    except ImportError:  # without gradserve[server]
        return Model.named(name)


def _on_the_server(url: str, name: str) -> Model:
    """Raises ClickException for a model that it does not have: the training would be refused, too."""
    from gradserve.algorithms.tasks.review import Model
    from gradserve.client.connect import LOCAL_KEY
    from gradserve.client.extensions import call

    answer = call(url, "get_server_capabilities", os.environ.get("TINKER_API_KEY") or LOCAL_KEY)
    offered = {each["model_name"]: each for each in json.loads(answer)["supported_models"]}
    if name not in offered:
        raise click.ClickException(f"the server has no model {name!r}; it has {', '.join(offered)}")
    return Model.named(name, offered[name].get("max_context_length"))


def _on_this_machine(name: str) -> Model:
    from gradserve.algorithms.tasks.review import Model
    from gradserve.compute.catalog import ModelUnusable
    from gradserve.compute.models import find_base
    from gradserve.settings import Settings

    settings = Settings()
    try:
        facts = find_base(name, settings.models, settings.data_dir, lambda text: click.echo(text, err=True))
    except ModelUnusable:
        return Model.named(name)
    return Model(name, facts.parameters, facts.context)
