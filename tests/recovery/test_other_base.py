"""The server comes back with another model under the same name: what was trained on the first is refused, not bent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from gradserve.compute.identity import identify
from tests.models import build_tiny
from tests.recovery.disaster import HEADERS, machine
from tests.recovery.test_power_loss import DATA, NEVER, new_run, state_of, train
from tests.sdk import client, prompt


def gradserve(*command: str) -> str:
    """What it says on stderr; it must fail."""
    done = subprocess.run([sys.executable, "-m", "gradserve", *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_nothing_goes_on_with_another_base_and_all_goes_on_with_its_own(tmp_path: Path) -> None:
    own, other = build_tiny(tmp_path / "own", seed=1), build_tiny(tmp_path / "other", seed=7)
    digests = [identity.weights for folder in (own, other) if (identity := identify(folder)) is not None]
    assert len(set(digests)) == 2

    def refuses(action: Callable[[], Any]) -> None:
        with pytest.raises(Exception, match="base model 'tiny'") as refusal:
            action()
        assert all(digest in str(refusal.value) for digest in digests), refusal.value
        assert "--model tiny=SOURCE" in str(refusal.value)

    one = tinker.SamplingParams(max_tokens=4, seed=1)
    with machine({"tiny": str(own)}, tmp_path / "data", **NEVER) as here:
        service, run = client(here.url), new_run(here)
        train(run, 2)
        path = run.save_state("kept").result().path
        sampler = run.save_weights_and_get_sampling_client().result()
        sampled = sampler.sample(prompt([30, 40]), 1, one).result().sequences[0].tokens
        train(run, 1, first=2)
        run.forward_backward(DATA[0], "cross_entropy").result()
        before = state_of(here, run)

        here.stop()
        here.start({"tiny": str(other)})
        refuses(lambda: run.forward_backward(DATA[1], "cross_entropy").result())
        refuses(lambda: sampler.sample(prompt([30, 40]), 1, one).result())
        refuses(lambda: service.create_sampling_client(model_path=path).sample(prompt([30, 40]), 1, one).result())
        refuses(lambda: service.create_training_client_from_state_with_optimizer(path).result())
        refuses(lambda: new_run(here).load_state(path).result())
        for wanted, body in (("name", {"name": "n"}), ("rollback", {"version": 2})):
            url = f"{here.url}/api/v1/gradserve/runs/{run.model_id}/{wanted}"
            answer = httpx.post(url, headers=HEADERS, json=body)
            assert (answer.status_code, answer.json()["code"]) == (400, "base.differs")
        said = gradserve("resume", run.model_id, "--url", here.url)
        assert all(digest in said for digest in digests), said
        said = gradserve(
            "export", path, "--to", str(tmp_path / "out"), "--data-dir", str(here.data_dir), "--base", str(other)
        )
        assert all(digest in said for digest in digests), said
        assert not (tmp_path / "out").exists()
        assert state_of(here, run) == before
        assert new_run(here).forward_backward(DATA[0], "cross_entropy").result(), "new runs are welcome"

        here.kill_server()
        here.start({"tiny": str(own)})
        assert state_of(here, run) == before
        again = sampler.sample(prompt([30, 40]), 1, one).result().sequences[0].tokens
        assert list(again) == list(sampled)
        run.forward_backward(DATA[1], "cross_entropy").result()
        train(run, 1, first=3)
        assert state_of(here, run)[0] == before[0] + 1
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        train(resumed, 1, first=2)
        assert state_of(here, resumed)[1:] == before[1:]
