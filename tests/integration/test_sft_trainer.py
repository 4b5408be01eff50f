"""SFTTrainer against a hand-written reference, and what every trainer's loop promises: resume, evaluation, limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from torch import Tensor

import gradserve
from gradserve.algorithms.sft import SFTTrainer
from gradserve.algorithms.stopping import EarlyStop
from gradserve.algorithms.training_loop import Diverged, Event
from gradserve.client import download
from gradserve.data.errors import DataError
from gradserve.episodes.errors import RowUnusable
from gradserve.tracking.names import meaning
from tests.numerics import reference

RANK = 4
CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "and then, at some length"},
            {"role": "assistant", "content": "two and three"},
        ]
    },
    {"messages": [{"role": "user", "content": "short"}, {"role": "assistant", "content": "yes"}]},
    {"messages": [{"role": "user", "content": "again"}, {"role": "assistant", "content": "no, no, no"}]},
]
NUMBERED = [{"prompt": f"{number}:", "completion": f" {number * 7}"} for number in range(10)]


@pytest.fixture
def service(url: str) -> tinker.ServiceClient:
    return gradserve.connect(url)


def trainer_of(service: tinker.ServiceClient, folder: Path, **settings: Any) -> SFTTrainer:
    return SFTTrainer("tiny", rank=RANK, service=service, log_dir=folder, **{"learning_rate": 1e-2, **settings})


def by_hand(tokenizer: Any, chat: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """ChatML written out: trained on are the assistant's words and its end of turn, not the line break after it."""
    tokens: list[int] = []
    weights: list[float] = []
    for message in chat["messages"]:
        own = float(message["role"] == "assistant")
        for text, weight in (
            (f"<|im_start|>{message['role']}\n", 0.0),
            (f"{message['content']}<|im_end|>", own),
            ("\n", 0.0),
        ):
            ids = tokenizer.encode(text, add_special_tokens=False)
            tokens += ids
            weights += [weight] * len(ids)
    return tokens, weights


def mean_loss(model: Any, rows: Sequence[tuple[list[int], list[float]]]) -> Tensor:
    """Σ weights·(-log p) / Σ weights, one row after the other."""
    total, count = torch.zeros(()), 0.0
    for tokens, weights in rows:
        found = model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        chosen = found.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        total = total - (chosen * torch.tensor(weights[1:])).sum()
        count += sum(weights)
    return total / count


def test_losses_and_gradients_of_conversations_are_those_of_plain_peft(
    service: tinker.ServiceClient, url: str, tiny_models: dict[str, str], tmp_path: Path
) -> None:
    trainer = trainer_of(service, tmp_path / "log", seed=5)
    history = trainer.fit(CHATS, epochs=4, batch_size=len(CHATS)).history

    twin = service.create_lora_training_client(base_model="tiny", rank=RANK, seed=5).result()
    begun = twin.save_state("begun").result().path
    adapter = tmp_path / "adapter.safetensors"
    download.weights(url, begun, "tml-local", adapter)
    model = reference.load_peft(Path(tiny_models["tiny"]), adapter, tmp_path / "peft", RANK)
    rows = [by_hand(twin.get_tokenizer(), chat) for chat in CHATS]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in history:
        optimizer.zero_grad()
        loss = mean_loss(model, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.stack([parameter.grad.norm() for parameter in trained if parameter.grad is not None]).norm()
        assert step["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert step["optim/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
        optimizer.step()
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    assert [name for name in history[0] if name != "step" and meaning(name) is None] == []
    assert trainer.evaluate(CHATS)["eval/loss"] == pytest.approx(float(mean_loss(model, rows).detach()), rel=1e-3)


class Recording(SFTTrainer):
    """Remembers which rows it was given."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.seen: list[str] = []

    def _ask(self, items: Sequence[Any], learning_rate: float) -> Any:
        self.seen += [row["prompt"] for row in items]
        return super()._ask(items, learning_rate)


class PowerCut(Exception):
    pass


def untimed(step: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in step.items() if not name.startswith("time/")}


def test_a_run_that_is_taken_up_again_sees_every_row_once_and_ends_where_it_would_have(
    service: tinker.ServiceClient, tmp_path: Path
) -> None:
    def recording(folder: str) -> Recording:
        return Recording("tiny", rank=RANK, learning_rate="linear_1e-2", service=service, log_dir=tmp_path / folder)

    whole = recording("whole")
    straight = whole.fit(NUMBERED, eval_data=CHATS, epochs=3, batch_size=4, checkpoint_every=2)
    epochs = [whole.seen[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == sorted(row["prompt"] for row in NUMBERED) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each epoch has an order of its own"

    def cut(event: Event) -> None:
        if event.kind == "step" and event.step == 5:
            raise PowerCut

    first, second = recording("cut"), recording("cut")
    with pytest.raises(PowerCut):
        first.fit(NUMBERED, eval_data=CHATS, epochs=3, batch_size=4, checkpoint_every=2, callbacks=[cut])
    taken_up = second.fit(NUMBERED, eval_data=CHATS, epochs=3, batch_size=4, checkpoint_every=2, resume=True)
    behind = 4 + 4 + 2 + 4  # rows of the four steps behind the checkpoint: an epoch's last batch has two
    assert first.seen[:behind] + second.seen == whole.seen
    assert [untimed(step) for step in taken_up.history] == [untimed(step) for step in straight.history[4:]]
    assert taken_up.evaluations == straight.evaluations[-len(taken_up.evaluations) :]
    lines = [json.loads(line) for line in (tmp_path / "cut/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 10)), "each step is logged once"


def test_an_epoch_that_is_over_is_not_trained_again(service: tinker.ServiceClient, tmp_path: Path) -> None:
    first = trainer_of(service, tmp_path).fit(NUMBERED, epochs=1, batch_size=5)
    again = trainer_of(service, tmp_path).fit(NUMBERED, epochs=1, batch_size=5, resume=True)
    more = trainer_of(service, tmp_path).fit(NUMBERED, epochs=2, batch_size=5, resume=first.path)
    assert [len(fitted.history) for fitted in (first, again, more)] == [2, 0, 2]
    assert more.history[0]["step"] == 3


def test_what_ends_a_training(service: tinker.ServiceClient, tmp_path: Path) -> None:
    def fitted(name: str, **limits: Any) -> Any:
        return trainer_of(service, tmp_path / name).fit(NUMBERED, epochs=9, batch_size=5, **limits)

    assert fitted("steps", max_steps=3).stopped == "max_steps=3 reached"
    called = fitted("callback", callbacks=[lambda event: event.kind == "step" and event.step == 2])
    assert (len(called.history), called.stopped) == (2, "a callback ended it after step 2")
    stop = EarlyStop("eval/loss", patience=2, mode="min", min_delta=100.0)
    early = fitted("early", eval_data=CHATS, eval_every=1, early_stop=stop)
    assert (len(early.history), early.stopped) == (2, "eval/loss has not become better for 2 evaluations")
    paid = fitted("paid", max_usd=1e-9)
    assert len(paid.history) <= 2
    assert paid.stopped.startswith("max_usd=1e-09: the run has cost $0.0")


def test_bad_arguments_and_rows_are_refused_at_once(service: tinker.ServiceClient, tmp_path: Path) -> None:
    trainer = trainer_of(service, tmp_path / "a")
    with pytest.raises(ValueError, match="batch_size is 0"):
        trainer.fit(NUMBERED, batch_size=0)
    with pytest.raises(ValueError, match="early_stop looks at evaluations: give eval_data"):
        trainer.fit(NUMBERED, early_stop=EarlyStop("eval/loss"))
    with pytest.raises(ValueError, match="does not name tinker://elsewhere"):
        trainer.fit(NUMBERED, resume="tinker://elsewhere")
    with pytest.raises(ValueError, match="no schedule"):
        trainer_of(service, tmp_path, learning_rate="fast")
    with pytest.raises(RowUnusable, match=r"the columns question, answer; .* in the row .'question': 'a'"):
        trainer.fit([{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match="max_length is 3"):
        trainer_of(service, tmp_path / "b", max_length=3).fit(CHATS)
    skipping = trainer_of(service, tmp_path / "c", max_length=45, overlong="skip")
    assert skipping.fit(CHATS, batch_size=3).history[0]["data/overlong_skipped"] == 1


def test_a_loss_that_is_not_finite_ends_the_training_and_says_what_to_do(
    service: tinker.ServiceClient, tmp_path: Path
) -> None:
    trainer = trainer_of(service, tmp_path, learning_rate=1e30)
    with pytest.raises((Diverged, tinker.TinkerError)):
        trainer.fit(NUMBERED, epochs=3, batch_size=5, checkpoint_every=1)
