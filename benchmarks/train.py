"""Training throughput: forward_backward and optim_step, pipelined as the cookbook does, 8 sequences of 128 tokens."""

from __future__ import annotations

import time
from typing import Any

from tinker import types

from .common import REPLY_LIMIT_S, Target, mean_nll, spread, supervised_batch, training_client

ROWS, LENGTH = 8, 128
WARM_UP, STEPS = 3, 20


def measure(target: Target) -> dict[str, Any]:
    """Seconds of a step and tokens per second. Raises if the loss did not fall: then nothing was trained."""
    client = training_client(target)
    data = supervised_batch(ROWS, LENGTH, target.vocab)
    adam = types.AdamParams(learning_rate=1e-3)
    seconds, losses = [], []
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        forward_backward = client.forward_backward(data, "cross_entropy")
        optim_step = client.optim_step(adam)
        output = forward_backward.result(timeout=REPLY_LIMIT_S)
        optim_step.result(timeout=REPLY_LIMIT_S)
        seconds.append(time.perf_counter() - began)
        losses.append(mean_nll(output))
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"the loss did not fall: {losses[0]:.4f} to {losses[-1]:.4f}")
    steady = seconds[WARM_UP:]
    return {
        "shape": f"{ROWS}x{LENGTH}",
        "step_s": spread(steady),
        "tokens_per_s": spread([ROWS * LENGTH / s for s in steady], digits=1),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }
