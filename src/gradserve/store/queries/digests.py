"""Which arrays are still needed.

A finished session's sampling sessions and runs can't be used any more; only what it saved as checkpoints counts, and
runs whose last requests are still on their way.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gradserve.store.tables import checkpoints, graphs, op_bodies, ops, runs, sampling_sessions, sessions, versions
from gradserve.wire.ops import CreateModule, PutTrajectory, Sample, decode_body


def _finished(session_id: sa.Column[str]) -> sa.ColumnElement[bool]:
    return sa.exists().where(sessions.c.id == session_id, sessions.c.finished.is_not(None))


_BUSY = sa.exists().where(ops.c.scope == runs.c.id, ops.c.state == "accepted")
_USABLE_RUN = sa.or_(sa.not_(_finished(runs.c.session_id)), _BUSY)
_USABLE_SAMPLER = sa.not_(_finished(sampling_sessions.c.session_id))

_NAMED = sa.union(
    sa.select(runs.c.weights).where(_USABLE_RUN),
    sa.select(runs.c.moments).where(_USABLE_RUN),
    sa.select(sampling_sessions.c.weights).where(_USABLE_SAMPLER),
    sa.select(runs.c.client_state),
    sa.select(checkpoints.c.weights),
    sa.select(checkpoints.c.moments),
    sa.select(checkpoints.c.client_state),
    sa.select(versions.c.weights),
    sa.select(versions.c.moments),
    sa.select(graphs.c.digest),
)
_GRADIENTS = sa.select(runs.c.gradients).where(_USABLE_RUN)
_WAITING_SAMPLES = (
    sa.select(op_bodies.c.body)
    .join(ops, ops.c.n == op_bodies.c.n)
    .where(ops.c.state == "accepted", ops.c.kind == "sample")
)
_COVERED = sa.exists().where(versions.c.run_id == ops.c.run_id, versions.c.seq >= ops.c.seq)
_NAMED_BY_BODIES = (
    sa.select(op_bodies.c.body)
    .join(ops, ops.c.n == op_bodies.c.n)
    .where(
        ops.c.state.in_(("accepted", "done")),
        sa.or_(ops.c.kind == "create_module", sa.and_(ops.c.kind == "put_trajectory", sa.not_(_COVERED))),
    )
)
"""What clients sent as objects: they wait for their turn, and a replay needs them until a durable version covers it."""


def live(connection: Connection) -> set[str]:
    digests: set[str | None] = set(connection.execute(_NAMED).scalars())
    for gradients in connection.execute(_GRADIENTS).scalars():
        digests.update(digest for _, digest in gradients)
    for body in connection.execute(_WAITING_SAMPLES).scalars():
        sample = decode_body(body)
        if isinstance(sample, Sample):
            digests.add(sample.weights)
    for body in connection.execute(_NAMED_BY_BODIES).scalars():
        match decode_body(body):
            case CreateModule(weights=sent) | PutTrajectory(trajectory=sent):
                digests.add(sent)
    return {digest for digest in digests if digest is not None}
