"""The ledger: lines are appended and never change, so a sum of the first n of them stays right for ever."""

from __future__ import annotations

from decimal import Context, Decimal, Inexact, InvalidOperation

import msgspec
import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy.engine import Connection

from gradserve.store.base import IdentityConflict, LedgerLine, LedgerTotal, Page
from gradserve.store.queries.common import matching, page_of
from gradserve.store.tables import fields, insert_if_new, ledger

_INSERT = insert_if_new(ledger)
_BY_ID = sa.select(*fields(LedgerLine, ledger)).where(ledger.c.id == sa.bindparam("key"))

_EXACT = Context(prec=1000, traps=[Inexact, InvalidOperation])
"""Adds without rounding, or raises: Python's default context rounds sums to 28 digits."""

_CHUNK = 5000


class Sum(msgspec.Struct, frozen=True):
    """The total of the matching lines up to number ``n``."""

    n: int
    total: LedgerTotal


NOTHING = Sum(0, LedgerTotal(0, 0, 0, 0, 0, Decimal(0), Decimal(0)))


def append(connection: Connection, line: LedgerLine) -> None:
    """Writing the same line again does nothing; another line under its id raises IdentityConflict."""
    if connection.execute(_INSERT, asdict(line)).scalar() is None:
        stored = connection.execute(_BY_ID, {"key": line.id}).one()
        if LedgerLine(*stored) != line:
            raise IdentityConflict(f"ledger line {line.id} exists with other contents")


def page(
    connection: Connection, tenant: str | None, run_id: str | None, limit: int, offset: int
) -> tuple[list[LedgerLine], Page]:
    where = matching(ledger, tenant=tenant, run_id=run_id)
    return page_of(connection, LedgerLine, ledger, where, [ledger.c.n], limit, offset)


def add_some(
    connection: Connection,
    known: Sum,
    tenant: str | None,
    run_id: str | None,
    session_id: str | None,
) -> tuple[Sum, bool]:
    """``known`` plus a bounded number of later lines, and whether those were all."""
    where = matching(ledger, tenant=tenant, run_id=run_id, session_id=session_id)
    rows = connection.execute(
        sa.select(
            ledger.c.n,
            ledger.c.train_tokens,
            ledger.c.prefill_tokens,
            ledger.c.cached_tokens,
            ledger.c.sample_tokens,
            ledger.c.env_steps,
            ledger.c.compute_ms,
            ledger.c.amount_usd,
        )
        .where(*where, ledger.c.n > known.n)
        .order_by(ledger.c.n)
        .limit(_CHUNK)
    ).all()
    if not rows:
        return known, True
    total = known.total
    compute_ms, amount_usd = total.compute_ms, total.amount_usd
    for row in rows:
        compute_ms = _EXACT.add(compute_ms, row.compute_ms)
        amount_usd = _EXACT.add(amount_usd, row.amount_usd)
    summed = LedgerTotal(
        lines=total.lines + len(rows),
        train_tokens=total.train_tokens + sum(row.train_tokens for row in rows),
        prefill_tokens=total.prefill_tokens + sum(row.prefill_tokens for row in rows),
        cached_tokens=total.cached_tokens + sum(row.cached_tokens for row in rows),
        sample_tokens=total.sample_tokens + sum(row.sample_tokens for row in rows),
        compute_ms=compute_ms,
        amount_usd=amount_usd,
        env_steps=total.env_steps + sum(row.env_steps for row in rows),
    )
    return Sum(rows[-1].n, summed), len(rows) < _CHUNK
