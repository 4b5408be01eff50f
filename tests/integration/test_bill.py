"""The bill of a real run: token counts known in advance, amounts worked by hand, shown by the CLI."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from tinker import types

from gradserve.cli import main
from tests.sdk import adam, client, datum, prompt, sequences

TRAIN, PREFILL, SAMPLE = Decimal("0.40"), Decimal("0.10"), Decimal("0.30")
"""The default price sheet, USD per million tokens."""


def test_every_executed_op_is_one_exact_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = client(url).create_lora_training_client(base_model="tiny", rank=4).result()
    rows = sequences(5, seed=1)
    data = [datum(row, weights=[1.0] * len(row)) for row in rows]
    trained = sum(len(row) for row in rows)
    run.forward(data, "cross_entropy").result()
    run.forward_backward(data, "cross_entropy").result()
    run.optim_step(adam()).result()
    run.optim_step(adam()).result()  # without gradients: nothing is executed, nothing is charged
    sampler = run.save_weights_and_get_sampling_client().result()
    sampler.sample(prompt([30] * 11), 3, types.SamplingParams(max_tokens=5, seed=1, stop=[])).result()
    run.save_state("free").result()

    assert run.model_id is not None
    answer = httpx.get(f"{url}/api/v1/gradserve/runs/{run.model_id}?lines=100", headers={"X-API-Key": "tml-test"})
    detail = json.loads(answer.text)
    lines = [
        (line["kind"], line["train_tokens"], line["prefill_tokens"], line["sample_tokens"]) for line in detail["lines"]
    ]
    # The samples share their prompt, which is prefilled once.
    assert lines == [
        ("create_model", 0, 0, 0),
        ("forward_backward", 0, trained, 0),
        ("forward_backward", trained, 0, 0),
        ("optim_step", 0, 0, 0),
        ("sample", 0, 11, 15),
    ]
    million = Decimal(1_000_000)
    expected = (trained * TRAIN + (trained + 11) * PREFILL + 15 * SAMPLE) / million
    assert Decimal(detail["total"]["amount_usd"]) == expected
    assert sum(Decimal(line["amount_usd"]) for line in detail["lines"]) == expected

    monkeypatch.setenv("GRADSERVE_URL", url)
    listed = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["runs", "--limit", "1000"])
    assert listed.exit_code == 0, listed.output
    assert run.model_id in listed.output
    shown = CliRunner().invoke(main, ["run", run.model_id])
    assert f"${expected:f}" in shown.output
    assert "weights/free" in shown.output
    missing = CliRunner().invoke(main, ["run", "nobody:train:0"])
    assert missing.exit_code == 1
    assert "gradserve runs lists them" in missing.output


def test_without_any_run_the_cli_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSERVE_URL", raising=False)
    result = CliRunner().invoke(main, ["runs", "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "there are no runs yet" in result.output
