"""The object store: immutable safetensors files named by the SHA-256 of their bytes.

Two tiers. *Fast* is shared memory where the machine has it; every worker on the machine maps the same pages, and
a crash of any process loses nothing. *Durable* is a directory on disk; ``persist`` copies an object there
(temporary file, fsync, rename). Reading looks into fast, then durable. An optional *archive* (compute/archive.py) is a
copy elsewhere: ``archive`` uploads what is durable, and what both tiers lost or damaged is fetched from there.

Files are written to a temporary name and renamed, so a name that exists is whole. What was damaged afterwards (a bad
disk, somebody's hand) is found when it is read: ``verified_path`` compares the bytes with the name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradserve.compute.archive import Archive, ArchiveDamaged, ArchiveError, ArchiveMissing
from gradserve.compute.files import copy_whole, sha256_of, whole_file

SUFFIX = ".safetensors"
_DAMAGED = ".damaged"
_OWNER = "owner"

log = logging.getLogger(__name__)


class ObjectMissing(KeyError):
    """Neither tier has an object of that digest, nor does the archive."""


class ObjectCorrupt(Exception):
    """The bytes of ``file`` are not those that its name, ``digest``, promises, and nowhere else are they right.

    ``file`` is a path, or the URL of the archive's copy.
    """

    def __init__(self, digest: str, file: Path | str) -> None:
        super().__init__(f"object {digest} is damaged: the bytes of {file} have another SHA-256")
        self.digest = digest
        self.file = file


def shared_memory_root(data_dir: Path) -> Path:
    """The fast tier that belongs to ``data_dir``: stable, so that a restarted server finds its objects again."""
    shm = Path("/dev/shm")
    base = shm if shm.is_dir() and os.access(shm, os.W_OK) else data_dir
    name = hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:16]
    return base / f"gradserve-{os.getuid()}-{name}"


def claim(root: Path, data_dir: Path) -> None:
    """Note in a fast tier whose it is, and remove those of data directories that are gone: they would keep memory."""
    root.mkdir(parents=True, exist_ok=True)
    (root / _OWNER).write_text(str(data_dir.resolve()))
    for other in root.parent.glob(f"gradserve-{os.getuid()}-*"):
        owner = other / _OWNER
        if owner.is_file() and not Path(owner.read_text()).is_dir():
            shutil.rmtree(other, ignore_errors=True)


@dataclass(frozen=True)
class SetAside:
    """A damaged file that waits for another to take its ``place``. Its bytes may be all that is left of an array."""

    place: Path
    file: Path

    def put_back(self) -> None:
        """Nothing better was found, unless there is."""
        if self.place.exists():
            self.remove()
        else:
            self.file.rename(self.place)

    def remove(self) -> None:
        """There is a good one now."""
        self.file.unlink(missing_ok=True)


class ObjectStore:
    """``fast`` and ``durable`` are created when missing; ``remote`` is the archive, or None. Safe to use from several
    processes.

    Whatever writes raises NoRoom when a tier is full, and leaves that tier as it was.
    """

    def __init__(self, fast: Path, durable: Path, archive: Archive | None = None) -> None:
        self.fast = fast
        self.durable = durable
        self.remote = archive
        for root in (fast, durable):
            root.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def digest(data: bytes | bytearray) -> str:
        """The name of an object with these bytes."""
        return hashlib.sha256(data).hexdigest()

    def put(self, data: bytes | bytearray) -> str:
        """Write into the fast tier; returns the digest. Writing the same bytes again changes nothing."""
        digest = self.digest(data)
        target = self.fast / (digest + SUFFIX)
        if not _renew(target):
            with whole_file(target, durable=False) as file:
                file.write(data)
        return digest

    def temporary(self) -> Path:
        """A name in the fast tier to write an object under; ``adopt`` it when it is whole."""
        return self.fast / f"{secrets.token_hex(16)}.tmp"

    def adopt(self, file: Path) -> str:
        """Make a file that was written under a ``temporary`` name an object; returns the digest."""
        digest = sha256_of(file)
        target = self.fast / (digest + SUFFIX)
        if _renew(target):
            file.unlink()  # others may have mapped the one that is there
        else:
            os.utime(file)  # young from now on, however long the writing took
            file.rename(target)
        return digest

    def path(self, digest: str) -> Path:
        """The file of an object. Raises ObjectMissing."""
        for candidate in self._places(digest):
            if candidate.exists():
                return candidate
        raise ObjectMissing(digest)

    def has(self, digest: str) -> bool:
        """Whether a local tier has an object."""
        return any(place.exists() for place in self._places(digest))

    def verified_path(self, digest: str) -> Path:
        """The same, after reading the file and comparing its bytes with its name: a second for a gigabyte.

        A damaged fast copy is removed when the durable one is good. What neither has is fetched from the archive into
        the durable tier. Raises ObjectMissing, ObjectCorrupt.
        """
        damaged: Path | None = None
        for candidate in self._places(digest):
            try:
                whole = _is_whole(candidate, digest)
            except FileNotFoundError:
                continue
            if not whole:
                damaged = damaged or candidate
                continue
            if damaged is not None:
                log.error("object %s is damaged in %s; %s is good and is used instead", digest, damaged, candidate)
                self.discard_fast(digest)
            return candidate
        if self._restored(digest):
            self.discard_fast(digest)
            return self.durable / (digest + SUFFIX)
        if damaged is None:
            raise ObjectMissing(digest)
        raise ObjectCorrupt(digest, damaged)

    def _restored(self, digest: str) -> bool:
        """Whether the archive had it whole; then it is in the durable tier. Raises ObjectCorrupt naming its copy."""
        if self.remote is None:
            return False
        try:
            self.remote.get_object(digest, self.durable / (digest + SUFFIX))
        except ArchiveMissing:
            return False
        except ArchiveDamaged as damaged:
            log.error("%s", damaged)
            raise ObjectCorrupt(digest, f"{self.remote.url}/objects/{digest}{SUFFIX}") from damaged
        except ArchiveError as error:
            log.error("object %s is not whole on this machine, and was not fetched: %s", digest, error)
            return False
        log.warning("object %s was fetched from %s", digest, self.remote.url)
        return True

    def size(self, digest: str) -> int:
        """Bytes of an object. Raises ObjectMissing."""
        return self.path(digest).stat().st_size

    def persist(self, digest: str) -> Path:
        """Copy an object to the durable tier and fsync it. Raises ObjectMissing; ObjectCorrupt: nothing is copied."""
        target = self.durable / (digest + SUFFIX)
        if not target.exists():
            source = self.verified_path(digest)
            if source != target:  # it may just have come from the archive
                copy_whole(source, target)
        return target

    def archive(self, digest: str) -> None:
        """Upload the durable copy of an object. Raises ObjectMissing (not durable), ObjectCorrupt, ArchiveError."""
        assert self.remote is not None
        durable = self.durable / (digest + SUFFIX)
        try:
            whole = _is_whole(durable, digest)
        except FileNotFoundError:
            raise ObjectMissing(digest) from None
        if not whole:
            raise ObjectCorrupt(digest, durable)
        self.remote.put_object(digest, durable)

    def discard_archived(self, digest: str) -> None:
        """Remove the archive's copy of an object. Raises ArchiveError."""
        assert self.remote is not None
        self.remote.delete(digest)

    def demote(self, digest: str) -> None:
        """Leave only the durable copy, made again if it was damaged. Raises ObjectMissing, ObjectCorrupt."""
        durable = self.persist(digest)
        if not _is_whole(durable, digest):
            durable.unlink()
            self.persist(digest)
        self.discard_fast(digest)

    def set_aside(self, digest: str) -> SetAside | None:
        """Take an object that is damaged out of the way, so that it can be made again; None when none is durable."""
        self.discard_fast(digest)
        durable = self.durable / (digest + SUFFIX)
        try:
            return SetAside(durable, durable.rename(durable.with_name(durable.name + _DAMAGED)))
        except FileNotFoundError:
            return None

    def discard(self, digest: str) -> None:
        """Remove an object from both tiers; one that is not there is fine."""
        for file in self._places(digest):
            file.unlink(missing_ok=True)

    def discard_older_than(self, digest: str, age_s: float) -> None:
        """The same, unless it was written again meanwhile: a copy that is young now stays."""
        for file in self._places(digest):
            aside = file.with_name(f"{digest}.{secrets.token_hex(4)}.tmp")
            try:
                file.rename(aside)  # so that nobody can renew it between the look and the removal
            except FileNotFoundError:
                continue
            if time.time() - aside.stat().st_mtime < age_s and not file.exists():
                aside.rename(file)
            else:
                aside.unlink()

    def discard_fast(self, digest: str) -> None:
        """Remove only the fast copy of an object."""
        (self.fast / (digest + SUFFIX)).unlink(missing_ok=True)

    def fast_older_than(self, age_s: float) -> list[str]:
        """Objects of the fast tier that were last written more than ``age_s`` seconds ago."""
        return _older_than(self.fast, age_s)

    def durable_older_than(self, age_s: float) -> list[str]:
        """The same of the durable tier."""
        return _older_than(self.durable, age_s)

    def has_durable(self, digest: str) -> bool:
        """Whether the object would survive a power cut."""
        return (self.durable / (digest + SUFFIX)).exists()

    def free_fast_bytes(self) -> int:
        """How much more the fast tier can take."""
        return shutil.disk_usage(self.fast).free

    def _places(self, digest: str) -> tuple[Path, Path]:
        """Where an object may be, in the order of looking."""
        return self.fast / (digest + SUFFIX), self.durable / (digest + SUFFIX)

    def sweep_temporary(self) -> None:
        """Undo what an interrupted writer or mender left. Only when no worker is running."""
        for root in (self.fast, self.durable):
            for file in root.glob("*.tmp"):
                file.unlink(missing_ok=True)
        for file in self.durable.glob(f"*{_DAMAGED}"):
            SetAside(file.with_suffix(""), file).put_back()


def copy_out(digest: str, target: Path, roots: Sequence[Path], archive: Archive | None = None) -> None:
    """Copy an object out of the tiers ``roots`` of a store that somebody else uses, or else out of the archive.

    Nothing there is changed. Raises ObjectMissing, ObjectCorrupt, ArchiveError.
    """
    damaged: Path | None = None
    for source in (root / (digest + SUFFIX) for root in roots):
        try:
            copy_whole(source, target)
        except FileNotFoundError:
            continue
        if _is_whole(target, digest):
            return
        target.unlink()
        damaged = damaged or source
    if archive is not None and archive.has(digest):
        archive.get_object(digest, target)
        return
    if damaged is None:
        raise ObjectMissing(digest)
    raise ObjectCorrupt(digest, damaged)


def _is_whole(path: Path, digest: str) -> bool:
    return sha256_of(path) == digest


def _renew(file: Path) -> bool:
    """Make an object young again, so that the janitor leaves it alone; False if it is not (or no longer) there."""
    try:
        os.utime(file)
    except FileNotFoundError:
        return False
    return True


def _older_than(root: Path, age_s: float) -> list[str]:
    limit = time.time() - age_s
    found = []
    for file in root.glob(f"*{SUFFIX}"):
        try:
            if file.stat().st_mtime < limit:
                found.append(file.name.removesuffix(SUFFIX))
        except FileNotFoundError:
            continue  # discarded meanwhile
    return found
