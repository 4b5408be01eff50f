"""From the outcomes of an Op's Program to the one Settlement that records them. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gradserve.compute.combine import joined
from gradserve.compute.tasks import Done, Failed, Usage
from gradserve.orchestration.meter import ledger_line
from gradserve.settings import PriceSheet
from gradserve.store.base import (
    Checkpoint,
    Event,
    Metrics,
    Op,
    Run,
    RunUpdate,
    SamplingSession,
    Settlement,
    Version,
    VersionCause,
)
from gradserve.wire import codec
from gradserve.wire.control import EpisodeStats
from gradserve.wire.errors import Gone, Problem, ServerError, UserError
from gradserve.wire.ops import (
    ApplyGraph,
    CreateLoss,
    CreateModel,
    CreateModule,
    Evaluate,
    ForwardBackward,
    LoadWeights,
    OpBody,
    OptimStep,
    PutTrajectory,
    Rollout,
    Sample,
    SaveForSampling,
    SaveWeights,
    UpdatePolicy,
)
from gradserve.wire.results import ForwardBackwardResult, GraphResult, SampleResult

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
MSGPACK = "application/msgpack"


@dataclass(frozen=True)
class Context:
    """What a settlement needs besides the outcomes: the run as the Op found it, the checkpoint that a load names
    or that a save would replace, the size of what a save made durable."""

    op: Op
    body: OpBody
    run: Run | None
    prices: PriceSheet
    at: float
    checkpoint: Checkpoint | None = None
    size_bytes: int = 0


def settle_done(context: Context, outcomes: Sequence[Done]) -> Settlement:
    """The Settlement of an Op whose Tasks all succeeded. Raises UserError when the Op itself is at fault."""
    usage = sum((outcome.usage for outcome in outcomes), Usage())
    settlement = _SETTLERS[type(context.body)](context, outcomes)
    if not outcomes:
        return settlement  # nothing was executed on a worker, so nothing is charged
    base = context.body.base if isinstance(context.body, Sample) else _run(context).base
    line = ledger_line(context.op, base, usage, context.prices, context.at)
    return msgspec.structs.replace(settlement, ledger=line)


def _history(context: Context, version: int, values: dict[str, float]) -> Metrics:
    """What a training Op measured, for the run's history. JSON has no word for what is not finite: it is left out."""
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return Metrics(_run(context).id, context.op.tenant, context.op.seq, version, context.op.kind, context.at, finite)


def settle_failed(op: Op, problem: Problem, at: float) -> Settlement:
    """The Settlement of an Op that failed: its seq is consumed, the run is as it was, nothing is charged."""
    return Settlement(op.id, "failed", at, problem=problem)


def after(run: Run, settlement: Settlement) -> Run:
    """The run's row as the settlement will have written it."""
    if settlement.run is None:
        return run
    changes = {name: getattr(settlement.run, name) for name in settlement.run.__struct_fields__}
    return msgspec.structs.replace(run, **changes)


def problem_of(failed: Failed) -> Problem:
    """What the client is told about a Task that raised."""
    return cancelled() if failed.kind == "cancelled" else refusal(failed).problem()


def refusal(failed: Failed) -> UserError | ServerError:
    """The same to be raised."""
    error: UserError | ServerError
    match failed.kind:
        case "user":
            error = UserError("compute.refused", failed.message)
        case "too_large":
            error = UserError(
                "compute.too_large",
                failed.message,
                field="data",
                index=failed.index,
                fix="Send shorter rows or fewer targets, or give the server a larger worker_memory_bytes.",
            )
        case "out_of_memory":
            peak = failed.peak_rss_bytes / 2**20
            error = ServerError(
                "compute.out_of_memory",
                f"The worker ran out of memory ({failed.message}; its peak so far was {peak:.0f} MiB).",
                fix="Send shorter or fewer rows, or give the server a smaller task_tokens or kv_cache_bytes.",
            )
        case "corrupt":
            error = weights_corrupt(failed.message)
        case "mismatch":
            error = weights_mismatch(failed.message)
        case "internal" | "cancelled":
            error = ServerError("compute.fault", f"The computation failed on our side: {failed.message}")
    return error


def weights_corrupt(what: str) -> ServerError:
    """Stored weights, moments or gradients are not what they were when they were written."""
    return ServerError(
        "weights.corrupt",
        f"Stored arrays of this run were changed or damaged ({what}); nothing was computed from them.",
        fix="Create a training client from the last saved state.",
    )


def cancelled() -> Problem:
    """What the future of a cancelled Op answers."""
    return Gone("op.cancelled", "The request was cancelled; nothing is charged for it.").problem()


def weights_mismatch(what: str) -> ServerError:
    """Something was computed from other weights than it was asked for, or was about to be."""
    return ServerError(
        "weights.mismatch",
        f"Arrays of different versions met; nothing was recorded ({what}).",
        fix="Create a training client from the last saved state.",
    )


def _run(context: Context) -> Run:
    assert context.run is not None
    return context.run


def _done(context: Context, answer: object) -> Settlement:
    return Settlement(context.op.id, "done", context.at, msgspec.json.encode(answer), JSON)


def _computed(context: Context, encoded: bytes, result: ForwardBackwardResult | SampleResult) -> Settlement:
    """A result with where it comes from, beside the bytes that the client reads."""
    return Settlement(
        context.op.id, "done", context.at, encoded, PROTOBUF, weights=result.weights, version=result.version
    )


def _require_weights(result: ForwardBackwardResult | SampleResult, weights: str | None) -> None:
    """The worker says which weights it used; a result of any others would be a wrong one."""
    if result.weights != weights:
        raise weights_mismatch(f"asked for {weights}, computed with {result.weights}")


def _update(run: Run, **changes: object) -> RunUpdate:
    same = {name: getattr(run, name) for name in RunUpdate.__struct_fields__}
    return RunUpdate(**{**same, **changes})


def _create_loss(context: Context, outcomes: Sequence[Done]) -> Settlement:
    body = context.body
    assert isinstance(body, CreateLoss)
    return _done(context, {"loss_id": body.graph})


def _create_model(context: Context, outcomes: Sequence[Done]) -> Settlement:
    run = _run(context)
    return msgspec.structs.replace(
        _done(context, {"model_id": run.id}), run=_update(run, weights=outcomes[0].objects["weights"])
    )


def _forward_backward(context: Context, outcomes: Sequence[Done]) -> Settlement:
    body = context.body
    assert isinstance(body, ForwardBackward)
    parts = [outcome.rows for outcome in outcomes if outcome.rows is not None]
    run = _run(context)
    result = msgspec.structs.replace(combine(parts), version=run.version)
    _require_weights(result, run.weights)
    settlement = _computed(context, codec.encode_forward_backward(result), result)
    if not body.backward:
        return settlement
    gradient = outcomes[-1].objects["gradient"]  # of the only GradTask, or of the ReduceTask after them
    update = _update(run, gradients=(*run.gradients, (context.op.seq, gradient)))
    return msgspec.structs.replace(settlement, run=update, metrics=_history(context, run.version, result.metrics))


def combine(parts: Sequence[ForwardBackwardResult]) -> ForwardBackwardResult:
    """The results of an Op's Tasks as one. Raises ServerError when they weren't computed with the same weights.

    In two stages the log-probs are those of the scores, and the metrics those of the one loss.
    """
    for part in parts:
        _require_weights(part, parts[0].weights)
    metrics = [part.metrics for part in parts if part.metrics]
    if len(metrics) == 1:
        logprobs = [row for part in parts for row in part.logprobs]
        return ForwardBackwardResult(logprobs, metrics[0], parts[0].weights)
    return joined(parts)


def _optim_step(context: Context, outcomes: Sequence[Done]) -> Settlement:
    if not outcomes:
        return _done(context, {"metrics": {"grad_norm": 0.0, "step_skipped": 1.0}})
    run = _run(context)
    (outcome,) = outcomes
    update = _update(
        run,
        version=run.version + 1,
        weights=outcome.objects["weights"],
        moments=outcome.objects["moments"],
        gradients=(),
    )
    history = _history(context, update.version, outcome.metrics)
    return msgspec.structs.replace(_done(context, {"metrics": outcome.metrics}), run=update, metrics=history)


def _create_module(context: Context, outcomes: Sequence[Done]) -> Settlement:
    body, run = context.body, _run(context)
    assert isinstance(body, CreateModule)
    return msgspec.structs.replace(_done(context, {"model_id": run.id}), run=_update(run, weights=body.weights))


def _apply_graph(context: Context, outcomes: Sequence[Done]) -> Settlement:
    body, run, (outcome,) = context.body, _run(context), outcomes
    assert isinstance(body, ApplyGraph)
    result = GraphResult(outcome.outputs, outcome.metrics, run.weights, run.version)
    settlement = Settlement(
        context.op.id,
        "done",
        context.at,
        msgspec.msgpack.encode(result),
        MSGPACK,
        weights=run.weights,
        version=run.version,
    )
    if not body.backward:
        return settlement
    update = _update(run, gradients=(*run.gradients, (context.op.seq, outcome.objects["gradient"])))
    return msgspec.structs.replace(settlement, run=update, metrics=_history(context, run.version, outcome.metrics))


def _rollout(context: Context, outcomes: Sequence[Done]) -> Settlement:
    run, stats = _run(context), _episodes(outcomes)
    made = tuple((context.op.seq, outcome.objects["trajectory"]) for outcome in outcomes)
    update = _update(run, gradients=(*run.gradients, *made))
    history = _history(context, run.version, episode_metrics(stats))
    return msgspec.structs.replace(_answer_episodes(context, stats), run=update, metrics=history)


def _put_trajectory(context: Context, outcomes: Sequence[Done]) -> Settlement:
    body, run = context.body, _run(context)
    assert isinstance(body, PutTrajectory)
    update = _update(run, gradients=(*run.gradients, (context.op.seq, body.trajectory)))
    return msgspec.structs.replace(_done(context, {"version": run.version}), run=update)


def _evaluate(context: Context, outcomes: Sequence[Done]) -> Settlement:
    run, stats = _run(context), _episodes(outcomes)
    return msgspec.structs.replace(
        _answer_episodes(context, stats), metrics=_history(context, run.version, episode_metrics(stats))
    )


def _answer_episodes(context: Context, stats: EpisodeStats) -> Settlement:
    return _done(context, {"episodes": stats, "metrics": episode_metrics(stats), "version": _run(context).version})


def _episodes(outcomes: Sequence[Done]) -> EpisodeStats:
    """Those of all groups, group by group."""
    parts = [outcome.episodes for outcome in outcomes if outcome.episodes is not None]
    return EpisodeStats(
        tuple(value for part in parts for value in part.returns),
        tuple(value for part in parts for value in part.lengths),
        sum(part.env_steps for part in parts),
    )


def episode_metrics(stats: EpisodeStats) -> dict[str, float]:
    """Means over the episodes that ended; without any, only the counts."""
    found = {"episodes": float(len(stats.returns)), "env_steps": float(stats.env_steps)}
    if stats.returns:
        found["episode_return"] = statistics.fmean(stats.returns)
        found["episode_length"] = statistics.fmean(stats.lengths)
    return found


def _save_weights(context: Context, outcomes: Sequence[Done]) -> Settlement:
    body, run = context.body, _run(context)
    assert isinstance(body, SaveWeights)
    assert run.weights is not None
    if context.checkpoint is not None and not body.overwrite:
        raise UserError(
            "checkpoint.exists",
            f"{context.checkpoint.path} exists.",
            field="path",
            fix="Choose another name or pass overwrite=true.",
        )
    checkpoint = Checkpoint(
        run_id=run.id,
        tenant=run.tenant,
        kind=body.kind,
        name=body.name,
        base=run.base,
        lora=run.lora,
        version=run.version,
        weights=run.weights,
        moments=run.moments if body.kind == "weights" else None,
        size_bytes=context.size_bytes,
        created_at=context.at,
        expires_at=None if body.ttl_seconds is None else context.at + body.ttl_seconds,
        user_metadata=body.user_metadata,
        client_state=body.client_state,
    )
    answer: dict[str, object] = {"path": checkpoint.path}
    if body.kind == "external_weights":
        answer["size_bytes"] = context.size_bytes
    settlement = msgspec.structs.replace(_done(context, answer), checkpoint=checkpoint)
    if body.kind != "weights" or run.gradients:
        return settlement
    return msgspec.structs.replace(settlement, durable=version_of(context, run, "save"))


def version_of(context: Context, run: Run, cause: VersionCause) -> Version:
    """The durable version that this Op makes: its arrays are in the durable tier already."""
    assert run.weights is not None
    return Version(
        run_id=run.id,
        tenant=run.tenant,
        version=run.version,
        seq=context.op.seq,
        weights=run.weights,
        moments=run.moments,
        cause=cause,
        size_bytes=context.size_bytes,
        created_at=context.at,
    )


def _save_for_sampling(context: Context, outcomes: Sequence[Done]) -> Settlement:
    body, run = context.body, _run(context)
    assert isinstance(body, SaveForSampling)
    session = SamplingSession(
        id=body.sampling_session_id,
        tenant=run.tenant,
        session_id=context.op.session_id,
        base=run.base,
        created_at=context.at,
        weights=run.weights,
        run_id=run.id,
        run_version=run.version,
    )
    return msgspec.structs.replace(_done(context, {"sampling_session_id": session.id}), sampling_session=session)


def _load_weights(context: Context, outcomes: Sequence[Done]) -> Settlement:
    body, run, source = context.body, _run(context), context.checkpoint
    assert isinstance(body, LoadWeights)
    if source is None:
        raise UserError("checkpoint.unknown", f"There is no checkpoint {body.path} (any more).", field="path")
    update = _update(
        run,
        version=source.version if body.creates else run.version + 1,
        weights=source.weights,
        moments=source.moments if body.optimizer else None,
        gradients=(),
        corrupted=False,
    )
    settlement = msgspec.structs.replace(_done(context, {"path": body.path, "model_id": run.id}), run=update)
    event = Event(
        context.at,
        "loaded",
        f"{body.path} (step {source.version}), {'with' if body.optimizer else 'without'} optimizer moments",
        run.tenant,
        run.id,
        context.op.seq,
    )
    return msgspec.structs.replace(settlement, durable=version_of(context, after(run, settlement), "load"), event=event)


def _sample(context: Context, outcomes: Sequence[Done]) -> Settlement:
    body, (outcome,) = context.body, outcomes
    assert isinstance(body, Sample)
    assert outcome.sample is not None
    _require_weights(outcome.sample, body.weights)
    return _computed(context, codec.encode_sample(outcome.sample), outcome.sample)


_SETTLERS = {
    CreateModule: _create_module,
    ApplyGraph: _apply_graph,
    Rollout: _rollout,
    PutTrajectory: _put_trajectory,
    UpdatePolicy: _optim_step,
    Evaluate: _evaluate,
    CreateLoss: _create_loss,
    CreateModel: _create_model,
    ForwardBackward: _forward_backward,
    OptimStep: _optim_step,
    SaveWeights: _save_weights,
    SaveForSampling: _save_for_sampling,
    LoadWeights: _load_weights,
    Sample: _sample,
}
