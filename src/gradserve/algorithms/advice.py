"""Learning rates, batch sizes and ranks by method and size of model, each with where it comes from.

Rules of thumb: where they were measured is said, and what is between two measurements is interpolated and called so.

>>> advised("sft", parameters=8_000_000_000)[0].value
0.0003
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

REGRET = "Schulman et al. 2025, LoRA Without Regret, thinkingmachines.ai/blog/lora"
SWEEP = "tinker-cookbook, hyperparam_utils.get_lr: a sweep of supervised LoRA, batch 128, 780 steps"
QUICKSTART = "docs/log.md, 2026-11-30: GRPO on SmolLM2-135M, rank 16, 8 x 8 samples, 0.1 to 0.9 in 10 steps"
RL_LOOP = "tinker-cookbook, recipes/rl_loop.py: Llama-3.1-8B, 128 x 16 samples"
DPO_RECIPE = "tinker-cookbook, recipes/preference/dpo/README.md: a 9B model"
DISTILLATION = "tinker-cookbook, recipes/distillation/README.md: a 9B model, rank 128"
GRPO_PAPER = "Shao et al. 2024, arXiv:2402.03300, section 4.2: 64 answers to a question"
ZOO = "rl-baselines3-zoo's tuned settings for the environment"

SMALL_UP_TO = 5_000_000_000
"""Parameters up to which the sweep's best rate is mostly 1e-3, and beyond which it is mostly 3e-4."""
_QUICKSTART_SIZE, _RL_LOOP_SIZE = 135e6, 8e9
_QUICKSTART_RATE, _RL_LOOP_RATE = 5e-4, 4e-5
_APART = 4.0
"""Times more or less than the advised learning rate that are still near it: the steps of a coarse sweep."""
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([mb])(?![a-z0-9])", re.IGNORECASE)


@dataclass(frozen=True)
class Advice:
    """``low`` and ``high`` are what is still near; ``keyword`` is the trainer's or its fit's."""

    keyword: str
    value: float
    low: float
    high: float
    because: str
    source: str

    def is_near(self, value: float) -> bool:
        """Whether nothing needs to be said about ``value``."""
        return self.low <= value <= self.high


def parameters_in(name: str) -> int | None:
    """What a model's name says of its size.

    >>> parameters_in("smollm2-135m-instruct"), parameters_in("Qwen/Qwen3-0.6B"), parameters_in("tiny")
    (135000000, 600000000, None)
    """
    found = _SIZE.search(name)
    return int(float(found[1]) * {"m": 1e6, "b": 1e9}[found[2].lower()]) if found else None


def advised(trainer: str, parameters: int | None, mode: str | None = None) -> list[Advice]:
    """For one of tasks.trainers.TRAINERS; ``mode`` is DistillTrainer's. Empty for what nobody has measured."""
    return [*_learning_rate(trainer, parameters, mode), *_batch(trainer), *_rank(trainer)]


def _learning_rate(trainer: str, parameters: int | None, mode: str | None) -> Iterator[Advice]:
    if trainer == "sft" or (trainer == "distill" and mode == "off_policy"):
        if parameters is None:
            yield _rate(1e-3, "the size of the model is unknown; this is for models up to 5B", SWEEP)
        elif parameters <= SMALL_UP_TO:
            yield _rate(
                1e-3, "best for most of 1B to 4B, and taken for smaller ones; some 10 times full fine-tuning's", SWEEP
            )
        else:
            yield _rate(3e-4, "best for most from 8B on; some 10 times full fine-tuning's", SWEEP)
    elif trainer == "rl":
        yield _reinforced(parameters)
    elif trainer == "dpo":
        yield _rate(1e-5 if (parameters or 0) > SMALL_UP_TO else 5e-5, _dpo_because(parameters), DPO_RECIPE)
    elif trainer == "distill":
        yield _rate(1e-4, "on-policy, with LoRA; half of it for full fine-tuning", DISTILLATION)


def _reinforced(parameters: int | None) -> Advice:
    """On a line through both measurements, in logarithms; at its ends beyond them."""
    if parameters is None:
        return _rate(_RL_LOOP_RATE, "the size of the model is unknown; this is for 8B", RL_LOOP)
    done = math.log(parameters / _QUICKSTART_SIZE) / math.log(_RL_LOOP_SIZE / _QUICKSTART_SIZE)
    if done <= 0:
        return _rate(_QUICKSTART_RATE, "measured at 135M", QUICKSTART)
    if done >= 1:
        return _rate(_RL_LOOP_RATE, "used at 8B", RL_LOOP)
    rate = _QUICKSTART_RATE * (_RL_LOOP_RATE / _QUICKSTART_RATE) ** done
    return _rate(float(f"{rate:.1g}"), "interpolated between 5e-4 at 135M and 4e-5 at 8B", f"{QUICKSTART}; {RL_LOOP}")


def _dpo_because(parameters: int | None) -> str:
    if (parameters or 0) > SMALL_UP_TO:
        return "pairs want a much lower rate than examples: too high, and both answers become unlikely"
    return "1e-5 is a 9B model's; small models bear more, this is the trainer's default and no sweep's result"


def _rate(value: float, because: str, source: str) -> Advice:
    return Advice("learning_rate", value, value / _APART, value * _APART, because, source)


def _batch(trainer: str) -> Iterator[Advice]:
    if trainer in ("sft", "dpo"):
        because = "LoRA loses more than full fine-tuning does when a batch is large, at any rank"
        yield Advice("batch_size", 32, 4, 128, because, REGRET)
    if trainer == "rl":
        because = "an advantage is a difference to the group's mean: of few answers it is mostly noise"
        yield Advice("group_size", 8, 4, 64, because, f"{GRPO_PAPER}; {RL_LOOP}")


def _rank(trainer: str) -> Iterator[Advice]:
    if trainer in ("sft", "dpo", "distill", "reward"):
        because = (
            "the adapter must hold what the data says: more rows, more rank; the learning rate does not depend on it"
        )
        yield Advice("rank", 32, 8, 256, because, REGRET)
    if trainer == "rl":
        because = "an episode's reward is about a bit: rank 1 learns as well, so a small rank costs nothing"
        yield Advice("rank", 16, 1, 64, because, REGRET)
