"""The archiver: what is durable and in use ends up in the archive, what became garbage leaves it, faults are said."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gradserve.compute.archive import Archive, ArchiveError
from gradserve.compute.checkpoints import CheckpointFolders
from gradserve.compute.objects import ObjectStore
from gradserve.orchestration.archiver import Archiver
from gradserve.orchestration.database_copier import DatabaseCopier
from gradserve.orchestration.held import Held
from gradserve.orchestration.janitor import Janitor
from gradserve.settings import Settings
from gradserve.store.sql import SqlStore


@pytest.fixture
def archive() -> Archive:
    return Archive(f"memory://{uuid.uuid4().hex}", attempts=1)


@pytest.fixture
def objects(tmp_path: Path, archive: Archive) -> ObjectStore:
    return ObjectStore(tmp_path / "fast", tmp_path / "durable", archive)


def made(objects: ObjectStore, data: bytes) -> str:
    digest = objects.put(data)
    objects.persist(digest)
    return digest


@contextlib.asynccontextmanager
async def archiving(objects: ObjectStore) -> AsyncIterator[tuple[Archiver, SqlStore]]:
    """An archiver over a store in a file beside the objects."""
    assert objects.remote is not None
    here = objects.durable.parent
    store = SqlStore.at(here / "gradserve.db")
    await store.open()
    copier = DatabaseCopier(store, objects.remote, Held(), here / "scratch", pause_s=0.0)
    yield Archiver(store, objects, copier, pause_s=0.01), store
    await store.close()


def test_what_is_wanted_goes_up_and_what_became_garbage_goes(objects: ObjectStore, archive: Archive) -> None:
    a, b = made(objects, b"a"), made(objects, b"b")

    async def story() -> None:
        async with archiving(objects) as (archiver, _):
            archiver.sync(wanted={a, b}, garbage=set())
            assert [archiver.status()[name] for name in ("archived", "waiting", "error")] == [0, 2, None]
            await archiver.round()
            assert (archive.has(a), archive.has(b)) == (True, True)
            archiver.sync(wanted={b}, garbage={a})
            await archiver.round()
            assert (archive.has(a), archive.has(b)) == (False, True)
            assert [archiver.status()[name] for name in ("archived", "waiting", "error")] == [1, 0, None]

    asyncio.run(story())


def test_a_new_data_directory_removes_nothing_that_it_did_not_see_die(objects: ObjectStore, archive: Archive) -> None:
    digest = made(objects, b"of an earlier life")
    objects.archive(digest)

    async def story() -> None:
        async with archiving(objects) as (archiver, _):
            archiver.sync(wanted=set(), garbage=set())
            await archiver.round()

    asyncio.run(story())
    assert archive.has(digest)


def test_damage_does_not_stop_the_others(objects: ObjectStore, archive: Archive) -> None:
    bad, good = made(objects, b"bad"), made(objects, b"good")
    objects.persist(bad).write_bytes(b"BAD")

    async def story() -> None:
        async with archiving(objects) as (archiver, _):
            archiver.sync(wanted={bad, good}, garbage=set())
            await archiver.round()
            assert archiver.status()["waiting"] == 1
            assert bad in str(archiver.status()["error"])

    asyncio.run(story())
    assert (archive.has(bad), archive.has(good)) == (False, True)


@pytest.mark.parametrize("fault", [ArchiveError("bucket: no answer"), OSError("disk: input/output error")])
def test_a_fault_is_said_and_tried_again(
    objects: ObjectStore,
    archive: Archive,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
) -> None:
    digest = made(objects, b"a")
    put, refusals = archive.put_object, iter([fault])

    def refuse_once(*arguments: Any) -> None:
        for refusal in refusals:
            raise refusal
        put(*arguments)

    monkeypatch.setattr(archive, "put_object", refuse_once)

    async def story() -> None:
        async with archiving(objects) as (archiver, _):
            running = asyncio.create_task(archiver.run())
            archiver.sync(wanted={digest}, garbage=set())
            while archiver.status()["waiting"] or archiver.status()["error"]:
                assert not running.done()
                await asyncio.sleep(0.005)
            running.cancel()
            await archiver.close()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert archive.has(digest)
    assert f"ALARM: 1 objects are only on this machine: {fault}" in caplog.text


def test_the_janitor_tells_it(objects: ObjectStore, archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lost = made(objects, b"kept"), made(objects, b"lost")
    objects.archive(lost)
    monkeypatch.setattr("gradserve.orchestration.janitor._GRACE_S", -1.0)

    async def story() -> None:
        async with archiving(objects) as (archiver, store):
            folders = CheckpointFolders(objects.durable.parent / "folders", objects, None)  # type: ignore[arg-type]
            settings = Settings(data_dir=objects.durable.parent)
            janitor = Janitor(store, objects, folders, settings, lambda: {kept}, set, archiver)
            await janitor.sweep()
            await archiver.round()

    asyncio.run(story())
    assert (archive.has(kept), archive.has(lost)) == (True, False)
