"""Direct preference optimisation: learning from pairs of answers without a reward model.

with DPOTrainer("smollm2-135m-instruct") as trainer:
    trainer.fit("pairs.jsonl", eval_data="held-out.jsonl", batch_size=16)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from tinker import types

from gradserve.algorithms.datums import grad_norm
from gradserve.algorithms.overlong import Overlong
from gradserve.algorithms.pair_trainer import PairTrainer, margins_of, pair_metrics
from gradserve.algorithms.pairs import pair_of
from gradserve.algorithms.sampling_clients import sampling_client
from gradserve.algorithms.schedules import Schedule
from gradserve.algorithms.training_loop import Answer, Metrics
from gradserve.data.errors import DataError
from gradserve.episodes.chat import ChatTemplate
from gradserve.episodes.tokens import Rendered
from gradserve.tracking.statistics import estimate


class DPOTrainer(PairTrainer):
    """Makes chosen answers likelier than rejected ones, against a reference that stays as it is.

    Rows are pairs: ``{"prompt": ..., "chosen": ..., "rejected": ...}``, see pairs.pair_of. ``loss`` is dpo
    (arXiv:2305.18290) or ipo (arXiv:2310.12036), a mean over the pairs of a batch; ``beta`` holds the model to the
    reference, which is the base model or a ``tinker://`` path for sampling. The implicit reward of an answer is
    beta (log p - log p_reference), summed over its tokens.

    max_length: pairs with a row of more tokens are refused, or left out and counted with ``overlong="skip"``.

    Metrics: loss, accuracy (the share of pairs whose chosen answer has the higher reward), margin, rewards/chosen and
    rewards/rejected; evaluations have the accuracy with a 95 % interval.
    """

    kind: ClassVar[str] = "dpo"
    shown: ClassVar[Mapping[str, str]] = {"loss": "loss", "accuracy": "right", "eval/accuracy": "eval"}
    ahead: ClassVar[int] = 2

    def __init__(
        self,
        model: str,
        *,
        beta: float = 0.1,
        loss: Literal["dpo", "ipo"] = "dpo",
        reference: str = "base",
        rank: int = 32,
        learning_rate: Schedule = 5e-5,
        max_length: int | None = None,
        overlong: Literal["refuse", "skip"] = "refuse",
        **settings: Any,
    ) -> None:
        """``settings`` are Trainer's: optimizer, seed, service, log_dir, sinks."""
        super().__init__(model, rank=rank, learning_rate=learning_rate, **settings)
        if loss not in ("dpo", "ipo"):
            raise ValueError(f"loss is {loss!r}: give 'dpo' or 'ipo'")
        if not beta > 0:
            raise ValueError(f"beta is {beta}: give a number above 0")
        self._beta, self._reference = beta, reference
        self._loss_name, self._loss_settings = loss, {"beta": beta}
        self._overlong = Overlong(max_length, overlong)
        self._known: dict[bytes, float] = {}

    def _begin(self) -> None:
        super()._begin()
        tokenizer = self.tokenizer
        self._template = ChatTemplate(tokenizer) if getattr(tokenizer, "chat_template", None) else tokenizer
        named = self.base_model if self._reference == "base" else self._reference
        self._reference_model = sampling_client(self.service, named)

    def _rendered(self, rows: Sequence[Mapping[str, Any]]) -> list[Rendered]:
        """Chosen and rejected in turn."""
        found: list[Rendered] = []
        for row in rows:
            pair = pair_of(row, self._template)
            longest = max(len(pair.chosen.tokens), len(pair.rejected.tokens))
            if self._overlong.admits(longest, "pair", row):
                found += [pair.chosen, pair.rejected]
        return found

    def _reference_logprobs(self, rows: Sequence[Rendered]) -> list[float]:
        """Σ weights·log p of each row under the reference; asked for once for each row, all at the same time."""
        named = [(_digest(row), row) for row in rows]
        asked = {
            name: (row, self._reference_model.compute_logprobs(types.ModelInput.from_ints(list(row.tokens))))
            for name, row in named
            if name not in self._known
        }
        for name, (row, future) in asked.items():
            logprobs = future.result()[1:]  # nothing predicts the first token
            self._known[name] = sum(w * (lp or 0.0) for w, lp in zip(row.weights[1:], logprobs, strict=True))
        return [self._known[name] for name, _ in named]

    def _rewards(self, logprobs: Sequence[float], reference: Sequence[float]) -> list[float]:
        return [self._beta * (mine - before) for mine, before in zip(logprobs, reference, strict=True)]

    def _ask(self, items: Sequence[Any], learning_rate: float) -> Answer:
        rows = self._rendered(items)
        if not rows:
            raise DataError(f"all {len(items)} pairs of a batch are longer than max_length={self._overlong.max_length}")
        reference = self._reference_logprobs(rows)
        gradient = self._gradient(rows, reference=reference)
        stepped = self.run.optim_step(self._step_params(learning_rate))

        def answer() -> Metrics:
            loss, logprobs = gradient.result()
            return {
                "loss": loss,
                "optim/grad_norm": grad_norm(stepped),
                **pair_metrics(self._rewards(logprobs, reference), "rewards"),
                "data/pairs": len(rows) // 2,
                "data/tokens": sum(len(row.tokens) for row in rows),
                "data/overlong_skipped": self._overlong.skipped,
            }

        return answer

    def _evaluate(self, rows: Sequence[Mapping[str, Any]]) -> Metrics:
        parts = self._rendered(rows)
        rewards = self._rewards(self._forward(parts), self._reference_logprobs(parts))
        margins = margins_of(rewards)
        right = estimate([float(margin > 0) for margin in margins])
        return {**right.metrics("eval/accuracy"), "eval/margin": sum(margins) / len(margins)}


def _digest(row: Rendered) -> bytes:
    return hashlib.sha256(np.array([row.tokens, row.weights]).tobytes()).digest()
