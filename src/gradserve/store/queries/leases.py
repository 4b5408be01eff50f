"""Whose database this is, and which life of it may write to the archive.

A server that was thought dead and wakes up finds a higher epoch, and writes nothing.
"""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gradserve.store.base import Claim, Fenced
from gradserve.store.tables import leases

_SERVER = "server"
_ARCHIVE = "archive"
_READ = sa.select(leases.c.epoch, leases.c.holder).where(leases.c.name == _SERVER)


def take(connection: Connection, holder: str, at: float) -> int:
    """Count the epoch up; from now on only who has this one writes."""
    current = connection.execute(_READ).first()
    if current is None:
        connection.execute(sa.insert(leases).values(name=_SERVER, epoch=1, holder=holder, taken_at=at))
        return 1
    epoch = int(current.epoch) + 1
    connection.execute(
        sa.update(leases).where(leases.c.name == _SERVER).values(epoch=epoch, holder=holder, taken_at=at)
    )
    return epoch


def require(connection: Connection, epoch: int) -> None:
    """Raises Fenced when the epoch is another by now. Inside a write transaction the answer stays true till its end."""
    current = connection.execute(_READ).first()
    if current is None or current.epoch != epoch:
        holder = "nobody" if current is None else current.holder
        raise Fenced(f"{holder} has taken this data directory over; this server writes nothing any more.")


def archive_claim(connection: Connection, at: float) -> Claim:
    """That of this database; made at the first call."""
    found = connection.execute(sa.select(leases.c.epoch, leases.c.holder).where(leases.c.name == _ARCHIVE)).first()
    return renew_archive_claim(connection, 1, at) if found is None else Claim(int(found.epoch), found.holder)


def renew_archive_claim(connection: Connection, epoch: int, at: float) -> Claim:
    """A new one: what has the old one is another life of this database from now on."""
    claim = Claim(epoch, secrets.token_hex(16))
    connection.execute(sa.delete(leases).where(leases.c.name == _ARCHIVE))
    connection.execute(sa.insert(leases).values(name=_ARCHIVE, epoch=claim.epoch, holder=claim.token, taken_at=at))
    return claim
