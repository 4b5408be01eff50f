"""Runs that train a module: an extension of the protocol. Requests with arrays are msgpack, the others JSON."""

from __future__ import annotations

import asyncio
import time

from starlette.responses import Response

from gradserve.gateway.bodies import (
    ApplyBody,
    CreateModuleBody,
    EvaluateBody,
    GraphBody,
    RolloutBody,
    StepBody,
    TrajectoryBody,
    UpdateBody,
)
from gradserve.gateway.call import Api, Call, answer_json, decode_msgpack
from gradserve.gateway.graphs import keep, kept
from gradserve.gateway.routes.models import run_id_of
from gradserve.gateway.submit import accept, future_of, known_run, live_session, make_op, submit_to_run
from gradserve.gateway.validate.models import adam_params, metadata, seed_or_drawn, sequence, sgd_params
from gradserve.gateway.validate.modules import check_arrays, check_policy, check_trajectory, check_weights, module_graph
from gradserve.store.base import Run
from gradserve.wire import graph as ir
from gradserve.wire.codec import JSON
from gradserve.wire.control import validate_env, validate_ppo, validate_rollout
from gradserve.wire.errors import Invalid
from gradserve.wire.graph import Graph
from gradserve.wire.ops import (
    ApplyGraph,
    CreateModule,
    Evaluate,
    OpBody,
    OptimStep,
    PutTrajectory,
    Rollout,
    UpdatePolicy,
    module_base,
)

MOST_EPISODES = 10_000


async def create_module(call: Call) -> Response:
    """Start a run from a module's forward graph, and its parameters and buffers as a safetensors file."""
    body = decode_msgpack(await call.body(), CreateModuleBody)
    run_id = run_id_of(body.session_id, sequence(body.model_seq_id, "model_seq_id", 0))
    session = await live_session(call, body.session_id)
    graph = module_graph(body.graph)
    check_weights(body.weights, graph)
    digest = await keep(call, graph)
    weights = await asyncio.to_thread(_put, call, body.weights)
    now = time.time()
    run = Run(
        id=run_id,
        tenant=call.tenant,
        session_id=session.id,
        base=module_base(digest),
        lora=None,
        created_at=now,
        last_request_at=now,
        user_metadata=metadata(body.user_metadata),
    )
    op = make_op(call, run_id, 0, session.id, run_id, CreateModule(digest, weights))
    return future_of(await accept(call, op, run))


def _put(call: Call, weights: bytes) -> str:
    digest = call.gateway.objects.put(weights)
    call.gateway.objects.persist(digest)
    return digest


async def put_graph(call: Call) -> Response:
    """Keep a graph of a module's parameters (a loss, another head); later requests name it by its hash."""
    body = await call.json(GraphBody)
    return answer_json({"graph": await keep(call, module_graph(body.graph))})


async def get_graph(call: Call) -> Response:
    """The text of a graph that was kept."""
    return Response(ir.encode(await kept(call, call.path("graph"), "graph")), media_type=JSON)


async def apply(call: Call) -> Response:
    """Run a graph on arrays; with ``backward`` the gradient of its loss accumulates."""
    return await submit_to_run(call, "apply_graph", ApplyBody, _apply, decode_msgpack)


async def _apply(call: Call, run: Run, body: ApplyBody) -> OpBody:
    graph = await _graph_of(call, run, body.graph)
    check_arrays(body.arrays, graph)
    if body.backward and "loss" not in [output.name for output in graph.outputs]:
        raise Invalid("graph.no_loss", f"The graph {graph.name!r} gives no loss.", field="backward")
    return ApplyGraph(body.graph, body.arrays, body.backward)


async def optim_step(call: Call) -> Response:
    """One step of AdamW, Adam or SGD on the accumulated gradients, for any run that trains adapters or a module."""
    return await submit_to_run(call, "optim_step", StepBody, _step)


async def _step(call: Call, run: Run, body: StepBody) -> OpBody:
    if body.sgd is not None and body.adam is not None:
        raise Invalid("optim.both", "Both adam and sgd are given.", field="sgd", fix="Send one of them.")
    if body.sgd is not None:
        return OptimStep(adam_params(None, optional=True), sgd=sgd_params(body.sgd))
    return OptimStep(adam_params(body.adam), coupled_decay=body.coupled_decay)


async def rollout(call: Call) -> Response:
    """Let the run's policy act; the trajectories wait for an update."""
    return await submit_to_run(call, "rollout", RolloutBody, _rollout)


async def _rollout(call: Call, run: Run, body: RolloutBody) -> OpBody:
    validate_rollout(body.spec)
    check_policy(await _graph_of(call, run, body.graph))
    return Rollout(body.graph, body.spec)


async def update(call: Call) -> Response:
    """PPO on the trajectories that wait."""
    return await submit_to_run(call, "update_policy", UpdateBody, _update)


async def _update(call: Call, run: Run, body: UpdateBody) -> OpBody:
    if (body.env is None) == (body.space is None):
        raise Invalid("update.actions", "Exactly one of env and space is needed.", field="env")
    if body.env is not None:
        validate_env(body.env)
    validate_ppo(body.config)
    check_policy(await _graph_of(call, run, body.graph))
    seed = seed_or_drawn(body.seed, "seed", run.id, body.seq_id)
    return UpdatePolicy(body.graph, body.space, body.env, body.config, seed)


async def put_trajectory(call: Call) -> Response:
    """A trajectory made on the client, in an environment of its own; it waits for an update."""
    return await submit_to_run(call, "put_trajectory", TrajectoryBody, _trajectory, decode_msgpack)


async def _trajectory(call: Call, run: Run, body: TrajectoryBody) -> OpBody:
    if run.graph is None:
        raise _no_module(run)
    check_trajectory(body.trajectory)
    return PutTrajectory(await asyncio.to_thread(_put, call, body.trajectory))


async def evaluate(call: Call) -> Response:
    """Whole episodes of the policy as it is."""
    return await submit_to_run(call, "evaluate", EvaluateBody, _evaluate)


async def _evaluate(call: Call, run: Run, body: EvaluateBody) -> OpBody:
    validate_env(body.env)
    if not 1 <= body.episodes <= MOST_EPISODES:
        raise Invalid(
            "evaluate.episodes", f"episodes is {body.episodes}; it must be 1 to {MOST_EPISODES}.", field="episodes"
        )
    check_policy(await _graph_of(call, run, body.graph))
    return Evaluate(
        body.graph,
        body.env,
        body.episodes,
        seed_or_drawn(body.seed, "seed", run.id, body.seq_id),
        body.deterministic,
        body.normalise_observations,
        body.clip_observation,
    )


async def weights(call: Call) -> Response:
    """The newest weights of a run as a safetensors file: of a module its parameters and buffers."""
    run = await known_run(call, call.path("run_id"), "run_id")
    if run.weights is None:
        raise Invalid("run.not_created", f"{run.id} is still being made.", field="run_id", fix="Ask again.")
    digest = run.weights
    content = await asyncio.to_thread(lambda: call.gateway.objects.verified_path(digest).read_bytes())
    headers = {"x-gradserve-weights": digest, "x-gradserve-version": str(run.version)}
    return Response(content, media_type="application/octet-stream", headers=headers)


async def _graph_of(call: Call, run: Run, digest: str) -> Graph:
    """A graph of the tenant's for a run that trains a module. Raises Invalid, NotFound."""
    if run.graph is None:
        raise _no_module(run)
    return await kept(call, digest, "graph")


def _no_module(run: Run) -> Invalid:
    return Invalid(
        "run.no_module",
        f"{run.id} trains a language model, not a module.",
        field="model_id",
        fix="Use forward_backward, sample and their like.",
    )


ROUTES = [
    Api("POST", "/gradserve/modules", create_module),
    Api("POST", "/gradserve/graphs", put_graph, GraphBody),
    Api("GET", "/gradserve/graphs/{graph}", get_graph),
    Api("POST", "/gradserve/apply", apply),
    Api("POST", "/gradserve/optim_step", optim_step, StepBody),
    Api("POST", "/gradserve/rollout", rollout, RolloutBody),
    Api("POST", "/gradserve/trajectory", put_trajectory),
    Api("POST", "/gradserve/update", update, UpdateBody),
    Api("POST", "/gradserve/evaluate", evaluate, EvaluateBody),
    Api("GET", "/gradserve/runs/{run_id}/weights", weights),
]
"""The routes of this file."""
