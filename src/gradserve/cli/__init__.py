"""The ``gradserve`` command. Each command's module is imported when it is called, so that --help is quick."""

from __future__ import annotations

import importlib
import keyword
from typing import Any

import click

import gradserve

_COMMANDS = {
    "serve": "Start a server on this machine.",
    "init": "Write a small project to train: a task file, data, a reward.",
    "train": "Train what a task file says; see gradserve init.",
    "advise": "Explain a task file's numbers, and warn of what will go wrong.",
    "quickstart": "Teach a small language model a task by RL, end to end.",
    "runs": "List runs: steps, tokens, cost.",
    "run": "Show one run: its state, checkpoints and bill.",
    "program": "Print what a request was lowered to: Tasks, graphs, bytes and FLOPs.",
    "checkpoints": "List the steps of a run that can be had again.",
    "resume": "Name the last complete step of a run, to go on from it.",
    "rollback": "Make an earlier step of a run its current one.",
    "fork": "Name a step of a run, to begin another run with it.",
    "diff": "Compare two runs, or two steps.",
    "lineage": "Show where the weights of a run come from.",
    "export": "Write a checkpoint as PEFT, merged model, GGUF or ONNX; or all that a tenant owns.",
    "restore": "Bring a data directory back from the archive alone.",
    "data": "Look at training data before it is paid for.",
    "reward": "Check a reward function before a token is spent.",
    "rollouts": "Look at what a training sampled, the worst and the best first.",
    "import": "Make a PEFT adapter a checkpoint to train on from.",
}


class _Lazy(click.Group):
    """Knows the commands' names and one-line helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        command = getattr(importlib.import_module(f"gradserve.cli.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """A database that can't be read (of another version, damaged) is one line for people, not a traceback."""
        from gradserve.store.base import StoreError

        try:
            return super().invoke(ctx)
        except StoreError as error:
            raise click.ClickException(str(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(gradserve.__version__, prog_name="gradserve")
def main() -> None:
    """gradserve: open, self-hosted post-training. Serves gradients over the tinker protocol."""
