"""Which Tasks share a pass: small ones of one base and direction, up to the budget, the oldest first."""

from __future__ import annotations

from gradserve.compute.engine.merge import take
from gradserve.compute.tasks import GradTask, ReduceTask, Task
from gradserve.wire.data import Row

BUDGET = 512


def grad(name: str, *lengths: int, base: str = "base", backward: bool = True) -> GradTask:
    rows = [Row(bytes(4 * length), {}) for length in lengths]
    return GradTask(name, base, "weights", rows, "cross_entropy", {}, backward)


def passes(waiting: list[Task]) -> list[list[str]]:
    found = []
    while waiting:
        found.append([task.id for task in take(waiting, BUDGET)])
    return found


def test_small_ones_together() -> None:
    assert passes([grad(f"g{n}", 32) for n in range(20)]) == [
        [f"g{n}" for n in range(16)],
        [f"g{n}" for n in range(16, 20)],
    ]


def test_a_large_one_alone_and_not_overtaken_for_ever() -> None:
    waiting: list[Task] = [grad("a", 100), grad("big", 300, 300), grad("b", 400), grad("c", 13), grad("d", 12)]
    assert passes(waiting) == [["a", "b", "d"], ["big"], ["c"]]


def test_only_like_with_like() -> None:
    waiting: list[Task] = [
        grad("a", 10),
        grad("forward", 10, backward=False),
        ReduceTask("reduce", []),
        grad("other", 10, base="other"),
        grad("b", 10),
        grad("forward2", 10, backward=False),
    ]
    assert passes(waiting) == [["a", "b"], ["forward", "forward2"], ["reduce"], ["other"]]


def test_a_pass_of_exactly_the_budget() -> None:
    assert passes([grad("a", 256), grad("b", 256), grad("c", 0), grad("d", 1)]) == [["a", "b", "c"], ["d"]]
