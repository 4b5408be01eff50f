"""A task looked through before it is paid for: what is set, what is advised, and what will probably go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gradserve.algorithms.advice import Advice, advised, parameters_in
from gradserve.algorithms.schedules import value_at
from gradserve.algorithms.tasks.calls import Call
from gradserve.algorithms.tasks.keywords import constructor_keywords
from gradserve.algorithms.tasks.plan import Plan
from gradserve.algorithms.tasks.task import Task

_FEW_STEPS = 10
_FEW_EPISODES = 32


@dataclass(frozen=True)
class Model:
    """``parameters`` and ``context`` (tokens) are None where nobody knows."""

    name: str
    parameters: int | None = None
    context: int | None = None

    @classmethod
    def named(cls, name: str, context: int | None = None) -> Model:
        """With the size that its name says."""
        return cls(name, parameters_in(name), context)


@dataclass(frozen=True)
class Compared:
    """An advice and what the task does. ``is_set``: by the file, not by default."""

    advice: Advice
    value: Any
    is_set: bool

    @property
    def is_near(self) -> bool:
        """Of a schedule the value that it begins with."""
        return self.advice.is_near(value_at(self.value, 0.0))


def compared(task: Task, model: Model) -> list[Compared]:
    """What is advised for this trainer and model, beside what the task says."""
    mode = task.told("mode") if "mode" in constructor_keywords(task.trainer) else None
    given = {**task.constructor.keywords, **task.fit}
    return [
        Compared(advice, task.told(advice.keyword), advice.keyword in given)
        for advice in advised(task.name, model.parameters, mode)
    ]


def defaults(task: Task) -> dict[str, Any]:
    """Of the constructor's keywords those that the file leaves as they are."""
    known = constructor_keywords(task.trainer).items()
    return {name: keyword.default for name, keyword in known if name not in task.constructor.keywords}


def warnings(task: Task, model: Model, plan: Plan | None) -> Iterator[str]:
    """Sentences, each with what to write instead. ``plan`` is None for a control task."""
    for found in compared(task, model):
        if not found.is_near:
            advice = found.advice
            yield (
                f"{advice.keyword} is {found.value}, and {advice.value:g} is advised ({advice.low:g} to "
                f"{advice.high:g}): {advice.because}"
            )
    if plan is None:
        return
    yield from _of_the_data(task, plan)
    yield from _of_lengths(task, model)
    if plan.max_tokens is not None and plan.group_size > 1 and plan.episodes_per_step < _FEW_EPISODES:
        yield (
            f"a step has {plan.episodes_per_step} episodes: so few say little; raise batch_size or {plan.group_keyword}"
        )
    if _told(task, "temperature") == 0:
        yield "temperature is 0: all answers to a prompt are the same, so nothing is learned; leave it at 1"


def _of_the_data(task: Task, plan: Plan) -> Iterator[str]:
    if task.fit.get("eval_data") is None:
        yield "[data] eval is missing: nothing will tell learning from memorising; hold rows out, eval = {split = ...}"
    elif _overlap(_rows(task, "train_data"), _rows(task, "eval_data")):
        yield "[data] eval reads rows that are trained on; give both a split, '[:90%]' and '[90%:]'"
    if plan.rows is not None and plan.rows < plan.batch_size:
        yield f"there are {plan.rows} rows and batch_size is {plan.batch_size}: an epoch is one smaller step"
    if plan.steps is not None and plan.steps < _FEW_STEPS:
        yield f"there will be only {plan.steps} optimizer steps: raise epochs or max_steps, or lower batch_size"


def _overlap(train: tuple[Any, Any], evaluated: tuple[Any, Any]) -> bool:
    """Of the same source, unless both have a split and not the same one."""
    (source, split), (other_source, other_split) = train, evaluated
    return bool(source == other_source) and (not split or not other_split or split == other_split)


def _rows(task: Task, keyword: str) -> tuple[Any, Any]:
    """The source and the split of [data] train or eval."""
    told = task.fit[keyword]
    return (told.keywords["source"], told.keywords.get("split")) if isinstance(told, Call) else (told, None)


def _of_lengths(task: Task, model: Model) -> Iterator[str]:
    if model.context is None:
        return
    for keyword in ("max_tokens", "max_length"):
        tokens = _told(task, keyword)
        if tokens is not None and tokens >= model.context:
            yield (
                f"{keyword} is {tokens:,} and the context of {model.name} is {model.context:,} tokens, prompt "
                "included: longer ones are refused by the server"
            )


def _told(task: Task, keyword: str) -> Any:
    return task.told(keyword) if keyword in constructor_keywords(task.trainer) else None
