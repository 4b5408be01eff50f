"""gradserve export CHECKPOINT, gradserve export --tenant TENANT"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradserve.cli.runs import DATA_DIR

if TYPE_CHECKING:
    from gradserve.compute.exports import DType, Exported, ExportedModule, Format, ModuleFormat, ModuleSource, Source


_OF_MODELS = ("peft", "merged", "gguf")
_OF_MODULES = ("safetensors", "onnx")


@click.command(short_help="Write a checkpoint as PEFT, merged model, GGUF or ONNX; or all that a tenant owns.")
@click.argument("checkpoint", required=False)
@click.option("--tenant", help="Instead of a checkpoint: everything that this tenant owns, from the data directory.")
@click.option("--bodies", is_flag=True, help="With --tenant: also what was sent and answered, as far as it is kept.")
@click.option("--to", required=True, type=click.Path(path_type=Path), help="Folder to make; it must not exist.")
@click.option(
    "--format",
    "kind",
    type=click.Choice([*_OF_MODELS, *_OF_MODULES]),
    help="Of a language model: an adapter for peft and vLLM (default), a whole model in safetensors, or one GGUF file. "
    "Of a module: weights and graph (default), or one ONNX file.",
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
    kind: Format | ModuleFormat | None,
    base: Path | None,
    dtype: DType | None,
    data_dir: Path | None,
) -> None:
    """Write CHECKPOINT (tinker://...) to a folder that other programs load.

    The log-probs of held prompts are computed from what was written, by plain transformers and peft, and compared with
    those of the checkpoint; of a module the outputs on seeded inputs, by onnxruntime for ONNX. The result is kept in
    the folder, in gradserve_export.json. An artefact that differs too much is kept as DIR.failed-parity, and the exit
    code is 1.

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
    checkpoint: str,
    to: Path,
    kind: Format | ModuleFormat | None,
    base: Path | None,
    dtype: DType | None,
    data_dir: Path | None,
) -> None:
    from gradserve.cli.checkpoint import find
    from gradserve.compute.catalog import ModelUnusable
    from gradserve.compute.exports import CannotExport, ModuleSource
    from gradserve.wire.errors import UserError

    _refuse_existing(to)
    with tempfile.TemporaryDirectory(prefix="gradserve-export-") as scratch:
        source = find(checkpoint, base, data_dir, Path(scratch), _say)
        try:
            if isinstance(source, ModuleSource):
                _report_module(_export_module(source, to, kind or "safetensors", dtype))
            else:
                _report(_export_model(source, to, kind or "peft", dtype))
        except (CannotExport, ModelUnusable, UserError, OSError) as error:
            raise click.ClickException(str(error)) from error


def _export_model(source: Source, to: Path, kind: Format | ModuleFormat, dtype: DType | None) -> Exported:
    from gradserve.compute.exports import CannotExport

    if kind == "onnx" or kind == "safetensors":
        raise CannotExport(
            f"--format {kind} is for modules, and {source.path} is a language model ({source.base.name}). Use "
            f"{' or '.join(_OF_MODELS)}; merged is a whole model in safetensors."
        )
    from gradserve.compute.engine.export import run  # torch: only when there is something to do

    return run.export(source, to, kind, dtype, _say)


def _export_module(source: ModuleSource, to: Path, kind: Format | ModuleFormat, dtype: DType | None) -> ExportedModule:
    from gradserve.compute.exports import CannotExport

    if kind != "onnx" and kind != "safetensors":
        raise CannotExport(
            f"--format {kind} is for language models, and {source.path} is a module. Use {' or '.join(_OF_MODULES)}."
        )
    if dtype is not None:
        raise CannotExport(f"a module is written in the dtypes that it was trained in: leave --dtype {dtype} out.")
    from gradserve.compute.engine.export import module_run  # torch: only when there is something to do

    return module_run.export(source, to, kind, _say)


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


def _report_module(exported: ExportedModule) -> None:
    parity = exported.parity
    worst = max(parity.differences.values())
    found = (
        f"outputs differ by {worst:.2g} at most over batches of {', '.join(map(str, parity.batches))}; "
        f"the bound is {parity.bound:g}"
    )
    if not parity.passed:
        raise click.ClickException(f"the parity check failed: {found}. What was written is in {exported.folder}.")
    click.echo(f"{exported.folder}: parity check passed: {found}")


def _say(text: str) -> None:
    click.echo(text, err=True)
