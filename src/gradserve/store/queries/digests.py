"""Which arrays are still needed."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gradserve.store.tables import checkpoints, op_bodies, ops, runs, sampling_sessions
from gradserve.wire.ops import Sample, decode_body

_NAMED = sa.union(
    sa.select(runs.c.weights),
    sa.select(runs.c.moments),
    sa.select(sampling_sessions.c.weights),
    sa.select(checkpoints.c.weights),
    sa.select(checkpoints.c.moments),
)
_GRADIENTS = sa.select(runs.c.gradients)
_WAITING_SAMPLES = (
    sa.select(op_bodies.c.body)
    .join(ops, ops.c.n == op_bodies.c.n)
    .where(ops.c.state == "accepted", ops.c.kind == "sample")
)


def live(connection: Connection) -> set[str]:
    digests: set[str | None] = set(connection.execute(_NAMED).scalars())
    for gradients in connection.execute(_GRADIENTS).scalars():
        digests.update(digest for _, digest in gradients)
    for body in connection.execute(_WAITING_SAMPLES).scalars():
        sample = decode_body(body)
        if isinstance(sample, Sample):
            digests.add(sample.weights)
    return {digest for digest in digests if digest is not None}
