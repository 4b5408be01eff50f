"""gradserve export CHECKPOINT, gradserve export --tenant TENANT"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradserve.cli.runs import DATA_DIR

if TYPE_CHECKING:
    from gradserve.compute.exports import DType, Exported, Format


@click.command(short_help="Write a checkpoint as PEFT, merged model or GGUF; or all that a tenant owns.")
@click.argument("checkpoint", required=False)
@click.option("--tenant", help="Instead of a checkpoint: everything that this tenant owns, from the data directory.")
@click.option("--bodies", is_flag=True, help="With --tenant: also what was sent and answered, as far as it is kept.")
@click.option("--to", required=True, type=click.Path(path_type=Path), help="Folder to make; it must not exist.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["peft", "merged", "gguf"]),
    default="peft",
    show_default=True,
    help="An adapter for peft and vLLM, a whole model in safetensors, or one GGUF file.",
)
@click.option("--base", type=click.Path(path_type=Path), help="Directory of the base model, if it is not configured.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Of merged and GGUF weights (default: the base's; GGUF has no bfloat16 here).",
)
@DATA_DIR
def export(
    checkpoint: str | None,
    tenant: str | None,
    bodies: bool,
    to: Path,
    kind: Format,
    base: Path | None,
    dtype: DType | None,
    data_dir: Path | None,
) -> None:
    """Write CHECKPOINT (tinker://...) to a folder that other programs load.

    The log-probs of held prompts are computed from what was written, by plain transformers and peft, and compared with
    those of the checkpoint. The result is kept in the folder, in gradserve_export.json. An artefact that differs too
    much is kept as DIR.failed-parity, and the exit code is 1.

    With --tenant write runs, requests, metrics, events, ledger and checkpoints of a tenant in open formats; a server
    may run meanwhile, its data is only read.
    """
    if (checkpoint is None) == (tenant is None):
        raise click.UsageError("name either a CHECKPOINT or a --tenant")
    if tenant is not None:
        _export_tenant(tenant, to, data_dir, bodies)
        return
    if bodies:
        raise click.UsageError("--bodies goes with --tenant")
    assert checkpoint is not None
    _export_checkpoint(checkpoint, to, kind, base, dtype, data_dir)


def _export_tenant(tenant: str, to: Path, data_dir: Path | None, bodies: bool) -> None:
    from gradserve.cli.tenant_files import write_export

    manifest = write_export(tenant, to, data_dir, bodies=bodies)
    click.echo(f"{to}: {len(manifest.files)} files, bill ${manifest.total.amount_usd:f}; README.md says what is what")
    for path, why in manifest.missing.items():
        click.secho(f"  not exported: {path}: {why}", fg="red", err=True)


def _export_checkpoint(
    checkpoint: str, to: Path, kind: Format, base: Path | None, dtype: DType | None, data_dir: Path | None
) -> None:
    from gradserve.cli.checkpoint import find
    from gradserve.compute.catalog import ModelUnusable
    from gradserve.compute.exports import CannotExport
    from gradserve.wire.errors import UserError

    _refuse_existing(to)
    with tempfile.TemporaryDirectory(prefix="gradserve-export-") as scratch:
        source = find(checkpoint, base, data_dir, Path(scratch), _say)
        from gradserve.compute.engine.export import run  # torch: only when there is something to do

        try:
            exported = run.export(source, to, kind, dtype, _say)
        except (CannotExport, ModelUnusable, UserError, OSError) as error:
            raise click.ClickException(str(error)) from error
    _report(exported)


def _refuse_existing(to: Path) -> None:
    if to.exists():
        raise click.ClickException(f"{to} exists and is not overwritten: remove it or choose another --to")


def _report(exported: Exported) -> None:
    parity = exported.parity
    for note in exported.notes:
        _say(f"note: {note}")
    found = (
        f"log-probs differ by {parity.max_abs_difference:.2g} at most and {parity.mean_abs_difference:.2g} on average "
        f"over {len(parity.prompts)} held prompts; the bound in {exported.dtype} is {parity.bound:g}"
    )
    if not parity.passed:
        raise click.ClickException(f"the parity check failed: {found}. What was written is in {exported.folder}.")
    click.echo(f"{exported.folder}: parity check passed: {found}")


def _say(text: str) -> None:
    click.echo(text, err=True)
