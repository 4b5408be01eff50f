"""A checkpoint's weights on this machine, checked: from a server's API, or from the data directory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from gradserve.cli.source import open_store, server_url, stored_object
from gradserve.client.extensions import ExtensionError
from gradserve.compute.catalog import BaseFacts, ModelUnusable, read_facts
from gradserve.compute.checkpoints import GRAPH_FILE
from gradserve.compute.exports import ModuleSource, Source, sha256
from gradserve.compute.identity import identify
from gradserve.store import trained_on
from gradserve.store.base import Checkpoint, Store
from gradserve.store.wakeups import MakeWhole
from gradserve.wire import graph as ir
from gradserve.wire.errors import Invalid
from gradserve.wire.identity import BaseIdentity, require_same_base
from gradserve.wire.ops import LoraConfig, module_graph

T = TypeVar("T")

_FLAGS = ("train_attn", "train_mlp", "train_unembed")


def find(
    path: str, base: Path | None, data_dir: Path | None, scratch: Path, tell: Callable[[str], None]
) -> Source | ModuleSource:
    """The checkpoint of a tinker:// path, of a language model or of a module.

    What comes from a server is put into the folder ``scratch``.

    ``base`` is the directory of the base model; None looks among the configured models. Raises ClickException.
    """
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or not all(parts):
        raise click.ClickException(f"{path!r} is not the path of a checkpoint: tinker://<run>/<kind>/<name>")
    if (url := server_url(data_dir)) is not None:
        found = _from_server(url, path, scratch)
    else:
        found = _from_disk(data_dir, path)
    if (graph := module_graph(found.base)) is not None:
        if base is not None:
            raise click.ClickException(f"{path} is a module: it has no base model, leave --base out")
        return ModuleSource(path, _graph(url, data_dir, path, graph), found.weights, found.digest)
    facts = _base(found.base, base, data_dir, tell)
    _require_same_base(path, found, facts)
    return Source(path, facts, found.lora, found.weights, found.digest)


@dataclass(frozen=True)
class _Found:
    """Name of the base, adapters (None: all parameters), file of the weights and its SHA-256, the base's digests."""

    base: str
    lora: LoraConfig | None
    weights: Path
    digest: str
    trained_on: BaseIdentity | None


def _require_same_base(path: str, found: _Found, facts: BaseFacts) -> None:
    """An adapter on another model than its own is nobody's work. Raises ClickException."""
    try:
        require_same_base(path, found.base, found.trained_on, identify(Path(facts.path)))
    except Invalid as differs:
        raise click.ClickException(f"{differs.detail} Give the directory of that one with --base DIR.") from differs


def _from_server(url: str, path: str, scratch: Path) -> _Found:
    from gradserve.client import download

    key = os.environ.get("TINKER_API_KEY", "tml-local")
    file = scratch / "weights.safetensors"
    try:
        info = download.weights_info(url, path, key)
        digest = download.weights(url, path, key, file)
    except ExtensionError as error:
        raise click.ClickException(str(error)) from error
    # The seed made the first weights; these are others, and nobody asks for it.
    lora = LoraConfig(info["lora_rank"], 0, **{flag: info[flag] for flag in _FLAGS}) if info["is_lora"] else None
    known = msgspec.convert(info.get("trained_on"), BaseIdentity | None)
    return _Found(info["base_model"], lora, file, digest, known)


def _from_disk(data_dir: Path | None, path: str) -> _Found:
    from gradserve.bootstrap import Paths
    from gradserve.compute.objects import SUFFIX

    checkpoint, known = asyncio.run(_with_store(data_dir, lambda store: _checkpoint(store, path)))
    if checkpoint is None:
        raise click.ClickException(f"there is no checkpoint {path} here; gradserve run shows those of a run")
    file = Paths(_data_dir(data_dir)).objects / (checkpoint.weights + SUFFIX)
    if not file.is_file():
        raise _unusable(data_dir, checkpoint, f"the weights of {path} are lost: there is no {file}")
    if (found := sha256(file)) != checkpoint.weights:
        words = f"the weights of {path} are damaged: the bytes of {file} have the SHA-256 {found}"
        raise _unusable(data_dir, checkpoint, words)
    return _Found(checkpoint.base, checkpoint.lora, file, checkpoint.weights, known)


def _graph(url: str | None, data_dir: Path | None, path: str, digest: str) -> bytes:
    """The forward graph of a module's checkpoint, compared with its digest."""
    text = stored_object(data_dir, digest) if url is None else _graph_from_server(url, path)
    if ir.digest(text) != digest:
        raise click.ClickException(f"the graph of {path} is damaged: it is not the one with the SHA-256 {digest}")
    return text


def _graph_from_server(url: str, path: str) -> bytes:
    from gradserve.client import download

    try:
        return download.small_file(url, path, os.environ.get("TINKER_API_KEY", "tml-local"), GRAPH_FILE)
    except ExtensionError as error:
        raise click.ClickException(str(error)) from error


def _unusable(data_dir: Path | None, checkpoint: Checkpoint, what: str) -> click.ClickException:
    """With what is good instead. Nothing is mended here: only a server may write to its data directory."""
    from gradserve.bootstrap import Paths
    from gradserve.compute.objects import ObjectStore
    from gradserve.orchestration.older import advice

    durable = Paths(_data_dir(data_dir)).objects
    objects = ObjectStore(durable, durable)  # shared memory is a running server's
    bad = MakeWhole.of(checkpoint, checkpoint.tenant, "weights")
    told = asyncio.run(_with_store(data_dir, lambda store: advice(store, objects, bad)))
    return click.ClickException(
        f"{what}. A server on this directory computes them again if it can (gradserve serve). {told}"
    )


async def _checkpoint(store: Store, path: str) -> tuple[Checkpoint | None, BaseIdentity | None]:
    """With the digests of the base that it was trained on."""
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    checkpoint = await store.get_checkpoint(None, run_id, kind, name)
    return checkpoint, None if checkpoint is None else await trained_on.of_checkpoint(store, checkpoint)


async def _with_store(data_dir: Path | None, work: Callable[[Store], Awaitable[T]]) -> T:
    store = open_store(data_dir)
    await store.open()
    try:
        return await work(store)
    finally:
        await store.close()


def _base(name: str, directory: Path | None, data_dir: Path | None, tell: Callable[[str], None]) -> BaseFacts:
    from gradserve.compute.models import find_base
    from gradserve.settings import Settings

    try:
        if directory is not None:
            return read_facts(name, directory)
        return find_base(name, Settings().models, _data_dir(data_dir), tell)
    except ModelUnusable as error:
        advice = "" if directory is not None else ". Give its directory with --base DIR, or name it in GRADSERVE_MODELS"
        raise click.ClickException(f"{error}{advice}") from error


def _data_dir(given: Path | None) -> Path:
    from gradserve.settings import Settings

    return given or Settings().data_dir
