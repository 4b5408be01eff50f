"""The object store: immutable safetensors files named by the SHA-256 of their bytes.

Two tiers. *Fast* is shared memory where the machine has it; every worker on the machine maps the same pages, and
a crash of any process loses nothing. *Durable* is a directory on disk; ``persist`` copies an object there
(temporary file, fsync, rename). Reading looks into fast, then durable.

Files are written to a temporary name and renamed, so a name that exists is whole.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path

SUFFIX = ".safetensors"


class ObjectMissing(KeyError):
    """Neither tier has an object of that digest."""


def shared_memory_root(data_dir: Path) -> Path:
    """The fast tier that belongs to ``data_dir``: stable, so that a restarted server finds its objects again."""
    shm = Path("/dev/shm")
    base = shm if shm.is_dir() and os.access(shm, os.W_OK) else data_dir
    name = hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:16]
    return base / f"gradserve-{os.getuid()}-{name}"


class ObjectStore:
    """``fast`` and ``durable`` are created when missing. Safe to use from several processes."""

    def __init__(self, fast: Path, durable: Path) -> None:
        self.fast = fast
        self.durable = durable
        for root in (fast, durable):
            root.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def digest(data: bytes) -> str:
        """The name of an object with these bytes."""
        return hashlib.sha256(data).hexdigest()

    def put(self, data: bytes) -> str:
        """Write into the fast tier; returns the digest. Writing the same bytes again changes nothing."""
        digest = self.digest(data)
        target = self.fast / (digest + SUFFIX)
        if not target.exists():
            temporary = self.fast / f"{digest}.{secrets.token_hex(4)}.tmp"
            temporary.write_bytes(data)
            temporary.rename(target)
        return digest

    def path(self, digest: str) -> Path:
        """The file of an object. Raises ObjectMissing."""
        for root in (self.fast, self.durable):
            candidate = root / (digest + SUFFIX)
            if candidate.exists():
                return candidate
        raise ObjectMissing(digest)

    def size(self, digest: str) -> int:
        """Bytes of an object. Raises ObjectMissing."""
        return self.path(digest).stat().st_size

    def persist(self, digest: str) -> Path:
        """Copy an object to the durable tier and fsync it. Raises ObjectMissing."""
        target = self.durable / (digest + SUFFIX)
        if not target.exists():
            temporary = self.durable / f"{digest}.{secrets.token_hex(4)}.tmp"
            with open(self.path(digest), "rb") as source, open(temporary, "wb") as sink:
                shutil.copyfileobj(source, sink, 4 << 20)
                sink.flush()
                os.fsync(sink.fileno())
            temporary.rename(target)
            _fsync_directory(self.durable)
        return target

    def discard(self, digest: str) -> None:
        """Remove an object from both tiers; one that is not there is fine."""
        for root in (self.fast, self.durable):
            (root / (digest + SUFFIX)).unlink(missing_ok=True)

    def discard_fast(self, digest: str) -> None:
        """Remove only the fast copy of an object."""
        (self.fast / (digest + SUFFIX)).unlink(missing_ok=True)

    def digests(self) -> set[str]:
        """All objects of both tiers."""
        return {
            file.name.removesuffix(SUFFIX)
            for root in (self.fast, self.durable)
            for file in root.glob(f"*{SUFFIX}")
        }

    def sweep_temporary(self) -> None:
        """Remove what an interrupted writer left. Only when no worker is running."""
        for root in (self.fast, self.durable):
            for file in root.glob("*.tmp"):
                file.unlink(missing_ok=True)


def _fsync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
