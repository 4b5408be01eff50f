"""The object store: names are digests, two tiers, whole files only."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore, claim


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "fast", tmp_path / "durable")


def test_a_name_is_the_sha256_of_the_bytes(objects: ObjectStore) -> None:
    digest = objects.put(b"weights")
    assert digest == hashlib.sha256(b"weights").hexdigest() == objects.put(b"weights")
    assert objects.path(digest).read_bytes() == b"weights"
    assert objects.size(digest) == 7


def test_persisted_objects_outlive_the_fast_tier(objects: ObjectStore) -> None:
    digest = objects.put(b"a")
    objects.persist(digest)
    objects.discard_fast(digest)
    assert objects.path(digest).parent == objects.durable
    assert objects.has_durable(digest)
    objects.discard(digest)
    with pytest.raises(ObjectMissing):
        objects.path(digest)
    with pytest.raises(ObjectMissing):
        objects.persist(digest)


def test_writing_again_makes_an_object_young(objects: ObjectStore) -> None:
    digest = objects.put(b"a")
    old = time.time() - 100
    os.utime(objects.path(digest), (old, old))
    assert objects.fast_older_than(50) == [digest]
    objects.put(b"a")
    assert objects.fast_older_than(50) == []


def test_interrupted_writes_are_not_objects(objects: ObjectStore) -> None:
    (objects.fast / "abc.1234.tmp").write_bytes(b"half")
    assert objects.fast_older_than(-1) == []
    objects.sweep_temporary()
    assert list(objects.fast.iterdir()) == []


def test_shared_memory_of_a_data_directory_that_is_gone_is_given_back(tmp_path: Path) -> None:
    shm, kept, gone = tmp_path / "shm", tmp_path / "kept", tmp_path / "gone"
    kept.mkdir()
    gone.mkdir()
    roots = [shm / f"gradserve-{os.getuid()}-{name}" for name in ("a", "b")]
    claim(roots[0], kept)
    claim(roots[1], gone)
    assert all(root.is_dir() for root in roots)
    gone.rmdir()
    claim(roots[0], kept)
    assert [root.is_dir() for root in roots] == [True, False]


@pytest.mark.parametrize("damage", [b"weightz", b"weight", b"weights\n", b""])
def test_damage_is_found_and_not_copied(objects: ObjectStore, damage: bytes) -> None:
    digest = objects.put(b"weights")
    assert objects.verified_path(digest) == objects.path(digest)
    objects.path(digest).write_bytes(damage)
    with pytest.raises(ObjectCorrupt, match=digest) as caught:
        objects.verified_path(digest)
    assert (caught.value.digest, caught.value.file) == (digest, objects.path(digest))
    with pytest.raises(ObjectCorrupt):
        objects.persist(digest)
    assert not objects.has_durable(digest)
    with pytest.raises(ObjectMissing):
        objects.verified_path("0" * 64)


def test_the_good_copy_wins(objects: ObjectStore) -> None:
    digest = objects.put(b"weights")
    durable = objects.persist(digest)
    objects.path(digest).write_bytes(b"x")
    assert objects.verified_path(digest) == durable
    assert not (objects.fast / durable.name).exists()
    objects.put(b"weights")
    durable.write_bytes(b"x")
    assert objects.verified_path(digest).parent == objects.fast
    objects.demote(digest)
    assert (objects.path(digest), durable.read_bytes()) == (durable, b"weights"), "mended before the other copy went"


def test_what_is_made_again_while_the_janitor_looks_stays(objects: ObjectStore) -> None:
    """Listed as old, then written again by a second run with the same arrays: its references are not known yet."""
    digest = objects.put(b"gradient")
    old = time.time() - 60
    os.utime(objects.path(digest), (old, old))
    assert objects.fast_older_than(10) == [digest]
    assert objects.put(b"gradient") == digest
    objects.discard_older_than(digest, 10)
    assert objects.path(digest).read_bytes() == b"gradient"
    os.utime(objects.path(digest), (old, old))
    objects.discard_older_than(digest, 10)
    with pytest.raises(ObjectMissing):
        objects.path(digest)
    assert not list(objects.fast.glob("*.tmp"))


def test_what_was_set_aside_comes_back_after_a_crash(tmp_path: Path) -> None:
    """Damaged bytes may be all that is left; where a good file has their place they go."""
    objects = ObjectStore(tmp_path / "fast", tmp_path / "durable")
    left, made_again = objects.put(b"left"), objects.put(b"made again")
    for digest in (left, made_again):
        objects.persist(digest).write_bytes(b"damaged")
        assert objects.set_aside(digest) is not None
        assert not objects.has(digest)
    objects.put(b"made again")
    objects.persist(made_again)
    ObjectStore(tmp_path / "fast", tmp_path / "durable").sweep_temporary()
    assert {file.name: file.read_bytes() for file in objects.durable.iterdir()} == {
        f"{left}.safetensors": b"damaged",
        f"{made_again}.safetensors": b"made again",
    }
