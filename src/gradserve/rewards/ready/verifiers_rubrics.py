"""Rubrics and environments of verifiers, which it has in its versions to 0.3."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

from gradserve.rewards.contract import TOTAL, Reward, RewardUnusable
from gradserve.rewards.ready.extras import need


def rubric_of(made: Any) -> Any:
    """Of a rubric or an environment. Raises RewardUnusable for an environment of several turns, or anything else."""
    package = need("verifiers", "verifiers")
    if not hasattr(package, "Rubric"):
        raise RewardUnusable(f"a {type(made).__name__} was made; this version of verifiers has rewards in a Taskset")
    if isinstance(made, package.Environment) and not isinstance(made, package.SingleTurnEnv):
        raise RewardUnusable(
            f"{type(made).__name__} is not of a single turn. If its rubric scores one reply as well, name a function "
            "that makes the rubric"
        )
    rubric = getattr(made, "rubric", made)
    if not isinstance(rubric, package.Rubric):
        raise RewardUnusable(f"a {type(made).__name__} was made; a Rubric, an Environment or a Taskset is needed")
    return rubric


def rows_of(environment: Any, size: int | None, evaluation: bool) -> list[dict[str, Any]]:
    """Of the dataset that the environment trains on, or evaluates on; its other columns are the state."""
    if evaluation and environment.build_eval_dataset() is None:
        raise ValueError("the environment has no dataset for evaluation; verifiers would take the one for training")
    dataset = environment.get_eval_dataset() if evaluation else environment.get_dataset()
    count = len(dataset) if size is None else min(size, len(dataset))
    return [_row(dict(dataset[index])) for index in range(count)]


def _row(columns: dict[str, Any]) -> dict[str, Any]:
    prompt, answer = columns.pop("prompt"), columns.pop("answer", None)
    if isinstance(columns.get("info"), str):  # verifiers keeps it as JSON, whose objects may differ from row to row
        columns["info"] = json.loads(columns["info"])
    return {"prompt": prompt, "answer": answer, "state": columns}


def reward_of(rubric: Any) -> Reward:
    """Calls the rubric's functions as verifiers does, but for one that raises: verifiers logs it and takes 0."""
    weighted = list(_functions(rubric))
    if not weighted:
        raise RewardUnusable("the rubric has no reward functions")

    async def reward(prompt: Any, completion: str, answer: Any, state: Any) -> dict[str, float]:
        rollout = _rollout(prompt, completion, answer, state or {})
        parts: dict[str, float] = {}
        total = 0.0
        for owner, function, weight in weighted:
            value = await _called(function, owner.score_objects(rollout))
            total += weight * value
            parts[function.__name__] = parts.get(function.__name__, 0.0) + value
        return {**parts, TOTAL: total}

    return reward


def _functions(rubric: Any) -> Iterator[tuple[Any, Callable[..., Any], float]]:
    """(the rubric that has it, the function, its weight), through groups of rubrics."""
    package = need("verifiers", "verifiers")
    if isinstance(rubric, package.RubricGroup):
        for member in rubric.rubrics:
            yield from _functions(member)
        return
    own = (type(rubric).score_rollout, type(rubric)._call_individual_reward_func)
    if own != (package.Rubric.score_rollout, package.Rubric._call_individual_reward_func):
        raise RewardUnusable(f"{type(rubric).__name__} has a scoring of its own; only functions and weights are read")
    for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
        if rubric._is_group_func(function):
            raise RewardUnusable(f"{function.__name__} compares a group of rollouts; a reward sees one completion")
        if function.__name__ == TOTAL:
            raise RewardUnusable(
                f"a reward function is called {TOTAL}, which is the name of the weighted sum: rename it"
            )
        yield rubric, function, float(weight)


def _rollout(prompt: Any, completion: str, answer: Any, columns: dict[str, Any]) -> Any:
    """What verifiers knows of a rollout of one turn when it scores it, without what only its own sampling makes.

    A function that asks for that (the tokens, the client) meets a KeyError, which is a failure.
    """
    types = need("verifiers.types", "verifiers")
    normal = need("verifiers.utils.message_utils", "verifiers").normalize_messages
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    row = {**columns, "prompt": normal(messages), "answer": "" if answer is None else answer}
    rollout = types.State(input=row)
    rollout["task"] = columns.get("task", row)
    rollout["completion"] = normal([{"role": "assistant", "content": completion}])
    rollout["trajectory"] = [{"prompt": row["prompt"], "completion": rollout["completion"], "extras": {}}]
    return rollout


async def _called(function: Callable[..., Any], objects: dict[str, Any]) -> float:
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        objects = {name: value for name, value in objects.items() if name in parameters}
    value = function(**objects)
    return float(await value if inspect.isawaitable(value) else value)
