"""The engine's training against plain transformers + peft, in this process, on one thread, in processor seconds.

Unlike the other scenarios this one imports gradserve: it asks what the engine costs without the service around it.
Both sides take turns, so that whatever else the machine does falls on both. A step is forward_backward and
optim_step; ours also writes gradient, weights and moments as objects and reads them again, as the service does.

    python -m benchmarks.engine_train --model tiny=DIR --model mid=DIR --out benchmarks/baselines/NAME.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.base import Bases
from gradserve.compute.engine.engine import Engine
from gradserve.compute.engine.lora import TARGETS
from gradserve.compute.engine.merge import take
from gradserve.compute.objects import ObjectStore, shared_memory_root
from gradserve.compute.tasks import BaseSpec, Done, GradTask, InitTask, OptimTask
from gradserve.settings import Settings
from gradserve.wire.data import Array, Row, as_tokens
from gradserve.wire.ops import LORA_ALPHA, AdamParams, LoraConfig

from .run import conditions

CPU = torch.device("cpu")
MERGE_TOKENS = Settings.model_fields["merge_tokens"].default
RANK = 8
EQUAL = [128] * 8
RAGGED = [16, 23, 31, 40, 52, 64, 75, 88, 100, 113, 127, 144, 165, 190, 215, 235]
"""Sixteen lengths; padded to the longest they are 2.2 times as many tokens."""
TENANTS = {"1x32": (8, [32]), "1x128": (4, [128]), "4x128": (4, [128] * 4)}
"""Shapes of merged requests: (tenants, lengths of each one's rows)."""


def sequences(lengths: list[int], vocab: int, seed: int = 0) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """Random ids; the targets of each are its own next tokens."""
    draw = np.random.default_rng(seed)
    return [draw.integers(8, vocab, length).astype(np.int32) for length in lengths]


def rows_of(lengths: list[int], vocab: int, seed: int = 0) -> list[Row]:
    """The same as the engine's rows, every token weighing one."""
    return [
        Row(
            as_tokens(tokens),
            {
                "target_tokens": Array.of(np.roll(tokens, -1).astype(np.int64)),
                "weights": Array.of(np.ones(len(tokens), np.float32)),
            },
        )
        for tokens in sequences(lengths, vocab, seed)
    ]


class Ours:
    """An engine with an object store in shared memory."""

    def __init__(self, path: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bench-engine-"))
        self._store = ObjectStore(shared_memory_root(self._folder), self._folder / "durable")
        arrays = Arrays(self._store, CPU)
        bases = Bases((BaseSpec("base", path),), CPU)
        self.vocab = bases.get("base").vocab
        self.engine = Engine(bases, arrays)

    def adapter(self, seed: int = 0) -> str:
        return self._done(self.engine.run(InitTask("init", "base", LoraConfig(RANK, seed)))).objects["weights"]

    def task(self, weights: str, lengths: list[int], seed: int = 0) -> GradTask:
        rows = rows_of(lengths, self.vocab, seed)
        return GradTask(f"grad-{seed}", "base", weights, rows, "cross_entropy", {}, backward=True)

    def stepper(self, lengths: list[int]) -> Callable[[], None]:
        """Steps of one run; each drops the objects that the next does not need."""
        state: dict[str, str | None] = {"weights": self.adapter(), "moments": None}

        def step() -> None:
            weights, moments = state["weights"], state["moments"]
            assert weights is not None
            gradient = self._done(self.engine.run(self.task(weights, lengths))).objects["gradient"]
            done = self._done(self.engine.run(OptimTask("optim", weights, moments, [gradient], AdamParams())))
            state.update(done.objects)
            self._drop(weights, moments, gradient)

        return step

    def as_the_worker(self, tasks: list[GradTask]) -> None:
        """As when all are waiting in a worker."""
        waiting = list(tasks)
        while waiting:
            for outcome in self.engine.run_together(take(waiting, MERGE_TOKENS)):
                self._drop(self._done(outcome).objects["gradient"])

    def one_by_one(self, tasks: list[GradTask]) -> None:
        for task in tasks:
            self._drop(self._done(self.engine.run(task)).objects["gradient"])

    def close(self) -> None:
        shutil.rmtree(self._store.fast, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _drop(self, *digests: str | None) -> None:
        for digest in digests:
            if digest is not None:
                self._store.discard(digest)

    @staticmethod
    def _done(outcome: object) -> Done:
        if not isinstance(outcome, Done):
            raise RuntimeError(f"the engine failed: {outcome}")
        return outcome


class Plain:
    """transformers + peft as a careful user writes it: right-padded batch, sdpa, cross entropy, AdamW."""

    def __init__(self, path: str) -> None:
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        config = PeftConfig(r=RANK, lora_alpha=LORA_ALPHA, target_modules=sorted(TARGETS), task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            self._model = get_peft_model(base, config)
        self._model.eval()

    def stepper(self, lengths: list[int], vocab: int) -> Callable[[], None]:
        optimizer = torch.optim.AdamW([p for p in self._model.parameters() if p.requires_grad], lr=1e-4)
        ids, mask, targets = _padded(sequences(lengths, vocab))

        def step() -> None:
            optimizer.zero_grad()
            padding = None if bool(mask.all()) else mask
            logits = self._model(input_ids=ids, attention_mask=padding, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
            torch.autograd.backward(loss)
            optimizer.step()

        return step


def _padded(rows: list[np.ndarray[Any, np.dtype[np.int32]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (len(rows), max(len(row) for row in rows))
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, -100)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.from_numpy(row.astype(np.int64))
        targets[index, : len(row)] = torch.from_numpy(np.roll(row, -1).astype(np.int64))
        mask[index, : len(row)] = 1
    return ids, mask, targets


def in_turns(first: Callable[[], None], second: Callable[[], None], rounds: int) -> dict[str, float]:
    """Median processor seconds of each after one round of warming up, and how many times longer the first took."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(1 + rounds):
        for work, spent in zip((first, second), seconds, strict=True):
            began = time.process_time()
            work()
            spent.append(time.process_time() - began)
    one, two = (statistics.median(spent[1:]) for spent in seconds)
    return {"first_cpu_s": round(one, 4), "second_cpu_s": round(two, 4), "ratio": round(one / two, 2)}


def measure(path: str, rounds: int) -> dict[str, Any]:
    """Figures of one model: plain to ours (equal and ragged rows), one by one to merged."""
    ours, plain = Ours(path), Plain(path)
    try:
        found: dict[str, Any] = {}
        for name, lengths in (("8x128", EQUAL), ("ragged", RAGGED)):
            found[f"plain to ours, {name}"] = in_turns(
                plain.stepper(lengths, ours.vocab), ours.stepper(lengths), rounds
            )
        for name, (tenants, lengths) in TENANTS.items():
            tasks = [ours.task(ours.adapter(seed), lengths, seed) for seed in range(tenants)]
            found[f"serial to merged, {tenants} tenants of {name}"] = in_turns(
                lambda tasks=tasks: ours.one_by_one(tasks),  # type: ignore[misc]
                lambda tasks=tasks: ours.as_the_worker(tasks),  # type: ignore[misc]
                rounds,
            )
        return found
    finally:
        ours.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the engine's training against transformers + peft.")
    parser.add_argument("--model", action="append", required=True, metavar="NAME=DIR", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"threads": 1, "rank": RANK, **conditions()}
    for model in arguments.model:
        name, _, path = model.partition("=")
        record[name] = measure(path, arguments.rounds)
        print(name, json.dumps(record[name], indent=2), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
