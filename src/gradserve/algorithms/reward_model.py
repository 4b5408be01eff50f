"""A reward model from pairs of answers (Bradley and Terry 1952): a model that says how good an answer is.

with RewardModelTrainer("smollm2-135m-instruct") as trainer:
    trainer.fit("pairs.jsonl", eval_data="held-out.jsonl", batch_size=16)
    trainer.score([{"prompt": "2+2?", "completion": "4"}])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tinker import types

from gradserve.algorithms.datums import grad_norm
from gradserve.algorithms.pair_trainer import PairTrainer, margins_of, pair_metrics
from gradserve.algorithms.pairs import conversation
from gradserve.algorithms.schedules import Schedule
from gradserve.algorithms.training_loop import Answer, Metrics
from gradserve.data.errors import DataError
from gradserve.episodes.chat import ChatTemplate
from gradserve.episodes.tokens import Rendered, encode
from gradserve.tracking.statistics import estimate

QUESTION = "Is this a good answer? Reply with yes or no."

_LARGEST = -1e-6
"""The log-prob at which scores end, as compiler.pair_losses.LARGEST: at about 13.8."""


class RewardModelTrainer(PairTrainer):
    """Trains a score so that chosen answers have higher ones: loss -log sigmoid(s_chosen - s_rejected), a mean.

    The score is the log-odds log p / (1 - p) with which the model answers ``question`` about the answer, as the user's
    next message, with the first token of ``yes``. This needs nothing but log-probs of the public protocol, so that it
    trains anywhere, and a score is one compute_logprobs request to ``trainer.model``. It is not the usual linear head
    on the last hidden state: the base model's word for yes is where it begins, scores end at about 13.8, and the
    question's tokens are paid for with every answer. Differences between scores have a meaning (the log-odds that one
    answer is preferred), scores alone do not.

    Rows are pairs as DPOTrainer's; texts are followed by a line of their own with the question. Metrics: loss,
    accuracy, margin, scores/chosen and scores/rejected; evaluations have the accuracy with a 95 % interval.
    """

    kind: ClassVar[str] = "reward-model"
    shown: ClassVar[Mapping[str, str]] = {"loss": "loss", "accuracy": "right", "eval/accuracy": "eval"}
    ahead: ClassVar[int] = 2
    _loss_name = "bradley_terry"

    def __init__(
        self,
        model: str,
        *,
        question: str = QUESTION,
        yes: str = "yes",
        rank: int = 32,
        learning_rate: Schedule = 1e-4,
        max_length: int | None = None,
        **settings: Any,
    ) -> None:
        """``max_length`` refuses longer rows; ``settings`` are Trainer's: optimizer, seed, service, log_dir, sinks."""
        super().__init__(model, rank=rank, learning_rate=learning_rate, **settings)
        if not yes:
            raise ValueError("yes is empty: give the text whose first token is the good answer")
        self._question, self._yes, self._max_length = question, yes, max_length

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """[N] scores of rows with ``prompt`` and ``completion`` (texts, messages), or with ``messages`` alone.

        Of the weights that ``trainer.model`` samples from. Raises DataError for rows that have neither.
        """
        model = self.model
        columns = ["messages" if row.get("messages") is not None else "completion" for row in rows]
        asked = [self._asked(row, column) for row, column in zip(rows, columns, strict=True)]
        futures = [model.compute_logprobs(types.ModelInput.from_ints(list(row.tokens))) for row in asked]
        return [log_odds(future.result()[-1]) for future in futures]

    def _begin(self) -> None:
        super()._begin()
        tokenizer = self.tokenizer
        self._template = ChatTemplate(tokenizer) if getattr(tokenizer, "chat_template", None) else None

    def _asked(self, row: Mapping[str, Any], column: str) -> Rendered:
        """The answer in ``column``, the question, and yes, which alone has a weight."""
        if row.get(column) is None:
            raise DataError(f"a row has no {column}: it has {', '.join(row) or 'nothing'}")
        if isinstance(row.get("prompt"), str):
            text = f"{row['prompt']}{row[column]}\n{self._question}\n"
            before = encode(self.tokenizer, text, special=True)
        elif self._template is None:
            raise DataError("this model has no chat template: give prompt and answers as texts")
        else:
            question = {"role": "user", "content": self._question}
            before = list(self._template.prompt([*conversation(row, column), question], row.get("tools")))
        tokens = [*before, encode(self.tokenizer, self._yes)[0]]
        if self._max_length is not None and len(tokens) > self._max_length:
            raise DataError(
                f"a row has {len(tokens)} tokens and max_length is {self._max_length}: {str(row)[:200]}; raise it"
            )
        return Rendered(tuple(tokens), (*[0.0] * len(before), 1.0))

    def _rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Rendered]:
        """Chosen and rejected in turn."""
        return [self._asked(row, column) for row in rows for column in ("chosen", "rejected")]

    def _ask(self, items: Sequence[Any], learning_rate: float) -> Answer:
        rows = self._rows(items)
        gradient = self._gradient(rows)
        stepped = self.run.optim_step(self._step_params(learning_rate))

        def answer() -> Metrics:
            loss, logprobs = gradient.result()
            return {
                "loss": loss,
                "optim/grad_norm": grad_norm(stepped),
                **pair_metrics([log_odds(value) for value in logprobs], "scores"),
                "data/pairs": len(items),
                "data/tokens": sum(len(row.tokens) for row in rows),
            }

        return answer

    def _evaluate(self, rows: Sequence[Mapping[str, Any]]) -> Metrics:
        margins = margins_of([log_odds(value) for value in self._forward(self._rows(rows))])
        right = estimate([float(margin > 0) for margin in margins])
        return {**right.metrics("eval/accuracy"), "eval/margin": sum(margins) / len(margins)}


def log_odds(logprob: float | None) -> float:
    """log p / (1 - p) from log p.

    >>> log_odds(math.log(0.5))
    0.0
    """
    if logprob is None:
        raise ValueError("the service gave no log-prob for a token")
    bounded = min(logprob, _LARGEST)
    return bounded - math.log(-math.expm1(bounded))
