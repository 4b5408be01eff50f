"""The tables that a new database gets are those that the migrations make."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from msgspec.structs import asdict
from sqlalchemy.engine import Connection

from gradserve.store import schema
from gradserve.store.base import Checkpoint, Run, Store, StoreError
from gradserve.store.sql import SqlStore
from gradserve.store.tables import metadata
from tests.contract.store_cases import a_checkpoint, a_line, a_run, an_op, create_run, on_store, write_checkpoint


def _migrated(path: Path, *revisions: str) -> Connection:
    connection = schema._engine(f"file:{path}", "BEGIN IMMEDIATE").connect()
    for revision in revisions:
        with connection.begin():
            schema.migrate(connection, revision)
    return connection


def _shape(connection: Connection) -> dict[str, object]:
    """Everything about the tables but their SQL's spelling."""
    look = sa.inspect(connection)
    return {
        name: (
            [(c["name"], str(c["type"]), c["nullable"]) for c in look.get_columns(name)],
            look.get_pk_constraint(name),
            sorted(look.get_unique_constraints(name), key=str),
            sorted(look.get_indexes(name), key=str),
        )
        for name in look.get_table_names()
        if name != "alembic_version"
    }


def test_the_migrations_lead_to_the_tables(tmp_path: Path) -> None:
    migrated, created = _migrated(tmp_path / "m.db", "head"), schema.open_memory()
    context = MigrationContext.configure(migrated, opts={"compare_type": True, "render_as_batch": True})
    assert compare_metadata(context, metadata) == []
    assert _shape(migrated) == _shape(created)
    assert set(_shape(created)) == set(metadata.tables)


def test_the_way_down_leaves_nothing(tmp_path: Path) -> None:
    connection = _migrated(tmp_path / "m.db", "head", "base")
    assert sa.inspect(connection).get_table_names() == ["alembic_version"]


def test_the_revisions_are_all_there_in_order() -> None:
    script = ScriptDirectory(str(schema.MIGRATIONS))
    assert [revision.revision for revision in script.walk_revisions()][::-1] == list(schema.REVISIONS)
    assert script.get_current_head() == schema.HEAD


def test_a_new_database_is_made_without_alembic(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from gradserve.store.sql import SqlStore;"
        "s = SqlStore.at(sys.argv[1]); asyncio.run(s.open());"
        "assert 'alembic' not in sys.modules"
    )
    path = tmp_path / "gradserve.db"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert _stamp(path) == schema.HEAD
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_commits_reach_the_disk(tmp_path: Path) -> None:
    connection = schema.open_file(tmp_path / "gradserve.db")
    assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL


def test_an_older_database_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "gradserve.db"
    _migrated(path, "head", "base").close()

    async def use(store: Store) -> None:
        assert await store.submit(an_op()) == (an_op(), True)

    with pytest.raises(StoreError, match="Starting the server"):
        asyncio.run(SqlStore.at(path, read_only=True).open())
    asyncio.run(on_store(SqlStore.at(path), use))
    assert _stamp(path) == schema.HEAD


def _as_then(row: Run | Checkpoint) -> dict[str, object]:
    """Without the columns that came later."""
    return {name: value for name, value in asdict(row).items() if name not in ("parent", "client_state")}


def test_rows_of_the_first_version_stay_and_full_runs_fit_beside_them(tmp_path: Path) -> None:
    """0002 rebuilds two tables: what was in them is read as before, and a run without adapters can be written."""
    path = tmp_path / "gradserve.db"
    old = _migrated(path, "0001")
    with old.begin():
        run, checkpoint = a_run(), a_checkpoint()
        old.execute(sa.insert(metadata.tables["runs"]), _as_then(run))
        old.execute(sa.insert(metadata.tables["checkpoints"]), _as_then(checkpoint))
    with pytest.raises(sa.exc.IntegrityError, match="NOT NULL"), old.begin():
        old.execute(sa.insert(metadata.tables["runs"]), _as_then(a_run("full", lora=None)))
    old.close()

    async def use(store: Store) -> None:
        assert await store.get_run(None, "r") == run
        assert (await store.list_checkpoints(None, "r", 9, 0))[0] == [checkpoint]
        made = await create_run(store, "full", lora=None)
        assert made.lora is None
        await write_checkpoint(store, a_checkpoint(run_id="full", lora=None))
        assert (await store.list_checkpoints(None, "full", 9, 0))[0][0].lora is None

    asyncio.run(on_store(SqlStore.at(path), use))


def test_a_bill_of_the_schema_before_stays_as_it_is(tmp_path: Path) -> None:
    """0005 adds steps of environments to the ledger: older lines had none, and their sum is the same."""
    path = tmp_path / "gradserve.db"
    old = _migrated(path, "0004")
    line = a_line(1, "0.000001", sample_tokens=7)
    with old.begin():
        then = {name: value for name, value in asdict(line).items() if name != "env_steps"}
        old.execute(sa.insert(metadata.tables["ledger"]), then)
    old.close()

    async def use(store: Store) -> None:
        assert (await store.ledger_lines(None, None, 9, 0))[0] == [line]
        total = await store.ledger_total(None)
        assert (total.amount_usd, total.sample_tokens, total.env_steps) == (line.amount_usd, 7, 0)

    asyncio.run(on_store(SqlStore.at(path), use))


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_database_is_refused_and_left_alone(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "gradserve.db"
    _migrated(path, "head").close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreError, match="9999"):
        asyncio.run(SqlStore.at(path, read_only=read_only).open())
    assert _stamp(path) == "9999"


def test_what_is_not_ours_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    with pytest.raises(StoreError, match="not gradserve's"):
        asyncio.run(SqlStore.at(path).open())

    text = tmp_path / "notes.txt"
    text.write_text("flour, water, salt\n" * 100)
    with pytest.raises(StoreError, match="not a database"):
        asyncio.run(SqlStore.at(text).open())
    assert text.read_text() == "flour, water, salt\n" * 100


def _stamp(path: Path) -> str:
    with sqlite3.connect(path) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])
