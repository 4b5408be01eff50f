"""Supervised fine-tuning: cross entropy on the tokens that the data says the model should give.

with SFTTrainer("smollm2-135m-instruct") as trainer:
    trainer.fit("chats.jsonl", eval_data="held-out.jsonl", epochs=2, batch_size=16)
    trainer.model  # a sampling client
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from gradserve.algorithms.datums import datum, grad_norm, scored
from gradserve.algorithms.overlong import Overlong
from gradserve.algorithms.schedules import Schedule
from gradserve.algorithms.trainer import Trainer
from gradserve.algorithms.training_loop import Answer, Metrics
from gradserve.data.errors import DataError
from gradserve.episodes.chat import ChatTemplate, OnRewrite, Train
from gradserve.episodes.errors import RowUnusable
from gradserve.episodes.rows import rendered
from gradserve.episodes.tokens import Rendered
from gradserve.tracking.statistics import student_t_interval

_ROWS_AT_ONCE = 256
"""Rows of an evaluation in one request."""


class SFTTrainer(Trainer):
    """Minimises the mean negative log-likelihood of the trained tokens of a batch.

    A row has ``messages`` (the assistant's turns are trained, or the last one alone with ``train="last"``), ``prompt``
    and ``completion``, or ``text``. The loss of a step is Σ weights·(-log p) / Σ weights over the whole batch, whatever
    way the batch is cut: long rows weigh more than short ones.

    max_length: rows with more tokens are refused, or left out and counted with ``overlong="skip"``. on_rewrite: what
    becomes of conversations whose earlier turns the model's template rewrites, see ChatTemplate.
    """

    kind: ClassVar[str] = "sft"
    shown: ClassVar[Mapping[str, str]] = {"loss": "loss", "optim/grad_norm": "grad", "eval/loss": "eval"}
    ahead: ClassVar[int] = 2

    def __init__(
        self,
        model: str,
        *,
        rank: int = 32,
        learning_rate: Schedule = 2e-4,
        train: Train = "assistant",
        max_length: int | None = None,
        overlong: Literal["refuse", "skip"] = "refuse",
        on_rewrite: OnRewrite = "refuse",
        **settings: Any,
    ) -> None:
        """``settings`` are Trainer's: optimizer, seed, service, log_dir, sinks."""
        super().__init__(model, rank=rank, learning_rate=learning_rate, **settings)
        self._trains, self._on_rewrite = train, on_rewrite
        self._overlong = Overlong(max_length, overlong)

    def _begin(self) -> None:
        tokenizer = self.tokenizer
        chat = getattr(tokenizer, "chat_template", None)
        self._template = ChatTemplate(tokenizer, on_rewrite=self._on_rewrite) if chat else tokenizer

    def _rendered(self, rows: Sequence[Mapping[str, Any]]) -> list[Rendered]:
        """What is trained of these rows."""
        return [
            part for row in rows for part in self._parts(row) if self._overlong.admits(len(part.tokens), "row", row)
        ]

    def _parts(self, row: Mapping[str, Any]) -> list[Rendered]:
        try:
            return rendered(row, self._template, train=self._trains)
        except RowUnusable as error:
            raise RowUnusable(f"{error}; in the row {str(row)[:200]}") from error

    def _ask(self, items: Sequence[Any], learning_rate: float) -> Answer:
        parts = self._rendered(items)
        total = sum(sum(part.weights) for part in parts)
        if not total:
            raise DataError(f"nothing is trained in a batch of {len(items)} rows: no weights, or all are too long")
        data = [datum(part.tokens, weights=np.asarray(part.weights) / total) for part in parts]
        gradient = self.run.forward_backward(data, "cross_entropy")
        stepped = self.run.optim_step(self._step_params(learning_rate))

        def answer() -> Metrics:
            loss = gradient.result().metrics["loss:sum"]
            return {
                "loss": loss,
                "optim/grad_norm": grad_norm(stepped),
                "data/rows": len(items),
                "data/tokens": sum(len(part.tokens) for part in parts),
                "data/trained_tokens": total,
                "data/overlong_skipped": self._overlong.skipped,
            }

        return answer

    def _evaluate(self, rows: Sequence[Mapping[str, Any]]) -> Metrics:
        """Mean loss per token, with an interval over rows."""
        parts = [part for part in self._rendered(rows) if sum(part.weights[1:])]
        means: list[float] = []
        weights: list[float] = []
        for start in range(0, len(parts), _ROWS_AT_ONCE):
            some = parts[start : start + _ROWS_AT_ONCE]
            output = self.run.forward([datum(part.tokens, weights=part.weights) for part in some], "cross_entropy")
            for part, found in zip(some, output.result().loss_fn_outputs, strict=True):
                trained = np.asarray(part.weights[1:])
                weights.append(float(trained.sum()))
                means.append(float(-(scored(found) * trained).sum() / trained.sum()))
        loss = float(np.average(means, weights=weights))
        interval = student_t_interval(means)
        return {"eval/loss": loss, "eval/row_loss_low": interval.low, "eval/row_loss_high": interval.high}
