"""Several tenants at once: four clients, each with a run of its own on one base, small and larger batches.

First one tenant alone, then all at once; a server that mixes tenants in one pass gains, one that does not stays at 1.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import tinker
from tinker import types

from .common import REPLY_LIMIT_S, Target, supervised_batch, training_client

TENANTS = 4
SHAPES = ((1, 32), (4, 128))
"""(rows, length) of each tenant's batch."""
STEPS = 10


def measure(target: Target) -> dict[str, Any]:
    """Tokens per second of one tenant and of all together, by shape."""
    clients = [training_client(target) for _ in range(TENANTS)]
    found: dict[str, Any] = {}
    for rows, length in SHAPES:
        batches = [supervised_batch(rows, length, target.vocab) for _ in clients]
        together(clients, batches, 2)  # warm
        alone_s = together(clients[:1], batches[:1], STEPS)
        all_s = together(clients, batches, STEPS)
        tokens = rows * length * STEPS
        found[f"{rows}x{length}"] = {
            "one_tokens_per_s": round(tokens / alone_s, 1),
            "all_tokens_per_s": round(TENANTS * tokens / all_s, 1),
            "ratio": round(TENANTS * alone_s / all_s, 2),
        }
    return {"tenants": TENANTS, **found}


def together(clients: list[tinker.TrainingClient], batches: list[list[types.Datum]], steps: int) -> float:
    """Seconds until all clients have done their steps. Raises what a client raised."""
    errors: list[BaseException] = []

    def work(client: tinker.TrainingClient, batch: list[types.Datum]) -> None:
        try:
            for _ in range(steps):
                step(client, batch)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(clients, batches, strict=True)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - began


def step(client: tinker.TrainingClient, batch: list[types.Datum]) -> None:
    """forward_backward and optim_step, pipelined as the cookbook does."""
    gradient = client.forward_backward(batch, "cross_entropy")
    change = client.optim_step(types.AdamParams(learning_rate=1e-3))
    gradient.result(timeout=REPLY_LIMIT_S)
    change.result(timeout=REPLY_LIMIT_S)
