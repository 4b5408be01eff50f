"""What an Op is lowered to: Steps and what each needs from earlier ones. Immutable and printable.

>>> print(Program("run:op:3", (Compute(InitTask("run:op:3/0", "tiny", LoraConfig(8, seed=1)), ()),)))
program run:op:3
  %0 = init tiny rank=8 seed=1
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gradserve.compute.tasks import (
    CheckTask,
    Digest,
    Done,
    EvaluateTask,
    GradTask,
    GraphTask,
    InitTask,
    LossTask,
    ModuleTask,
    OptimTask,
    Outcome,
    ReduceTask,
    RolloutTask,
    SampleTask,
    ScoreTask,
    Task,
    UpdateTask,
)
from gradserve.wire.ops import LoraConfig, graph_of

__all__ = ["Compute", "LoraConfig", "Persist", "Program", "Step"]


@dataclass(frozen=True)
class Compute:
    """A Task for a worker, which takes what the steps ``after`` made, in that order: a ReduceTask their gradients, a
    LossTask their scores, a GradTask the cotangents of the one LossTask."""

    task: Task
    after: tuple[int, ...] = ()

    def bind(self, outcomes: dict[int, Outcome]) -> Task:
        """The Task with the digests that the earlier steps produced."""
        match self.task:
            case ReduceTask():
                return msgspec.structs.replace(self.task, gradients=self._made("gradient", outcomes))
            case LossTask():
                return msgspec.structs.replace(self.task, scores=self._made("scores", outcomes))
            case GradTask() if self.after:
                (cotangents,) = self._made("cotangents", outcomes)
                return msgspec.structs.replace(self.task, cotangents=cotangents)
            case task:
                return task

    def _made(self, name: str, outcomes: dict[int, Outcome]) -> list[Digest]:
        done = [outcomes[step] for step in self.after]
        return [outcome.objects[name] for outcome in done if isinstance(outcome, Done)]


@dataclass(frozen=True)
class Persist:
    """Make objects durable; runs in the server, no worker is needed."""

    digests: tuple[Digest, ...]


Step = Compute | Persist


@dataclass(frozen=True)
class Program:
    """The steps of one Op, in an order in which every step comes after those it needs."""

    op_id: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join([f"program {self.op_id}", *(f"  {line}" for line in self.lines())])

    def lines(self) -> list[str]:
        """One line for each step."""
        return [f"%{number} = {_words(step)}" for number, step in enumerate(self.steps)]


def _module_words(task: ModuleTask) -> str:
    what = f"graph:{task.graph[:8]} weights={task.weights[:8]}"
    match task:
        case GraphTask():
            sizes = " ".join(f"{name}={list(array.shape)}" for name, array in sorted(task.arrays.items()))
            return f"{'grad' if task.backward else 'forward'} {what} {sizes}"
        case RolloutTask():
            members = task.spec.members(task.group)
            first, last = members[0], members[-1]
            return f"rollout {what} {task.spec.env.id} environments={first}..{last} steps={task.spec.steps}"
        case UpdateTask():
            trajectories = " ".join(digest[:8] for digest in task.trajectories)
            return f"ppo {what} trajectories={trajectories} epochs={task.config.epochs}"
        case EvaluateTask():
            return f"evaluate {what} {task.env.id} episodes={task.episodes}"


def _loss(name: str) -> str:
    """A graph by the start of its hash."""
    digest = graph_of(name)
    return name if digest is None else f"graph:{digest[:8]}"


def _optimizer(task: OptimTask) -> str:
    return "sgd" if task.sgd is not None else "adam" if task.coupled_decay else "adamw"


def _trained(lora: LoraConfig | None) -> str:
    return "all parameters" if lora is None else f"rank={lora.rank} seed={lora.seed}"


def _words(step: Step) -> str:
    if isinstance(step, Persist):
        return "persist " + " ".join(digest[:8] for digest in step.digests)
    match step.task:
        case InitTask() as task:
            return f"init {task.base} {_trained(task.lora)}"
        case GradTask() as task:
            verb = "grad" if task.backward else "forward"
            tokens = sum(row.length for row in task.rows)
            passes = f" passes={len(task.pass_rows)}" if task.pass_rows else ""
            given = f" cotangents=%{step.after[0]}.{task.part}" if step.after else ""
            loss = _loss(task.loss)
            return f"{verb} {task.base}+{task.weights[:8]} {loss} rows={len(task.rows)} tokens={tokens}{passes}{given}"
        case ScoreTask() as task:
            return f"score {task.base}+{task.weights[:8]} {_loss(task.loss)} rows={len(task.rows)} tokens={task.tokens}"
        case LossTask() as task:
            return f"loss {_loss(task.loss)} rows={len(task.rows)} " + " ".join(f"%{number}" for number in step.after)
        case GraphTask() | RolloutTask() | UpdateTask() | EvaluateTask() as task:
            return _module_words(task)
        case CheckTask() as task:
            return f"check graph:{task.graph[:8]}"
        case ReduceTask():
            return "reduce " + " ".join(f"%{number}" for number in step.after)
        case OptimTask() as task:
            moments = task.moments[:8] if task.moments else "none"
            gradients = " ".join(digest[:8] for digest in task.gradients)
            return f"{_optimizer(task)} weights={task.weights[:8]} moments={moments} gradients={gradients}"
        case SampleTask() as task:
            weights = task.op.weights[:8] if task.op.weights else "base"
            prompt = len(task.op.prompt) // 4
            return f"sample {task.op.base}+{weights} prompt={prompt} n={task.op.num_samples}"
