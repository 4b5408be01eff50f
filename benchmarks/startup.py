"""Startup: from launching the server's process to the first finished forward_backward of 8 x 128 tokens."""

from __future__ import annotations

import time
from typing import Any

from .common import REPLY_LIMIT_S, Launch, Target, first_training_client, started, supervised_batch


def measure(launch: Launch, model: str, vocab: int, rank: int) -> dict[str, Any]:
    """One launch. Importing the SDK is not counted: the process that measures has done so already."""
    with started(launch) as server:
        healthy_s = server.wait_until_healthy()
        client = first_training_client(Target(server.base_url, model, vocab, rank))
        client_s = time.monotonic() - server.started
        client.forward_backward(supervised_batch(8, 128, vocab), "cross_entropy").result(timeout=REPLY_LIMIT_S)
        return {
            "healthy_s": round(healthy_s, 3),
            "client_s": round(client_s, 3),
            "first_forward_backward_s": round(time.monotonic() - server.started, 3),
        }
