"""Everything that the database knows of one tenant, as JSON lines and CSV that need no gradserve to read.

All files come from one read transaction, so they agree with each other while a server goes on writing.
"""

from __future__ import annotations

import base64
import contextlib
import csv
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gradserve.store import schema
from gradserve.store.base import (
    Checkpoint,
    Event,
    LedgerLine,
    LedgerTotal,
    Metrics,
    Op,
    Run,
    SamplingSession,
    Session,
    StoredGraph,
    Version,
)
from gradserve.store.queries.ledger import NOTHING, add_some
from gradserve.store.tables import (
    checkpoints,
    events,
    fields,
    graphs,
    ledger,
    op_bodies,
    ops,
    run_metrics,
    runs,
    sampling_sessions,
    sessions,
    versions,
)
from gradserve.wire.data import Array, Row, tokens_of
from gradserve.wire.ops import decode_body
from gradserve.wire.proto import gradserve_wire_pb2 as pb

_ROWS_AT_ONCE = 500
_JSON = "application/json"

_TABLES: dict[str, tuple[type[msgspec.Struct], sa.Table]] = {
    "sessions": (Session, sessions),
    "runs": (Run, runs),
    "sampling_sessions": (SamplingSession, sampling_sessions),
    "checkpoints": (Checkpoint, checkpoints),
    "ledger": (LedgerLine, ledger),
    "metrics": (Metrics, run_metrics),
    "events": (Event, events),
    "versions": (Version, versions),
    "graphs": (StoredGraph, graphs),
}


class UnknownTenant(Exception):
    """The database has nothing of that tenant; the message names those that it has."""


class ExportedRows(msgspec.Struct, frozen=True):
    """What was written: how many lines in which file, the bill, and checkpoints and graphs whose files belong to it."""

    lines: dict[str, int]
    total: LedgerTotal
    checkpoints: list[Checkpoint]
    graphs: list[StoredGraph]


def export_rows(database: Path, tenant: str, folder: Path, *, bodies: bool = False) -> ExportedRows:
    """Write the tenant's rows of every table as .jsonl files (the ledger also as .csv) into ``folder``.

    ``bodies`` adds what was sent and answered to each Op, as far as it is kept. Only reads the database.
    Raises UnknownTenant, FileNotFoundError, StoreError.
    """
    connection = schema.open_read_only(database)
    try:
        with connection.begin():
            _require_known(connection, tenant)
            lines = {}
            for name, (struct, table) in _TABLES.items():
                lines[f"{name}.jsonl"] = _write_lines(
                    folder / f"{name}.jsonl", _rows(connection, struct, table, tenant)
                )
            lines["ledger.csv"] = _write_csv(folder / "ledger.csv", _rows(connection, LedgerLine, ledger, tenant))
            lines["ops.jsonl"] = _write_lines(folder / "ops.jsonl", _ops(connection, tenant, bodies))
            kept = list(_rows(connection, StoredGraph, graphs, tenant))
            return ExportedRows(lines, _total(connection, tenant), _checkpoints(connection, tenant), kept)
    finally:
        connection.close()


def readable(value: Any) -> Any:
    """Structs as objects, decimals digit for digit without an exponent, arrays as (nested) lists of numbers."""
    match value:
        case Row():
            return {"tokens": tokens_of(value).tolist(), "inputs": readable(value.inputs)}
        case Array():
            return {"dtype": value.dtype, "shape": list(value.shape), "values": value.numpy().tolist()}
        case msgspec.Struct():
            return {name: readable(getattr(value, name)) for name in value.__struct_fields__}
        case Decimal():
            return f"{value:f}"
        case bytes():  # the prompt of a sample is the only one
            return np.frombuffer(value, dtype="<i4").tolist()
        case dict():
            return {name: readable(item) for name, item in value.items()}
        case list() | tuple():
            return [readable(item) for item in value]
        case _:
            return value


def _require_known(connection: Connection, tenant: str) -> None:
    known = set(connection.execute(sa.select(sessions.c.tenant).distinct()).scalars())
    if tenant not in known:
        raise UnknownTenant(f"there is no tenant {tenant!r} here; there are: {', '.join(sorted(known)) or 'none'}")


def _rows(
    connection: Connection, struct: type[msgspec.Struct], table: sa.Table, tenant: str
) -> Iterator[dict[str, Any]]:
    for row in _owned(connection, fields(struct, table), table, tenant):
        yield readable(struct(*row))


def _owned(
    connection: Connection, columns: list[Any], table: sa.Table, tenant: str, source: sa.FromClause | None = None
) -> Iterator[Any]:
    """The tenant's rows, in the order they were written. The only way to rows in this module."""
    select = sa.select(*columns).select_from(source if source is not None else table)
    yield from connection.execute(select.where(table.c.tenant == tenant).order_by(table.c.n)).yield_per(_ROWS_AT_ONCE)


def _checkpoints(connection: Connection, tenant: str) -> list[Checkpoint]:
    return [Checkpoint(*row) for row in _owned(connection, fields(Checkpoint, checkpoints), checkpoints, tenant)]


def _total(connection: Connection, tenant: str) -> LedgerTotal:
    known, complete = NOTHING, False
    while not complete:
        known, complete = add_some(connection, known, tenant, None, None)
    return known.total


def _ops(connection: Connection, tenant: str, bodies: bool) -> Iterator[dict[str, Any]]:
    names = [name for name in Op.__struct_fields__ if name != "body"]
    columns: list[Any] = [ops.c[name] for name in names]
    source: sa.FromClause = ops
    if bodies:
        columns.append(op_bodies.c.body)
        source = ops.outerjoin(op_bodies, op_bodies.c.n == ops.c.n)
    for row in _owned(connection, columns, ops, tenant, source):
        known = dict(zip(names, row, strict=False))
        result = known.pop("result")
        line = {name: readable(value) for name, value in known.items()}
        line["metrics"] = _metrics(known["kind"], known["content_type"], result)
        if bodies:
            line["body"] = _body(row[-1])
            line["result"] = _result(known["content_type"], result)
        yield line


def _metrics(kind: str, content_type: str | None, result: bytes | None) -> dict[str, float] | None:
    if result is None:
        return None
    if content_type == _JSON:
        answer = _result(content_type, result)
        return answer.get("metrics") if isinstance(answer, dict) else None
    return dict(pb.ForwardBackwardOutput.FromString(result).metrics) if kind == "forward_backward" else None


def _result(content_type: str | None, result: bytes | None) -> Any:
    if result is None:
        return None
    if content_type == _JSON:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(result)
    return base64.b64encode(result).decode()


def _body(body: bytes | None) -> Any:
    if body is None:
        return None
    try:
        return readable(decode_body(body))
    except msgspec.DecodeError:  # of another gradserve; better in its bytes than not at all
        return base64.b64encode(body).decode()


def _write_lines(file: Path, lines: Iterator[dict[str, Any]]) -> int:
    count = 0
    with open(file, "wb") as opened:
        for line in lines:
            count += 1
            opened.write(msgspec.json.encode(line) + b"\n")
    return count


def _write_csv(file: Path, lines: Iterator[dict[str, Any]]) -> int:
    count = 0
    with open(file, "w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, LedgerLine.__struct_fields__)
        writer.writeheader()
        for line in lines:
            count += 1
            writer.writerow(line)
    return count
