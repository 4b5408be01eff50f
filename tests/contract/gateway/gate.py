"""The gateway over an in-memory store, with no scheduler: tests end Ops themselves.

>>> with opened(tmp_path) as gate:
...     run = gate.run()                       # session, create_model, seq 0 settled
...     gate.forward_backward(run, seq=1)      # 200
...     gate.settle(f"{run}:op:1", b"...")
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import pytest
from fastapi import FastAPI
from numpy.typing import NDArray
from starlette.testclient import TestClient

from gradserve.compute.catalog import BaseFacts, Catalog
from gradserve.compute.objects import ObjectStore
from gradserve.gateway.app import create_app
from gradserve.settings import Settings
from gradserve.store.base import Checkpoint, Op, RunUpdate, Settlement
from gradserve.store.sql import SqlStore
from gradserve.store.wakeups import Ask, Wakeups
from gradserve.wire.data import as_tokens
from gradserve.wire.errors import Problem, ServerError
from gradserve.wire.ops import SaveWeights, decode_body
from gradserve.wire.proto import gradserve_wire_pb2 as pb

T = TypeVar("T")

TINY = BaseFacts("tiny", "/models/tiny", "llama", vocab_size=320, context=512, eos_tokens=(2,))
OTHER = BaseFacts("other", "/models/other", "qwen3", vocab_size=300, context=128, eos_tokens=(1, 7))
KEY = "tml-anything"

_TYPES = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64, "int32": pb.DTYPE_INT32}


class Reply(Protocol):
    """A response, of whichever httpx the test client is built on."""

    @property
    def status_code(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content(self) -> bytes: ...
    @property
    def text(self) -> str: ...
    def json(self) -> Any: ...


def tensor(values: NDArray[Any]) -> pb.Tensor:
    """A dense tensor message."""
    return pb.Tensor(dense=values.tobytes(), dtype=_TYPES[values.dtype.name], shape=values.shape)


def row(tokens: list[int], **inputs: Any) -> pb.Datum:
    """A datum; ``target_tokens`` are the tokens themselves unless given (None leaves them out)."""
    datum = pb.Datum()
    datum.model_input.add().encoded_text.tokens = as_tokens(tokens)
    for name, values in {"target_tokens": np.array(tokens, np.int64), **inputs}.items():
        if values is not None:
            datum.loss_fn_inputs[name].CopyFrom(values if isinstance(values, pb.Tensor) else tensor(values))
    return datum


def batch(run: str, seq: int, *rows: pb.Datum, loss: str = "cross_entropy", **fields: Any) -> bytes:
    """A ForwardBackwardRequest; one good row unless given."""
    message = pb.ForwardBackwardRequest(model_id=run, seq_id=seq, loss_fn=loss, **fields)
    message.data.extend(rows or (row([1, 2, 3]),))
    return message.SerializeToString()


def prompt(*tokens: int) -> dict[str, Any]:
    """A text prompt in JSON."""
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


class Gate:
    """A client of the gateway, and the scheduler's side of its store."""

    def __init__(
        self, app: FastAPI, client: TestClient, store: SqlStore, wakeups: Wakeups, objects: ObjectStore
    ) -> None:
        self.app = app
        self.client = client
        self.store = store
        self.wakeups = wakeups
        self.objects = objects
        self.key: str | None = KEY

    # the client's side

    def call(self, method: str, path: str, *, headers: dict[str, str] | None = None, **body: Any) -> Reply:
        sent = {} if self.key is None else {"X-API-Key": self.key}
        return self.client.request(method, f"/api/v1/{path}", headers={**sent, **(headers or {})}, **body)

    def post(self, path: str, /, **fields: Any) -> Reply:
        return self.call("POST", path, json=fields)

    def get(self, path: str, /, **query: Any) -> Reply:
        return self.call("GET", path, params=query)

    def session(self) -> str:
        answer = self.post("create_session", tags=[], sdk_version="0.38.0")
        assert answer.status_code == 200, answer.text
        session_id: str = answer.json()["session_id"]
        return session_id

    def create_model(self, session: str, number: int = 0, base: str = "tiny", **fields: Any) -> Reply:
        lora = {"lora_config": {"rank": 4}, **fields}
        return self.post("create_model", session_id=session, model_seq_id=number, base_model=base, **lora)

    def run(self, session: str | None = None, number: int = 0, **fields: Any) -> str:
        """A run whose creation has been settled."""
        answer = self.create_model(session or self.session(), number, **fields)
        assert answer.status_code == 200, answer.text
        run: str = answer.json()["model_id"]
        weights = self.objects.put(f"weights of {run}".encode())
        self.settle(f"{run}:op:0", b'{"model_id":"x"}', run=RunUpdate(run, 0, weights, None, ()))
        return run

    def sampler(self, session: str | None = None, number: int = 0, **target: Any) -> str:
        """A sampling session on the base, or on ``target``."""
        fields = target or {"base_model": "tiny"}
        answer = self.post(
            "create_sampling_session",
            session_id=session or self.session(),
            sampling_session_seq_id=number,
            **fields,
        )
        assert answer.status_code == 200, answer.text
        sampler: str = answer.json()["sampling_session_id"]
        return sampler

    def forward_backward(self, body: bytes, **headers: str) -> Reply:
        return self.call(
            "POST", "forward_backward", content=body, headers={"Content-Type": "application/x-protobuf", **headers}
        )

    def sample(self, sampler: str, seq: int = 0, **fields: Any) -> Reply:
        body = {"prompt": prompt(1, 2, 3), "sampling_params": {"max_tokens": 4}, **fields}
        return self.post("asample", sampling_session_id=sampler, seq_id=seq, **body)

    def retrieve(self, request_id: str) -> Reply:
        return self.post("retrieve_future", request_id=request_id, allow_metadata_only=True)

    # the scheduler's side

    def on_loop(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine where the store lives."""
        portal = self.client.portal
        assert portal is not None
        return portal.call(work)

    def op(self, op_id: str) -> Op:
        op = self.on_loop(lambda: self.store.get_op(None, op_id))
        assert op is not None, op_id
        return op

    def submitted(self) -> list[Op]:
        """What the scheduler was woken for since the last call."""
        return self.on_loop(lambda: self.wakeups.take_submitted(0.01))

    def cursor(self, run: str) -> int:
        found = self.on_loop(lambda: self.store.get_run(None, run))
        assert found is not None
        return found.cursor

    def settle(self, op_id: str, result: bytes, content_type: str = "application/json", **writes: Any) -> None:
        self._end(Settlement(op_id, "done", time.time(), result, content_type, **writes))

    def fail(self, op_id: str, status: int, detail: str) -> None:
        self._end(Settlement(op_id, "failed", time.time(), problem=Problem(status, "some.code", "T", detail)))

    def _end(self, settlement: Settlement) -> None:
        async def settle() -> None:
            assert await self.store.settle(settlement)
            self.wakeups.ended(settlement.op_id)

        self.on_loop(settle)

    def save(self, run: str, seq: int, name: str, kind: str = "weights", **fields: Any) -> Checkpoint:
        """A checkpoint, asked for by the client and made by the scheduler."""
        path = {
            "weights": "save_weights",
            "sampler_weights": "save_weights_for_sampler",
            "external_weights": "save_weights_external",
        }[kind]
        answer = self.post(path, model_id=run, path=name, seq_id=seq, **fields)
        assert answer.status_code == 200, answer.text
        stored = self.on_loop(lambda: self.store.get_run(None, run))
        assert stored is not None
        assert stored.weights is not None
        body = decode_body(self.op(answer.json()["request_id"]).body)
        metadata = body.user_metadata if isinstance(body, SaveWeights) else {}
        checkpoint = Checkpoint(
            run_id=run,
            tenant=stored.tenant,
            kind=kind,  # type: ignore[arg-type]
            name=name,
            base=stored.base,
            lora=stored.lora,
            version=stored.version,
            weights=stored.weights,
            moments=None,
            size_bytes=100,
            created_at=time.time() + seq,
            user_metadata=metadata,
        )
        result = msgspec.json.encode({"path": checkpoint.path})
        self.settle(answer.json()["request_id"], result, checkpoint=checkpoint)
        return checkpoint


@contextmanager
def opened(root: Path, models: tuple[BaseFacts, ...] = (), **settings: Any) -> Iterator[Gate]:
    """A gateway that lives as long as the block, with TINY and OTHER unless ``models`` are given."""
    store, wakeups = SqlStore.in_memory(), Wakeups()
    objects = ObjectStore(root / "fast", root / "durable")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        await store.open()
        yield
        await store.close()

    app = create_app(
        Settings(data_dir=root, **{"long_poll_s": 0.05, **settings}),
        store,
        wakeups,
        Catalog(list(models or (TINY, OTHER))),
        objects,
        health=lambda: {"workers": []},
        lifespan=lifespan,
    )
    with TestClient(app, raise_server_exceptions=False) as client:
        yield Gate(app, client, store, wakeups, objects)


def nobody_mends(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> list[Ask]:
    """Orchestration answers everything that it is asked for with checkpoint.corrupt; what that was."""
    asked: list[Ask] = []

    def ask(what: Ask) -> asyncio.Future[Any]:
        asked.append(what)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_exception(ServerError("checkpoint.corrupt", "No."))
        return answer

    monkeypatch.setattr(gate.wakeups, "ask", ask)
    return asked


def problem(response: Reply) -> dict[str, Any]:
    """The problem document of a refusal."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    document: dict[str, Any] = response.json()
    assert document["status"] == response.status_code
    assert document["detail"]
    return document
