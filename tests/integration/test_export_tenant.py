"""``gradserve export --tenant`` beside a running server: the bill is the API's, the adapter is PEFT's."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import httpx
import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.processes import serve_on, stop
from tests.sdk import client, logprobs, supervised, train

DATA = supervised(3, seed=6)


def test_a_run_leaves_with_its_bill_and_its_weights(
    tiny_models: dict[str, str], data_dir: Path, tmp_path: Path
) -> None:
    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir)
    try:
        url, out = f"http://127.0.0.1:{port}", tmp_path / "out"
        run = client(url).create_lora_training_client(base_model="tiny", rank=4, seed=5).result()
        train(run, DATA, steps=2)
        run.save_state("kept").result()
        ours = logprobs(run.forward(DATA, "cross_entropy").result())
        command = [sys.executable, "-m", "gradserve", "export", "--tenant", "local", "--to", str(out)]
        done = subprocess.run(
            [*command, "--data-dir", str(data_dir)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        bill = httpx.get(f"{url}/api/v1/gradserve/ledger", headers={"X-API-Key": "tml-test"}).json()["total"]
    finally:
        stop(server)
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    assert sum(Decimal(line["amount_usd"]) for line in lines) == Decimal(bill["amount_usd"]) > 0
    assert len(lines) == bill["lines"]
    assert json.loads((out / "manifest.json").read_text())["missing"] == {}
    steps = [line for line in map(json.loads, (out / "ops.jsonl").read_text().splitlines()) if line["metrics"]]
    assert [step["kind"] for step in steps] == ["forward_backward", "optim_step"] * 2 + ["forward_backward"]
    assert run.model_id is not None
    folder = out / "checkpoints" / run.model_id.replace(":", "_") / "weights" / "kept"
    assert (folder / "optimizer.safetensors").is_file()
    base = AutoModelForCausalLM.from_pretrained(tiny_models["tiny"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(folder))
    for item, expected in zip(DATA, ours, strict=True):
        targets = torch.tensor(item.loss_fn_inputs["target_tokens"].tolist())
        with torch.no_grad():
            found = model(torch.tensor([item.model_input.to_ints()])).logits[0].log_softmax(-1)
        np.testing.assert_allclose(expected, found.gather(1, targets[:, None])[:, 0].numpy(), atol=1e-5)
