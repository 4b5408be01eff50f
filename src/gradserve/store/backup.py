"""Copies of a database file, and bringing one back to life."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from gradserve.store import schema
from gradserve.store.base import Backup, Checkpoint, Event, Run, StoreError, Version
from gradserve.store.queries import digests, history, leases
from gradserve.store.tables import checkpoints, fields, runs, versions

S = TypeVar("S", bound=msgspec.Struct)


def back_up(database: Path, to: Path) -> Backup:
    """Copy ``database``, which a server may be writing to, to the new file ``to`` (mode 0600). Raises StoreError.

    VACUUM INTO reads one state of the database and holds up no writer (the log is write-ahead). Unlike a copy of
    pages it leaves out what was deleted: bodies that have expired do not travel.
    """
    to.touch(mode=0o600, exist_ok=False)
    taken_at = time.time()
    try:
        source = sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=schema.BUSY_TIMEOUT_S)
        with contextlib.closing(source):
            source.execute("VACUUM INTO ?", (str(to),))
    except sqlite3.Error as error:
        raise StoreError(f"{database} could not be copied to {to}: {error}") from error
    with contextlib.closing(schema.open_read_only(to)) as copy, copy.begin():
        return Backup(taken_at, digests.live(copy), _all(copy, Version, versions))


class Revived(msgspec.Struct, frozen=True):
    """What a database holds that was brought back; ``live`` as of ``Store.live_digests``, the others oldest first."""

    live: set[str]
    runs: list[Run]
    checkpoints: list[Checkpoint]
    versions: list[Version]


def revive(database: Path, claim_epoch: int, event: Event) -> Revived:
    """Make a copy that was brought to ``database`` a life of its own: a new claim on the archive, and ``event``.

    Raises StoreError when it is no database of ours, of a newer gradserve, or damaged.
    """
    try:
        with contextlib.closing(schema.open_file(database)) as connection, connection.begin():
            leases.renew_archive_claim(connection, claim_epoch, event.at)
            history.add_event(connection, event)
            return Revived(
                digests.live(connection),
                _all(connection, Run, runs),
                _all(connection, Checkpoint, checkpoints),
                _all(connection, Version, versions),
            )
    except SQLAlchemyError as error:
        raise StoreError(f"{database} can't be used: {getattr(error, 'orig', None) or error}") from error


def _all(connection: Connection, struct: type[S], table: sa.Table) -> list[S]:
    return [struct(*row) for row in connection.execute(sa.select(*fields(struct, table)).order_by(table.c.n))]
