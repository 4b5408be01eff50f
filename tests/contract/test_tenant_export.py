"""What a tenant's export holds: all of its rows, nobody else's, exact amounts; every file and field explained."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import json
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import pyrage
import pytest
from click.testing import CliRunner

from gradserve.cli import main
from gradserve.cli.tenant_files import write_export
from gradserve.cli.tenant_readme import FIELDS, readme
from gradserve.compute.objects import ObjectStore, shared_memory_root
from gradserve.store.base import AGE_RECIPIENTS, Event, Metrics, Store, StoredGraph
from gradserve.store.sql import SqlStore
from gradserve.wire.codec import encode_forward_backward
from gradserve.wire.data import Array, Row, as_tokens
from gradserve.wire.ops import ForwardBackward, encode_body
from gradserve.wire.results import ForwardBackwardResult
from tests.contract.store_cases import (
    PROBLEM,
    a_checkpoint,
    a_line,
    a_sample_body,
    a_sampler,
    a_session,
    a_version,
    an_op,
    create_run,
    end,
    on_store,
    write_checkpoint,
    write_line,
)

AMOUNTS = ("0.1", "0.0000000000000000000000000000001", "123456789", "1E-10")
BODY = ForwardBackward([Row(as_tokens([5, 6]), {"weights": Array.of(np.array([0.5, 1.0]))})], "cross_entropy", {})
RESULT = encode_forward_backward(ForwardBackwardResult([Array.of(np.array([-1.5, -2.0]))], {"loss:sum": 3.5}))


@pytest.fixture
def objects(data_dir: Path) -> ObjectStore:
    return ObjectStore(data_dir.parent / "fast", data_dir / "objects")


def durable(objects: ObjectStore, data: bytes) -> str:
    digest = objects.put(data)
    objects.demote(digest)
    return digest


def write(data_dir: Path, story: Callable[[Store], Awaitable[None]]) -> None:
    asyncio.run(on_store(SqlStore.at(data_dir / "gradserve.db"), story))


async def two_tenants(store: Store) -> None:
    """The same of everything for acme and for rival."""
    for tenant, run in (("acme", "r"), ("rival", "of-rival")):
        await store.create_session(a_session(f"session of {tenant}", tenant=tenant))
        await create_run(store, run, tenant=tenant, session_id=f"session of {tenant}")
        await store.put_sampling_session(a_sampler(f"sampler of {tenant}", tenant=tenant))
        op = an_op(1, run, tenant=tenant, body=encode_body(BODY))
        await store.submit(op)
        await store.settle(end(op, result=RESULT, content_type="application/x-protobuf"))
        await store.reject(an_op(2, run, tenant=tenant, body=b""), PROBLEM)
        step = an_op(3, run, "optim_step", tenant=tenant, body=a_sample_body(None))
        await store.submit(step)
        ended = end(step, result=b'{"metrics":{"grad_norm":0.25}}')
        metrics = Metrics(run, tenant, 3, 1, "optim_step", 50.0, {"grad_norm": 0.25})
        event = Event(50.0, "loaded", "from a checkpoint", tenant, run, 3)
        version = a_version(run_id=run, tenant=tenant)
        await store.settle(msgspec.structs.replace(ended, metrics=metrics, event=event, durable=version))
        for seq, amount in enumerate(AMOUNTS):
            line = a_line(seq, amount, tenant=tenant, id=f"{tenant} {seq}", run_id=run, compute_ms=Decimal("0.001"))
            await write_line(store, line)
        await write_checkpoint(store, a_checkpoint(tenant=tenant, run_id=run))
        await store.put_graph(StoredGraph(tenant, f"graph of {tenant}", "a loss", 9, 50.0))


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_the_sum_of_the_ledger_is_the_bill(data_dir: Path, tmp_path: Path) -> None:
    write(data_dir, two_tenants)
    manifest = write_export("acme", tmp_path / "out", data_dir)

    async def bill(store: Store) -> None:
        assert (await store.ledger_total("acme")).amount_usd == manifest.total.amount_usd

    write(data_dir, bill)
    by_hand = Decimal("123456789.1000000001000000000000000000001")
    assert manifest.total.amount_usd == by_hand
    with open(tmp_path / "out" / "ledger.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for found in (rows, lines(tmp_path / "out", "ledger.jsonl")):
        assert [Decimal(line["amount_usd"]) for line in found] == [Decimal(amount) for amount in AMOUNTS]
        assert not any("E" in line["amount_usd"] for line in found), "spreadsheets would read that as a float"
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["total"]["amount_usd"] == f"{by_hand:f}"


def test_nothing_of_another_tenant(data_dir: Path, tmp_path: Path) -> None:
    write(data_dir, two_tenants)
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    write_export("acme", mine, data_dir, bodies=True)
    write_export("rival", theirs, data_dir, bodies=True)
    for file in mine.rglob("*"):
        assert file.is_dir() or b"rival" not in file.read_bytes()
    for name in FIELDS:
        found = lines(mine, name)
        assert found, f"{name} is empty"
        assert {line["tenant"] for line in found} == {"acme"}
        assert len(found) == len(lines(theirs, name))


def test_bodies_and_results_only_when_asked_for(data_dir: Path, tmp_path: Path) -> None:
    write(data_dir, two_tenants)
    write_export("acme", tmp_path / "without", data_dir)
    write_export("acme", tmp_path / "with", data_dir, bodies=True)
    plain = {line["id"]: line for line in lines(tmp_path / "without", "ops.jsonl")}
    assert plain["r:1"]["metrics"] == {"loss:sum": 3.5}
    assert plain["r:3"]["metrics"] == {"grad_norm": 0.25}
    assert plain["r:2"]["problem"]["detail"] == "rows is empty"
    assert not any({"body", "result"} & line.keys() for line in plain.values())
    full = {line["id"]: line for line in lines(tmp_path / "with", "ops.jsonl")}
    assert full["r:1"]["body"]["rows"] == [
        {"tokens": [5, 6], "inputs": {"weights": {"dtype": "float32", "shape": [2], "values": [0.5, 1.0]}}}
    ]
    assert full["r:3"]["result"] == {"metrics": {"grad_norm": 0.25}}
    assert full["r:2"]["body"] is None
    assert (tmp_path / "with" / "gradserve_wire.proto").is_file()


def test_every_file_and_field_is_explained(data_dir: Path, tmp_path: Path) -> None:
    write(data_dir, two_tenants)
    out = tmp_path / "out"
    write_export("acme", out, data_dir, bodies=True)
    assert {file.name for file in out.glob("*.jsonl")} == set(FIELDS)
    for name, (_, fields) in FIELDS.items():
        assert all(list(line) == list(fields) for line in lines(out, name)), name
    assert (out / "README.md").read_text() == readme("acme")


def test_the_manifest_has_every_file(data_dir: Path, tmp_path: Path, objects: ObjectStore) -> None:
    weights, moments = durable(objects, b"weights"), durable(objects, b"moments")

    async def story(store: Store) -> None:
        await two_tenants(store)
        await write_checkpoint(store, a_checkpoint("whole", weights=weights, moments=moments))

    write(data_dir, story)
    out = tmp_path / "out"
    write_export("acme", out, data_dir)
    manifest = json.loads((out / "manifest.json").read_text())
    folder = "checkpoints/r/weights/whole"
    assert (out / folder / "adapter_model.safetensors").read_bytes() == b"weights"
    assert (out / folder / "optimizer.safetensors").read_bytes() == b"moments"
    assert json.loads((out / folder / "adapter_config.json").read_text())["r"] == 8
    found = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == found
    for name, (digest, size) in manifest["files"].items():
        data = (out / name).read_bytes()
        assert (digest, size) == (hashlib.sha256(data).hexdigest(), len(data))
    assert manifest["lines"]["checkpoints.jsonl"] == 2
    assert set(manifest["missing"]) == {
        "graphs/graph of acme.json",
        "checkpoints/r/weights/c/adapter_model.safetensors",
        "checkpoints/r/weights/c/optimizer.safetensors",
    }, "the other checkpoint's objects were never written: said, not hidden"
    assert out.stat().st_mode & 0o077 == 0


def test_a_damaged_object_is_named_and_not_exported(data_dir: Path, tmp_path: Path, objects: ObjectStore) -> None:
    weights = durable(objects, b"weights")
    objects.path(weights).write_bytes(b"WEIGHTS")

    async def story(store: Store) -> None:
        await store.create_session(a_session())
        await create_run(store)
        await write_checkpoint(store, a_checkpoint(weights=weights, moments=None))

    write(data_dir, story)
    manifest = write_export("acme", tmp_path / "out", data_dir)
    (path,) = manifest.missing
    assert weights in manifest.missing[path]
    assert not (tmp_path / "out" / path).exists()
    assert objects.path(weights).read_bytes() == b"WEIGHTS", "an export changes nothing"


def test_external_weights_with_recipients_leave_encrypted(data_dir: Path, tmp_path: Path, objects: ObjectStore) -> None:
    identity = pyrage.x25519.Identity.generate()
    weights = durable(objects, b"weights")
    metadata = {AGE_RECIPIENTS: str(identity.to_public())}

    async def story(store: Store) -> None:
        await store.create_session(a_session())
        await create_run(store)
        kept = a_checkpoint(kind="external_weights", weights=weights, moments=None, user_metadata=metadata)
        await write_checkpoint(store, kept)

    write(data_dir, story)
    write_export("acme", tmp_path / "out", data_dir)
    folder = tmp_path / "out" / "checkpoints" / "r" / "external_weights" / "c"
    assert {file.name for file in folder.iterdir()} == {"adapter_model.safetensors.age", "adapter_config.json.age"}
    sealed = (folder / "adapter_model.safetensors.age").read_bytes()
    assert pyrage.decrypt(sealed, [identity]) == b"weights"


def test_a_whole_model_has_its_config_and_tokenizer(data_dir: Path, tmp_path: Path, objects: ObjectStore) -> None:
    weights = durable(objects, b"weights")
    folder = data_dir / "checkpoints" / "r" / "weights" / "c"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"not taken from here")

    async def story(store: Store) -> None:
        await store.create_session(a_session())
        await create_run(store, lora=None)
        for name in ("c", "gone"):
            await write_checkpoint(store, a_checkpoint(name, lora=None, weights=weights, moments=None))

    write(data_dir, story)
    manifest = write_export("acme", tmp_path / "out", data_dir)
    out = tmp_path / "out" / "checkpoints" / "r" / "weights"
    assert (out / "c" / "model.safetensors").read_bytes() == b"weights"
    assert (out / "c" / "config.json").read_text() == "{}"
    assert list(manifest.missing) == ["checkpoints/r/weights/gone/config.json"]


def test_what_cannot_be_exported_leaves_no_folder(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="no gradserve database"):
        write_export("acme", tmp_path / "out", data_dir)
    write(data_dir, two_tenants)
    with pytest.raises(click.ClickException, match="there are: acme, rival"):
        write_export("nobody", tmp_path / "out", data_dir)
    (tmp_path / "taken").mkdir()
    with pytest.raises(click.ClickException, match="exists"):
        write_export("acme", tmp_path / "taken", data_dir)
    assert {file.name for file in tmp_path.iterdir()} == {"data", "taken"}


def test_the_command_reads_while_a_server_writes(data_dir: Path, tmp_path: Path) -> None:
    async def story(store: Store) -> None:
        await two_tenants(store)
        command = ["export", "--tenant", "acme", "--to", str(tmp_path / "out"), "--data-dir", str(data_dir)]
        done = await asyncio.to_thread(CliRunner().invoke, main, command)
        assert done.exit_code == 0, done.output
        assert "bill $123456789.1" in done.output
        await store.create_session(a_session("later"))

    write(data_dir, story)
    assert not shared_memory_root(data_dir).exists(), "nor does it make anything"
