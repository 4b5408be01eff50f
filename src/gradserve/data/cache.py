"""Remote files kept on this disk, each under a name that its content has: what changed there is fetched again."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from gradserve.data.errors import DataError


def fetched(fs: Any, name: str, folder: Path) -> Path:
    """The local copy of the file ``name`` of an fsspec file system; downloaded unless ``folder`` has it.

    A file counts as the same while all that the store tells of it (size, time, ETag) is. Several processes may share
    the folder, and everything in it may be deleted at any time. Raises DataError when the bytes that came are not as
    many as the store says.
    """
    fs.invalidate_cache()  # of listings, which may be older than the file
    told = fs.info(name)
    identity = repr((fs.unstrip_protocol(name), sorted((str(key), str(value)) for key, value in told.items())))
    copy = folder / hashlib.sha256(identity.encode()).hexdigest()
    size = int(told["size"])
    if copy.is_file() and copy.stat().st_size == size:
        return copy
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=folder, prefix=".part-")
    os.close(descriptor)
    try:
        fs.get_file(name, draft)
        if (came := os.path.getsize(draft)) != size:
            raise DataError(f"{name}: {came} of {size} bytes came; try again")
        os.replace(draft, copy)
    except BaseException:
        os.unlink(draft)
        raise
    return copy
