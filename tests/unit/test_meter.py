"""The bill: exact decimals, worked by hand."""

from __future__ import annotations

from decimal import Decimal

import pytest

from gradserve.compute.tasks import Usage
from gradserve.orchestration.meter import ledger_line, price
from gradserve.settings import Prices, PriceSheet
from gradserve.store.base import Op

PRICES = Prices(
    train=Decimal("0.40"), prefill=Decimal("0.10"), cached=Decimal("0.02"), sample=Decimal("0.30"),
    compute_hour=Decimal("1.80"),
)  # fmt: skip


def test_tokens_are_exact() -> None:
    usage = Usage(train_tokens=1, prefill_tokens=3, cached_tokens=7, sample_tokens=11)
    # (1*0.40 + 3*0.10 + 7*0.02 + 11*0.30) / 1e6 = 4.14e-6
    assert price(usage, PRICES) == Decimal("0.00000414")


def test_worker_time() -> None:
    # half an hour at 1.80 an hour
    assert price(Usage(compute_us=1_800_000_000), PRICES) == Decimal("0.90")


def test_a_thousand_small_lines_are_exactly_one_big_one() -> None:
    small = sum((price(Usage(train_tokens=1), PRICES) for _ in range(1000)), Decimal(0))
    assert small == price(Usage(train_tokens=1000), PRICES) == Decimal("0.0004")


def test_storage_is_exact_to_the_last_digit() -> None:
    prices = Prices(storage_gib_month=Decimal("0.1"))
    assert prices.storage(3 << 29) == Decimal("0.15"), "one and a half GiB"
    # 1 / 2^30 has these 30 digits; a float has 17.
    assert prices.storage(1) == Decimal("0.0000000000931322574615478515625")
    assert Prices().storage(1 << 40) == 0
    assert PriceSheet(default=prices).version != PriceSheet().version
    with pytest.raises(ValueError, match="storage_gib_month"):
        Prices(storage_gib_month=Decimal("-1"))


def test_a_models_own_prices_and_the_sheets_version() -> None:
    sheet = PriceSheet(default=PRICES, models={"big": Prices(train=Decimal(8))})
    op = Op("r:op:1", "t", "s", "r", 1, "forward_backward", b"", 0.0, run_id="r")
    line = ledger_line(op, "big", Usage(train_tokens=500_000, compute_us=1234), sheet, at=5.0)
    assert (line.amount_usd, line.compute_ms, line.id) == (Decimal(4), Decimal("1.234"), "r:op:1")
    assert line.price_version == sheet.version != PriceSheet().version
