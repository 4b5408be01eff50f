"""A power cut: every process is gone, and so is shared memory; what was acknowledged is computed again, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker

import gradserve
from gradserve.client.extensions import ExtensionError
from tests.recovery.disaster import Machine, machine
from tests.sdk import adam, client, logprobs, prompt, supervised

DATA = [supervised(4, seed=41), supervised(6, seed=42), supervised(3, seed=43)]
NEVER = {"GRADSERVE_DURABLE_EVERY_S": "3600"}


def train(run: tinker.TrainingClient, steps: int, first: int = 0) -> None:
    """Steps of two forward_backwards each, one after the other."""
    for step in range(first, first + steps):
        for data in (DATA[step % 3], DATA[(step + 1) % 3]):
            run.forward_backward(data, "cross_entropy").result()
        run.optim_step(adam(1e-2)).result()


def state_of(here: Machine, run: tinker.TrainingClient) -> tuple[int, str, str]:
    """Version and digests of weights and moments: equal digests are equal bits."""
    row = here.get(f"runs/{run.model_id}")["run"]
    return row["version"], row["weights"], row["moments"]


def new_run(here: Machine, seed: int = 51) -> tinker.TrainingClient:
    return client(here.url).create_lora_training_client(base_model="tiny", rank=8, seed=seed).result()


@pytest.mark.parametrize("durable", [NEVER, {**NEVER, "GRADSERVE_DURABLE_EVERY_STEPS": "2"}], ids=["none", "every 2"])
def test_no_acknowledged_step_is_lost(tiny_models: dict[str, str], tmp_path: Path, durable: dict[str, str]) -> None:
    """In the middle of accumulating, with a sampler open; without and with a durable version on the way."""
    with machine({"tiny": tiny_models["tiny"]}, tmp_path / "data", **durable) as here:
        run = new_run(here)
        train(run, 3)
        sampler = run.save_weights_and_get_sampling_client().result()
        wanted = sampler.sample(prompt([30, 40, 50]), 2, tinker.SamplingParams(max_tokens=12, seed=5)).result()
        before = state_of(here, run)
        run.forward_backward(DATA[0], "cross_entropy").result()
        here.cut_power()
        here.start()
        again = sampler.sample(prompt([30, 40, 50]), 2, tinker.SamplingParams(max_tokens=12, seed=5)).result()
        assert [list(s.tokens) for s in again.sequences] == [list(s.tokens) for s in wanted.sequences]
        run.optim_step(adam(1e-2)).result()
        after = state_of(here, run)
        assert after[0] == before[0] + 1
        told = [event["detail"] for event in here.events(run.model_id) if event["kind"] == "recovered"]
        assert any("0 steps lost" in detail and "not billed" in detail for detail in told), told

        reference = new_run(here)
        train(reference, 3)
        assert state_of(here, reference) == before
        reference.forward_backward(DATA[0], "cross_entropy").result()
        reference.optim_step(adam(1e-2)).result()
        assert state_of(here, reference) == after
        lines = [here.get(f"runs/{r.model_id}/ledger")["total"]["train_tokens"] for r in (run, reference)]
        assert lines[0] == lines[1], "what is computed again is not billed"


def test_a_script_that_died_goes_on_from_the_last_step(tiny_models: dict[str, str], tmp_path: Path) -> None:
    with machine({"tiny": tiny_models["tiny"]}, tmp_path / "data", **NEVER) as here:
        run = new_run(here)
        train(run, 2)
        gradserve.set_client_state(run, b'{"row": 8}')
        with pytest.raises(ExtensionError, match="larger than 1048576 bytes"):
            gradserve.set_client_state(run, bytes((1 << 20) + 1))
        before = state_of(here, run)
        run.forward_backward(DATA[0], "cross_entropy").result()  # lost with the script: no step was made of it
        here.cut_power()
        here.start()
        path = here.post(f"runs/{run.model_id}/name", {"name": "resumed"})["path"]
        service = client(here.url)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert state_of(here, resumed) == before
        assert gradserve.get_client_state(resumed) == gradserve.get_client_state(run, path) == b'{"row": 8}'
        train(resumed, 1, first=2)
        reference = new_run(here)
        train(reference, 3)
        assert state_of(here, reference)[1:] == state_of(here, resumed)[1:]


def test_without_the_optimizer_the_moments_are_fresh(tiny_models: dict[str, str], tmp_path: Path) -> None:
    """Against a run that steps with zero moments from the same weights: they can't be told apart."""
    with machine({"tiny": tiny_models["tiny"]}, tmp_path / "data") as here:
        run = new_run(here)
        train(run, 2)
        path = run.save_state("two").result().path
        kept = client(here.url).create_training_client_from_state_with_optimizer(path).result()
        fresh = client(here.url).create_training_client_from_state(path).result()
        row = here.get(f"runs/{fresh.model_id}")["run"]
        assert (row["moments"], row["parent"]) == (None, path)
        for resumed in (kept, fresh, run):
            train(resumed, 1, first=2)
        assert state_of(here, kept)[1:] == state_of(here, run)[1:]
        assert state_of(here, fresh)[1] != state_of(here, run)[1]


def test_rolling_back_and_forward_again(tiny_models: dict[str, str], tmp_path: Path) -> None:
    """Back to a step that nobody saved, on again, a power cut: the road over the rollback is the one that counts."""
    with machine({"tiny": tiny_models["tiny"]}, tmp_path / "data", **NEVER) as here:
        run = new_run(here)
        states = []
        for step in range(3):
            train(run, 1, first=step)
            states.append(state_of(here, run))
        here.post(f"runs/{run.model_id}/rollback", {"version": 1})
        assert state_of(here, run) == states[0]
        train(run, 1, first=5)
        elsewhere = state_of(here, run)
        assert elsewhere[0] == 2
        assert elsewhere[1] != states[1][1]
        here.cut_power()
        here.start()
        values = [row.tolist() for row in logprobs(run.forward(DATA[0], "cross_entropy").result())]
        assert values
        assert state_of(here, run) == elsewhere
        kinds = [event["kind"] for event in here.events(run.model_id)]
        assert kinds == ["recovered", "rolled_back"]
