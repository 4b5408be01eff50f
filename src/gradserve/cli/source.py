"""Where ``gradserve runs`` and ``gradserve run`` read from: a server's API, or this machine's data directory."""

from __future__ import annotations

import asyncio
import os
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

import click
import msgspec

from gradserve.store.base import Store
from gradserve.store.overview import RunDetail, RunList, list_overviews, run_detail


def list_of_runs(data_dir: Path | None, limit: int) -> RunList:
    """The newest runs."""
    if (url := _server(data_dir)) is not None:
        return msgspec.json.decode(_get(f"{url}/api/v1/gradserve/runs?limit={limit}"), type=RunList)
    return asyncio.run(_list_from_disk(data_dir, limit))


def one_run(data_dir: Path | None, run_id: str, lines: int) -> RunDetail | None:
    """One run; None when it does not exist."""
    if (url := _server(data_dir)) is not None:
        body = _get(f"{url}/api/v1/gradserve/runs/{quote(run_id, safe=':')}?lines={lines}", missing_ok=True)
        return msgspec.json.decode(body, type=RunDetail | None)
    return asyncio.run(_one_from_disk(data_dir, run_id, lines))


def _server(data_dir: Path | None) -> str | None:
    """GRADSERVE_URL, unless a data directory was named."""
    url = os.environ.get("GRADSERVE_URL")
    return url.rstrip("/") if url and data_dir is None else None


def _get(url: str, missing_ok: bool = False) -> bytes:
    key = os.environ.get("TINKER_API_KEY", "tml-local")
    request = urllib.request.Request(url, headers={"X-API-Key": key})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            body: bytes = response.read()
            return body
    except urllib.error.HTTPError as error:
        if error.code == 404 and missing_ok:
            return b"null"
        raise click.ClickException(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except urllib.error.URLError as error:
        raise click.ClickException(f"no gradserve at {url}: {error.reason}") from error


async def _list_from_disk(data_dir: Path | None, limit: int) -> RunList:
    store = _store(data_dir)
    await store.open()
    try:
        return await list_overviews(store, None, limit, 0)
    finally:
        await store.close()


async def _one_from_disk(data_dir: Path | None, run_id: str, lines: int) -> RunDetail | None:
    store = _store(data_dir)
    await store.open()
    try:
        return await run_detail(store, None, run_id, lines)
    finally:
        await store.close()


def _store(data_dir: Path | None) -> Store:
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
