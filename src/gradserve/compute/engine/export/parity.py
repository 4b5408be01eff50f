"""Whether an artefact gives the log-probs that the engine gives: the same held prompts through both.

The engine computes from the checkpoint itself, in float32, by the code that trains. The artefact is loaded by plain
transformers (and peft) as its user would, and computed in float32 too, so that only what was written is judged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from gradserve.compute.catalog import BaseFacts
from gradserve.compute.engine import full, tensorfile
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.kernels import FAST
from gradserve.compute.engine.lora import Adapter, Tensors
from gradserve.compute.engine.parameters import is_full
from gradserve.compute.engine.train import score
from gradserve.compute.exports import HELD_TEXTS, CannotExport, DType, Parity, Source
from gradserve.compute.tasks import GradTask
from gradserve.wire.data import Array, Row, as_tokens
from gradserve.wire.results import ForwardBackwardResult

Logprobs = list[NDArray[np.float32]]
"""[n - 1] per prompt of n tokens."""

CPU = torch.device("cpu")

MOST_TOKENS = 64
"""Of a held prompt."""

BOUNDS: dict[DType, float] = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.2}
"""Of the largest difference, by the dtype that was written: three times what was seen (docs/guides/export.md)."""


def held_prompts(base: BaseFacts) -> list[list[int]]:
    """HELD_TEXTS as the base's tokenizer writes them."""
    tokenizer = AutoTokenizer.from_pretrained(base.path, local_files_only=True)
    return [tokenizer(text).input_ids[: min(MOST_TOKENS, base.context)] for text in HELD_TEXTS]


def by_engine(source: Source, prompts: list[list[int]]) -> Logprobs:
    """What the engine computes from the checkpoint. Raises CannotExport when it does not fit the base."""
    base = Base.load(source.base.spec, CPU, torch.float32, FAST)
    weights, _ = tensorfile.load(source.weights, CPU)
    rows = [_row(prompt) for prompt in prompts]
    return [array.numpy().astype(np.float32) for array in _forward(base, weights, rows).logprobs]


def _forward(base: Base, weights: Tensors, rows: list[Row]) -> ForwardBackwardResult:
    if is_full(weights):
        task = GradTask("parity", base.name, "", rows, "cross_entropy", {}, backward=False)
        return full.forward(base, weights, task, None, between=lambda: None)
    _check_fits(base, Adapter.of(weights))
    return score(base, weights, rows)


def _check_fits(base: Base, adapter: Adapter) -> None:
    """The engine passes over modules that it does not have; an export must not."""
    for name, (a, b) in adapter.pairs.items():
        linear = base.targets.get(name)
        if linear is None or (linear.in_features, linear.out_features) != (a.shape[1], b.shape[0]):
            raise CannotExport(
                f"the checkpoint has an adapter of {a.shape[1]} inputs and {b.shape[0]} outputs on {name}, and "
                f"{base.name} has no such module. Is it the right base?"
            )


def _row(prompt: list[int]) -> Row:
    return Row(as_tokens(prompt[:-1]), {"target_tokens": Array.of(np.array(prompt[1:], np.int64))})


def by_transformers(model: Any, prompts: list[list[int]]) -> Logprobs:
    """The same from a loaded artefact, one prompt at a time and without a cache."""
    with torch.no_grad():
        return [_logprobs(model, torch.tensor([prompt])) for prompt in prompts]


def _logprobs(model: Any, ids: torch.Tensor) -> NDArray[np.float32]:
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    found: NDArray[np.float32] = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    return found


def compare(prompts: list[list[int]], expected: Logprobs, found: Logprobs, dtype: DType) -> Parity:
    """The figures, under the bound of the dtype that was written."""
    difference = np.abs(np.concatenate(found).astype(np.float64) - np.concatenate(expected))
    return Parity(prompts, float(difference.max()), float(difference.mean()), BOUNDS[dtype])


def load_model(folder: Path, **options: Any) -> Any:
    """A model directory as plain transformers reads it, float32, ready to compute."""
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options).eval()
