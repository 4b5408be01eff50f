"""What VllmSampler asks of vLLM, done the slow ordinary way: transformers and peft, one whole forward per token."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from gradserve.compute.engine.vllm_engine import Drawn, Job, PeftFolder, Token
from tests.numerics import reference


@dataclass
class _Running:
    job: Job
    tokens: list[int] = field(default_factory=list)


class PeftEngine:
    """``submitted`` and ``aborted`` are keys in order; ``models`` are what is loaded, by number."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.models: dict[int, Any] = {}
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self._running: dict[str, _Running] = {}

    def load(self, adapter: PeftFolder) -> None:
        with warnings.catch_warnings():
            # Of a base without adapter the folder holds one pair of zeros, and peft expects one in every layer.
            warnings.filterwarnings("ignore", message=".*(tie_word_embeddings|missing adapter keys).*")
            self.models[adapter.number] = PeftModel.from_pretrained(reference.load(self.directory), adapter.folder)

    def unload(self, adapter: PeftFolder) -> None:
        assert all(running.job.adapter.number != adapter.number for running in self._running.values())
        del self.models[adapter.number]

    def submit(self, job: Job) -> None:
        self.submitted.append(job.key)
        self._running[job.key] = _Running(job)

    def abort(self, keys: list[str]) -> None:
        self.aborted += keys
        for key in keys:
            del self._running[key]

    @torch.no_grad()
    def step(self) -> Iterator[Drawn]:
        for key, running in list(self._running.items()):
            token = self._draw(running)
            running.tokens.append(token.id)
            job = running.job
            ended = token.id in job.params.stop_tokens or len(running.tokens) == job.limit
            if ended:
                del self._running[key]
            yield Drawn(key, [token], cached=0, ended=ended)

    def _draw(self, running: _Running) -> Token:
        job = running.job
        model = self.models[job.adapter.number]
        logits = model(input_ids=torch.tensor([job.prompt + running.tokens]), use_cache=False).logits[0, -1]
        logprobs = logits.log_softmax(-1)
        if job.params.temperature == 0:
            chosen = int(logits.argmax())
        else:
            logits = logits.nan_to_num()
            generator = torch.Generator().manual_seed((job.seed + len(running.tokens)) % 2**63)
            chosen = int(torch.multinomial((logits / job.params.temperature).softmax(-1), 1, generator=generator))
        best = logprobs.topk(job.topk)
        pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Token(chosen, float(logprobs[chosen]), pairs)
