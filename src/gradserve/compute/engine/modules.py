"""Tasks of runs that train a module: its graphs, and its life in environments. Pure, as all Tasks are."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec
import numpy as np
import torch
from torch import Tensor

from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.control.actor import Policy
from gradserve.compute.engine.control.environments import spaces_of
from gradserve.compute.engine.control.evaluate import evaluate
from gradserve.compute.engine.control.live import LiveGroups
from gradserve.compute.engine.control.ppo import ppo_update
from gradserve.compute.engine.control.rollout import rollout
from gradserve.compute.engine.graph_store import BoundedGraph, GraphStore
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.engine.objectives import GRAPH_SECONDS
from gradserve.compute.engine.origin import Origin, require
from gradserve.compute.engine.train import check_gradient, check_loss
from gradserve.compute.tasks import (
    Done,
    EvaluateTask,
    GraphTask,
    ModuleTask,
    RolloutTask,
    UpdateTask,
    Usage,
)
from gradserve.wire.control import EnvSpec, SpaceSpec
from gradserve.wire.data import Array
from gradserve.wire.errors import Invalid

MODULE = "module"
"""What a module's gradients say they belong to, where an adapter's name its base."""
_STATES = "env."
"""What the names of the environments' states start with, in a trajectory and among the moments."""


class Modules:
    """Runs Tasks of modules; raises what goes wrong."""

    def __init__(self, arrays: Arrays, graphs: GraphStore) -> None:
        self._arrays = arrays
        self._graphs = graphs
        self._live = LiveGroups()
        self._spaces: dict[bytes, SpaceSpec] = {}

    def run(self, task: ModuleTask, started: int) -> Done:
        """The outcome. ``started``: time.perf_counter_ns() when the Task began."""
        match task:
            case GraphTask():
                return self._graph(task, started)
            case RolloutTask():
                return self._rollout(task, started)
            case UpdateTask():
                return self._update(task, started)
            case EvaluateTask():
                return self._evaluate(task, started)

    def _graph(self, task: GraphTask, started: int) -> Done:
        graph, weights = self._graphs.get(task.graph), self._arrays.get(task.weights)
        arrays = {name: torch.from_numpy(np.array(array.numpy())) for name, array in task.arrays.items()}
        parameters = graph.graph.names("parameter")
        leaves = {name: weights[name].detach().requires_grad_(task.backward) for name in parameters}
        buffers = {name: weights[name] for name in graph.graph.names("buffer")}
        values = leaves | buffers | _inputs(graph, arrays)
        graph.check(values)
        with torch.set_grad_enabled(task.backward):
            outputs = graph.executable.run(values, time.monotonic() + GRAPH_SECONDS)
        metrics = {_metric(name): float(value.detach()) for name, value in outputs.items() if _is_metric(name)}
        objects = {}
        if task.backward:
            if "loss" not in outputs:
                raise Invalid("graph_output", "this graph gives no loss to differentiate.", field="graph")
            check_loss(metrics)
            found = torch.autograd.grad(outputs["loss"], list(leaves.values()), materialize_grads=True)
            gradient = dict(zip(parameters, found, strict=True))
            check_gradient(gradient)
            objects["gradient"] = self._arrays.put(gradient, Origin(task.weights, MODULE))
        results = {name: _array(value) for name, value in outputs.items() if not _is_metric(name)}
        return Done(task.id, _usage(started), objects, metrics=metrics, outputs=results)

    def _rollout(self, task: RolloutTask, started: int) -> Done:
        state = None if task.moments is None else self._arrays.read(task.moments)
        if state is not None and state.origin is not None:
            require(state.origin, task.weights, f"moments {task.moments}")
        trajectory, after, stats = rollout(
            self._policy(task.graph),
            self._arrays.get(task.weights),
            task.spec,
            task.group,
            None if state is None else state.tensors,
            self._live,
        )
        made = self._arrays.put(trajectory | after, Origin(task.weights, MODULE))
        usage = Usage(compute_us=_elapsed_us(started), env_steps=stats.env_steps)
        return Done(task.id, usage, {"trajectory": made}, episodes=stats)

    def _update(self, task: UpdateTask, started: int) -> Done:
        """The states of the environments go from the trajectories into the moments."""
        trajectories = [self._arrays.read(digest) for digest in task.trajectories]
        for digest, trajectory in zip(task.trajectories, trajectories, strict=True):
            require(trajectory.origin, task.weights, f"trajectory {digest}")
        moments = None if task.moments is None else self._arrays.read(task.moments).tensors
        weights, new_moments, metrics = ppo_update(
            self._policy(task.graph),
            self._arrays.get(task.weights),
            moments,
            [trajectory.tensors for trajectory in trajectories],
            task.config,
            task.seed,
            task.space or self._action_space(task.env),
            self._graphs.get(task.graph).graph.names("buffer"),
        )
        for trajectory in trajectories:
            new_moments |= {name: value for name, value in trajectory.tensors.items() if name.startswith(_STATES)}
        made = self._arrays.put(weights)
        objects = {"weights": made, "moments": self._arrays.put(new_moments, Origin(made))}
        return Done(task.id, _usage(started), objects, metrics=metrics)

    def _evaluate(self, task: EvaluateTask, started: int) -> Done:
        stats = evaluate(
            self._policy(task.graph),
            self._arrays.get(task.weights),
            task.env,
            task.episodes,
            task.seed,
            task.deterministic,
            task.normalise_observations,
            task.clip_observation,
        )
        usage = Usage(compute_us=_elapsed_us(started), env_steps=stats.env_steps)
        return Done(task.id, usage, episodes=stats)

    def _action_space(self, env: EnvSpec | None) -> SpaceSpec:
        """Environments are made to be asked for their spaces; once is enough."""
        if env is None:
            raise Invalid("bad_control", "neither env nor space says what the actions are.", field="space")
        key = msgspec.json.encode(env, order="deterministic")
        if key not in self._spaces:
            _, self._spaces[key] = spaces_of(env)
        return self._spaces[key]

    def _policy(self, digest: str) -> Policy:
        return policy_of(self._graphs.get(digest))


def policy_of(graph: BoundedGraph) -> Policy:
    """A graph with one input, the observations; what it gives besides ``value`` is the distribution's."""
    (name,) = _one_input(graph)
    run = graph.executable.run

    def act(weights: Mapping[str, Tensor], observations: Tensor) -> Tensors:
        return run({**weights, name: observations})

    return act


def _one_input(graph: BoundedGraph) -> list[str]:
    names = graph.graph.names("input")
    if len(names) != 1:
        raise Invalid("bad_policy", f"a policy has one input, the observations; this graph has {names}.", field="graph")
    return names


def _inputs(graph: BoundedGraph, arrays: Tensors) -> Tensors:
    """The arrays in the dtypes that the graph declares. Raises Invalid when one is missing or too many."""
    found = {}
    for given in graph.graph.inputs:
        if given.kind != "input":
            continue
        if given.name not in arrays:
            raise Invalid("missing_input", f"the graph reads {given.name!r}.", field=f"arrays.{given.name}")
        found[given.name] = arrays[given.name].to(getattr(torch, given.dtype))
    unknown = sorted(arrays.keys() - found.keys())
    if unknown:
        raise Invalid("unknown_input", f"the graph does not read {unknown[0]!r}.", field=f"arrays.{unknown[0]}")
    return found


def _is_metric(name: str) -> bool:
    return name == "loss" or name.startswith("metrics.")


def _metric(name: str) -> str:
    return "loss:sum" if name == "loss" else name.removeprefix("metrics.")


def _array(value: Tensor) -> Array:
    kept = value.detach()
    return Array.of((kept.float() if kept.is_floating_point() else kept.long()).cpu().numpy())


def _usage(started: int) -> Usage:
    return Usage(compute_us=_elapsed_us(started))


def _elapsed_us(started: int) -> int:
    return (time.perf_counter_ns() - started) // 1000
