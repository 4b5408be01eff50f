"""From an Op to its Program. Pure: the same Op, run state and budget give the same Program.

The cutting of a forward_backward depends only on the rows and the budget, never on which workers there are, and
its gradients are folded in Task order; so the result does not depend on who computed what.
"""

from __future__ import annotations

from gradserve.compute.tasks import (
    EvaluateTask,
    GradTask,
    GraphTask,
    InitTask,
    LossTask,
    OptimTask,
    ReduceTask,
    RolloutTask,
    SampleTask,
    ScoreTask,
    UpdateTask,
)
from gradserve.orchestration.program import Compute, Persist, Program, Step
from gradserve.store.base import Run
from gradserve.wire.data import Row
from gradserve.wire.errors import UserError
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


def lower(op_id: str, body: OpBody, run: Run | None, task_tokens: int) -> Program:
    """The Program of one Op. ``run`` is the run as the Op finds it (None for a Sample).

    ``task_tokens`` is the token budget of one GradTask; a row longer than the budget gets a Task of its own
    (so 0 cuts after every row).
    """
    return Program(op_id, _steps(op_id, body, run, task_tokens))


def sample_task_id(op_id: str) -> str:
    """The id of the one Task of a Sample."""
    return f"{op_id}/0"


def _steps(op_id: str, body: OpBody, run: Run | None, task_tokens: int) -> tuple[Step, ...]:
    match body:
        case Sample():
            return (Compute(SampleTask(sample_task_id(op_id), body)),)
        case CreateModel():
            return (Compute(InitTask(f"{op_id}/0", body.base, body.lora)),)
        case ForwardBackward():
            return _forward_backward(op_id, body, _existing(run), task_tokens)
        case OptimStep():
            return _optim_step(op_id, body, _existing(run))
        case SaveWeights():
            return (_persist(body, _existing(run)),)
        case CreateLoss() | SaveForSampling() | LoadWeights() | CreateModule() | PutTrajectory():
            return ()
        case ApplyGraph() | Rollout() | UpdatePolicy() | Evaluate():
            return _module_steps(op_id, body, _existing(run))


def _forward_backward(op_id: str, body: ForwardBackward, run: Run, task_tokens: int) -> tuple[Step, ...]:
    assert run.weights is not None
    groups = cut(body.rows, task_tokens)
    if run.lora is None:
        return (Compute(_in_one_task(op_id, body, run, groups)),)
    if body.whole and len(groups) > 1:
        return _in_two_stages(op_id, body, run, groups)
    steps: list[Step] = [
        Compute(GradTask(f"{op_id}/{number}", run.base, run.weights, rows, body.loss, body.config, body.backward))
        for number, rows in enumerate(groups)
    ]
    if body.backward and len(steps) > 1:
        steps.append(Compute(ReduceTask(f"{op_id}/{len(steps)}", []), tuple(range(len(steps)))))
    return tuple(steps)


def _module_steps(op_id: str, body: ApplyGraph | Rollout | UpdatePolicy | Evaluate, run: Run) -> tuple[Step, ...]:
    assert run.weights is not None
    weights, moments = run.weights, run.moments
    match body:
        case ApplyGraph():
            return (Compute(GraphTask(f"{op_id}/0", body.graph, weights, body.arrays, body.backward)),)
        case Rollout():
            if run.gradients:
                raise UserError(
                    "rollout.unread",
                    "The last rollout's trajectories, or a gradient, have not been used yet.",
                    fix="Send an update (or an optim_step) between two rollouts.",
                )
            return tuple(
                Compute(RolloutTask(f"{op_id}/{group}", body.graph, weights, moments, body.spec, group))
                for group in range(body.spec.groups)
            )
        case UpdatePolicy():
            trajectories = [digest for _, digest in run.gradients]
            if not trajectories:
                raise UserError(
                    "update.nothing", "There are no trajectories to learn from.", fix="Send a rollout first."
                )
            task = UpdateTask(
                f"{op_id}/0", body.graph, weights, moments, trajectories, body.space, body.env, body.config, body.seed
            )
            return (Compute(task),)
        case Evaluate():
            task_of = EvaluateTask(
                f"{op_id}/0",
                body.graph,
                weights,
                body.env,
                body.episodes,
                body.seed,
                body.deterministic,
                body.normalise_observations,
                body.clip_observation,
            )
            return (Compute(task_of),)


def _in_two_stages(op_id: str, body: ForwardBackward, run: Run, groups: list[list[Row]]) -> tuple[Step, ...]:
    """A loss over the whole request: scores of every group, the loss on all of them, its cotangents through each."""
    assert run.weights is not None
    count = len(groups)
    steps: list[Step] = [
        Compute(ScoreTask(f"{op_id}/{number}", run.base, run.weights, rows, body.loss))
        for number, rows in enumerate(groups)
    ]
    part_rows = tuple(len(rows) for rows in groups)
    loss = LossTask(f"{op_id}/{count}", run.base, run.weights, body.rows, part_rows, body.loss, [])
    steps.append(Compute(loss, tuple(range(count))))
    if not body.backward:
        return tuple(steps)
    for part, rows in enumerate(groups):
        task = GradTask(f"{op_id}/{count + 1 + part}", run.base, run.weights, rows, body.loss, {}, True, part=part)
        steps.append(Compute(task, (count,)))
    gradients = tuple(range(count + 1, 2 * count + 1))
    steps.append(Compute(ReduceTask(f"{op_id}/{2 * count + 1}", []), gradients))
    return tuple(steps)


def _in_one_task(op_id: str, body: ForwardBackward, run: Run, groups: list[list[Row]]) -> GradTask:
    """A gradient of all parameters is as large as the model: the worker sums those of the groups, in the same order."""
    assert run.weights is not None
    pass_rows = tuple(len(rows) for rows in groups)
    return GradTask(f"{op_id}/0", run.base, run.weights, body.rows, body.loss, body.config, body.backward, pass_rows)


def _optim_step(op_id: str, body: OptimStep, run: Run) -> tuple[Step, ...]:
    if not run.gradients:
        return ()  # nothing was accumulated: the step is a no-op, not a step of momentum
    assert run.weights is not None
    gradients = [digest for _, digest in sorted(run.gradients)]
    return (
        Compute(OptimTask(f"{op_id}/0", run.weights, run.moments, gradients, body.adam, body.coupled_decay, body.sgd)),
    )


def _persist(body: SaveWeights, run: Run) -> Persist:
    assert run.weights is not None
    with_moments = body.kind == "weights" and run.moments is not None
    return Persist((run.weights, run.moments) if with_moments and run.moments else (run.weights,))


def cut(rows: list[Row], task_tokens: int) -> list[list[Row]]:
    """Rows in order, in groups of at most ``task_tokens`` tokens (or one longer row)."""
    groups: list[list[Row]] = []
    room = 0
    for row in rows:
        if not groups or row.length > room:
            groups.append([])
            room = task_tokens
        groups[-1].append(row)
        room -= row.length
    return groups


def _existing(run: Run | None) -> Run:
    if run is None:
        raise ValueError("this Op belongs to a run")
    return run
