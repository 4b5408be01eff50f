"""Copies of the database in the archive, and whose archive it is.

    database/<epoch>-<time>-<sha256>.db.zst    a copy; the SHA-256 is that of these compressed bytes
    database/<epoch>-<time>-<sha256>.json      which objects and manifests the copy needs
    owner.json                                 the claim of the data directory that writes here

Invariant: when a copy is there, what it needs was there before, and stays as long as the copy does. So a ``.json`` is
written before its copy and removed after it; the newest copies sort last.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import zstandard

from gradserve.compute.archive import Archive, ArchiveDamaged, ArchiveError, ArchiveMissing
from gradserve.compute.files import sha256_of, whole_file

_FOLDER = "database"
_COPY, _NEEDS = ".db.zst", ".json"
_OWNER = "owner.json"
_TIME = "%Y%m%dT%H%M%S.%fZ"
_LEVEL = 3


class ArchiveTaken(ArchiveError):
    """Another data directory writes to this archive."""


class Owner(msgspec.Struct, frozen=True):
    """``owner.json``: of two lives of a database the one with the higher epoch may write."""

    epoch: int
    token: str


class Needs(msgspec.Struct, frozen=True):
    """What a copy refers to in the archive: digests of objects, and names of manifests."""

    objects: frozenset[str] = frozenset()
    manifests: frozenset[str] = frozenset()

    def __or__(self, other: Needs) -> Needs:
        return Needs(self.objects | other.objects, self.manifests | other.manifests)

    def __sub__(self, other: Needs) -> Needs:
        return Needs(self.objects - other.objects, self.manifests - other.manifests)


class Copy(NamedTuple):
    """A copy by what its name says; they sort by age. ``taken``: all that was committed before is in it."""

    epoch: int
    taken: datetime
    sha256: str

    @property
    def stem(self) -> str:
        """Its name in the archive without the ending."""
        return f"{_FOLDER}/{self.epoch:08d}-{self.taken.strftime(_TIME)}-{self.sha256}"

    @classmethod
    def named(cls, name: str) -> Copy:
        """Raises ValueError when it is no name of a copy or its needs."""
        stem = name.removeprefix(f"{_FOLDER}/").removesuffix(_COPY).removesuffix(_NEEDS)
        epoch, moment, sha256 = stem.split("-")
        return cls(int(epoch), datetime.strptime(moment, _TIME).replace(tzinfo=UTC), sha256)


class DatabaseCopies:
    """Everything raises ArchiveError."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def owner(self) -> Owner | None:
        """Whose archive it is; None when nobody has written to it yet."""
        try:
            return msgspec.json.decode(self._archive.get_text(_OWNER), type=Owner)
        except ArchiveMissing:
            return None
        except msgspec.MsgspecError as error:
            raise ArchiveDamaged(f"{self._archive.url}/{_OWNER} can't be read: {error}") from error

    def require_owner(self, ours: Owner) -> None:
        """Take the archive over from nobody or from an earlier life. Raises ArchiveTaken when it is another's."""
        found = self.owner()
        if found == ours:
            return
        if found is None or found.epoch < ours.epoch:
            self._archive.put_text(_OWNER, msgspec.json.encode(ours).decode())
            return
        url = self._archive.url
        raise ArchiveTaken(
            f"{url} belongs to another data directory, and nothing of this one is written there. Was it restored "
            "elsewhere: stop this server. Is this one new: choose another archive_url, or go on with what is there by "
            f"gradserve restore --from {url}."
        )

    def put(self, database: Path, epoch: int, taken_at: float, needs: Needs) -> Copy:
        """Upload the database file of ``taken_at`` (seconds since 1970); what it needs must be there already.

        Writes a packed one beside the file.
        """
        packed = database.with_name(database.name + ".zst")
        with open(database, "rb") as source, whole_file(packed, durable=False, private=True) as sink:
            zstandard.ZstdCompressor(_LEVEL).copy_stream(source, sink)
        copy = Copy(epoch, datetime.fromtimestamp(taken_at, UTC), sha256_of(packed))
        self._archive.put_text(copy.stem + _NEEDS, msgspec.json.encode(needs, order="deterministic").decode())
        self._archive.put_file(copy.stem + _COPY, packed)
        return copy

    def newest_first(self) -> list[Copy]:
        """All copies; files of other names are passed over."""
        return sorted(_copies(name for name in self._archive.list(_FOLDER) if name.endswith(_COPY)), reverse=True)

    def fetch(self, copy: Copy, to: Path) -> None:
        """Unpack a copy to ``to``, which appears only whole, mode 0600. Raises ArchiveMissing, ArchiveDamaged."""
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=".restoring-") as folder:
            packed = Path(folder) / "packed"
            self._archive.get_file(copy.stem + _COPY, packed, copy.sha256)
            try:
                with open(packed, "rb") as source, whole_file(to, private=True) as sink:
                    zstandard.ZstdDecompressor().copy_stream(source, sink)
            except zstandard.ZstdError as error:
                raise ArchiveDamaged(f"{self._archive.url}/{copy.stem}{_COPY} can't be unpacked: {error}") from error

    def needs(self, copy: Copy) -> Needs:
        """Raises ArchiveMissing, ArchiveDamaged."""
        name = copy.stem + _NEEDS
        try:
            return msgspec.json.decode(self._archive.get_text(name), type=Needs)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ArchiveDamaged(f"{self._archive.url}/{name} can't be read: {error}") from error

    def drop(self, copy: Copy) -> None:
        """Remove a copy, then what says its needs."""
        self._archive.remove(copy.stem + _COPY)
        self._archive.remove(copy.stem + _NEEDS)

    def orphans(self) -> list[Copy]:
        """Those of which only the needs are there: an upload or a removal that was interrupted."""
        names = self._archive.list(_FOLDER)
        whole = set(_copies(name for name in names if name.endswith(_COPY)))
        return [copy for copy in _copies(name for name in names if name.endswith(_NEEDS)) if copy not in whole]


def _copies(names: Iterable[str]) -> Iterator[Copy]:
    for name in names:
        with contextlib.suppress(ValueError):
            yield Copy.named(name)
