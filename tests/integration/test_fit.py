"""gradserve.fit: any algorithm on a module or a language model."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from torch import Tensor, nn

import gradserve
from gradserve.client.modules import ModuleClient
from tests.sdk import sequences


@pytest.fixture
def service(url: str) -> tinker.ServiceClient:
    """A client of the shared server."""
    return gradserve.connect(url)


class Classifier:
    """Three classes in the plane; 50 samples, so that batches of 16 leave one of 2."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(50, 2, generator=generator)
        self.y = (self.x[:, 0] > 0).long() + (self.x[:, 1] > 0).long()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))

    def data_loader(self, batch_size: int) -> Iterator[dict[str, Any]]:
        for start in range(0, 50, batch_size):
            rows = slice(start, start + batch_size)
            yield {"x": self.x[rows], "y": self.y[rows].numpy(), "wanted": torch.ones(len(self.y[rows])).bool()}

    def loss_fn(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        scores = model(batch["x"])
        right = (scores.argmax(-1) == batch["y"]) & batch["wanted"]
        return nn.functional.cross_entropy(scores, batch["y"]), {"accuracy": right.float().mean()}


def plainly(algorithm: Classifier, optimizer: torch.optim.Optimizer, epochs: int, clip: float = 0.0) -> list[float]:
    """The same in plain torch; the losses."""
    losses = []
    for _ in range(epochs):
        for batch in algorithm.data_loader(16):
            loss, _ = algorithm.loss_fn(algorithm.model, {name: torch.as_tensor(x) for name, x in batch.items()})
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if clip:
                nn.utils.clip_grad_norm_(algorithm.model.parameters(), clip)
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("name", "settings", "plain", "clip"),
    [
        ("adamw", {"learning_rate": 3e-2}, lambda p: torch.optim.AdamW(p, 3e-2), 0.0),
        (
            "adam",
            {"learning_rate": 3e-2, "weight_decay": 0.1, "betas": (0.8, 0.9), "grad_clip_norm": 0.1},
            lambda p: torch.optim.Adam(p, 3e-2, (0.8, 0.9), weight_decay=0.1),
            0.1,
        ),
        (
            "sgd",
            {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
            lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.01),
            0.0,
        ),
    ],
)
def test_the_weights_are_those_of_a_plain_loop(
    name: str, settings: dict[str, Any], plain: Any, clip: float, service: tinker.ServiceClient
) -> None:
    fitted = gradserve.fit(Classifier(), epochs=4, batch_size=16, optimizer=name, service=service, **settings)
    reference = Classifier()
    losses = plainly(reference, plain(reference.model.parameters()), epochs=4, clip=clip)
    assert [row["loss"] for row in fitted.history] == pytest.approx(losses, abs=1e-6)
    assert [(row["step"], row["epoch"]) for row in fitted.history] == [(i + 1, i // 4 + 1) for i in range(16)]
    for key, tensor in reference.model.state_dict().items():
        torch.testing.assert_close(fitted.model.state_dict()[key], tensor, atol=1e-6, rtol=0)


def test_resumed_is_bitwise_undisturbed(service: tinker.ServiceClient) -> None:
    settings: dict[str, Any] = {"batch_size": 16, "service": service, "learning_rate": lambda step: 0.05 / (1 + step)}
    undisturbed = gradserve.fit(Classifier(), epochs=3, **settings)
    first = gradserve.fit(Classifier(), epochs=2, checkpoint_every=5, **settings)
    halfway = first.path.replace("final", "step-5")
    second = gradserve.fit(Classifier(), epochs=3, resume=halfway, **settings)
    assert second.history == undisturbed.history[5:]
    for key, tensor in undisturbed.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[key], tensor), key


def test_the_run_is_the_modules_own_forward_pass(service: tinker.ServiceClient) -> None:
    fitted = gradserve.fit(Classifier(), batch_size=16, service=service)
    run = ModuleClient.load(service, fitted.path)
    x = torch.randn(7, 2)
    found = run.apply({"input": x.numpy()}).result().outputs["output"].numpy()
    torch.testing.assert_close(torch.tensor(found), fitted.model(x).detach(), atol=1e-6, rtol=0)


def test_a_callback_ends_the_training(service: tinker.ServiceClient) -> None:
    fitted = gradserve.fit(
        Classifier(), epochs=9, batch_size=16, service=service, callback=lambda row: row["step"] == 3
    )
    assert [row["step"] for row in fitted.history] == list(range(1, 7))


class Weighted:
    """Supervised learning of a language model, rows weighted, with an entropy bonus: no loss that is built in."""

    model = "tiny"
    loss_inputs = {"entropy": "float32[token]"}  # noqa: RUF012

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = [
            {"tokens": tokens[:-1], "target_tokens": tokens[1:], "worth": 1.0 + number,
             "bonus": [0.01] * (len(tokens) - 1)}
            for number, tokens in enumerate(sequences(6, seed=5, shortest=4, longest=12))
        ]  # fmt: skip

    def data_loader(self, batch_size: int) -> Iterator[list[dict[str, Any]]]:
        for start in range(0, len(self.rows), batch_size):
            yield self.rows[start : start + batch_size]

    def loss_fn(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        per_token = -model(batch) * batch["worth"][:, None] - batch["bonus"] * batch["entropy"]
        return (per_token * batch["mask"]).sum() / batch["mask"].sum(), {"rows": (batch["lengths"] > 0).float().sum()}


def test_a_loss_of_ones_own_on_a_language_model(service: tinker.ServiceClient) -> None:
    algorithm = Weighted()
    fitted = gradserve.fit(algorithm, epochs=3, batch_size=4, rank=4, learning_rate=1e-2, service=service)
    assert [row["rows"] for row in fitted.history] == [4, 2] * 3
    assert fitted.history[-2]["loss"] < 0.9 * fitted.history[0]["loss"]
    # The first loss by hand, from log-probs of the untrained model.
    run = service.create_lora_training_client(base_model="tiny", rank=4).result()
    data = [
        tinker.types.Datum(
            model_input=tinker.types.ModelInput.from_ints(row["tokens"]),
            loss_fn_inputs={
                "target_tokens": tinker.types.TensorData.from_numpy(np.array(row["target_tokens"])),
                "weights": tinker.types.TensorData.from_numpy(np.ones(len(row["tokens"]), np.float32)),
            },
        )
        for row in algorithm.rows[:4]
    ]
    found = run.forward(data, "cross_entropy").result().loss_fn_outputs
    total = sum(-float(np.sum(out["logprobs"].to_numpy())) * (i + 1) for i, out in enumerate(found))
    tokens = sum(len(row["tokens"]) for row in algorithm.rows[:4])
    bonus = total / tokens - fitted.history[0]["loss"]
    assert 0 < bonus < 0.01 * np.log(320)  # the entropy is between 0 and that of a uniform choice


def test_a_language_model_resumes_where_it_stood(service: tinker.ServiceClient) -> None:
    settings: dict[str, Any] = {"batch_size": 3, "rank": 4, "learning_rate": 1e-2, "service": service}
    undisturbed = gradserve.fit(Weighted(), epochs=2, **settings)
    first = gradserve.fit(Weighted(), epochs=1, **settings)
    second = gradserve.fit(Weighted(), epochs=2, resume=first.path, **settings)
    assert second.history == undisturbed.history[2:]


def test_what_does_not_fit_is_refused(service: tinker.ServiceClient) -> None:
    with pytest.raises(TypeError, match=r"no setting 'momentum'; adamw has learning_rate, betas"):
        gradserve.fit(Classifier(), momentum=0.9)
    with pytest.raises(ValueError, match="adamw, adam, sgd"):
        gradserve.fit(Classifier(), optimizer="lion")
    with pytest.raises(ValueError, match="adamw, not sgd"):
        gradserve.fit(Weighted(), optimizer="sgd", service=service)
    with pytest.raises(TypeError, match="dicts of tensors"):
        gradserve.fit(_Rows(), model=nn.Linear(1, 1), service=service)


class _Rows:
    """Gives a module rows."""

    def data_loader(self, batch_size: int) -> list[Any]:
        return [[{"x": 1.0}] * batch_size]

    def loss_fn(self, model: Any, batch: Any) -> Any:
        raise AssertionError("never called")


def test_the_example_runs(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GRADSERVE_URL", url)
    runpy.run_path(str(Path(__file__).parents[2] / "examples/fit_regression.py"), run_name="__main__")
    steps, sine = capsys.readouterr().out.splitlines()
    assert steps.startswith("320 steps: loss ")
    assert float(sine.rpartition(" ")[2]) == pytest.approx(1, abs=0.15)
