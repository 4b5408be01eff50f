"""Opening a database file and bringing its tables to the version that this code speaks.

Alembic is imported only when there is something to migrate: the import alone costs most of a second.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import NullPool

from gradserve.store.base import StoreError
from gradserve.store.tables import metadata

REVISIONS = ("0001", "0002", "0003", "0004", "0005")
"""All migrations in order. A database at one that is not here was written by a newer gradserve."""

HEAD = REVISIONS[-1]
MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_TIMEOUT_S = 30.0

# Readers never wait for the writer; a commit is on disk, not just with the operating system; a log that one large
# transaction blew up is cut again.
_DURABLE = ("journal_mode=WAL", "synchronous=FULL", f"journal_size_limit={64 << 20}")

_version_table = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), primary_key=True),
)


def open_memory() -> Connection:
    """A new database that lives as long as the connection."""
    return _checked(_engine("file::memory:", "BEGIN"), prepare)


def open_file(path: Path) -> Connection:
    """The database at ``path``, created or migrated if need be. Raises StoreError when it can't be used."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)  # everybody's prompts are in there; SQLite gives its -wal file the same mode
    return _checked(_engine(f"file:{quote(str(path))}?mode=rw", "BEGIN IMMEDIATE", _DURABLE), prepare)


def open_read_only(path: Path) -> Connection:
    """The database at ``path`` as it is, while a server may be writing to it."""
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no gradserve database at {path}. It is made by the first `gradserve up`; "
            "if yours is elsewhere, set GRADSERVE_DATA_DIR (or data_dir in gradserve.toml)."
        )
    return _checked(_engine(f"file:{quote(str(path))}?mode=ro", "BEGIN"), _require_head)


def prepare(connection: Connection) -> None:
    """Bring the tables to HEAD, inside the caller's transaction: all of it or nothing."""
    tables = set(sa.inspect(connection).get_table_names())
    if not tables:
        _create(connection)
    elif _version_table.name not in tables:
        raise StoreError("this database holds tables that are not gradserve's; choose another file.")
    else:
        _bring_to_head(connection, _version(connection))


def _create(connection: Connection) -> None:
    metadata.create_all(connection)
    _version_table.create(connection)
    connection.execute(sa.insert(_version_table).values(version_num=HEAD))


def _bring_to_head(connection: Connection, found: str | None) -> None:
    if found == HEAD:
        return
    if found is not None and found not in REVISIONS:
        raise StoreError(
            f"this database has schema version {found}, which this gradserve (up to {HEAD}) does not know: "
            "a newer one wrote it. Upgrade gradserve."
        )
    migrate(connection, HEAD)


def migrate(connection: Connection, revision: str) -> None:
    """Run Alembic up or down to ``revision`` ("base" is the empty database), in the connection's transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    if revision == "base":
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)


def _require_head(connection: Connection) -> None:
    found = _version(connection)
    if found != HEAD:
        raise StoreError(
            f"this database has schema version {found or 'none'}, this gradserve reads {HEAD}. "
            "Starting the server brings an older database up to date."
        )


def _version(connection: Connection) -> str | None:
    if not sa.inspect(connection).has_table(_version_table.name):
        return None
    return connection.execute(sa.select(_version_table.c.version_num)).scalar()


def _checked(engine: Engine, check: Callable[[Connection], None]) -> Connection:
    """A connection whose database passed ``check``, which runs in a transaction of its own."""
    connection = engine.connect()
    try:
        with connection.begin():
            check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _engine(uri: str, begin: str, pragmas: tuple[str, ...] = ()) -> Engine:
    """An engine on one SQLite URI whose transactions start when told, not when Python's driver thinks so."""

    def connect() -> sqlite3.Connection:
        driver = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        for pragma in pragmas:
            driver.execute(f"PRAGMA {pragma}")
        return driver

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=NullPool)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine
