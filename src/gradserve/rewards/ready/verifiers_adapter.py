"""Rewards and rows of the package verifiers: of rubrics and environments (its versions to 0.3), and of tasksets (0.4).

    rows = verifiers_rows("gsm8k", {"num_train_examples": 500})
    trainer = RLTrainer(model, reward_func=verifiers("gsm8k", {"num_train_examples": 500}))
    trainer.fit(rows)

What has one reply to a prompt is scored; what needs several turns, tools, a sandbox or a whole group is refused. Needs
the extra "verifiers".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradserve.rewards.contract import Reward
from gradserve.rewards.naming import Reference, factory, resolve
from gradserve.rewards.ready import verifiers_rubrics as rubrics
from gradserve.rewards.ready import verifiers_tasks as tasks
from gradserve.rewards.ready.extras import need


@factory
def verifiers(source: str, arguments: dict[str, Any] | None = None) -> Reward:
    """What a rubric or a taskset rewards: its functions' values by name, and as ``total`` their sum times the weights.

    ``source`` is the id of an installed environment or taskset, or the name ``"file.py:make"``, ``"module:make"`` of a
    function that makes a Rubric, an Environment or a Taskset; ``arguments`` are its arguments, or the fields of the
    taskset's configuration. Metrics are parts that don't count. A function that raises is a failure, where verifiers
    itself would give 0.

    Raises RewardUnusable for what can't be scored by one reply alone, and what the source itself raises.
    """
    made = _load(source, arguments)
    if tasks.is_taskset(made):
        return tasks.reward_of(made)
    return rubrics.reward_of(rubrics.rubric_of(made))


def verifiers_rows(
    source: str, arguments: dict[str, Any] | None = None, *, size: int | None = None, evaluation: bool = False
) -> list[dict[str, Any]]:
    """The first ``size`` rows of an environment's dataset or of a taskset, all with None: ``{prompt, answer, state}``.

    ``source`` and ``arguments`` as for :func:`verifiers`; both must be the same as for the reward. ``prompt`` is a list
    of messages with the environment's system prompt, ``state`` is what the reward needs. ``evaluation``: the dataset
    that an environment keeps for evaluation. Raises ValueError for what has no such rows or doesn't end.
    """
    if size is not None and size < 1:
        raise ValueError(f"size is {size}: give at least 1, or None for all")
    made = _load(source, arguments)
    if tasks.is_taskset(made):
        if evaluation:
            raise ValueError("a taskset has no rows for evaluation: give another taskset, or hold some rows out")
        return tasks.rows_of(made, size)
    if not hasattr(made, "get_dataset"):
        raise ValueError(f"{source} made a {type(made).__name__}, which has no dataset")
    return rubrics.rows_of(made, size, evaluation)


def _load(source: str, arguments: Mapping[str, Any] | None) -> Any:
    package = need("verifiers", "verifiers")
    if ":" in source:
        return resolve(Reference(source, dict(arguments or {})))
    if hasattr(package, "load_environment"):
        return package.load_environment(source, **(arguments or {}))
    return tasks.load(source, arguments or {})
