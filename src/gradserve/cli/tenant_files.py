"""The folder of ``gradserve export --tenant``: a tenant's rows and checkpoints in open formats."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import msgspec

import gradserve
from gradserve.cli.tenant_readme import readme
from gradserve.compute.archive import Archive, ArchiveError
from gradserve.compute.checkpoints import GRAPH_FILE, adapter_config, folder_of, weights_file
from gradserve.compute.encryption import SUFFIX, encrypt_file
from gradserve.compute.files import sha256_of
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, copy_out, shared_memory_root
from gradserve.store.base import Checkpoint, LedgerTotal, StoreError
from gradserve.store.tenant_export import UnknownTenant, export_rows, readable
from gradserve.wire.ops import module_graph

MANIFEST = "manifest.json"
_PROTO = Path(gradserve.__file__).parent / "wire" / "proto" / "gradserve_wire.proto"


class Manifest(msgspec.Struct, frozen=True):
    """``manifest.json``. ``files`` maps every other file's path to its SHA-256 and size in bytes."""

    tenant: str
    exported_at: float
    gradserve: str
    lines: dict[str, int]
    total: LedgerTotal
    files: dict[str, tuple[str, int]]
    missing: dict[str, str]


def write_export(tenant: str, to: Path, data_dir: Path | None = None, *, bodies: bool = False) -> Manifest:
    """Make the folder ``to``, whole or not at all. Raises ClickException saying what is wrong."""
    from gradserve.settings import Settings

    settings = Settings()
    archive = None if settings.archive_url is None else Archive(settings.archive_url, settings.archive_options)
    try:
        with _whole_folder(to) as part:
            return _fill(part, tenant, data_dir or settings.data_dir, archive, bodies)
    except (UnknownTenant, StoreError, OSError) as error:
        raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _whole_folder(to: Path) -> Iterator[Path]:
    if to.exists():
        raise click.ClickException(f"{to} exists; name a folder that does not")
    part = to.with_name(f".{to.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True, mode=0o700)  # everybody's prompts may be in there
    try:
        yield part
        part.rename(to)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _fill(part: Path, tenant: str, data_dir: Path, archive: Archive | None, bodies: bool) -> Manifest:
    from gradserve.bootstrap import Paths

    paths = Paths(data_dir)
    rows = export_rows(paths.database, tenant, part, bodies=bodies)
    (part / "README.md").write_text(readme(tenant))
    if bodies:
        shutil.copyfile(_PROTO, part / _PROTO.name)
    roots = (paths.objects, shared_memory_root(paths.root))
    files = _CheckpointFiles(part / paths.checkpoints.name, paths.checkpoints, roots, archive)
    for checkpoint in rows.checkpoints:
        files.write(checkpoint)
    for graph in rows.graphs:
        files.write_graph(part / "graphs", graph.digest)
    manifest = Manifest(
        tenant, time.time(), gradserve.__version__, rows.lines, rows.total, _digests(part), files.missing
    )
    (part / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(readable(manifest)), indent=2) + b"\n")
    return manifest


@dataclass
class _CheckpointFiles:
    """Writes checkpoints under ``to``; ``folders`` are the server's own, ``roots`` its object store's tiers."""

    to: Path
    folders: Path
    roots: tuple[Path, ...]
    archive: Archive | None
    missing: dict[str, str] = field(default_factory=dict)

    def write(self, checkpoint: Checkpoint) -> None:
        folder = folder_of(self.to, checkpoint.run_id, checkpoint.kind, checkpoint.name)
        folder.mkdir(parents=True)
        self._object(checkpoint.weights, folder / weights_file(checkpoint.lora))
        if checkpoint.moments is not None:
            self._object(checkpoint.moments, folder / "optimizer.safetensors")
        if checkpoint.lora is not None:
            config = msgspec.json.encode(adapter_config(checkpoint.base, checkpoint.lora))
            (folder / "adapter_config.json").write_bytes(msgspec.json.format(config, indent=2) + b"\n")
        else:
            self._small_files(checkpoint, folder)
        if checkpoint.age_recipients:
            _encrypt(folder, checkpoint.age_recipients)

    def write_graph(self, folder: Path, digest: str) -> None:
        """The text of a loss or of a module."""
        folder.mkdir(exist_ok=True)
        self._object(digest, folder / f"{digest}.json")

    def _object(self, digest: str, target: Path) -> None:
        try:
            copy_out(digest, target, self.roots, self.archive)
        except ObjectMissing:
            self._miss(target, "it is in neither tier of the object store, nor in an archive that is set")
        except (ObjectCorrupt, ArchiveError) as error:
            self._miss(target, str(error))

    def _small_files(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Config and tokenizer of a whole model are in the server's folder of the checkpoint."""
        if (graph := module_graph(checkpoint.base)) is not None:
            self._object(graph, folder / GRAPH_FILE)
            return
        own = folder_of(self.folders, checkpoint.run_id, checkpoint.kind, checkpoint.name)
        if not (own / "config.json").is_file():
            self._miss(folder / "config.json", f"{own} is gone; take config and tokenizer from {checkpoint.base}")
            return
        for file in own.iterdir():
            if file.suffix not in (".safetensors", SUFFIX):
                shutil.copyfile(file, folder / file.name)

    def _miss(self, target: Path, why: str) -> None:
        self.missing[target.relative_to(self.to.parent).as_posix()] = why


def _encrypt(folder: Path, recipients: list[str]) -> None:
    """These files were promised to leave the server only like this."""
    for file in list(folder.iterdir()):
        encrypt_file(file, file.with_name(file.name + SUFFIX), recipients)
        file.unlink()


def _digests(root: Path) -> dict[str, tuple[str, int]]:
    files = sorted(file for file in root.rglob("*") if file.is_file())
    return {file.relative_to(root).as_posix(): (sha256_of(file), file.stat().st_size) for file in files}
