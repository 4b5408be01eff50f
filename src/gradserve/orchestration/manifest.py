"""What a resume needs, each thing with its digest: the manifest of a durable version.

docs/reference/durability.md describes every entry.
"""

from __future__ import annotations

import hashlib

import msgspec

import gradserve
from gradserve.compute.catalog import Catalog
from gradserve.settings import Settings
from gradserve.store.base import Run, Store
from gradserve.wire.identity import BaseIdentity
from gradserve.wire.losses import LOSSES

FORMAT = 2
"""1 had other digests of bases, which changed with the version of transformers that converted them."""


class Manifests:
    """Makes manifests."""

    def __init__(self, store: Store, catalog: Catalog, settings: Settings) -> None:
        self._store = store
        self._catalog = catalog
        self._settings = settings

    async def of(self, run: Run, seq: int) -> str:
        """The manifest of a run's state after the Op at ``seq``, between two optimizer steps, as JSON."""
        _, metrics = await self._store.list_metrics(None, run.id, 1, 0)
        ledger = await self._store.ledger_total(None, run.id)
        base = await self._base(run)
        settings = self._settings
        entries = {
            "weights": {"digest": run.weights},
            "moments": {"digest": run.moments},
            "gradient_accumulator": _entry(list(run.gradients)),
            "cursors": _entry({"version": run.version, "seq": seq}),
            "random_streams": _entry({"lora_seed": None if run.lora is None else run.lora.seed, "samples": "counter"}),
            "client_state": {"digest": run.client_state},
            "losses": _entry({name: msgspec.to_builtins(loss) for name, loss in sorted(LOSSES.items())}),
            "base": {"digest": base.weights, "value": run.base},
            "tokenizer": {"digest": base.tokenizer},
            "lora": _entry(run.lora),
            "code": _entry({"gradserve": gradserve.__version__}),
            "config": _entry(
                {
                    "numerics": settings.numerics,
                    "dtype": settings.dtype,
                    "device": settings.device,
                    "task_tokens": settings.tokens_per_task,
                    "merge_tokens": settings.merge_tokens,
                    "threads_per_worker": settings.threads_per_worker,
                }
            ),
            "metrics_cursor": _entry(metrics.total),
            "ledger_cursor": _entry({"lines": ledger.lines, "amount_usd": str(ledger.amount_usd)}),
            "parallel_layout": _entry({"processes_per_worker": 1, "arrays": "whole"}),
        }
        manifest = {"format": FORMAT, "run": run.id, "tenant": run.tenant, "parent": run.parent, "entries": entries}
        return msgspec.json.encode(manifest).decode()

    async def _base(self, run: Run) -> BaseIdentity:
        if run.graph is not None:
            return BaseIdentity(run.graph, "")
        return run.trained_on or await self._catalog.identity(run.base) or BaseIdentity("", "")


def _entry(value: object) -> dict[str, object]:
    plain = msgspec.to_builtins(value)
    return {"digest": hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest(), "value": plain}
