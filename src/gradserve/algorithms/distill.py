"""Distillation: a student learns to answer as a teacher does, on its own answers or on the teacher's.

with DistillTrainer("smollm2-135m-instruct", teacher="qwen3-4b") as trainer:
    trainer.fit("prompts.jsonl", eval_data="held-out.jsonl", batch_size=16)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

from gradserve.algorithms.datums import datum, grad_norm, scored
from gradserve.algorithms.sampling_clients import sampling_client, tokenizer_of
from gradserve.algorithms.schedules import Schedule
from gradserve.algorithms.trainer import Trainer
from gradserve.algorithms.training_loop import Answer, Metrics
from gradserve.data.errors import DataError
from gradserve.episodes.chat import ChatTemplate
from gradserve.episodes.tokens import encode
from gradserve.tracking.statistics import Estimate, estimate

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Answered:
    """What was sampled after a prompt: ``tokens`` [M] and their ``logprobs`` [M]; ``row`` is the prompt's number."""

    row: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def whole(self) -> types.ModelInput:
        """Prompt and answer."""
        return types.ModelInput.from_ints([*self.prompt, *self.tokens])


@dataclass(frozen=True)
class Soft:
    """The teacher's K likeliest tokens at each place of an answer: ``tokens``, ``probabilities`` [M, K] of sum 1.

    ``kept`` [M] is the probability that the teacher gives to all K together.
    """

    tokens: NDArray[np.int64]
    probabilities: Floats
    kept: Floats


class DistillTrainer(Trainer):
    """Brings the student's distribution to the teacher's, token by token, on the prompts of the rows.

    on_policy: the student answers, and each token's advantage is log p_teacher - log p_student, so that what is
    minimised is the reverse KL on the student's own answers (Agarwal et al. 2024, arXiv:2306.13649). With ``discount``
    a token also answers for those after it, as a return: 0 (the default) looks at the token alone.

    off_policy: the teacher answers, and the student is trained by cross entropy against the teacher's ``top_k``
    likeliest tokens at each place, their probabilities renormalised: the forward KL to a teacher that gives no others.
    The metric teacher/top_k_mass says how much of the true one that is; where it is far below 1, the student unlearns
    the rest, and a larger top_k is needed. top_k=0 trains on the sampled tokens alone (Kim and Rush 2016,
    arXiv:1606.07947).

    Rows have ``prompt`` (a text as it is, or messages) or ``messages``; what is asked for is the next message.
    ``teacher`` is a base model's name or a ``tinker://`` path for sampling, with the student's tokenizer: another one
    is a ValueError. ``samples`` answers of at most ``max_tokens`` tokens are drawn for each prompt at temperature 1.

    Metrics: loss and, per token, kl/reverse on_policy (an unbiased estimate from the samples, which may be below 0) or
    kl/forward off_policy with top_k. Evaluations have them with 95 % intervals over prompts.
    """

    kind: ClassVar[str] = "distill"
    shown: ClassVar[Mapping[str, str]] = {"kl/reverse": "KL", "kl/forward": "KL", "optim/grad_norm": "grad"}

    def __init__(
        self,
        model: str,
        teacher: str,
        *,
        mode: Literal["on_policy", "off_policy"] = "on_policy",
        samples: int = 4,
        max_tokens: int = 128,
        discount: float = 0.0,
        top_k: int = 20,
        rank: int = 32,
        learning_rate: Schedule = 1e-4,
        **settings: Any,
    ) -> None:
        """``settings`` are Trainer's: optimizer, seed, service, log_dir, sinks."""
        super().__init__(model, rank=rank, learning_rate=learning_rate, **settings)
        if mode not in ("on_policy", "off_policy"):
            raise ValueError(f"mode is {mode!r}: give 'on_policy' or 'off_policy'")
        if samples < 1 or max_tokens < 1 or top_k < 0:
            raise ValueError(f"samples {samples}, max_tokens {max_tokens}, top_k {top_k}: give at least 1, 1 and 0")
        if not 0 <= discount <= 1:
            raise ValueError(f"discount is {discount}: give a number from 0 to 1")
        if discount and mode == "off_policy":
            raise ValueError("discount is of on_policy: the teacher's own answers have no advantages")
        self._teacher_name, self._mode = teacher, mode
        self._samples, self._max_tokens, self._discount, self._top_k = samples, max_tokens, discount, top_k

    def _begin(self) -> None:
        self._teacher = sampling_client(self.service, self._teacher_name)
        tokenizer = self.tokenizer
        refuse_other_tokenizer(tokenizer, tokenizer_of(self._teacher), self._teacher_name)
        self._template = ChatTemplate(tokenizer) if getattr(tokenizer, "chat_template", None) else None
        self._stop = self._template.stop if self._template else [tokenizer.eos_token_id]

    def _ask(self, items: Sequence[Any], learning_rate: float) -> Answer:
        if self._mode == "on_policy":
            return self._ask_on_policy(items, learning_rate)
        return self._ask_off_policy(items, learning_rate)

    def _ask_on_policy(self, items: Sequence[Any], learning_rate: float) -> Answer:
        answers = self._answers(self._student(), items, f"step {self.step}")
        teacher = self._teacher_logprobs(answers)
        count = sum(len(answer.tokens) for answer in answers)
        data = []
        for given, theirs in zip(answers, teacher, strict=True):
            silent = [0.0] * len(given.prompt)
            gains = discounted(theirs - np.array(given.logprobs), self._discount) / count
            data.append(
                datum(
                    [*given.prompt, *given.tokens],
                    logprobs=[*silent, *given.logprobs],
                    advantages=[*silent, *gains],
                )
            )
        gradient = self.run.forward_backward(data, "importance_sampling")
        stepped = self.run.optim_step(self._step_params(learning_rate))
        reverse = sum(float((np.array(a.logprobs) - t).sum()) for a, t in zip(answers, teacher, strict=True)) / count

        def answer() -> Metrics:
            gradient.result()
            return {
                "loss": reverse,
                "kl/reverse": reverse,
                "optim/grad_norm": grad_norm(stepped),
                **self._counts(answers),
            }

        return answer

    def _ask_off_policy(self, items: Sequence[Any], learning_rate: float) -> Answer:
        answers = self._answers(self._teacher, items, f"step {self.step}")
        soft = self._soft_targets(answers)
        count = sum(len(answer.tokens) for answer in answers)
        data = [soft_datum(given, targets, 1 / count) for given, targets in zip(answers, soft, strict=True)]
        gradient = self.run.forward_backward(data, "cross_entropy")
        stepped = self.run.optim_step(self._step_params(learning_rate))

        def answer() -> Metrics:
            found = gradient.result()
            loss = found.metrics["loss:sum"]
            forward = {}
            if self._top_k:
                kept = float(np.concatenate([targets.kept for targets in soft]).mean())
                forward = {"kl/forward": loss - sum(map(entropy, soft)) / count, "teacher/top_k_mass": kept}
            return {"loss": loss, **forward, "optim/grad_norm": grad_norm(stepped), **self._counts(answers)}

        return answer

    def _evaluate(self, rows: Sequence[Mapping[str, Any]]) -> Metrics:
        """On samples that are drawn anew, with the same seeds at each evaluation."""
        if self._mode == "on_policy":
            answers = self._answers(self._student(), rows, "evaluation")
            theirs = self._teacher_logprobs(answers)
            apart = [
                float((np.array(given.logprobs) - found).mean()) for given, found in zip(answers, theirs, strict=True)
            ]
            return _of_prompts(apart, answers).metrics("eval/reverse_kl")
        answers = self._answers(self._teacher, rows, "evaluation")
        soft = self._soft_targets(answers)
        data = [soft_datum(given, targets, 1.0) for given, targets in zip(answers, soft, strict=True)]
        outputs = self.run.forward(data, "cross_entropy").result().loss_fn_outputs
        losses = []
        for given, targets, output in zip(answers, soft, outputs, strict=True):
            mine = scored(output).reshape(-1, targets.tokens.shape[1])[len(given.prompt) - 1 :]
            loss = -float((mine * targets.probabilities).sum())
            losses.append((loss - entropy(targets)) / len(given.tokens))
        return _of_prompts(losses, answers).metrics("eval/forward_kl" if self._top_k else "eval/loss")

    def _student(self) -> tinker.SamplingClient:
        return self.run.save_weights_and_get_sampling_client().result()

    def _prompt(self, row: Mapping[str, Any]) -> list[int]:
        if isinstance(row.get("prompt"), str):
            tokens = encode(self.tokenizer, row["prompt"], special=True)
        else:
            messages = row.get("prompt") or row.get("messages")
            if not messages:
                raise DataError(
                    f"a row to distil on has prompt or messages; this one has {', '.join(row) or 'nothing'}"
                )
            if self._template is None:
                raise DataError("this model has no chat template: give prompts as texts")
            tokens = list(self._template.prompt(messages, row.get("tools")))
        if not tokens:
            raise DataError("a prompt is empty")
        return tokens

    def _answers(self, model: tinker.SamplingClient, rows: Sequence[Mapping[str, Any]], when: str) -> list[Answered]:
        """``samples`` for each row; the same for the same seed, ``when`` and weights."""
        prompts = [self._prompt(row) for row in rows]
        asked = [
            model.sample(
                types.ModelInput.from_ints(prompt),
                self._samples,
                types.SamplingParams(
                    max_tokens=self._max_tokens, temperature=1.0, stop=self._stop, seed=_seed(self.seed, when, row)
                ),
            )
            for row, prompt in enumerate(prompts)
        ]
        return [
            Answered(row, tuple(prompt), tuple(found.tokens), tuple(found.logprobs or ()))
            for row, (prompt, future) in enumerate(zip(prompts, asked, strict=True))
            for found in future.result().sequences
            if found.tokens
        ]

    def _teacher_logprobs(self, answers: Sequence[Answered]) -> list[Floats]:
        """[M] of each answer."""
        futures = [self._teacher.compute_logprobs(given.whole) for given in answers]
        return [
            np.array(future.result()[len(given.prompt) :], dtype=np.float64)
            for given, future in zip(answers, futures, strict=True)
        ]

    def _soft_targets(self, answers: Sequence[Answered]) -> list[Soft]:
        if not self._top_k:
            return [certain(given.tokens) for given in answers]
        params = types.SamplingParams(max_tokens=1, temperature=1.0, seed=0)
        futures = [
            self._teacher.sample(given.whole, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=self._top_k)
            for given in answers
        ]
        return [
            soft_of((future.result().topk_prompt_logprobs or [])[len(given.prompt) :])
            for given, future in zip(answers, futures, strict=True)
        ]

    def _counts(self, answers: Sequence[Answered]) -> Metrics:
        tokens = sum(len(given.tokens) for given in answers)
        cut = sum(given.tokens[-1] not in self._stop for given in answers)
        return {"data/tokens": tokens, "length/mean": tokens / len(answers), "length/truncated": cut / len(answers)}


def refuse_other_tokenizer(student: Any, teacher: Any, name: str) -> None:
    """Raises ValueError unless both make the same ids of the same texts, as far as their vocabularies say."""
    mine, theirs = student.get_vocab(), teacher.get_vocab()
    if mine == theirs:
        return
    other = sorted(token for token in {*mine, *theirs} if mine.get(token) != theirs.get(token))
    raise ValueError(
        f"the teacher {name} has another tokenizer than the student ({len(theirs)} and {len(mine)} tokens; "
        f"{other[0]!r} is {theirs.get(other[0])} there and {mine.get(other[0])} here), so that its log-probs are of "
        "other tokens; take a teacher of the student's family"
    )


def discounted(values: Floats, discount: float) -> Floats:
    """[M] each value with those after it, by ``discount`` less for every place.

    >>> discounted(np.array([1.0, 2.0, 4.0]), 0.5).tolist()
    [3.0, 4.0, 4.0]
    """
    backwards = accumulate(values[::-1], lambda later, now: now + discount * later)
    return np.array(list(backwards), dtype=np.float64)[::-1]


def soft_of(places: Iterable[Sequence[tuple[int, float]] | None]) -> Soft:
    """From a service's K likeliest (token, log-prob) at each place. Raises ValueError where there are none."""
    found = list(places)
    if not found or any(not place for place in found):
        raise ValueError("the service gave no top-k log-probs of the prompt: train with top_k=0")
    tokens = np.array([[token for token, _ in place or ()] for place in found], dtype=np.int64)
    logprobs = np.array([[value for _, value in place or ()] for place in found], dtype=np.float64)
    likely = np.exp(logprobs)
    kept = likely.sum(1)
    return Soft(tokens, likely / kept[:, None], kept)


def certain(tokens: Sequence[int]) -> Soft:
    """[M, 1]: the tokens themselves, and no doubt."""
    return Soft(np.array(tokens, np.int64)[:, None], np.ones((len(tokens), 1)), np.ones(len(tokens)))


def soft_datum(given: Answered, targets: Soft, scale: float) -> types.Datum:
    """Targets and weights [N - 1, K]; the prompt's places have weight 0."""
    silent, width = len(given.prompt) - 1, targets.tokens.shape[1]
    ids = np.concatenate([np.zeros((silent, width), np.int64), targets.tokens])
    weights = np.concatenate([np.zeros((silent, width)), targets.probabilities * scale]).astype(np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints([*given.prompt, *given.tokens][:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(ids),
            "weights": types.TensorData.from_numpy(weights),
        },
    )


def entropy(targets: Soft) -> float:
    """Σ -p log p over all places: what a cross entropy against them has more than the KL."""
    likely = targets.probabilities
    return -float((likely * np.log(np.maximum(likely, 1e-300))).sum())


def _of_prompts(values: Sequence[float], answers: Sequence[Answered]) -> Estimate:
    return estimate(values, problems=[given.row for given in answers])


def _seed(seed: int, when: str, row: int) -> int:
    text = f"{seed}, {when}, {row}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") % (2**31)
