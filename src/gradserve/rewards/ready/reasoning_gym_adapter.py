"""Tasks of the package reasoning-gym: rows that it generates, and the reward that its own scorers give.

    rows = reasoning_gym_rows("leg_counting", size=500, seed=0, max_animals=4)
    trainer = RLTrainer(model, reward_func=reasoning_gym("leg_counting"))
    trainer.fit(rows)

Needs the extra "reasoning-gym".
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from gradserve.rewards.contract import Reward
from gradserve.rewards.naming import factory
from gradserve.rewards.ready.extras import need

_TUPLE, _ITEMS = "$tuple", "$items"
"""The only keys of the objects that stand for a tuple, and for a dict whose keys are not all texts."""


def reasoning_gym_rows(name: str, size: int, seed: int, **config: Any) -> list[dict[str, Any]]:
    """``size`` tasks of the dataset ``name``, equal for equal arguments: ``{"prompt", "answer", "state"}``.

    ``config`` is the dataset's own configuration (``max_animals=4``). ``state`` is what the scorer needs, as JSON: the
    dataset, its configuration and the task's metadata. ``answer`` is None where a task has many right answers. Rows of
    several datasets can be joined: the reward scores each with its own.

    Raises ValueError for a dataset that the package doesn't have, TypeError for a setting that it doesn't have or that
    is not JSON.
    """
    need("reasoning_gym", "reasoning-gym")
    if size < 1:
        raise ValueError(f"size is {size}: give at least 1")
    settings = json.dumps(config, sort_keys=True)
    dataset = _generator(name, {**config, "size": size, "seed": seed})
    return [
        {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "state": {"dataset": name, "config": json.loads(settings), "metadata": _to_json(entry["metadata"])},
        }
        for entry in (dataset[index] for index in range(size))
    ]


@factory
def reasoning_gym(name: str | None = None, tag: str | None = "answer") -> Reward:
    """What ``score_answer`` of the row's dataset gives, from 0.0 to 1.0; for rows of :func:`reasoning_gym_rows`.

    The answer is what stands in the last ``<answer>...</answer>`` of the completion, as in the package's own trainings;
    ``tag`` names another tag, and None takes the whole completion. Without the tag there is no answer, which the
    scorers give 0.0. ``name``: refuse rows of another dataset; None takes any. A scorer that raises is a failure, as
    with every reward.
    """
    utilities = need("reasoning_gym.utils", "reasoning-gym")
    if name is not None:
        _refuse_unknown(name)

    def reward(prompt: Any, completion: str, answer: Any, state: Any) -> float:
        dataset, config, metadata = _task_of(state)
        if name not in (None, dataset):
            raise ValueError(f"the row is of {dataset}, and this reward is for {name}")
        given = completion.strip() if tag is None else utilities.extract_answer(completion, tag_name=tag)
        entry = {"question": prompt, "answer": answer, "metadata": metadata}
        return float(_scorer(dataset, json.dumps(config, sort_keys=True)).score_answer(given, entry))

    return reward


def _task_of(state: Any) -> tuple[str, dict[str, Any], Any]:
    if not isinstance(state, Mapping) or not {"dataset", "config", "metadata"} <= state.keys():
        raise ValueError("the row's state is not of a reasoning-gym task: make the rows by reasoning_gym_rows")
    return state["dataset"], state["config"], _from_json(state["metadata"])


@functools.lru_cache(maxsize=64)
def _scorer(name: str, config: str) -> Any:
    """Kept: some datasets read word lists when they are made. Some scorers go by the configuration."""
    return _generator(name, json.loads(config))


def _generator(name: str, config: Mapping[str, Any]) -> Any:
    _refuse_unknown(name)
    return need("reasoning_gym", "reasoning-gym").create_dataset(name, **config)


def _refuse_unknown(name: str) -> None:
    known = need("reasoning_gym.factory", "reasoning-gym").DATASETS
    if name not in known:
        raise ValueError(f"reasoning-gym has no dataset {name!r}; it has {', '.join(sorted(known))}")


def _to_json(value: Any) -> Any:
    """JSON that :func:`_from_json` makes equal again: some scorers compare tuples, or look up numbers in dicts."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and key not in (_TUPLE, _ITEMS) for key in value):
            return {key: _to_json(item) for key, item in value.items()}
        return {_ITEMS: [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    raise TypeError(f"the task's metadata has a {type(value).__name__}, which can't be kept as JSON: {value!r:.80}")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(_from_json(item) for item in value[_TUPLE])
    if value.keys() == {_ITEMS}:
        return {_from_json(key): _from_json(item) for key, item in value[_ITEMS]}
    return {key: _from_json(item) for key, item in value.items()}
