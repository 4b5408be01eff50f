"""Where ``gradserve runs`` and ``gradserve run`` read from: a server's API, or this machine's data directory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click
import msgspec

from gradserve.client.extensions import ExtensionError, get, run_path
from gradserve.store.base import Store
from gradserve.store.overview import RunDetail, RunList, list_overviews, run_detail


def list_of_runs(data_dir: Path | None, limit: int) -> RunList:
    """The newest runs."""
    if (url := server_url(data_dir)) is not None:
        return msgspec.json.decode(_ask(url, f"runs?limit={limit}"), type=RunList)
    return asyncio.run(_list_from_disk(data_dir, limit))


def one_run(data_dir: Path | None, run_id: str, lines: int) -> RunDetail | None:
    """One run; None when it does not exist."""
    if (url := server_url(data_dir)) is not None:
        return msgspec.json.decode(_ask(url, run_path(run_id, lines)), type=RunDetail | None)
    return asyncio.run(_one_from_disk(data_dir, run_id, lines))


def server_url(data_dir: Path | None) -> str | None:
    """GRADSERVE_URL, unless a data directory was named."""
    return os.environ.get("GRADSERVE_URL") if data_dir is None else None


def _ask(url: str, path: str) -> bytes:
    try:
        return get(url, path, os.environ.get("TINKER_API_KEY", "tml-local"))
    except ExtensionError as error:
        if error.status == 404:
            return b"null"
        raise click.ClickException(str(error)) from error


async def _list_from_disk(data_dir: Path | None, limit: int) -> RunList:
    store = open_store(data_dir)
    await store.open()
    try:
        return await list_overviews(store, None, limit, 0)
    finally:
        await store.close()


async def _one_from_disk(data_dir: Path | None, run_id: str, lines: int) -> RunDetail | None:
    store = open_store(data_dir)
    await store.open()
    try:
        return await run_detail(store, None, run_id, lines)
    finally:
        await store.close()


def open_store(data_dir: Path | None) -> Store:
    """The store of a data directory, to look into. Raises ClickException when there is none."""
    from gradserve.bootstrap import Paths
    from gradserve.settings import Settings
    from gradserve.store.sql import SqlStore

    database = Paths(data_dir or Settings().data_dir).database
    if not database.exists():
        raise click.ClickException(
            f"there are no runs yet in {database.parent}. Start with gradserve quickstart or gradserve serve, or set "
            "GRADSERVE_URL to ask a server."
        )
    return SqlStore.at(database, read_only=True)


def stored_object(data_dir: Path | None, digest: str) -> bytes:
    """The bytes of a durable object as they lie there, not compared. Raises ClickException when it is lost."""
    from gradserve.bootstrap import Paths
    from gradserve.compute.objects import SUFFIX
    from gradserve.settings import Settings

    file = Paths(data_dir or Settings().data_dir).objects / (digest + SUFFIX)
    if not file.is_file():
        raise click.ClickException(f"the object {digest} is lost: there is no {file}")
    return file.read_bytes()
