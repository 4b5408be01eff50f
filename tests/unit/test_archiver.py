"""The archiver: what is durable and in use ends up in the archive, what became garbage leaves it, faults are said."""

from __future__ import annotations

import asyncio
import contextlib
import threading
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
from tests.contract.store_cases import a_version, create_run


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the database may follow each other at once."""
    monkeypatch.setattr("gradserve.orchestration.database_copier._PAUSE_PER_S", 0.0)


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
            await archiver.close()
            assert len(copies_of(archive)) == 1, "the archive itself is well"

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
            async with asyncio.timeout(30):
                while archiver.status()["waiting"] or archiver.status()["error"]:
                    assert not running.done()
                    await asyncio.sleep(0.005)
            running.cancel()
            await archiver.close()

    asyncio.run(story())
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


def copies_of(archive: Archive) -> list[str]:
    return [name for name in archive.list("database") if name.endswith(".db.zst")]


def test_what_a_kept_copy_names_stays_until_that_copy_goes(objects: ObjectStore, archive: Archive) -> None:
    """A version is dropped and its array is garbage here; three newer copies later it leaves the archive as well."""
    old = made(objects, b"old")
    new = [made(objects, b"new %d" % number) for number in range(3)]

    async def story() -> None:
        async with archiving(objects) as (archiver, store):
            await create_run(store)
            await store.put_version(a_version(weights=old, moments=None))
            await archiver.round()
            assert archive.has(old)
            for number, digest in enumerate(new):
                assert archive.has(old), f"{len(copies_of(archive))} copies, the oldest needs it"
                await store.put_version(a_version(version=2 + number, weights=digest, moments=None))
                await store.retain_versions(1, 0.0)
                objects.discard(old)
                archiver.sync(wanted={digest}, garbage={old} if number == 0 else set())
                await archiver.round()
                await archiver.round()
            assert not archive.has(old)
            assert len(copies_of(archive)) == 3
            assert len(archive.list("manifests")) == 3
            assert archive.objects() == set(new)

    asyncio.run(story())


def test_no_copy_without_something_durable_that_is_new(objects: ObjectStore, archive: Archive) -> None:
    async def story() -> None:
        async with archiving(objects) as (archiver, store):
            await create_run(store)
            await archiver.round()
            assert copies_of(archive) == []
            await store.put_version(a_version(weights=made(objects, b"w"), moments=None))
            for _ in range(3):
                await archiver.round()
            assert len(copies_of(archive)) == 1
            await archiver.close()
            assert len(copies_of(archive)) == 2, "an orderly stop keeps what came since"

    asyncio.run(story())


def test_a_copy_goes_up_after_what_it_names(
    objects: ObjectStore, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No upload of the array succeeds: then no copy that names it appears."""
    refused = ArchiveError("bucket: no answer")

    def refuse(*arguments: Any) -> None:
        raise refused

    monkeypatch.setattr(archive, "put_object", refuse)

    async def story() -> None:
        async with archiving(objects) as (archiver, store):
            await create_run(store)
            await store.put_version(a_version(weights=made(objects, b"w"), moments=None))
            with pytest.raises(ArchiveError, match="no answer"):
                await archiver.round()
            assert archive.list("database") == []

    asyncio.run(story())


def test_a_copy_that_does_not_say_what_it_needs_stops_removals(objects: ObjectStore, archive: Archive) -> None:
    digest, later = made(objects, b"a"), made(objects, b"b")

    async def story() -> None:
        async with archiving(objects) as (archiver, store):
            await create_run(store)
            await store.put_version(a_version(weights=digest, moments=None))
            await archiver.round()
            (needs,) = [name for name in archive.list("database") if name.endswith(".json")]
            archive.put_text(needs, "{")
            await store.put_version(a_version(version=2, weights=later, moments=None))
            archiver.sync(wanted={later}, garbage={digest})
            await archiver.round()
            assert archive.has(digest)

    asyncio.run(story())


def test_a_hurried_archive_gives_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that never answers, at an orderly stop."""
    archive = Archive(f"memory://{uuid.uuid4().hex}", timeout_s=3600.0, pause_s=0.0)
    forever = threading.Event()
    monkeypatch.setattr(type(archive._files), "find", lambda *_: forever.wait())
    archive.hasten(0.05)
    with pytest.raises(ArchiveError, match="no answer"):
        archive.list("database")
    forever.set()
