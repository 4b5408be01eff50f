"""What each trainer of language models reaches, over several seeds, checked by other means than its own metrics.

    python -m benchmarks.trainers --model tiny=DIR --seeds 0 1 2 --out FILE                     # a random model
    python -m benchmarks.trainers --model smollm2-135m=DIR --methods rl-addition --out FILE

The check asks the trained weights themselves, by ``trainer.model`` and the public SDK: it samples and scores, or adds
up log-probs of held-out rows. A method that misses its aim is named, and the status is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tinker
from tinker import types

import gradserve
from gradserve.algorithms.distill import DistillTrainer
from gradserve.algorithms.dpo import DPOTrainer
from gradserve.algorithms.reward_model import RewardModelTrainer
from gradserve.algorithms.rl import RLTrainer
from gradserve.algorithms.sampling_clients import tokenizer_of
from gradserve.algorithms.sft import SFTTrainer
from gradserve.tracking.statistics import estimate

from .control_service import less, spent
from .run import conditions
from .trainer_tasks import Rows, addition_reward, addition_rows, digits_reward, digits_rows

MODEL = "the-model"
RANK = 16
POLITE = [
    {"prompt": f"{number}:", "chosen": f" {number} please", "rejected": f" {number} nonsense"} for number in range(60)
]
PAIRS, HELD_OUT_PAIRS = POLITE[:40], POLITE[40:]
TAUGHT = [{"prompt": text, "completion": f" is {text}"} for text in ("one", "the", "user", "and so")]


@dataclass(frozen=True)
class Found:
    """Of one seed: the checked value of the base model and of the trained one."""

    before: float
    after: float


@dataclass(frozen=True)
class Method:
    """``train(service, seed, folder)``; ``reached`` says whether (before, after) meets what ``aim`` states."""

    train: Callable[[tinker.ServiceClient, int, Path], Found]
    aim: str
    reached: Callable[[Found], bool]


def sampled(client: tinker.SamplingClient, rows: Rows, reward: Callable[[str, str], float], max_tokens: int) -> float:
    """Mean reward of 8 answers to each row, at temperature 1."""
    tokenizer = tokenizer_of(client)
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=99, stop=[tokenizer.eos_token_id])
    earned: list[float] = []
    asked = []
    for row in rows:
        chat = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        asked.append(client.sample(types.ModelInput.from_ints(ids), 8, params))
    for row, future in zip(rows, asked, strict=True):
        texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in future.result().sequences]
        earned += [reward(text, row["answer"]) for text in texts]
    return sum(earned) / len(earned)


def log_likelihood(client: tinker.SamplingClient, prompt: str, answer: str) -> float:
    """log p(answer | prompt), as plain text."""
    tokenizer = tokenizer_of(client)
    given, follows = tokenizer.encode(prompt), tokenizer.encode(answer)
    found = client.compute_logprobs(types.ModelInput.from_ints([*given, *follows])).result()
    return float(sum(value for value in found[len(given) :] if value is not None))


def base_of(service: tinker.ServiceClient) -> tinker.SamplingClient:
    """The model before any training."""
    client: tinker.SamplingClient = service.create_sampling_client(base_model=MODEL).result()
    return client


def reinforced(
    rows: Rows, held_out: Rows, reward: Callable[[str, str], float], rate: float, steps: int, tokens: int
) -> Callable[[tinker.ServiceClient, int, Path], Found]:
    """GRPO with 8 prompts of 8 answers a step; mean reward of answers to held-out rows."""

    def train(service: tinker.ServiceClient, seed: int, folder: Path) -> Found:
        before = sampled(base_of(service), held_out, reward, tokens)
        settings: dict[str, Any] = {"max_tokens": tokens, "rank": RANK, "learning_rate": rate, "seed": seed}
        with RLTrainer(MODEL, reward, service=service, log_dir=folder, **settings) as trainer:
            trainer.fit(rows, epochs=steps, batch_size=8, max_steps=steps)
            return Found(before, sampled(trainer.model, held_out, reward, tokens))

    return train


def tuned(service: tinker.ServiceClient, seed: int, folder: Path) -> Found:
    """SFT on polite completions; log-likelihood per row of held-out ones."""

    def score(client: tinker.SamplingClient) -> float:
        return sum(log_likelihood(client, row["prompt"], row["chosen"]) for row in HELD_OUT_PAIRS) / len(HELD_OUT_PAIRS)

    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    trainer = SFTTrainer(MODEL, rank=RANK, learning_rate=1e-2, seed=seed, service=service, log_dir=folder)
    trainer.fit(rows, epochs=4, batch_size=8)
    return Found(score(base_of(service)), score(trainer.model))


def preferred(service: tinker.ServiceClient, seed: int, folder: Path) -> Found:
    """DPO; the share of held-out pairs whose chosen answer has gained more log-likelihood than the rejected one."""
    trainer = DPOTrainer(MODEL, rank=RANK, learning_rate=5e-3, seed=seed, service=service, log_dir=folder)
    trainer.fit(PAIRS, epochs=3, batch_size=8)
    base, model = base_of(service), trainer.model

    def likelier(client: tinker.SamplingClient, row: dict[str, str]) -> float:
        return log_likelihood(client, row["prompt"], row["chosen"]) - log_likelihood(
            client, row["prompt"], row["rejected"]
        )

    gains = [likelier(model, row) - likelier(base, row) for row in HELD_OUT_PAIRS]
    # Without training no pair has gained anything: half of the pairs by the toss of a coin.
    return Found(0.5, sum(gain > 0 for gain in gains) / len(gains))


def judged(service: tinker.ServiceClient, seed: int, folder: Path) -> Found:
    """A reward model; the share of held-out pairs that its scores rank right, before and after."""
    trainer = RewardModelTrainer(
        MODEL, question="Good?", rank=RANK, learning_rate=5e-3, seed=seed, service=service, log_dir=folder
    )
    fitted = trainer.fit(PAIRS, HELD_OUT_PAIRS, epochs=4, batch_size=8)

    def scores(column: str) -> list[float]:
        return trainer.score([{"prompt": row["prompt"], "completion": row[column]} for row in HELD_OUT_PAIRS])

    right = sum(good > bad for good, bad in zip(scores("chosen"), scores("rejected"), strict=True))
    return Found(fitted.evaluations[0]["eval/accuracy"], right / len(HELD_OUT_PAIRS))


def distilled(
    mode: Literal["on_policy", "off_policy"], epochs: int, settings: dict[str, Any]
) -> Callable[[tinker.ServiceClient, int, Path], Found]:
    """The teacher has begun to learn four sentences; how much less likely its answers are to the student.

    The mean over answers that the teacher samples of log p_teacher - log p_student: the forward KL, estimated on
    samples that no student has seen.
    """

    def train(service: tinker.ServiceClient, seed: int, folder: Path) -> Found:
        teacher = SFTTrainer(MODEL, rank=RANK, learning_rate=1e-2, seed=7, service=service, log_dir=folder / "teacher")
        teacher.fit(TAUGHT, epochs=3, batch_size=4)
        path = teacher.run.save_weights_for_sampler("teacher").result().path
        student = DistillTrainer(
            MODEL, path, mode=mode, max_tokens=2, rank=RANK, learning_rate=1e-2, seed=seed, service=service,
            log_dir=folder / "student", **settings,
        )  # fmt: skip
        rows = [{"prompt": row["prompt"]} for row in TAUGHT]
        student.fit(rows, epochs=epochs, batch_size=4)
        return Found(*(gap(teacher.model, client, rows) for client in (base_of(service), student.model)))

    return train


def gap(teacher: tinker.SamplingClient, student: tinker.SamplingClient, rows: Sequence[dict[str, str]]) -> float:
    """Mean over the teacher's answers of two tokens; see distilled."""
    tokenizer = tokenizer_of(teacher)
    params = types.SamplingParams(max_tokens=2, temperature=1.0, seed=1234)
    gaps = []
    for row in rows:
        prompt = tokenizer.encode(row["prompt"])
        for answer in teacher.sample(types.ModelInput.from_ints(prompt), 32, params).result().sequences:
            asked = types.ModelInput.from_ints([*prompt, *answer.tokens])
            own = student.compute_logprobs(asked).result()[len(prompt) :]
            gaps.append(sum(answer.logprobs or ()) - sum(value for value in own if value is not None))
    return sum(gaps) / len(gaps)


SUMS = addition_rows()
METHODS = {
    "rl-digits": Method(
        reinforced(digits_rows()[:12], digits_rows()[12:], digits_reward, 1e-2, 14, 8),
        "share of digits in answers to unseen questions from under 0.1 to over 0.9",
        lambda found: found.before < 0.1 and found.after > 0.9,
    ),
    "rl-addition": Method(
        reinforced(
            [row for number, row in enumerate(SUMS) if number % 6],
            SUMS[::6],
            addition_reward,
            5e-4,
            12,
            16,
        ),
        "reward on unseen sums from under 0.2 to over 0.9",
        lambda found: found.before < 0.2 and found.after > 0.9,
    ),
    "sft": Method(
        tuned,
        "log-likelihood of unseen completions from below -30 to above -10",
        lambda found: found.before < -30 and found.after > -10,
    ),
    "dpo": Method(preferred, "over 0.95 of unseen pairs moved the right way", lambda found: found.after > 0.95),
    "reward-model": Method(judged, "over 0.9 of unseen pairs ranked right", lambda found: found.after > 0.9),
    "distill-on-policy": Method(
        distilled("on_policy", 10, {"samples": 16}),
        "under half of the gap to the teacher",
        lambda found: found.after < found.before / 2,
    ),
    "distill-off-policy": Method(
        distilled("off_policy", 20, {"samples": 2, "top_k": 20}),
        "under half of the gap to the teacher",
        lambda found: found.after < found.before / 2,
    ),
}


def measure(method: Method, folder: str, seeds: Sequence[int]) -> dict[str, Any]:
    """All seeds, each on a server of its own."""
    runs: list[dict[str, Any]] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as data, gradserve.connect(models={MODEL: folder}, data_dir=data) as service:
            started = spent()
            found = method.train(service, seed, Path(data) / "log")
            cost = sum(less(spent(), started).values())
            runs.append(
                {"seed": seed, "before": found.before, "after": found.after, "cpu_s": round(cost, 1)}
                | {"reached": method.reached(found)}
            )
    means = {name: str(estimate([run[name] for run in runs])) for name in ("before", "after")}
    return {
        "aim": method.aim,
        "reached": all(run["reached"] for run in runs),
        "mean_and_95_percent": means,
        "runs": runs,
    }


def main() -> None:
    """Measure, print, write; a file keeps what it has of other models and methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="NAME=DIRECTORY")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[n for n in METHODS if n != "rl-addition"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GRADSERVE_WORKER_THREADS": "1"}
    name, _, folder = asked.model.partition("=")
    record = json.loads(asked.out.read_text()) if asked.out.exists() else {"conditions": conditions(), "models": {}}
    missed = []
    for method in asked.methods:
        found = measure(METHODS[method], folder, asked.seeds)
        record["models"].setdefault(name, {})[method] = found
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
        print(method, json.dumps(found), flush=True)
        missed += [] if found["reached"] else [method]
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
