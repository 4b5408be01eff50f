"""A third place for objects, away from this machine: a mounted folder, S3, or whatever else fsspec has a class for.

Layout under the URL: ``objects/<digest>.safetensors``; other files and texts under the names that they are given.
An object is visible only when it is whole: file systems get a temporary name and a rename, object stores have an atomic
put. Nothing that comes out of an archive is trusted: its SHA-256 is compared with its name before it gets one here.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gradserve.compute.files import NoRoom, copy_whole, sha256_of, whole_file

T = TypeVar("T")

_ATOMIC_PUT = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"})
"""Stores in which an upload becomes visible at its end, and a rename would be a second copy."""

_SLOWEST_BYTES_PER_S = 1 << 20
"""A transfer may take its base timeout plus its size at this rate."""

_PERMANENT = (
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    NotImplementedError,
    TypeError,
    ValueError,
    NoRoom,
)
"""What another attempt would not mend."""

_S3_DEFAULTS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 0}}
"""For botocore, in seconds; the attempts are counted here."""

_TEMPORARY = ".tmp"
_OBJECTS = "objects/"
_SUFFIX = ".safetensors"


class ArchiveError(Exception):
    """The archive can't do it; the message says what was tried where, and why it failed."""


class ArchiveMissing(ArchiveError):
    """There is nothing of that name."""


class ArchiveDamaged(ArchiveError):
    """What is there are not the bytes that its name promises."""


class Archive:
    """``options`` are the arguments of fsspec's file system, e.g. ``{"endpoint_url": ...}``; AWS_* variables count too.

    Cheap to make: the protocol's library is imported and the store reached only when something is asked of it. Safe
    to use from several threads. Everything raises ArchiveError, after ``attempts`` attempts where it may be temporary.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        attempts: int = 4,
        pause_s: float = 0.5,
    ) -> None:
        self.url = url.rstrip("/")
        self._options = dict(options or {})
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._pause_s = pause_s
        self._end = math.inf

    def hasten(self, within_s: float) -> None:
        """From now on nothing takes longer than till then: what has not ended fails."""
        self._end = time.monotonic() + within_s

    def require_protocol(self) -> None:
        """Raises ArchiveError when the URL's protocol is unknown or its library isn't installed: ask at start."""
        protocol, separator, _ = self.url.partition("://")
        if not separator:
            raise ArchiveError(f"{self.url!r} is not a URL; write file:///mnt/nas/gradserve or s3://bucket/prefix")
        registry = importlib.import_module("fsspec.registry")
        try:
            registry.get_filesystem_class(protocol)
        except ValueError as error:
            raise ArchiveError(f"{self.url}: fsspec knows no protocol {protocol!r}") from error
        except ImportError as error:
            package = _package(protocol, registry.known_implementations[protocol]["class"])
            raise ArchiveError(f"{self.url} needs a library that is not installed: pip install '{package}'") from error

    def put_object(self, digest: str, file: Path) -> None:
        """Upload ``file``, whose bytes have that digest. One that is there with the same size is left alone."""
        if self._size(_object(digest)) != file.stat().st_size:
            self.put_file(_object(digest), file)

    def get_object(self, digest: str, to: Path) -> None:
        """Download to ``to``, which appears only whole. Raises ArchiveMissing, ArchiveDamaged."""
        self.get_file(_object(digest), to, digest)

    def objects(self) -> set[str]:
        """The digests of all objects that are there."""
        return {name.removeprefix(_OBJECTS).removesuffix(_SUFFIX) for name in self.list(_OBJECTS.rstrip("/"))}

    def put_file(self, name: str, file: Path) -> None:
        """Upload (or replace) a file, whole."""
        self._try(f"upload {name}", lambda: self._upload(file, self._key(name)), file.stat().st_size)

    def get_file(self, name: str, to: Path, sha256: str) -> None:
        """Download to ``to``, which appears only if its bytes have that digest, and for this user alone.

        Raises ArchiveMissing, ArchiveDamaged.
        """
        size = self._size(name)
        if size is None:
            raise ArchiveMissing(f"{self.url} has no {name}")

        def fetch() -> None:
            with whole_file(to, private=True) as sink:
                self._files.get_file(self._key(name), sink.name)
                if sha256_of(Path(sink.name)) != sha256:
                    raise ArchiveDamaged(f"{self.url}/{name} is damaged: its bytes have another SHA-256")

        self._try(f"download {name}", fetch, size)

    def has(self, digest: str) -> bool:
        """Whether an object is there; its bytes are not looked at."""
        return self._size(_object(digest)) is not None

    def delete(self, digest: str) -> None:
        """Remove an object; one that is not there is fine."""
        self.remove(_object(digest))

    def remove(self, name: str) -> None:
        """Remove what has that name; nothing of that name is fine."""
        with contextlib.suppress(ArchiveMissing):
            self._try(f"delete {name}", lambda: self._files.rm_file(self._key(name)))

    def put_text(self, name: str, text: str) -> None:
        """Write (or replace) a text, whole."""
        with tempfile.TemporaryDirectory(prefix="gradserve-") as folder:
            file = Path(folder) / "text"
            file.write_text(text, encoding="utf-8")
            self.put_file(name, file)

    def get_text(self, name: str) -> str:
        """A text. Raises ArchiveMissing."""
        found: bytes = self._try(f"read {name}", lambda: self._files.cat_file(self._key(name)))
        return found.decode("utf-8")

    def list(self, folder: str) -> list[str]:
        """The names of everything under ``folder``, whole ones only, in order; [] when there is no such folder."""
        try:
            keys = self._try(f"list {folder}", lambda: self._files.find(self._key(folder)))
        except ArchiveMissing:
            return []
        start = len(self._root) + 1
        return sorted(key[start:] for key in keys if not key.endswith(_TEMPORARY))

    def _upload(self, file: Path, key: str) -> None:
        if _is(self._files, {"file", "local"}):
            Path(key).parent.mkdir(parents=True, exist_ok=True)
            copy_whole(file, Path(key), private=True)  # weights and prompts: nobody else's
            return
        atomic = _is(self._files, _ATOMIC_PUT)
        place = key if atomic else f"{key}.{secrets.token_hex(4)}{_TEMPORARY}"
        try:
            self._files.put_file(str(file), place)
            self._require_size(place, file.stat().st_size)
            if not atomic:
                self._files.mv(place, key)
        except BaseException:
            if not atomic:
                with contextlib.suppress(Exception):  # the error that matters is the one being raised
                    self._files.rm_file(place)
            raise

    def _require_size(self, place: str, size: int) -> None:
        stored = self._files.info(place)["size"]
        if stored != size:
            self._files.rm_file(place)
            raise OSError(f"{stored} of {size} bytes arrived")

    def _size(self, name: str) -> int | None:
        try:
            info = self._try(f"look for {name}", lambda: self._files.info(self._key(name)))
        except ArchiveMissing:
            return None
        size: int = info["size"]
        return size

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    @property
    def _files(self) -> Any:
        """fsspec's AbstractFileSystem."""
        return self._place[0]

    @property
    def _root(self) -> str:
        return self._place[1]

    @cached_property
    def _place(self) -> tuple[Any, str]:
        # fsspec is imported when first needed: most servers and workers have no archive
        options = {"use_listings_cache": False, **self._options}  # other machines write there too
        if self.url.startswith(("s3://", "s3a://")):
            options["config_kwargs"] = _S3_DEFAULTS | options.get("config_kwargs", {})
        files, root = importlib.import_module("fsspec.core").url_to_fs(self.url, **options)
        return files, root.rstrip("/")

    def _try(self, what: str, work: Callable[[], T], size_bytes: int = 0) -> T:
        """The result of ``work``, tried again after a pause that doubles while the fault may pass."""
        limit_s = self._timeout_s + size_bytes / _SLOWEST_BYTES_PER_S
        for attempt in range(1, self._attempts + 1):
            try:
                return _within(max(0.0, min(limit_s, self._end - time.monotonic())), work)
            except ArchiveError:
                raise
            except Exception as error:
                hopeless = isinstance(error, _PERMANENT) or time.monotonic() > self._end
                if attempt == self._attempts or hopeless:
                    kind = ArchiveMissing if isinstance(error, FileNotFoundError) else ArchiveError
                    raise kind(f"{self.url}: could not {what}: {error or type(error).__name__}") from error
            time.sleep(self._pause_s * 2 ** (attempt - 1))
        raise AssertionError("attempts is at least 1")


def _object(digest: str) -> str:
    return f"{_OBJECTS}{digest}{_SUFFIX}"


def _is(files: Any, protocols: set[str] | frozenset[str]) -> bool:
    own = files.protocol
    return not protocols.isdisjoint((own,) if isinstance(own, str) else own)


def _package(protocol: str, implementation: str) -> str:
    """What to install for a protocol that fsspec knows; its class is named like ``gcsfs.GCSFileSystem``."""
    if protocol in ("s3", "s3a"):
        return "gradserve[s3]"
    module = implementation.partition(".")[0]
    return f"fsspec[{protocol}]" if module == "fsspec" else module


def _within(limit_s: float, work: Callable[[], T]) -> T:
    """The result of ``work``, run in a thread that is left behind when it hangs (a dead mount can't be interrupted)."""
    outcome: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((True, work()))
        except BaseException as error:
            outcome.put((False, error))

    threading.Thread(target=run, name="archive", daemon=True).start()
    try:
        succeeded, value = outcome.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer for {limit_s:.0f} s") from None
    if not succeeded:
        raise value
    result: T = value
    return result
