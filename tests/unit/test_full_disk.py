"""A full file system: what was there stays whole, nothing half-written stays behind, the next write may succeed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import torch

from gradserve.compute.engine.drafts import Draft
from gradserve.compute.files import NoRoom, whole_file
from gradserve.compute.objects import ObjectStore
from tests.disks import small_disk

MIB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_disk(tmp_path / "small", "1m") as place:
        yield place


def files_under(place: Path) -> dict[str, bytes]:
    return {found.name: found.read_bytes() for found in place.iterdir()}


def test_a_full_fast_tier(small: Path, tmp_path: Path) -> None:
    objects = ObjectStore(small, tmp_path / "durable")
    kept = objects.put(b"k" * (MIB // 2))
    before = files_under(small)
    with pytest.raises(NoRoom, match="no room left"):
        objects.put(b"n" * MIB)
    assert files_under(small) == before
    with pytest.raises(NoRoom, match=str(small)):
        Draft(objects, {"x": torch.empty(MIB, dtype=torch.uint8, device="meta")}, torch.device("cpu"))
    assert files_under(small) == before
    objects.demote(kept)
    assert objects.size(objects.put(b"n" * (3 * MIB // 4))) == 3 * MIB // 4


def test_a_full_durable_tier(small: Path, tmp_path: Path) -> None:
    objects = ObjectStore(tmp_path / "fast", small)
    kept, refused = objects.put(b"k" * (MIB // 2)), objects.put(b"r" * (MIB // 2 + 1))
    objects.persist(kept)
    before = files_under(small)
    for write in (objects.persist, objects.demote):
        with pytest.raises(NoRoom, match=str(small)):
            write(refused)
        assert files_under(small) == before
    assert objects.verified_path(refused).parent == objects.fast, "the copy that is there is not given up"
    objects.discard(kept)
    objects.demote(refused)
    assert objects.verified_path(refused).parent == small


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_that_fails_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    objects = ObjectStore(tmp_path / "fast", tmp_path / "durable")
    kept, refused = objects.put(b"kept"), objects.put(b"refused")
    objects.persist(kept)
    before = files_under(objects.durable)

    def half(source: IO[bytes], sink: IO[bytes], _: int) -> None:
        sink.write(source.read(3))
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("gradserve.compute.files.shutil.copyfileobj", half)
        with pytest.raises(NoRoom) as caught:
            objects.persist(refused)
    assert caught.value.errno == number
    assert files_under(objects.durable) == before
    assert objects.persist(refused).read_bytes() == b"refused"


def test_fsync_that_fails_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems say only then that they are full."""
    target = tmp_path / "file"
    target.write_bytes(b"before")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("gradserve.compute.files.os.fsync", full)
        with pytest.raises(NoRoom), whole_file(target) as file:
            file.write(b"after")
    assert files_under(tmp_path) == {"file": b"before"}


def test_other_faults_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "no" / "such" / "file"):
        pass
