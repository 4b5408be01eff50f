"""An Op of the journal and the run as it found it, so that it can be lowered again and looked at.

The digests of what the run held then are not in the journal. Names stand for them: ``v3`` for the weights or moments of
version 3, ``#7`` for what the Op of seq 7 made. Where a result says its weights' digest, that is taken.
"""

from __future__ import annotations

import msgspec

from gradserve.store.base import Op, Run, Store
from gradserve.wire.ops import (
    ApplyGraph,
    ForwardBackward,
    LoadWeights,
    OpBody,
    OpKind,
    PutTrajectory,
    Rollout,
    decode_body,
)

TRAINING: tuple[OpKind, ...] = (
    "forward_backward",
    "optim_step",
    "apply_graph",
    "rollout",
    "update_policy",
    "evaluate",
)
"""What is shown when no seq is named: the newest of these."""

_STEPS: tuple[OpKind, ...] = ("optim_step", "update_policy", "load_weights", "create_model", "create_module")
"""What ends an accumulation: it begins anew after one of these."""
_PAGE = 5000


class JournalledOp(msgspec.Struct, frozen=True):
    """An Op with its body. ``run`` is as described above; ``transitions`` are those that wait in it, of rollouts."""

    id: str
    seq: int
    kind: OpKind
    state: str
    body: bytes
    run: Run
    transitions: int


async def journalled_op(store: Store, tenant: str | None, run: Run, seq: int | None) -> JournalledOp | None:
    """The Op of this seq, or the newest training Op whose body is kept; None when there is none."""
    op = await _newest(store, tenant, run) if seq is None else await _op(store, tenant, run, seq)
    if op is None or not op.body:
        return None
    version = op.version if op.version is not None else await _version_before(store, tenant, run, op.seq)
    name = f"v{version}"
    waiting, transitions, moments = await _accumulated(store, tenant, run, op.seq)
    found = msgspec.structs.replace(
        run,
        version=version,
        weights=op.weights or name,
        moments=name if moments else None,
        gradients=tuple(waiting),
    )
    return JournalledOp(op.id, op.seq, op.kind, op.state, op.body, found, transitions)


async def _newest(store: Store, tenant: str | None, run: Run) -> Op | None:
    for seq in range(run.cursor, -1, -1):
        outcome = await store.get_outcome(tenant, _id(run, seq))
        if outcome is not None and outcome.kind in TRAINING and outcome.problem is None:
            op = await _op(store, tenant, run, seq)
            if op is not None and op.body:
                return op
    return None


async def _accumulated(
    store: Store, tenant: str | None, run: Run, before: int
) -> tuple[list[tuple[int, str]], int, bool]:
    """What had accumulated before an Op, of how many transitions, and whether there were moments."""
    waiting: list[tuple[int, str]] = []
    transitions = 0
    for seq in range(before - 1, -1, -1):
        op = await _op(store, tenant, run, seq)
        if op is None or op.problem is not None:
            continue
        if op.kind in _STEPS:
            return waiting[::-1], transitions, _leaves_moments(op)
        body = decode_body(op.body) if op.body else None
        waiting += [(seq, name) for name in reversed(_made(op, body))]
        if isinstance(body, Rollout):
            transitions += body.spec.num_envs * body.spec.steps
    return waiting[::-1], transitions, False


def _leaves_moments(op: Op) -> bool:
    if op.kind == "load_weights" and op.body:
        body = decode_body(op.body)
        return isinstance(body, LoadWeights) and body.optimizer
    return op.kind in ("optim_step", "update_policy")


def _made(op: Op, body: OpBody | None) -> list[str]:
    """Names of the gradients or trajectories of an Op; one whose body has expired is taken for one gradient."""
    name = f"#{op.seq}"
    match body:
        case Rollout():
            return [f"{name}.{group}" for group in range(body.spec.groups)] if body.spec.groups > 1 else [name]
        case ForwardBackward() | ApplyGraph():
            return [name] if body.backward else []
        case PutTrajectory():
            return [name]
        case None:
            return [name] if op.kind in ("forward_backward", "apply_graph", "rollout", "put_trajectory") else []
        case _:
            return []


async def _version_before(store: Store, tenant: str | None, run: Run, seq: int) -> int:
    """The run's version after the newest measured Op before ``seq``."""
    version, offset = 0, 0
    while True:
        rows, page = await store.list_metrics(tenant, run.id, _PAGE, offset)
        version = max([version, *(row.version for row in rows if row.seq < seq)])
        offset += len(rows)
        if not rows or offset >= page.total:
            return version


async def _op(store: Store, tenant: str | None, run: Run, seq: int) -> Op | None:
    return await store.get_op(tenant, _id(run, seq))


def _id(run: Run, seq: int) -> str:
    return f"{run.id}:op:{seq}"
