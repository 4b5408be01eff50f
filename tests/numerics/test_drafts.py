"""Objects computed in place are safetensors files like any other, whole or not there at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save

from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.drafts import Draft
from gradserve.compute.engine.origin import Origin
from gradserve.compute.objects import ObjectStore

CPU = torch.device("cpu")


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "fast", tmp_path / "durable")


TENSORS = {
    "b.weight": torch.arange(12.0).view(3, 4),
    "a.ü": torch.tensor([1, 2, 3], dtype=torch.int64),
    "scalar": torch.tensor(5.0),
    "none": torch.empty(0, 4),
    "half": torch.ones(5, dtype=torch.bfloat16),
}


def write(store: ObjectStore) -> str:
    arrays = Arrays(store, CPU)
    with arrays.copy(TENSORS) as draft:
        return arrays.commit(draft)


def test_the_bytes_are_those_of_safetensors(store: ObjectStore) -> None:
    digest = write(store)
    assert store.path(digest).read_bytes() == save(TENSORS)
    assert digest == ObjectStore.digest(save(TENSORS))


def test_the_origin_may_be_said_at_the_end(store: ObjectStore) -> None:
    """Moments belong to weights whose digest is known only when they are finished."""
    arrays = Arrays(store, CPU)
    with arrays.copy(TENSORS, Origin("0" * 64)) as draft:
        digest = arrays.commit(draft, Origin("a" * 64))
    assert store.path(digest).read_bytes() == save(TENSORS, Origin("a" * 64).metadata())
    assert arrays.read(digest).origin == Origin("a" * 64)
    with arrays.copy(TENSORS) as draft, pytest.raises(ValueError, match="not as long"):
        arrays.commit(draft, Origin("a" * 64))


def test_tensors_are_the_pages_of_the_file(store: ObjectStore) -> None:
    with Draft(store, {"x": torch.empty(1000, device="meta")}, CPU) as draft:
        assert not draft.tensors["x"].any()
        draft.tensors["x"].add_(2.0)
        digest = draft.commit()
    assert torch.equal(Arrays(store, CPU).get(digest)["x"], torch.full((1000,), 2.0))
    assert [file.name for file in store.fast.iterdir()] == [f"{digest}.safetensors"]


def test_the_same_object_again_stays_the_one_file(store: ObjectStore) -> None:
    first = store.path(write(store))
    inode = first.stat().st_ino
    os.utime(first, (0, 0))
    again = store.path(write(store))
    assert (again.stat().st_ino, again.stat().st_mtime > 1e9) == (inode, True)


def test_what_was_not_finished_is_removed(store: ObjectStore) -> None:
    with pytest.raises(ZeroDivisionError), Draft(store, TENSORS, CPU):
        raise ZeroDivisionError
    assert list(store.fast.iterdir()) == []


def test_a_full_disk_is_an_error_before_anything_is_written(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no room left"):
        write(store)
    assert list(store.fast.iterdir()) == []


def test_a_model_is_not_kept_in_the_cache(store: ObjectStore) -> None:
    arrays = Arrays(store, CPU, cache_bytes=4000)
    small, large = arrays.put({"x": torch.ones(10)}), arrays.put({"x": torch.ones(500)})
    store.verified_path = Mock(wraps=store.verified_path)  # type: ignore[method-assign]
    kept = arrays.get(small)
    arrays.get(large)
    assert arrays.get(small) is kept
    assert arrays.get(large) is not arrays.get(large)
    assert [call.args for call in store.verified_path.call_args_list] == [(small,), (large,)], "checked once each"
