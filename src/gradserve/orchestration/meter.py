"""What an executed Op costs: usage times price, exact decimals."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

from gradserve.compute.tasks import Usage
from gradserve.settings import Prices, PriceSheet
from gradserve.store.base import LedgerLine, Op

_MILLION = Decimal(1_000_000)
_MICROSECONDS_PER_HOUR = Decimal(3_600_000_000)
_RESOLUTION = Decimal("1e-15")


def price(usage: Usage, prices: Prices) -> Decimal:
    """USD. Amounts for tokens and steps of environments are exact.

    Worker time (us / 3.6e9 * hourly price) is rounded half-even to 1e-15 USD.
    """
    tokens = (
        usage.train_tokens * prices.train
        + usage.prefill_tokens * prices.prefill
        + usage.cached_tokens * prices.cached
        + usage.sample_tokens * prices.sample
        + usage.env_steps * prices.env_step
    ) / _MILLION
    time = usage.compute_us * prices.compute_hour / _MICROSECONDS_PER_HOUR
    return tokens + time.quantize(_RESOLUTION, ROUND_HALF_EVEN).normalize()


def ledger_line(op: Op, base: str, usage: Usage, sheet: PriceSheet, at: float) -> LedgerLine:
    """The one line of an executed Op; its id is the Op's, so that a repetition writes nothing new."""
    return LedgerLine(
        id=op.id,
        op_id=op.id,
        tenant=op.tenant,
        kind=op.kind,
        base=base,
        run_id=op.run_id,
        session_id=op.session_id,
        seq=op.seq,
        train_tokens=usage.train_tokens,
        prefill_tokens=usage.prefill_tokens,
        cached_tokens=usage.cached_tokens,
        sample_tokens=usage.sample_tokens,
        compute_ms=Decimal(usage.compute_us) / 1000,
        amount_usd=price(usage, sheet.of(base)),
        price_version=sheet.version,
        at=at,
        env_steps=usage.env_steps,
    )
