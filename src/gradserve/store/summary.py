"""A step of a run in a few figures, so that two can be compared: what it is, what it saw, what it measured."""

from __future__ import annotations

from decimal import Decimal

import msgspec

from gradserve.store.base import Metrics, Run, Store
from gradserve.wire.ops import STEPS, LoraConfig

_PAGE = 5000


class Stored(msgspec.Struct, frozen=True):
    """What is kept of a run on disk: the objects of its checkpoints and durable versions, each counted once.

    ``usd_per_month`` is bytes / 2^30 * usd_per_gib_month. It is not in the ledger.
    """

    objects: int
    bytes: int
    usd_per_gib_month: Decimal
    usd_per_month: Decimal


class Summary(msgspec.Struct, frozen=True):
    """``data_sha256`` is over the bodies of all batches that were trained on up to the step, in order.

    ``metrics`` are the newest values by name, those of batches as "forward_backward/NAME". ``norms`` are the L2 norms
    of the weights' tensors by kind (their last two name parts), None when the arrays are not at hand. ``stored`` is of
    the whole run.
    """

    run_id: str
    base: str
    lora: LoraConfig | None
    parent: str | None
    version: int
    weights: str | None
    batches: int
    data_sha256: str
    metrics: dict[str, float]
    norms: dict[str, float] | None = None
    stored: Stored | None = None


async def summary_of(store: Store, tenant: str | None, run: Run, version: int, weights: str | None) -> Summary:
    """The summary of a run at a step; norms and storage are for the caller to add."""
    seq, newest = await _measured(store, tenant, run, version)
    batches, digest = await store.data_digest(run.id, seq)
    return Summary(run.id, run.base, run.lora, run.parent, version, weights, batches, digest, newest)


async def _measured(store: Store, tenant: str | None, run: Run, version: int) -> tuple[int, dict[str, float]]:
    """The seq of the Op that made ``version``, last time it was made, and the metrics up to it."""
    rows: list[Metrics] = []
    while True:
        some, page = await store.list_metrics(tenant, run.id, _PAGE, len(rows))
        rows += some
        if not some or len(rows) >= page.total:
            break
    steps = [row.seq for row in rows if row.kind in STEPS and row.version == version]
    last = max(steps) if steps else -1 if version < run.version else run.cursor
    newest: dict[str, float] = {}
    for row in rows:
        if row.seq <= last:
            prefix = "" if row.kind in STEPS else f"{row.kind}/"
            newest |= {prefix + name: value for name, value in row.values.items()}
    return last, newest
