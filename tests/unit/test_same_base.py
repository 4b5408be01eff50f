"""Requests that were accepted with one base model are not computed with another of the same name."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gradserve.compute.catalog import Catalog, read_facts
from gradserve.compute.identity import identify
from gradserve.store import trained_on
from gradserve.wire.identity import BaseIdentity
from gradserve.wire.ops import CreateModel
from tests.contract.store_cases import a_checkpoint, a_sampler
from tests.unit.test_scheduler import LORA, World, forward_backward, play


def model(folder: Path, weights: bytes = b"weights", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    small = {"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 8, **config}
    (folder / "config.json").write_text(json.dumps(small))
    (folder / "weights.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def identity(folder: Path, **changed: Any) -> BaseIdentity:
    found = identify(model(folder, **changed))
    assert found is not None
    return found


def test_what_makes_another_model(tmp_path: Path) -> None:
    first = identity(tmp_path)
    assert identity(tmp_path, transformers_version="9", _name_or_path="elsewhere") == first, "who wrote it is no part"
    assert identity(tmp_path, weights=b"Weights").weights != first.weights
    assert identity(tmp_path, rms_norm_eps=1e-5).weights != first.weights
    model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ }")
    changed = identify(tmp_path)
    assert changed is not None
    assert (changed.weights, changed.tokenizer != first.tokenizer) == (first.weights, True)
    assert identify(tmp_path / "none") is None


def test_files_are_read_once_and_again_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def sha256_of(file: Path) -> str:
        read.append(file.name)
        return str(len(read))

    monkeypatch.setattr("gradserve.compute.identity.sha256_of", sha256_of)
    folder, notes = model(tmp_path / "model"), tmp_path / "cache" / "digests.json"
    first = identify(folder, notes)
    assert identify(folder, notes) == first
    assert sorted(read) == ["tokenizer.json", "weights.safetensors"]
    (folder / "weights.safetensors").write_bytes(b"others, of another length")
    assert identify(folder, notes) != first
    notes.write_text("not JSON")
    assert identify(folder, notes) != first
    assert read[2:] == ["weights.safetensors", "weights.safetensors", "tokenizer.json"]


def test_an_op_of_an_earlier_server_is_refused_by_name(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    served = identify(folder)
    assert served is not None
    other = BaseIdentity("0" * 64, served.tokenizer)

    async def story(world: World, began_with: BaseIdentity) -> None:
        await world.submit(0, CreateModel("tiny", LORA), told=False, user_metadata=began_with.as_metadata())
        waiting = await world.submit(1, forward_backward(2), told=False)
        await world.scheduler.start()
        ended = await world.ended(waiting)
        outcomes.append(ended.problem)
        run = await world.store.get_run("t", "r")
        assert run is not None
        assert (len(run.gradients), run.cursor) == (0 if ended.problem else 1, 1)

    outcomes: list[Any] = []
    for began_with in (other, served):
        play(
            tmp_path, partial(story, began_with=began_with), start=False, catalog=Catalog([read_facts("tiny", folder)])
        )
    refused, computed = outcomes
    assert computed is None
    assert refused.code == "base.differs"
    assert other.weights in refused.detail
    assert served.weights in refused.detail
    assert "--model tiny=SOURCE" in refused.detail


def test_a_run_that_wakes_to_another_tokenizer_goes_on_and_says_so(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    served = identify(folder)
    assert served is not None
    catalog = Catalog([read_facts("tiny", folder)])

    async def story(world: World) -> None:
        before = BaseIdentity(served.weights, "1" * 64)
        await world.ended(await world.submit(0, CreateModel("tiny", LORA), user_metadata=before.as_metadata()))
        run = await world.store.get_run("t", "r")
        assert run is not None
        world.scheduler._lanes.clear()  # as after ten idle minutes, or a restart
        ended = await world.ended(await world.submit(1, forward_backward(2)))
        assert ended.problem is None
        events, _ = await world.store.list_events("t", "r", 10, 0)
        assert [event.kind for event in events] == ["base_differs"]
        assert "other tokenizer files" in events[0].detail

    play(tmp_path, story, catalog=catalog)


def test_imported_weights_know_their_base_without_a_run(tmp_path: Path) -> None:
    known = BaseIdentity("a" * 64, "b" * 64)
    imported = a_checkpoint(run_id="import-1", moments=None, user_metadata=known.as_metadata())
    path = imported.path

    async def story(world: World) -> None:
        await world.store.put_checkpoint(imported)
        assert await trained_on.of_checkpoint(world.store, imported) == known
        for sampler, wanted in (
            (a_sampler(run_id="import-1", model_path=path, weights="w"), known),
            (a_sampler(run_id="import-1", model_path=path + "-deleted", weights="w"), None),
            (a_sampler(), None),
        ):
            assert await trained_on.of_sampler(world.store, sampler) == wanted

    play(tmp_path, story, start=False)
