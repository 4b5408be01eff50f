"""gradserve diff A B"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from gradserve.cli.remote import URL, ask, run_route


@click.command(short_help="Compare two runs, or two steps.")
@click.argument("a")
@click.argument("b")
@URL
def diff(a: str, b: str, url: str) -> None:
    """Compare A and B: each a run, RUN@STEP, or the tinker:// path of a checkpoint.

    Shows what differs in configuration, data (a hash over all batches), newest metrics and the norms of the weights.
    """
    first, second = (_flat(_summary(url, what)) for what in (a, b))
    same = [name for name in first if first[name] == second.get(name)]
    for name in sorted(first.keys() | second.keys()):
        if name not in same:
            click.echo(f"{name:<40} {first.get(name, '-')!s:<24} {second.get(name, '-')}")
    click.echo(f"the same: {', '.join(sorted(same)) or 'nothing'}")


def _summary(url: str, what: str) -> dict[str, Any]:
    if what.startswith("tinker://"):
        run_id, _, name = what.removeprefix("tinker://").split("/")
    else:
        run_id, _, name = what.partition("@")
    query = f"?version={quote(name)}" if name else ""
    found: dict[str, Any] = ask(url, run_route(run_id, f"/summary{query}"))
    return found


def _flat(summary: dict[str, Any]) -> dict[str, object]:
    """One line per fact."""
    flat: dict[str, object] = {}
    for name, value in summary.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": _short(inner) for key, inner in value.items()}
        else:
            flat[name] = _short(value)
    return flat


def _short(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value[:16] if isinstance(value, str) and len(value) == 64 else value
