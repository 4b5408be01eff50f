"""Which waiting Tasks are computed together. Pure.

Small requests of several runs gain from sharing a pass (their products are too thin to use the processor), large ones
lose (bigger activations leave its cache); a budget of tokens separates them.
"""

from __future__ import annotations

from typing import TypeVar

from gradserve.compute.tasks import GradTask

AnyTask = TypeVar("AnyTask")


def take(waiting: list[AnyTask], budget: int) -> list[AnyTask]:
    """Remove and return what to run next: the first Task, and with a small GradTask all that fit beside it.

    Those are GradTasks of the same base and direction, oldest first, of at most ``budget`` tokens in all. A Task that
    is overtaken waits for one such pass longer; never for two, since it is then the first.
    """
    first = waiting[0]
    if not isinstance(first, GradTask):
        return [waiting.pop(0)]
    chosen, room = [0], budget - first.tokens
    for index, task in enumerate(waiting[1:], 1):
        if isinstance(task, GradTask) and _alike(first, task) and task.tokens <= room:
            chosen.append(index)
            room -= task.tokens
    taken = [waiting[index] for index in chosen]
    for index in reversed(chosen):
        del waiting[index]
    return taken


def _alike(one: GradTask, other: GradTask) -> bool:
    """Tasks on all parameters of a base share a pass with none."""
    return (one.base, one.backward) == (other.base, other.backward) and not (one.pass_rows or other.pass_rows)
