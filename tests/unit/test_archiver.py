"""The archiver: what is durable and in use ends up in the archive, what became garbage leaves it, faults are said."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest

from gradserve.compute.archive import Archive, ArchiveError
from gradserve.compute.checkpoints import CheckpointFolders
from gradserve.compute.objects import ObjectStore
from gradserve.orchestration.archiver import Archiver
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


def test_what_is_wanted_goes_up_and_what_became_garbage_goes(objects: ObjectStore, archive: Archive) -> None:
    a, b = made(objects, b"a"), made(objects, b"b")

    async def story() -> None:
        archiver = Archiver(objects)
        archiver.sync(wanted={a, b}, garbage=set())
        assert archiver.status() == {"archived": 0, "waiting": 2, "error": None}
        await archiver.round()
        assert (archive.has(a), archive.has(b)) == (True, True)
        archiver.sync(wanted={b}, garbage={a})
        await archiver.round()
        assert (archive.has(a), archive.has(b)) == (False, True)
        assert archiver.status() == {"archived": 1, "waiting": 0, "error": None}

    asyncio.run(story())


def test_a_new_data_directory_removes_nothing_that_it_did_not_see_die(objects: ObjectStore, archive: Archive) -> None:
    digest = made(objects, b"of an earlier life")
    objects.archive(digest)

    async def story() -> None:
        archiver = Archiver(objects)
        archiver.sync(wanted=set(), garbage=set())
        await archiver.round()

    asyncio.run(story())
    assert archive.has(digest)


def test_damage_does_not_stop_the_others(objects: ObjectStore, archive: Archive) -> None:
    bad, good = made(objects, b"bad"), made(objects, b"good")
    objects.persist(bad).write_bytes(b"BAD")

    async def story() -> None:
        archiver = Archiver(objects)
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
        archiver = Archiver(objects, pause_s=0.01)
        running = asyncio.create_task(archiver.run())
        archiver.sync(wanted={digest}, garbage=set())
        while archiver.status()["waiting"]:
            assert not running.done()
            await asyncio.sleep(0.005)
        assert archiver.status()["error"] is None, "the alarm ends when all is well"
        running.cancel()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert archive.has(digest)
    assert f"ALARM: 1 objects are only on this machine: {fault}" in caplog.text


def test_the_janitor_tells_it(objects: ObjectStore, archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lost = made(objects, b"kept"), made(objects, b"lost")
    objects.archive(lost)
    monkeypatch.setattr("gradserve.orchestration.janitor._GRACE_S", -1.0)

    async def story() -> None:
        store = SqlStore.in_memory()
        await store.open()
        archiver = Archiver(objects)
        folders = CheckpointFolders(objects.durable.parent / "folders", objects, None)  # type: ignore[arg-type]
        janitor = Janitor(
            store, objects, folders, Settings(data_dir=objects.durable.parent), lambda: {kept}, set, archiver
        )
        await janitor.sweep()
        await archiver.round()
        await store.close()

    asyncio.run(story())
    assert (archive.has(kept), archive.has(lost)) == (True, False)
