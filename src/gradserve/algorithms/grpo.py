"""Group relative policy optimisation in its plain form (Shao et al. 2024, arXiv:2402.03300).

For each prompt a group of answers is sampled; an answer's advantage is its reward minus the group's mean (without the
division by the standard deviation, as Liu et al. 2025, arXiv:2503.20783, advise). One importance-sampled
policy-gradient step per batch of groups, no KL term. Groups whose rewards are all equal teach nothing; they are not
sent.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tinker
from tinker import types


class Problem(Protocol):
    """What GRPO needs of a task."""

    @property
    def prompt(self) -> str: ...

    def reward(self, answer: str, finished: bool) -> float: ...


@dataclass(frozen=True)
class GRPOConfig:
    """``learning_rate`` is AdamW's, constant. A batch is ``prompts`` groups of ``group`` answers."""

    steps: int = 12
    prompts: int = 8
    group: int = 8
    max_tokens: int = 16
    learning_rate: float = 5e-4
    temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """A sampled answer: its text, tokens and log-probs under the policy that sampled it, and what it earned."""

    problem: Problem
    text: str
    tokens: list[int]
    logprobs: list[float]
    reward: float


@dataclass(frozen=True)
class Step:
    """What one step did. Token counts are prompt + answer of the trained rows, and the sampled tokens."""

    number: int
    reward: float
    trained_tokens: int
    sampled_tokens: int
    best: Answer


def train(
    run: tinker.TrainingClient, tokenizer: Any, problems: Sequence[Problem], config: GRPOConfig
) -> Iterator[Step]:
    """Train ``run`` step by step; each step is yielded when it is done."""
    order = _epochs(problems, random.Random(config.seed))
    for number in range(config.steps):
        sampler = run.save_weights_and_get_sampling_client().result()
        batch = [next(order) for _ in range(config.prompts)]
        groups = rollout(sampler, tokenizer, batch, config.group, config, seed=config.seed * 1_000_003 + number)
        data = [datum for group in groups for datum in group_data(group, tokenizer)]
        if data:
            gradient = run.forward_backward(_per_token(data), "importance_sampling")
            step = run.optim_step(types.AdamParams(learning_rate=config.learning_rate))
            gradient.result()
            step.result()
        answers = [answer for group in groups for answer in group]
        yield Step(
            number,
            reward=float(np.mean([answer.reward for answer in answers])),
            trained_tokens=sum(datum.model_input.length for datum in data),
            sampled_tokens=sum(len(answer.tokens) for answer in answers),
            best=max(answers, key=lambda answer: answer.reward),
        )


def rollout(
    sampler: tinker.SamplingClient,
    tokenizer: Any,
    problems: Sequence[Problem],
    count: int,
    config: GRPOConfig,
    seed: int,
) -> list[list[Answer]]:
    """``count`` answers to each problem, all prompts in flight together."""
    futures = []
    for index, problem in enumerate(problems):
        prompt = types.ModelInput.from_ints(tokenizer.encode(problem.prompt))
        parameters = types.SamplingParams(
            max_tokens=config.max_tokens, temperature=config.temperature, seed=seed * 10_007 + index
        )
        futures.append(sampler.sample(prompt, count, parameters))
    return [
        [_answer(problem, sequence, tokenizer) for sequence in future.result().sequences]
        for problem, future in zip(problems, futures, strict=True)
    ]


def _answer(problem: Problem, sequence: types.SampledSequence, tokenizer: Any) -> Answer:
    assert sequence.logprobs is not None
    text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    reward = problem.reward(text, finished=sequence.stop_reason == "stop")
    return Answer(problem, text, list(sequence.tokens), list(sequence.logprobs), reward)


def group_data(group: Sequence[Answer], tokenizer: Any) -> list[types.Datum]:
    """The rows of one group, with advantages; none when all rewards are equal."""
    mean = float(np.mean([answer.reward for answer in group]))
    if all(answer.reward == mean for answer in group):
        return []
    return [_datum(answer, answer.reward - mean, tokenizer.encode(answer.problem.prompt)) for answer in group]


def _datum(answer: Answer, advantage: float, prompt: list[int]) -> types.Datum:
    """Inputs are all tokens but the last, targets all but the first; the prompt's positions carry no advantage."""
    tokens = [*prompt, *answer.tokens]
    silent = len(prompt) - 1

    def padded(values: list[float]) -> types.TensorData:
        return types.TensorData.from_numpy(np.array([0.0] * silent + values, dtype=np.float32))

    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
            "logprobs": padded(answer.logprobs),
            "advantages": padded([advantage] * len(answer.tokens)),
        },
    )


def _per_token(data: list[types.Datum]) -> list[types.Datum]:
    """Losses are sums on this protocol: dividing the advantages by the number of answer tokens makes a mean of it."""
    count = sum(int(np.count_nonzero(datum.loss_fn_inputs["logprobs"].to_numpy())) for datum in data)
    for datum in data:
        advantages = datum.loss_fn_inputs["advantages"].to_numpy() / max(count, 1)
        datum.loss_fn_inputs["advantages"] = types.TensorData.from_numpy(advantages.astype(np.float32))
    return data


def _epochs(problems: Sequence[Problem], rng: random.Random) -> Iterator[Problem]:
    """All problems in random order, again and again."""
    while True:
        yield from rng.sample(problems, len(problems))
