"""Restoring by halves, what is lost, and whose the archive is afterwards."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from gradserve.bootstrap import CannotStart, Paths, serve
from gradserve.compute.archive import Archive, ArchiveError
from gradserve.compute.database_copies import ArchiveTaken, DatabaseCopies, Needs, Owner
from gradserve.compute.objects import ObjectStore
from gradserve.orchestration.archiver import Archiver
from gradserve.orchestration.database_copier import DatabaseCopier
from gradserve.orchestration.held import Held
from gradserve.orchestration.restoration import CannotRestore, Restored, restore
from gradserve.settings import Settings
from gradserve.store.base import Claim, Event
from gradserve.store.sql import SqlStore
from tests.contract.store_cases import a_version, an_op, create_run, end


@pytest.fixture
def archive() -> Archive:
    return Archive(f"memory://{uuid.uuid4().hex}", attempts=1)


@pytest.fixture
def digests(tmp_path: Path, archive: Archive) -> list[str]:
    """Of a data directory with two durable arrays, which is gone; the archive has everything."""
    objects = ObjectStore(tmp_path / "fast", tmp_path / "durable", archive)
    made = [objects.put(b"weights"), objects.put(b"moments")]
    for digest in made:
        objects.persist(digest)

    async def story() -> None:
        store = SqlStore.at(tmp_path / "gradserve.db")
        await store.open()
        await create_run(store)
        await store.put_version(a_version(weights=made[0], moments=made[1]))
        await Archiver(store, objects, DatabaseCopier(store, archive, Held(), tmp_path / "scratch")).round()
        await store.close()

    asyncio.run(story())
    return made


def restored(archive: Archive, to: Path, **more: bool) -> Restored:
    paths = Paths(to)
    return restore(archive, paths.database, paths.objects, paths.restoring, print, **more)


async def look(data: Path) -> tuple[Claim, list[Event], int]:
    """The claim, the server's events, and the epoch of a database that a server has opened."""
    store = SqlStore.at(Paths(data).database)
    await store.open()
    claim, (events, _) = await store.archive_claim(), await store.list_events(None, None, 10, 0)
    epoch = store._epoch
    await store.close()
    assert epoch is not None
    return claim, events, epoch


def test_an_interrupted_restore_goes_on(
    archive: Archive, digests: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network fails at one array: no database yet, no server starts; the next call fetches what is not there."""
    data, fetch, fetched = tmp_path / "new", archive.get_object, list[str]()

    def break_off(digest: str, to: Path) -> None:
        if digest == digests[1]:
            raise ArchiveError("no answer")
        fetch(digest, to)

    with monkeypatch.context() as patch:
        patch.setattr(archive, "get_object", break_off)
        with pytest.raises(CannotRestore, match="no answer"):
            restored(archive, data)
    there = {digest for digest in digests if (Paths(data).objects / f"{digest}.safetensors").exists()}
    assert digests[1] not in there
    assert not Paths(data).database.exists()
    with pytest.raises(CannotStart, match="not restored to the end"):
        serve(Settings(data_dir=data, port=0), print, lambda *_: None)

    def count(digest: str, to: Path) -> None:
        fetched.append(digest)
        fetch(digest, to)

    monkeypatch.setattr(archive, "get_object", count)
    assert restored(archive, data).arrays == 2
    assert set(fetched) - {"w0"} == set(digests) - there, "w0 is only named: its bytes never were durable"
    assert not Paths(data).restoring.exists()
    assert [(Paths(data).objects / f"{digest}.safetensors").read_bytes() for digest in digests] == [
        b"weights",
        b"moments",
    ]


def test_arrays_that_the_archive_lost_are_named(archive: Archive, digests: list[str], tmp_path: Path) -> None:
    archive.delete(digests[0])
    archive.put_text(f"objects/{digests[1]}.safetensors", "Moments")
    found = restored(archive, tmp_path / "new")
    assert found.arrays == 0
    assert found.lost.keys() == set(digests)
    assert "damaged" in found.lost[digests[1]]


def test_every_restore_is_a_new_life(archive: Archive, digests: list[str], tmp_path: Path) -> None:
    """Epoch and owner: the first restored one that archives owns it; the old one and the other restored one do not."""
    copies, old = DatabaseCopies(archive), asyncio.run(look(tmp_path))
    for name in ("a", "b"):
        restored(archive, tmp_path / name, arrays=False)
    a, b = (asyncio.run(look(tmp_path / name)) for name in ("a", "b"))
    assert old[0].epoch < a[0].epoch == b[0].epoch
    assert len({old[0].token, a[0].token, b[0].token}) == 3
    assert a[2] == 2, "the copy was written under 1"
    assert [event.kind for event in a[1]] == ["restored"]
    copies.require_owner(Owner(b[0].epoch, b[0].token))
    for other in (old, a):
        with pytest.raises(ArchiveTaken):
            copies.require_owner(Owner(other[0].epoch, other[0].token))
    restored(archive, tmp_path / "c", arrays=False)
    c = asyncio.run(look(tmp_path / "c"))
    copies.require_owner(Owner(c[0].epoch, c[0].token))
    with pytest.raises(ArchiveTaken, match="belongs to another data directory"):
        copies.require_owner(Owner(b[0].epoch, b[0].token))


def test_the_newest_copy_is_first_whatever_its_epoch_s_clock_said(archive: Archive, tmp_path: Path) -> None:
    """A machine whose clock was a year ahead died; what the restored one writes is newer all the same."""
    database, copies = tmp_path / "some.db", DatabaseCopies(archive)
    database.write_bytes(b"pages")
    ahead = copies.put(database, 1, 1.9e9, Needs())
    behind = copies.put(database, 2, 1.8e9, Needs(frozenset("o"), frozenset("m")))
    archive.put_text("database/somebody's notes", "")
    assert copies.newest_first() == [behind, ahead]
    assert copies.needs(behind) == Needs(frozenset("o"), frozenset("m"))
    copies.fetch(behind, tmp_path / "back.db")
    assert (tmp_path / "back.db").read_bytes() == b"pages"


def test_deleted_rows_do_not_travel(tmp_path: Path) -> None:
    """A copy of pages would carry those of bodies that have expired."""
    secret = b"the prompt that expired" * 10_000

    async def write() -> None:
        store = SqlStore.at(tmp_path / "gradserve.db")
        await store.open()
        await create_run(store)
        await store.submit(an_op(1, body=secret))
        await store.settle(end(an_op(1)))
        await store.put_version(a_version(seq=5))
        await store.close()

    async def expire_and_copy() -> None:
        store = SqlStore.at(tmp_path / "gradserve.db")
        await store.open()
        await store.expire_results(1e12)
        await store.back_up(tmp_path / "copy.db")
        await store.close()

    asyncio.run(write())
    asyncio.run(expire_and_copy())
    original, copy = (tmp_path / "gradserve.db").read_bytes(), (tmp_path / "copy.db").read_bytes()
    assert len(original) > len(secret) > len(copy)
    assert secret[:20] not in copy
