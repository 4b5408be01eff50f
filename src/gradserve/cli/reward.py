"""gradserve reward test FILE[:FUNCTION]"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gradserve.rewards.check import Report
    from gradserve.rewards.contract import Sample


@click.group(short_help="Check a reward function before a token is spent.")
def reward() -> None:
    """Reward functions; see docs/guides/rewards.md."""


@reward.command(short_help="Check determinism, edge cases, speed and failures of a reward.")
@click.argument("target", metavar="FILE[:FUNCTION]")
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSONL with prompt, completion, answer and state, to check on; default: one built-in sum.",
)
@click.option("--rows", default=5, show_default=True, type=click.IntRange(min=1), help="Rows of --data to check on.")
@click.option(
    "--timeout", default=5.0, show_default=True, type=click.FloatRange(0, min_open=True), help="Seconds for a call."
)
@click.option("--range", "allowed", nargs=2, type=float, metavar="LOW HIGH", help="Where every reward must lie.")
def test(target: str, data: Path | None, rows: int, timeout: float, allowed: tuple[float, float] | None) -> None:
    """Score edge cases with FILE's FUNCTION (default: reward, or the only one there) and print what came of them.

    A case is scored twice, and once more in another process. The exit code is 1 when a call fails, when the same input
    gets another reward, when a reward is out of --range, or when naming the answer without giving it earns something.
    """
    from gradserve.rewards.check import ABOUT, check
    from gradserve.rewards.contract import RewardUnusable

    if allowed and allowed[0] > allowed[1]:
        raise click.UsageError("--range is LOW HIGH, the smaller number first")
    try:
        report = check(_with_function(target), _samples(data, rows) if data else (ABOUT,), timeout, allowed)
    except RewardUnusable as error:
        raise click.ClickException(str(error)) from error
    _print(report)
    if report.problems:
        raise SystemExit(1)


def _with_function(target: str) -> str:
    """``file.py`` becomes ``file.py:function``, by reading the file, not by running it."""
    if not target.endswith(".py"):
        return target
    try:
        tree = ast.parse(Path(target).read_bytes(), target)
    except (OSError, SyntaxError) as error:
        raise click.ClickException(f"{target} can't be read: {error}") from error
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assigned = [name for node in tree.body if isinstance(node, ast.Assign) for name in map(ast.unparse, node.targets)]
    public = [name for name in functions if not name.startswith("_")]
    if "reward" in [*functions, *assigned]:
        return f"{target}:reward"
    if len(public) != 1:
        raise click.ClickException(f"which is the reward in {target}? Name it, {target}:FUNCTION: {', '.join(public)}")
    return f"{target}:{public[0]}"


def _samples(data: Path, rows: int) -> list[Sample]:
    from gradserve.rewards.contract import Sample

    lines = [line for line in data.read_text(encoding="utf-8").split("\n") if line.strip()][:rows]
    samples = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            samples.append(Sample(row["prompt"], row.get("completion", ""), row.get("answer"), row.get("state")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise click.ClickException(
                f"{data}, row {number}: {error!r}; a row is an object with prompt, and completion, answer, state if any"
            ) from error
    if not samples:
        raise click.ClickException(f"{data} has no rows")
    return samples


def _print(report: Report) -> None:
    from gradserve.rewards.check import printable, said
    from gradserve.rewards.contract import Outcome

    width = max(len("completion"), *(len(row.case.name) for row in report.rows))
    click.echo(f"{'completion':{width}}  {'reward':>13}  {'ms':>8}")
    for row in report.rows:
        spent = parts = ""
        if isinstance(row.result, Outcome):
            spent = f"{1000 * row.result.seconds:.2f}"
            parts = ", ".join(f"{printable(name)} {value:g}" for name, value in row.result.parts.items())
        click.echo(f"{row.case.name:{width}}  {said(row.result):>13}  {spent:>8}  {parts}".rstrip())
    if report.values:
        low, high = min(report.values), max(report.values)
        click.echo(f"rewards from {low:g} to {high:g}" + (": all the same" if low == high else ""))
    if report.median_s is not None and report.p95_s is not None:
        click.echo(f"a call takes {1000 * report.median_s:.2f} ms (median), {1000 * report.p95_s:.2f} ms (95%)")
    for problem in report.problems:
        click.secho(f"wrong: {problem}", fg="red")
    if not report.problems:
        click.echo("nothing wrong was found")
