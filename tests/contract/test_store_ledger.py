"""The ledger is exact."""

from __future__ import annotations

from decimal import Decimal
from unittest.mock import patch

from gradserve.store.base import LedgerTotal, Page, Store
from gradserve.store.queries import ledger
from tests.contract.store_cases import a_line, each_store, write_line


@each_store
async def test_a_line_comes_back_digit_for_digit(store: Store) -> None:
    line = a_line(1, "0.000000123400", compute_ms=Decimal("17.250"), run_id=None, train_tokens=12)
    await write_line(store, line)
    (stored,), page = await store.ledger_lines("acme", None, 10, 0)
    assert stored == line
    assert (str(stored.amount_usd), str(stored.compute_ms)) == ("1.23400E-7", "17.250")
    assert page == Page(0, 10, 1)


@each_store
async def test_no_lines_cost_nothing(store: Store) -> None:
    assert await store.ledger_total(None) == LedgerTotal(0, 0, 0, 0, 0, Decimal(0), Decimal(0))


@each_store
async def test_the_total_of_hand_worked_lines(store: Store) -> None:
    lines = [
        a_line(1, "0.1", train_tokens=1, prefill_tokens=20, compute_ms=Decimal("0.7")),
        a_line(2, "0.2", train_tokens=3, cached_tokens=400, compute_ms=Decimal("0.1")),
        a_line(3, "0.0000005", sample_tokens=5000, session_id="t"),
        a_line(4, "10", run_id="q", train_tokens=1 << 40),
    ]
    for line in lines:
        await write_line(store, line)
    run = LedgerTotal(3, 4, 20, 400, 5000, Decimal("0.8"), Decimal("0.3000005"))
    session = LedgerTotal(3, 4 + (1 << 40), 20, 400, 0, Decimal("0.8"), Decimal("10.3"))
    everything = LedgerTotal(4, 4 + (1 << 40), 20, 400, 5000, Decimal("0.8"), Decimal("10.3000005"))
    assert await store.ledger_total("acme", "r") == run
    assert await store.ledger_total(None, "r") == run
    assert await store.ledger_total("acme", session_id="s") == session
    assert await store.ledger_total("acme", "q", "s") == LedgerTotal(1, 1 << 40, 0, 0, 0, Decimal(0), Decimal(10))
    assert await store.ledger_total("acme") == everything == await store.ledger_total(None)


@each_store
async def test_a_sum_is_not_rounded(store: Store) -> None:
    """Python's default context keeps 28 digits; these sums have 41."""
    large, small = "100000000000000000000", "0.00000000000000000001"
    await write_line(store, a_line(1, large, compute_ms=Decimal(small)))
    await write_line(store, a_line(2, small, compute_ms=Decimal(large)))
    total = await store.ledger_total("acme")
    assert str(total.amount_usd) == str(total.compute_ms) == "100000000000000000000.00000000000000000001"


@each_store
async def test_a_total_counts_every_line_once_however_often_it_is_asked_for(store: Store) -> None:
    with patch.object(ledger, "_CHUNK", 3):
        for n in range(1, 11):
            await write_line(store, a_line(n, "0.1"))
            total = await store.ledger_total("acme", "r")
            assert (total.lines, total.amount_usd) == (n, Decimal(n) / 10)
        assert (await store.ledger_total("acme")).amount_usd == 1
        assert (await store.ledger_total(None)).lines == 10


@each_store
async def test_lines_in_the_order_they_were_written(store: Store) -> None:
    for n in range(7):
        await write_line(store, a_line(n, run_id="r" if n % 2 else "q"))
    await write_line(store, a_line(7, tenant="other"))
    for offset, expected in ((0, [0, 1, 2]), (3, [3, 4, 5]), (6, [6]), (9, [])):
        lines, page = await store.ledger_lines("acme", None, 3, offset)
        assert [line.seq for line in lines] == expected
        assert page == Page(offset, 3, 7)
    assert [line.seq for line in (await store.ledger_lines("acme", "r", 10, 0))[0]] == [1, 3, 5]
    assert [line.seq for line in (await store.ledger_lines(None, "r", 10, 0))[0]] == [1, 3, 5, 7]
