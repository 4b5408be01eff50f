"""DPO, reward models and distillation against plain transformers and peft, and their resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import gradserve
from gradserve.algorithms import pair_trainer
from gradserve.algorithms.distill import DistillTrainer, discounted
from gradserve.algorithms.dpo import DPOTrainer
from gradserve.algorithms.pairs import pair_of
from gradserve.algorithms.reward_model import RewardModelTrainer
from gradserve.algorithms.sft import SFTTrainer
from gradserve.algorithms.training_loop import Event
from gradserve.client import download
from gradserve.data.errors import DataError
from tests.numerics import reference

RANK = 4
CHATS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "hello"}], "chosen": "good day", "rejected": "go"},
    {"prompt": [{"role": "user", "content": "a b"}], "chosen": "c", "rejected": "no, not now"},
    {"prompt": [{"role": "user", "content": "thanks"}], "chosen": "with pleasure", "rejected": "what"},
]
POLITE = [
    {"prompt": f"{number}:", "chosen": f" {number} please", "rejected": f" {number} nonsense"} for number in range(30)
]
TRAIN, HELD_OUT = POLITE[:20], POLITE[20:]


@pytest.fixture
def service(url: str) -> tinker.ServiceClient:
    return gradserve.connect(url)


def plain_model(url: str, path: str, base: str, folder: Path) -> Any:
    """transformers and peft with a checkpoint's adapter."""
    adapter = folder / "adapter.safetensors"
    download.weights(url, path, "tml-local", adapter)
    return reference.load_peft(Path(base), adapter, folder / "peft", RANK)


def logprob(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Of an answer's tokens, summed; one row, no padding."""
    found: Tensor = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, :-1].log_softmax(-1)
    chosen = found.gather(1, torch.tensor([*prompt, *answer][1:])[:, None])[:, 0]
    return chosen[len(prompt) - 1 :].sum()


def chat_ids(tokenizer: Any, row: dict[str, Any], column: str) -> tuple[list[int], list[int]]:
    """ChatML written out: the prompt, and the answer with its end of turn."""
    before = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["prompt"])
    return (
        tokenizer.encode(before + "<|im_start|>assistant\n", add_special_tokens=False),
        tokenizer.encode(f"{row[column]}<|im_end|>", add_special_tokens=False),
    )


def same_history(one: Sequence[dict[str, float]], other: Sequence[dict[str, float]], tolerance: float) -> None:
    """All but times; ``tolerance`` is relative and absolute, 0: to the bit."""
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        kept = [{name: value for name, value in step.items() if "time/" not in name} for step in (mine, theirs)]
        assert kept[0] == pytest.approx(kept[1], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
@pytest.mark.parametrize("road", ["beside the weights", "on the client"])
def test_dpo_is_that_of_plain_peft(
    loss: Any, road: str, service: tinker.ServiceClient, url: str, tiny_models: dict[str, str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three steps of Adam: loss, gradient norm, rewards and accuracy; the weights they end at rank as PEFT's do."""
    if road == "on the client":
        monkeypatch.setattr(pair_trainer.PairTrainer, "_runs_graphs", lambda self: False)
    beta = 0.3
    trainer = DPOTrainer(
        "tiny", beta=beta, loss=loss, rank=RANK, learning_rate=1e-2, seed=5, service=service, log_dir=tmp_path / "log"
    )
    history = trainer.fit(CHATS, epochs=3, batch_size=3).history

    twin = service.create_lora_training_client(base_model="tiny", rank=RANK, seed=5).result()
    model = plain_model(url, twin.save_state("begun").result().path, tiny_models["tiny"], tmp_path)
    base = reference.load(Path(tiny_models["tiny"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    ids = [[chat_ids(twin.get_tokenizer(), row, column) for column in ("chosen", "rejected")] for row in CHATS]
    for step in history:
        changes = torch.stack(
            [torch.stack([logprob(model, *each) - logprob(base, *each).detach() for each in pair]) for pair in ids]
        )
        h = changes[:, 0] - changes[:, 1]
        expected = (-logsigmoid(beta * h) if loss == "dpo" else (h - 1 / (2 * beta)) ** 2).mean()
        optimizer.zero_grad()
        expected.backward()  # type: ignore[no-untyped-call]
        norm = torch.stack([parameter.grad.norm() for parameter in trained if parameter.grad is not None]).norm()
        assert step["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
        assert step["optim/grad_norm"] == pytest.approx(float(norm), rel=2e-3)
        rewards = beta * changes.detach().mean(0)
        assert step["rewards/chosen"] == pytest.approx(float(rewards[0]), abs=1e-4)
        assert step["rewards/rejected"] == pytest.approx(float(rewards[1]), abs=1e-4)
        assert step["margin"] == pytest.approx(float(rewards[0] - rewards[1]), abs=2e-4)
        if step["step"] > 1:  # before, all margins are 0 but for rounding
            assert step["accuracy"] == pytest.approx(float((h > 0).float().mean()))
        optimizer.step()


def test_dpo_prefers_what_was_chosen_on_pairs_it_has_not_seen(
    service: tinker.ServiceClient, url: str, tiny_models: dict[str, str], tmp_path: Path
) -> None:
    trainer = DPOTrainer("tiny", rank=RANK, learning_rate=5e-3, service=service, log_dir=tmp_path / "log")
    fitted = trainer.fit(TRAIN, HELD_OUT, epochs=3, batch_size=5)
    model = plain_model(url, fitted.path, tiny_models["tiny"], tmp_path)
    base = reference.load(Path(tiny_models["tiny"]))
    tokenizer = trainer.tokenizer
    right = []
    for row in HELD_OUT:
        prompt = tokenizer.encode(row["prompt"])
        ids = [[*tokenizer.encode(row[column]), tokenizer.eos_token_id] for column in ("chosen", "rejected")]
        with torch.no_grad():
            change = [float(logprob(model, prompt, answer) - logprob(base, prompt, answer)) for answer in ids]
        right.append(change[0] > change[1])
    assert np.mean(right) == fitted.evaluations[-1]["eval/accuracy"] == 1.0
    assert fitted.evaluations[-1]["eval/accuracy_low"] < 1.0


def test_a_reward_model_ranks_pairs_it_has_not_seen(
    service: tinker.ServiceClient, url: str, tiny_models: dict[str, str], tmp_path: Path
) -> None:
    trainer = RewardModelTrainer(
        "tiny", question="Good?", rank=RANK, learning_rate=5e-3, service=service, log_dir=tmp_path / "log"
    )
    fitted = trainer.fit(TRAIN, HELD_OUT, epochs=4, batch_size=5)
    assert fitted.history[-1]["loss"] < 0.2 * fitted.history[0]["loss"]
    model = plain_model(url, fitted.path, tiny_models["tiny"], tmp_path)
    tokenizer = trainer.tokenizer
    scores = []
    for row in HELD_OUT:
        for column in ("chosen", "rejected"):
            before = tokenizer.encode(f"{row['prompt']}{row[column]}\nGood?\n")
            with torch.no_grad():
                p = float(logprob(model, before, tokenizer.encode("yes")[:1]).exp())
            scores.append(np.log(p / (1 - p)))
    answers = [{"prompt": r["prompt"], "completion": r[c]} for r in HELD_OUT for c in ("chosen", "rejected")]
    assert trainer.score(answers) == pytest.approx(scores, abs=2e-3)
    right = np.mean(np.array(scores[0::2]) > np.array(scores[1::2]))
    assert right == fitted.evaluations[-1]["eval/accuracy"] >= 0.9


def test_a_reward_models_first_loss_on_conversations_is_plain_bradley_terry(
    service: tinker.ServiceClient, tiny_models: dict[str, str], tmp_path: Path
) -> None:
    """A new adapter changes nothing, so the base model in transformers gives the same."""
    trainer = RewardModelTrainer("tiny", question="Good?", rank=RANK, service=service, log_dir=tmp_path)
    step = trainer.fit(CHATS, batch_size=3).history[0]
    base, tokenizer = reference.load(Path(tiny_models["tiny"])), trainer.tokenizer
    scores = []
    for row in CHATS:
        for column in ("chosen", "rejected"):
            prompt, answer = chat_ids(tokenizer, row, column)
            question = "\n<|im_start|>user\nGood?<|im_end|>\n<|im_start|>assistant\n"
            after = tokenizer.encode(question, add_special_tokens=False)
            scores.append(torch.logit(logprob(base, [*prompt, *answer, *after], tokenizer.encode("yes")[:1]).exp()))
    margins = torch.stack(scores[0::2]) - torch.stack(scores[1::2])
    assert step["loss"] == pytest.approx(float(-logsigmoid(margins).mean()), rel=1e-4)
    assert step["scores/chosen"] == pytest.approx(float(torch.stack(scores[0::2]).mean()), rel=1e-4)


PROMPTS = [{"prompt": text} for text in ("one", "the", "user", "and so")]


def teacher_of(service: tinker.ServiceClient, folder: Path) -> tuple[str, str]:
    """The same base that has begun to learn four sentences: paths of its weights to sample from and to load."""
    rows = [{"prompt": row["prompt"], "completion": f" is {row['prompt']}"} for row in PROMPTS]
    trainer = SFTTrainer("tiny", rank=RANK, learning_rate=1e-2, service=service, log_dir=folder)
    fitted = trainer.fit(rows, epochs=3, batch_size=4)
    return trainer.run.save_weights_for_sampler("teacher").result().path, fitted.path


def next_logprobs(model: Any, prompt: Sequence[int]) -> Tensor:
    """[V] of the token after the prompt."""
    found: Tensor = model(input_ids=torch.tensor([list(prompt)])).logits[0, -1].log_softmax(-1)
    return found


def exact_kl(student: Any, teacher: Any, ids: Sequence[Sequence[int]], *, reverse: bool) -> float:
    """KL of next tokens after each of the prompts, whole vocabulary, mean."""
    found = []
    for prompt in ids:
        with torch.no_grad():
            mine, theirs = (next_logprobs(model, prompt) for model in (student, teacher))
        p, q = (mine, theirs) if reverse else (theirs, mine)
        found.append(float((p.exp() * (p - q)).sum()))
    return float(np.mean(found))


@pytest.mark.parametrize("mode", ["on_policy", "off_policy"])
def test_distillation_brings_the_student_to_the_teacher(
    mode: Any, service: tinker.ServiceClient, url: str, tiny_models: dict[str, str], tmp_path: Path
) -> None:
    """The exact KL of the next token after the prompts falls to under a third, that of whole answers by a third."""
    sampler, state = teacher_of(service, tmp_path / "teacher-log")
    settings: dict[str, Any] = {"on_policy": {"samples": 16}, "off_policy": {"samples": 4, "top_k": 128}}[mode]
    epochs = {"on_policy": 10, "off_policy": 15}[mode]
    student = DistillTrainer(
        "tiny", sampler, mode=mode, max_tokens=2, rank=RANK, learning_rate=1e-2, service=service,
        log_dir=tmp_path / "log", **settings,
    )  # fmt: skip
    fitted = student.fit(PROMPTS, PROMPTS, epochs=epochs, batch_size=4, eval_every=epochs)
    (tmp_path / "s").mkdir()
    (tmp_path / "t").mkdir()
    teacher = plain_model(url, state, tiny_models["tiny"], tmp_path / "t")
    now = plain_model(url, fitted.path, tiny_models["tiny"], tmp_path / "s")
    base = reference.load(Path(tiny_models["tiny"]))
    ids = [student.tokenizer.encode(row["prompt"]) for row in PROMPTS]
    reverse = mode == "on_policy"
    before, after = (exact_kl(model, teacher, ids, reverse=reverse) for model in (base, now))
    assert after < before / 3
    name = "eval/reverse_kl" if reverse else "eval/forward_kl"
    assert fitted.evaluations[-1][name] < fitted.evaluations[0][name] * 2 / 3


def test_the_forward_kl_of_one_token_is_that_of_plain_torch(
    service: tinker.ServiceClient, url: str, tiny_models: dict[str, str], tmp_path: Path
) -> None:
    """kl/forward of the first step is that of the base model to the teacher's 20 likeliest tokens, renormalised."""
    sampler, state = teacher_of(service, tmp_path / "teacher-log")
    student = DistillTrainer(
        "tiny", sampler, mode="off_policy", samples=1, max_tokens=1, top_k=20, rank=RANK, service=service,
        log_dir=tmp_path / "log",
    )  # fmt: skip
    step = student.fit(PROMPTS, batch_size=4).history[0]
    teacher = plain_model(url, state, tiny_models["tiny"], tmp_path)
    base = reference.load(Path(tiny_models["tiny"]))
    expected, mass = [], []
    for row in PROMPTS:
        ids = torch.tensor([student.tokenizer.encode(row["prompt"])])
        with torch.no_grad():
            p = teacher(input_ids=ids).logits[0, -1].softmax(-1).topk(20)
            q = base(input_ids=ids).logits[0, -1].log_softmax(-1)[p.indices]
        mass.append(float(p.values.sum()))
        kept = p.values / p.values.sum()
        expected.append(float((kept * (kept.log() - q)).sum()))
    assert step["teacher/top_k_mass"] == pytest.approx(np.mean(mass), rel=1e-4)
    assert step["kl/forward"] == pytest.approx(np.mean(expected), rel=1e-3)


def test_without_top_k_the_loss_is_that_of_the_teachers_own_tokens(
    service: tinker.ServiceClient, url: str, tiny_models: dict[str, str], tmp_path: Path
) -> None:
    """Drawn with the trainer's own seeds from the base model, which is teacher and student here."""
    student = DistillTrainer(
        "tiny", "tiny", mode="off_policy", samples=2, max_tokens=3, top_k=0, rank=RANK, service=service,
        log_dir=tmp_path,
    )  # fmt: skip
    rows = PROMPTS[:2]
    step = student.fit(rows, batch_size=2).history[0]
    base = reference.load(Path(tiny_models["tiny"]))
    student.step = 0
    drawn = student._answers(student._teacher, rows, "step 0")
    shuffled = student._answers(student._teacher, rows[::-1], "step 0")
    losses = []
    for answers in (drawn, shuffled):
        with torch.no_grad():
            total = sum(float(logprob(base, given.prompt, given.tokens)) for given in answers)
        losses.append(-total / sum(len(given.tokens) for given in answers))
    assert any(step["loss"] == pytest.approx(loss, rel=1e-4) for loss in losses)
    assert "kl/forward" not in step


def test_a_discounted_advantage_is_a_return() -> None:
    assert discounted(np.array([1.0, 2.0, 4.0]), 0.5).tolist() == [3.0, 4.0, 4.0]
    assert discounted(np.array([1.0, 2.0, 4.0]), 0.0).tolist() == [1.0, 2.0, 4.0]


def test_the_reference_may_be_weights_and_long_pairs_are_refused_or_counted(
    service: tinker.ServiceClient, url: str, tiny_models: dict[str, str], tmp_path: Path
) -> None:
    sampler, state = teacher_of(service, tmp_path / "sft")
    settings: dict[str, Any] = {"rank": RANK, "service": service, "reference": sampler, "beta": 0.5}
    long = {"prompt": "a:", "chosen": " b" * 50, "rejected": " c"}
    trainer = DPOTrainer("tiny", **settings, max_length=40, overlong="skip", log_dir=tmp_path / "skip")
    step = trainer.fit([TRAIN[0], long], batch_size=2).history[0]
    assert (step["data/pairs"], step["data/overlong_skipped"]) == (1, 1)
    base = reference.load(Path(tiny_models["tiny"]))
    referred, tokenizer = plain_model(url, state, tiny_models["tiny"], tmp_path), trainer.tokenizer
    for column in ("chosen", "rejected"):
        ids = tokenizer.encode(TRAIN[0]["prompt"]), [*tokenizer.encode(TRAIN[0][column]), tokenizer.eos_token_id]
        with torch.no_grad():
            expected = 0.5 * float(logprob(base, *ids) - logprob(referred, *ids))
        assert step[f"rewards/{column}"] == pytest.approx(expected, abs=1e-3)
    with pytest.raises(DataError, match="max_length is 40"):
        DPOTrainer("tiny", **settings, max_length=40, log_dir=tmp_path / "refuse").fit([long])


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    from gradserve.algorithms.distill import refuse_other_tokenizer
    from tests.models import byte_tokenizer

    other = byte_tokenizer()
    other.add_tokens(["zebra"])
    refuse_other_tokenizer(byte_tokenizer(), byte_tokenizer(), "twin")
    with pytest.raises(ValueError, match=r"teacher big has another tokenizer .*'zebra' is \d+ there and None here"):
        refuse_other_tokenizer(byte_tokenizer(), other, "big")


class PowerCut(Exception):
    pass


@pytest.mark.parametrize("kind", ["dpo", "reward", "on_policy", "off_policy"])
def test_resumed_equals_undisturbed(kind: Any, service: tinker.ServiceClient, tmp_path: Path) -> None:
    """Histories, evaluations and the weights' answers: to the bit, or to rounding where a sampler is asked.

    Requests that reach a sampler together are computed together, and how many do is a matter of timing.
    """
    tolerance = 1e-4 if kind in ("on_policy", "off_policy") else 0.0

    def made(folder: str) -> Any:
        settings: dict[str, Any] = {
            "rank": RANK, "learning_rate": "linear_1e-2", "service": service, "log_dir": tmp_path / folder
        }  # fmt: skip
        match kind:
            case "dpo":
                return DPOTrainer("tiny", **settings)
            case "reward":
                return RewardModelTrainer("tiny", **settings)
        # Not its own teacher: where both agree the gradient is rounding alone, which Adam makes as large as any other.
        return DistillTrainer("tiny", "tiny-qwen", mode=kind, samples=2, max_tokens=3, **settings)

    def cut(event: Event) -> None:
        if event.kind == "step" and event.step == 3:
            raise PowerCut

    rows, fit = POLITE[:6], {"epochs": 2, "batch_size": 2, "checkpoint_every": 2, "eval_data": POLITE[6:9]}
    whole, first, second = made("whole"), made("cut"), made("cut")
    straight = whole.fit(rows, **fit)
    with pytest.raises(PowerCut):
        first.fit(rows, **fit, callbacks=[cut])
    taken_up = second.fit(rows, **fit, resume=True)
    same_history(straight.history[2:], taken_up.history, tolerance)
    same_history(straight.evaluations[-len(taken_up.evaluations) :], taken_up.evaluations, tolerance)
    prompt = tinker.types.ModelInput.from_ints([5, 9, 30, 31, 70])
    answers = [trainer.model.compute_logprobs(prompt).result() for trainer in (whole, second)]
    assert answers[0][1:] == pytest.approx(answers[1][1:], abs=tolerance, rel=tolerance)


def test_a_pair_is_trained_on_from_where_its_conversations_part(service: tinker.ServiceClient) -> None:
    from tests.models import byte_tokenizer

    tokenizer = byte_tokenizer()
    common = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    row = {name: [*common, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    pair = pair_of(row, tokenizer)
    trained = [token for token, weight in zip(pair.rejected.tokens, pair.rejected.weights, strict=True) if weight]
    assert tokenizer.decode(trained) == "rejected<|im_end|>"
    with pytest.raises(DataError, match="do not part"):
        pair_of({"chosen": row["chosen"], "rejected": row["chosen"]}, tokenizer)
    with pytest.raises(DataError, match="chosen and rejected; this one has prompt, chosen"):
        pair_of({"prompt": "a", "chosen": "b"}, tokenizer)
    with pytest.raises(DataError, match="rejected is a text without a prompt"):
        pair_of({"chosen": row["chosen"], "rejected": "no"}, tokenizer)
