"""gradserve restore"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gradserve.orchestration.restoration import Restored


@click.command(short_help="Bring a data directory back from the archive alone.")
@click.option("--from", "url", metavar="URL", help="The archive (default: the setting archive_url).")
@click.option(
    "--archive-option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument of its fsspec file system, VALUE as JSON or text; repeat for more (default: archive_options).",
)
@click.option("--data-dir", type=click.Path(path_type=Path), help="Directory to restore to; empty or not there yet.")
@click.option("--lazy", is_flag=True, help="Only the database; the server fetches arrays when it needs them.")
def restore(url: str | None, options: tuple[str, ...], data_dir: Path | None, lazy: bool) -> None:
    """Bring back database and arrays from an archive, when the disk that held them is gone.

    The newest copy of the database that is whole is taken; what was acknowledged after it was made is lost. Then
    gradserve serve goes on in that directory, as the archive's new owner: an old server that still runs somewhere
    writes nothing to the archive any more.
    """
    from gradserve.bootstrap import Paths
    from gradserve.compute.archive import Archive
    from gradserve.orchestration.restoration import CannotRestore
    from gradserve.orchestration.restoration import restore as bring_back
    from gradserve.settings import Settings

    settings = Settings()
    url = url or settings.archive_url
    if url is None:
        raise click.UsageError("name the archive by --from, or by GRADSERVE_ARCHIVE_URL")
    chosen = dict(_pair(option) for option in options) or settings.archive_options
    paths = Paths(data_dir or settings.data_dir)
    try:
        restored = bring_back(
            Archive(url, chosen), paths.database, paths.objects, paths.restoring, _notice, arrays=not lazy
        )
    except CannotRestore as error:
        raise click.ClickException(str(error)) from error
    _report(restored, url, paths.root, lazy)


def _pair(option: str) -> tuple[str, Any]:
    name, equals, value = option.partition("=")
    if not (name and equals):
        raise click.BadParameter(f"{option!r} is not KEY=VALUE", param_hint="--archive-option")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _report(restored: Restored, url: str, root: Path, lazy: bool) -> None:
    held = restored.held
    click.echo(f"{root}: restored from {url}, as it was at {restored.copy.taken:%Y-%m-%d %H:%M:%S} UTC")
    for run in held.runs:
        click.echo(f"  {run.id}  {run.base}  step {run.version}, {run.cursor + 1} requests ended")
    arrays = "arrays are fetched when needed" if lazy else f"{restored.arrays} arrays, {_mib(restored.size_bytes)}"
    click.echo(
        f"  {len(held.runs)} runs, {len(held.checkpoints)} checkpoints, {len(held.versions)} durable steps; {arrays}"
    )
    for digest, why in restored.lost.items():
        _notice(f"lost: {digest}: {why}")
    click.echo(
        "What was acknowledged after that time is lost. Start scripts again that ran then: gradserve resume RUN names "
        "the last complete step."
    )
    bases = _bases(restored)
    for base, weights in sorted(bases.items()):
        click.echo(f"  needs the model {base}" + (f" (weights {weights[:12]})" if weights else ""))
    models = " ".join(f"--model {base}=SOURCE" for base in sorted(bases))
    click.echo(f"Go on: GRADSERVE_ARCHIVE_URL={url} gradserve serve --data-dir {root} {models}".rstrip())


def _bases(restored: Restored) -> dict[str, str]:
    """By name, all models that runs and checkpoints need; the digest of their weights where it was noted."""
    held = restored.held
    known = {checkpoint.base: "" for checkpoint in held.checkpoints}
    known |= {run.base: "" for run in held.runs}
    return known | {run.base: run.trained_on.weights for run in held.runs if run.trained_on is not None}


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def _notice(text: str) -> None:
    click.secho(text, fg="yellow", err=True)
