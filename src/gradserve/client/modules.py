"""A client of runs that train a module. Knows nothing of torch: arrays are numpy's, graphs are text, weights are bytes.

``gradserve.PPOTrainer`` and ``gradserve.fit`` are made of it; see there for the easy way.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import NDArray
from tinker import ServiceClient

from gradserve.client.connect import LOCAL_KEY
from gradserve.client.http import Connection
from gradserve.wire.control import EnvSpec, PPOConfig, RolloutSpec, SpaceSpec
from gradserve.wire.data import Array
from gradserve.wire.ops import AdamParams, SgdParams
from gradserve.wire.results import GraphResult

Arrays = dict[str, NDArray[Any]]

_MSGPACK = "application/msgpack"


class RequestFailed(RuntimeError):
    """The server accepted a request and could not do it. ``code`` is the problem's."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ModuleFuture:
    """The result of a request that was accepted."""

    def __init__(self, connection: Connection, request_id: str) -> None:
        self._connection = connection
        self.request_id = request_id
        self._found: Any = None

    def result(self) -> Any:
        """Wait for it: a GraphResult of ``apply``, a dict of anything else. Raises RequestFailed, ExtensionError."""
        if self._found is None:
            self._found = self._wait()
        return self._found

    def _wait(self) -> Any:
        status, kind, answer = 408, "", b""
        ask = json.dumps({"request_id": self.request_id}).encode()
        while status == 408:
            status, kind, answer = self._connection.post("retrieve_future", ask)
        if kind.startswith(_MSGPACK):
            return msgspec.msgpack.decode(answer, type=GraphResult)
        found = json.loads(answer)
        if "error" in found:
            raise RequestFailed(found["error"], found.get("code", ""))
        return found


class ModuleClient:
    """One run that trains a module. Requests are numbered in the order of the calls; they return at once.

    Make one by :meth:`create` or :meth:`load`.
    """

    def __init__(self, connection: Connection, run_id: str, graph: str) -> None:
        self._connection = connection
        self.run_id = run_id
        self.graph = graph
        self._seq = 0

    @classmethod
    def create(
        cls,
        service: ServiceClient,
        graph: str,
        weights: bytes,
        user_metadata: dict[str, str] | None = None,
    ) -> ModuleClient:
        """A run that starts with ``weights`` (a safetensors file of the graph's parameters and buffers).

        ``service`` must be connected to a gradserve server. Raises ExtensionError when the server refuses.
        """
        connection = connection_of(service)
        request = {
            "session_id": service.holder.get_session_id(),
            "model_seq_id": service.holder.get_training_client_id(),
            "graph": graph,
            "weights": weights,
            "user_metadata": user_metadata,
        }
        _, _, answer = connection.post("gradserve/modules", msgspec.msgpack.encode(request), _MSGPACK)
        future = json.loads(answer)
        ModuleFuture(connection, future["request_id"]).result()
        return cls(connection, future["model_id"], cls._keep(connection, graph))

    @classmethod
    def load(cls, service: ServiceClient, path: str, *, optimizer: bool = True) -> ModuleClient:
        """A new run from a checkpoint's tinker:// path, with or without optimizer moments and environments' states."""
        connection = connection_of(service)
        request = {
            "session_id": service.holder.get_session_id(),
            "model_seq_id": service.holder.get_training_client_id(),
            "path": path,
            "optimizer": optimizer,
        }
        future = connection.post_json("load_weights", request)
        ModuleFuture(connection, future["request_id"]).result()
        base = connection.post_json("weights_info", {"tinker_path": path})["base_model"]
        return cls(connection, future["model_id"], base.removeprefix("module:"))

    @staticmethod
    def _keep(connection: Connection, graph: str) -> str:
        digest: str = connection.post_json("gradserve/graphs", {"graph": graph})["graph"]
        return digest

    def keep(self, graph: str) -> str:
        """Keep another graph of the module's parameters (a loss, say); returns its hash for ``apply``."""
        return self._keep(self._connection, graph)

    def apply(self, arrays: Arrays, graph: str | None = None, *, backward: bool = False) -> ModuleFuture:
        """Run a graph (by hash; default: the forward graph) on arrays; ``backward``: its loss's gradient accumulates.

        The result is a GraphResult.
        """
        body = {
            "graph": graph or self.graph,
            "arrays": {name: Array.of(narrowed(array)) for name, array in arrays.items()},
            "backward": backward,
        }
        return self._submit("gradserve/apply", body, packed=True)

    def optim_step(self, rule: AdamParams | SgdParams, *, coupled_decay: bool = False) -> ModuleFuture:
        """One step on what has accumulated: AdamW, Adam (with ``coupled_decay``) or SGD."""
        if isinstance(rule, SgdParams):
            return self._submit("gradserve/optim_step", {"sgd": msgspec.to_builtins(rule)})
        return self._submit("gradserve/optim_step", {"adam": msgspec.to_builtins(rule), "coupled_decay": coupled_decay})

    def rollout(self, spec: RolloutSpec) -> ModuleFuture:
        """Let the policy act; ``episodes`` of the result are those that ended."""
        return self._submit("gradserve/rollout", {"graph": self.graph, "spec": msgspec.to_builtins(spec)})

    def put_trajectory(self, trajectory: bytes) -> ModuleFuture:
        """Send a trajectory that was made here (docs/reference/control.md); it waits for an update."""
        return self._submit("gradserve/trajectory", {"trajectory": trajectory}, packed=True)

    def update(self, actions: EnvSpec | SpaceSpec, config: PPOConfig, seed: int | None = None) -> ModuleFuture:
        """PPO on the trajectories that wait; ``actions`` are those of an environment, or of a space.

        ``seed`` draws the minibatches; None: by the request's number.
        """
        body = {
            "graph": self.graph,
            "env" if isinstance(actions, EnvSpec) else "space": msgspec.to_builtins(actions),
            "config": msgspec.to_builtins(config),
            "seed": seed,
        }
        return self._submit("gradserve/update", body)

    def evaluate(
        self,
        env: EnvSpec,
        episodes: int,
        seed: int | None = None,
        *,
        deterministic: bool = True,
        normalise_observations: bool = False,
        clip_observation: float = 10.0,
    ) -> ModuleFuture:
        """Whole episodes of the policy as it is."""
        body = {
            "graph": self.graph,
            "env": msgspec.to_builtins(env),
            "episodes": episodes,
            "seed": seed,
            "deterministic": deterministic,
            "normalise_observations": normalise_observations,
            "clip_observation": clip_observation,
        }
        return self._submit("gradserve/evaluate", body)

    def save(self, name: str, *, overwrite: bool = False, ttl_seconds: int | None = None) -> ModuleFuture:
        """Name the current state; ``path`` of the result is what ``load`` takes."""
        return self._submit("save_weights", {"path": name, "overwrite": overwrite, "ttl_seconds": ttl_seconds})

    def weights(self) -> bytes:
        """The current parameters and buffers as a safetensors file."""
        path = f"gradserve/runs/{quote(self.run_id, safe=':')}/weights"
        return self._connection.get(path)

    def _submit(self, route: str, body: dict[str, Any], *, packed: bool = False) -> ModuleFuture:
        self._seq += 1
        request = {"model_id": self.run_id, "seq_id": self._seq, **body}
        if packed:
            _, _, answer = self._connection.post(route, msgspec.msgpack.encode(request), _MSGPACK)
        else:
            _, _, answer = self._connection.post(route, json.dumps(request).encode())
        return ModuleFuture(self._connection, json.loads(answer)["request_id"])


def connection_of(service: ServiceClient) -> Connection:
    """A connection to the server of an SDK client, with its key."""
    holder = service.holder
    return Connection(str(holder._base_url), holder._api_key or LOCAL_KEY)


def narrowed(array: NDArray[Any]) -> NDArray[Any]:
    """An array in one of the wire's dtypes: booleans and small integers as int64, floats as float32."""
    if array.dtype.kind in "biu" and array.dtype != np.int32:
        return array.astype(np.int64)
    return array.astype(np.float32) if array.dtype.kind == "f" else array
