"""Tasksets of verifiers, which its version 0.4 has in place of rubrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gradserve.rewards.contract import TOTAL, Reward, RewardUnusable
from gradserve.rewards.ready.extras import need


def is_taskset(made: object) -> bool:
    """Whether it has a taskset's parts."""
    return hasattr(made, "load") and hasattr(made, "task_type")


def load(name: str, fields: Mapping[str, Any]) -> Any:
    """The installed taskset of that id, with these fields of its configuration."""
    package = _v1()
    config = package.taskset_config_type(name).model_validate({**fields, "id": name})
    return package.load_taskset(config)


def rows_of(taskset: Any, size: int | None) -> list[dict[str, Any]]:
    """Raises ValueError for a taskset without an end, and for a task whose prompt is not given."""
    if size is None and not taskset.bounded:
        raise ValueError("the taskset has no end: give size")
    return [_row(task) for task in (taskset if size is None else taskset.take(size))]


def _row(task: Any) -> dict[str, Any]:
    data = task.data.model_dump(mode="json")
    if not data["prompt"]:
        raise ValueError(f"task {data['idx']} has no prompt: its user would begin, and a row has one reply to a prompt")
    prompt = data["prompt"] if isinstance(data["prompt"], list) else [{"role": "user", "content": data["prompt"]}]
    system = [{"role": "system", "content": data["system_prompt"]}] if data["system_prompt"] else []
    return {"prompt": [*system, *prompt], "answer": data.get("answer"), "state": {"task": data}}


def reward_of(taskset: Any) -> Reward:
    """The task's own ``score`` of a trace that is the prompt and the completion."""
    kind = taskset.task_type()
    _refuse_more_than_a_reply(kind, taskset)

    async def reward(prompt: Any, completion: str, state: Any) -> dict[str, float]:
        task = _task_of(kind, taskset, state)
        if missing := [name for name, function in _signals(task) if _needs_sandbox(function)]:
            raise RewardUnusable(f"{', '.join(missing)} of {kind.__name__} wants a sandbox, which is not there")
        trace = _trace(task, prompt, completion)
        await task.score(trace)
        if TOTAL in trace.rewards or TOTAL in trace.metrics:
            raise RewardUnusable(f"a reward or metric is called {TOTAL}, which is the name of the weighted sum")
        parts = {name: given.score for name, given in trace.rewards.items()}
        return {**trace.metrics, **parts, TOTAL: trace.reward}

    return reward


def _refuse_more_than_a_reply(kind: Any, taskset: Any) -> None:
    """Rewards of such tasks look at what a run left behind; without a run they would be wrong, not missing."""
    base = _v1().Task
    hooks = [name for name in ("setup", "finalize", "score") if getattr(kind, name) is not getattr(base, name)]
    if kind.NEEDS_CONTAINER or hooks:
        why = "a container" if kind.NEEDS_CONTAINER else f"its own {' and '.join(hooks)}"
        raise RewardUnusable(f"{kind.__name__} has {why}: it can't be scored by the completion alone")
    if kind.toolsets(taskset.config.task) or type(taskset).toolsets(taskset.config):
        raise RewardUnusable(f"{kind.__name__} has tools: it can't be scored by one reply")


def _signals(task: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for function in (*task.hooks("reward"), *task.hooks("metric")):
        yield function.__name__, function
    for judge in task.plugged_judges():
        yield judge.reward_name, judge.score


def _needs_sandbox(function: Callable[..., Any]) -> bool:
    """As Task.score decides it, which then leaves the function out."""
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _task_of(kind: Any, taskset: Any, state: Any) -> Any:
    if not isinstance(state, Mapping) or "task" not in state:
        raise ValueError("the row's state is not of a verifiers task: make the rows by verifiers_rows")
    return kind(kind.data_type().model_validate(state["task"]), taskset.config.task)


def _trace(task: Any, prompt: Any, completion: str) -> Any:
    package = _v1()
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = [*messages, {"role": "assistant", "content": completion}]
    nodes = [
        {"parent": place - 1 if place else None, "message": message, "sampled": place == len(messages)}
        for place, message in enumerate(said)
    ]
    return package.Trace(
        task=package.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=package.AgentInfo(config=package.AgentConfig()),
        state=need("verifiers.v1.state", "verifiers").state_cls(type(task))(),
        nodes=[package.MessageNode.model_validate(node) for node in nodes],
    )


def _v1() -> Any:
    return need("verifiers.v1", "verifiers")
