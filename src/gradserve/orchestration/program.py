"""What an Op is lowered to: Steps and what each needs from earlier ones. Immutable and printable.

>>> print(Program("run:op:3", (Compute(InitTask("run:op:3/0", "tiny", LoraConfig(8, seed=1)), ()),)))
program run:op:3
  %0 = init tiny rank=8 seed=1
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gradserve.compute.tasks import Digest, GradTask, InitTask, OptimTask, Outcome, ReduceTask, SampleTask, Task
from gradserve.wire.ops import LoraConfig

__all__ = ["Compute", "LoraConfig", "Persist", "Program", "Step"]


@dataclass(frozen=True)
class Compute:
    """A Task for a worker. A ReduceTask's gradients are those of the steps ``after``, in that order."""

    task: Task
    after: tuple[int, ...] = ()

    def bind(self, outcomes: dict[int, Outcome]) -> Task:
        """The Task with the digests that the earlier steps produced."""
        if not isinstance(self.task, ReduceTask):
            return self.task
        gradients = [outcomes[step].objects["gradient"] for step in self.after]  # type: ignore[union-attr]
        return msgspec.structs.replace(self.task, gradients=gradients)


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
        lines = [f"program {self.op_id}"]
        lines += [f"  %{number} = {_words(step)}" for number, step in enumerate(self.steps)]
        return "\n".join(lines)


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
            return f"{verb} {task.base}+{task.weights[:8]} {task.loss} rows={len(task.rows)} tokens={tokens}{passes}"
        case ReduceTask():
            return "reduce " + " ".join(f"%{number}" for number in step.after)
        case OptimTask() as task:
            moments = task.moments[:8] if task.moments else "none"
            gradients = " ".join(digest[:8] for digest in task.gradients)
            return f"adamw weights={task.weights[:8]} moments={moments} gradients={gradients}"
        case SampleTask() as task:
            weights = task.op.weights[:8] if task.op.weights else "base"
            prompt = len(task.op.prompt) // 4
            return f"sample {task.op.base}+{weights} prompt={prompt} n={task.op.num_samples}"
