"""The archive: whole objects or none, nothing trusted that comes back, over every kind of store we can have here."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gradserve.bootstrap import CannotStart, serve
from gradserve.compute.archive import Archive, ArchiveDamaged, ArchiveError, ArchiveMissing
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from gradserve.settings import Settings
from tests.s3 import s3_server

DATA = bytes(range(256)) * 40
DIGEST = hashlib.sha256(DATA).hexdigest()
NAME = f"objects/{DIGEST}.safetensors"


class Halfway(MemoryFileSystem):  # type: ignore[misc]
    """A file system without atomic puts whose uploads can be told to break in the middle."""

    protocol = "halfway"
    store: dict[str, Any] = {}  # noqa: RUF012 (fsspec's own pattern: shared by all instances)
    breaks: list[BaseException] = []  # noqa: RUF012

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        data = Path(lpath).read_bytes()
        if self.breaks:
            self.pipe_file(rpath, data[: len(data) // 2])
            raise self.breaks.pop()
        self.pipe_file(rpath, data)


fsspec.register_implementation("halfway", Halfway)


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """A local S3 server; the usual variables lead to it."""
    with s3_server("bucket") as endpoint:
        yield endpoint


@pytest.fixture(params=["file", "memory", "halfway", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "nas" / "archive").as_uri()
    if request.param == "s3":
        request.getfixturevalue("s3_endpoint")
        return f"s3://bucket/{uuid.uuid4().hex}"
    return f"{request.param}://{uuid.uuid4().hex}"


@pytest.fixture
def archive(url: str) -> Archive:
    return Archive(url, pause_s=0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "object"
    made.write_bytes(DATA)
    return made


@pytest.fixture
def objects(tmp_path: Path, archive: Archive) -> ObjectStore:
    return ObjectStore(tmp_path / "fast", tmp_path / "durable", archive)


def archived(objects: ObjectStore) -> str:
    """An object that is in the durable tier and in the archive, not in shared memory."""
    digest = objects.put(DATA)
    objects.demote(digest)
    objects.archive(digest)
    return digest


def overwrite(url: str, name: str, data: bytes) -> None:
    """Change the archive's copy behind its back."""
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/{name}", data)


def flipped(data: bytes) -> bytes:
    """One bit is another."""
    return data[:1000] + bytes([data[1000] ^ 0x10]) + data[1001:]


def test_an_object_comes_back_as_it_went(archive: Archive, file: Path, tmp_path: Path) -> None:
    assert not archive.has(DIGEST)
    with pytest.raises(ArchiveMissing, match=DIGEST):
        archive.get_object(DIGEST, tmp_path / "back")
    archive.put_object(DIGEST, file)
    archive.put_object(DIGEST, file)
    assert archive.has(DIGEST)
    archive.get_object(DIGEST, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == DATA
    assert archive.list("objects") == [NAME]
    archive.delete(DIGEST)
    archive.delete(DIGEST)
    assert not archive.has(DIGEST)
    assert archive.list("objects") == []


def test_texts(archive: Archive) -> None:
    with pytest.raises(ArchiveMissing):
        archive.get_text("manifests/a.json")
    archive.put_text("manifests/a.json", "{}")
    archive.put_text("manifests/a.json", '{"ü": 1}')
    archive.put_text("manifests/b/c.json", "[]")
    assert archive.get_text("manifests/a.json") == '{"ü": 1}'
    assert archive.list("manifests") == ["manifests/a.json", "manifests/b/c.json"]
    assert archive.list("nothing") == []


def test_a_bit_flip_in_the_archive_is_refused_and_named(
    archive: Archive, url: str, file: Path, objects: ObjectStore
) -> None:
    archive.put_object(DIGEST, file)
    overwrite(url, NAME, flipped(DATA))
    target = objects.durable / "target"
    with pytest.raises(ArchiveDamaged, match=DIGEST):
        archive.get_object(DIGEST, target)
    with pytest.raises(ObjectCorrupt, match=DIGEST) as caught:
        objects.verified_path(DIGEST)
    assert caught.value.file == f"{url}/{NAME}"
    assert list(objects.durable.iterdir()) == []


@pytest.mark.parametrize("damage", ["lost", "flipped", "cut"])
def test_what_is_lost_or_damaged_here_is_fetched(objects: ObjectStore, damage: str) -> None:
    digest = archived(objects)
    local = objects.path(digest)
    if damage == "lost":
        local.unlink()
    else:
        local.write_bytes(flipped(DATA) if damage == "flipped" else DATA[:-1])
    assert objects.verified_path(digest) == local
    assert local.read_bytes() == DATA
    assert [found.name for found in objects.durable.iterdir()] == [local.name], "no temporary files"


def test_damage_in_both_tiers_is_healed(objects: ObjectStore) -> None:
    digest = archived(objects)
    objects.put(DATA)
    for place in (objects.fast, objects.durable):
        (place / f"{digest}.safetensors").write_bytes(flipped(DATA))
    assert objects.verified_path(digest).parent == objects.durable
    assert objects.verified_path(digest).read_bytes() == DATA
    assert not (objects.fast / f"{digest}.safetensors").exists()


def test_nowhere_is_nowhere(objects: ObjectStore) -> None:
    with pytest.raises(ObjectMissing):
        objects.verified_path("0" * 64)
    with pytest.raises(ObjectMissing):
        objects.archive("0" * 64)


def test_a_damaged_object_is_not_uploaded(objects: ObjectStore, archive: Archive) -> None:
    digest = objects.put(DATA)
    objects.persist(digest).write_bytes(flipped(DATA))
    with pytest.raises(ObjectCorrupt, match=digest):
        objects.archive(digest)
    assert not archive.has(digest)


@pytest.mark.parametrize("url", ["file", "halfway", "s3"], indirect=True)  # fsspec's memory shows half files
def test_two_writers_of_one_digest(url: str, file: Path, tmp_path: Path) -> None:
    failures: list[BaseException] = []
    together = threading.Barrier(4)

    def write() -> None:
        try:
            together.wait(30)
            Archive(url, pause_s=0.0).put_object(DIGEST, file)
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert failures == []
    archive = Archive(url)
    archive.get_object(DIGEST, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == DATA
    assert archive.list("") == [NAME]


@pytest.mark.parametrize("breaks", [OSError("the line went dead"), KeyboardInterrupt()])
def test_an_interrupted_upload_leaves_nothing_visible(file: Path, breaks: BaseException) -> None:
    url = f"halfway://{uuid.uuid4().hex}"
    archive = Archive(url, attempts=1)
    Halfway.breaks.append(breaks)
    with pytest.raises((ArchiveError, KeyboardInterrupt)):
        archive.put_object(DIGEST, file)
    assert not archive.has(DIGEST)
    files, root = fsspec.core.url_to_fs(url)
    assert files.find(root) == []


def test_a_passing_fault_is_tried_again(file: Path, tmp_path: Path) -> None:
    archive = Archive(f"halfway://{uuid.uuid4().hex}", pause_s=0.0)
    Halfway.breaks.extend([OSError("once"), OSError("twice")])
    archive.put_object(DIGEST, file)
    archive.get_object(DIGEST, tmp_path / "back")
    assert Halfway.breaks == []


def test_an_upload_that_is_killed_leaves_a_temporary_name_only(file: Path) -> None:
    """A killed process cleans nothing up; what it leaves is not taken for an object."""
    url = f"halfway://{uuid.uuid4().hex}"
    overwrite(url, f"{NAME}.0a0a0a0a.tmp", DATA[:100])
    archive = Archive(url)
    assert not archive.has(DIGEST)
    assert archive.list("objects") == []


def test_a_full_archive_says_so_and_keeps_what_it_has(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive((tmp_path / "nas").as_uri(), attempts=1)
    archive.put_object(DIGEST, file)
    other = tmp_path / "other"
    other.write_bytes(b"other")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gradserve.compute.files.shutil.copyfileobj", full)
    with pytest.raises(ArchiveError, match="no room left"):
        archive.put_object(hashlib.sha256(b"other").hexdigest(), other)
    assert archive.list("objects") == [NAME]
    assert len(list((tmp_path / "nas" / "objects").iterdir())) == 1


def test_a_store_that_hangs_is_given_up(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(Halfway, "info", lambda *_, **__: release.wait(60))
    try:
        with pytest.raises(ArchiveError, match="no answer"):
            Archive("halfway://hangs", timeout_s=0.05, attempts=2, pause_s=0.0).has(DIGEST)
    finally:
        release.set()


def test_a_store_that_is_away_costs_no_local_object(tmp_path: Path, s3_endpoint: str) -> None:
    archive = Archive(
        "s3://bucket/x",
        {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}},
        attempts=1,
        timeout_s=20,
    )
    objects = ObjectStore(tmp_path / "fast", tmp_path / "durable", archive)
    digest = objects.put(DATA)
    objects.persist(digest)
    with pytest.raises(ArchiveError, match="s3://bucket/x"):
        objects.archive(digest)
    assert objects.verified_path(digest).read_bytes() == DATA
    with pytest.raises(ObjectMissing):
        objects.verified_path("0" * 64)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("/mnt/nas", "file:///mnt/nas"),
        ("nosuch://x", "knows no protocol 'nosuch'"),
        ("gcs://bucket/x", "pip install 'gcsfs'"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_at_start(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(CannotStart, match=said):
        serve(Settings(archive_url=url, data_dir=tmp_path), print, lambda *_: None)


def test_s3_without_its_library_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(sys.modules["fsspec.registry"], "get_filesystem_class", missing)
    with pytest.raises(ArchiveError, match=r"pip install 'gradserve\[s3\]'"):
        Archive("s3://bucket/x").require_protocol()
