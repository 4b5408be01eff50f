"""Losses of the user's own, beside the weights: by gradserve.loss and by the public SDK's handles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from torch import Tensor

import gradserve
from tests.integration.test_sdk_training import ratio_data
from tests.processes import serve_on, stop
from tests.sdk import Floats, adam, client, datum, logprobs, sequences, supervised, tensor, train

GENTLE = adam(1e-2, eps=1e-2)
"""An eps so large that the step is nearly linear in the gradient: equal weights then mean equal gradients."""


@pytest.fixture
def service(url: str) -> tinker.ServiceClient:
    return client(url)


@pytest.fixture(scope="module")
def cutting(tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that cuts requests into Tasks of a few tokens."""
    port, process = serve_on(
        {"tiny": tiny_models["tiny"]}, tmp_path_factory.mktemp("cutting"), GRADSERVE_TASK_TOKENS="24"
    )
    yield f"http://127.0.0.1:{port}"
    stop(process)


def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run whose adapter is not zero any more; the same at every call."""
    run = service.create_lora_training_client(base_model="tiny", rank=8, seed=7).result()
    train(run, supervised(4), steps=2)
    return run


def after_a_step(run: tinker.TrainingClient, data: list[types.Datum], loss: Any) -> tuple[dict[str, float], Floats]:
    """Metrics of a forward_backward, and the log-probs after the step that its gradient makes."""
    found = run.forward_backward(data, loss).result()
    run.optim_step(GENTLE).result()
    return found.metrics, now(run, data)


def now(run: tinker.TrainingClient, data: list[types.Datum]) -> Floats:
    """The log-probs of all targets, end to end."""
    plain = [datum(row.model_input.to_ints()) for row in data]
    return np.concatenate(logprobs(run.forward(plain, "cross_entropy").result()))


def importance_sampling(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -((logprobs - old_logprobs).exp() * advantages * mask).sum()


def ppo(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    return -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask).sum()


def cispo(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old_logprobs).detach().exp().clamp(0.0, 4.0)
    return -(ratio * logprobs * advantages * mask).sum()


def dro(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    gap = logprobs - old_logprobs
    return -((logprobs * advantages - 0.5 * 0.05 * gap**2) * mask).sum()


@pytest.mark.parametrize("loss", [importance_sampling, ppo, cispo, dro])
def test_a_public_loss_written_by_hand_is_the_public_loss(
    service: tinker.ServiceClient, loss: Callable[..., Tensor]
) -> None:
    data, _, _ = ratio_data()
    ours, after = after_a_step(trained(service), data, gradserve.loss(loss))
    theirs, expected = after_a_step(trained(service), data, loss.__name__)
    assert ours["loss:sum"] == pytest.approx(theirs["loss:sum"], rel=1e-6)
    np.testing.assert_allclose(after, expected, atol=1e-6)


def group_normalised(logprobs: Tensor, mask: Tensor, reward: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO with one group: every row's advantage depends on the rewards of all."""
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    per_row = (logprobs * mask).sum(1) / mask.sum(1)
    return -(advantage * per_row).mean(), {"advantage": advantage.abs().mean(), "tokens:sum": mask.sum()}


def rewarded(count: int = 6) -> list[types.Datum]:
    return [datum(tokens, reward=[float(index % 3)]) for index, tokens in enumerate(sequences(count, seed=5))]


def by_torch(run: tinker.TrainingClient, data: list[types.Datum]) -> Any:
    """The same loss by the SDK's own road: the client computes it from the log-probs of a first pass."""

    def on_client(rows: list[types.Datum], found: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        reward = torch.tensor([row.loss_fn_inputs["reward"].tolist()[0] for row in rows])
        padded = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(part)) for part in found], batch_first=True)
        loss, _ = group_normalised(padded, mask, reward)
        return loss, {}

    found = run.forward_backward_custom(data, on_client).result()
    run.optim_step(GENTLE).result()
    return found.metrics, now(run, data)


@pytest.mark.parametrize("cut", [False, True])
def test_a_loss_over_the_whole_request(service: tinker.ServiceClient, cutting: str, cut: bool) -> None:
    """Also where the request is cut into Tasks, each of which sees some rows only."""
    where = client(cutting) if cut else service
    loss = gradserve.loss(group_normalised, inputs={"reward": "float32[row]"})
    data = rewarded()
    metrics, after = after_a_step(trained(where), data, loss)
    theirs, expected = by_torch(trained(where), data)
    assert metrics["loss:sum"] == pytest.approx(theirs["loss:sum"], rel=1e-5)
    assert metrics["tokens:sum"] == sum(row.model_input.length for row in data)
    assert metrics["advantage:mean"] > 0
    np.testing.assert_allclose(after, expected, atol=1e-5)


def test_all_parameters_under_a_loss_over_the_whole_request(service: tinker.ServiceClient, cutting: str) -> None:
    loss = gradserve.loss(group_normalised, inputs={"reward": "float32[row]"})
    data = rewarded()
    found = []
    for where in (service, client(cutting)):
        run = gradserve.create_full_training_client(where, "tiny").result()
        found.append(after_a_step(run, data, loss))
    (whole, after), (cut, same) = found
    assert cut["loss:sum"] == pytest.approx(whole["loss:sum"], rel=1e-5)
    np.testing.assert_allclose(after, same, atol=1e-5)


def test_forward_alone_gives_the_loss(service: tinker.ServiceClient, cutting: str) -> None:
    loss = gradserve.loss(group_normalised, inputs={"reward": "float32[row]"})
    runs = [trained(where) for where in (service, client(cutting))]
    whole, cut = (run.forward(rewarded(), loss).result() for run in runs)  # type: ignore[arg-type]
    assert cut.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-5)
    for ours, theirs in zip(logprobs(cut), logprobs(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def with_entropy(logprobs: Tensor, mask: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -((logprobs + 0.1 * entropy) * mask).sum(), {"entropy": (entropy * mask).sum() / mask.sum()}


def test_the_entropy_of_every_position_can_be_read(service: tinker.ServiceClient, cutting: str) -> None:
    found = [
        after_a_step(trained(where), supervised(5, seed=9), gradserve.loss(with_entropy))
        for where in (service, client(cutting))
    ]
    (whole, after), (cut, same) = found
    assert 0 < whole["entropy:mean"] < np.log(400)
    assert cut["entropy:mean"] == pytest.approx(whole["entropy:mean"], rel=1e-5)
    np.testing.assert_allclose(after, same, atol=1e-5)


def actor_critic(logprobs: Tensor, mask: Tensor, values: Tensor, goal: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    advantage = (goal - values).detach()
    loss = ((values - goal) ** 2 * mask).sum() - 0.1 * (advantage * logprobs * mask).sum()
    return loss, {"value": (values * mask).sum() / mask.sum()}


def test_a_value_head_learns_with_the_adapters(service: tinker.ServiceClient, cutting: str) -> None:
    loss: Any = gradserve.loss(actor_critic)
    data = [datum(tokens, goal=[2.0] * len(tokens)) for tokens in sequences(5, seed=12)]
    found = []
    for where in (service, client(cutting)):
        run = gradserve.create_lora_training_client(where, "tiny", rank=4, seed=3, value_head=True).result()
        values = []
        for _ in range(12):
            values.append(run.forward_backward(data, loss).result().metrics["value:mean"])
            run.optim_step(adam(0.05, eps=1e-2)).result()
        path = run.save_state("head").result().path
        resumed = where.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.forward(data, loss).result().metrics == run.forward(data, loss).result().metrics
        found.append(values)
    whole, cut = found
    assert whole[0] == 0.0, "a new head says 0 of every state"
    assert abs(whole[-1] - 2.0) < 0.5, "it has learned what every state is worth"
    np.testing.assert_allclose(cut[:6], whole[:6], atol=1e-4)  # later steps amplify last bits
    with pytest.raises(tinker.BadRequestError, match="has no value head"):
        trained(service).forward_backward(data, loss).result()


def per_datum(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * weights).sum() / weights.sum().clamp(min=1.0), {"custom/tokens:sum": weights.sum()}


def test_a_handle_of_the_public_sdk_runs_on_the_server(service: tinker.ServiceClient) -> None:
    """ServiceClient.create_custom_loss and forward_backward_custom, unchanged."""
    handle = service.create_custom_loss(per_datum, {"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is not None
    data = supervised(5, seed=11)
    run, other = trained(service), trained(service)
    ours = run.forward_backward_custom(data, handle).result()
    theirs = other.forward_backward_custom(data, on_the_client).result()
    assert ours.metrics["custom/tokens:sum"] == theirs.metrics["custom/tokens:sum"]
    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5)
    for one in (run, other):
        one.optim_step(GENTLE).result()
    for mine, his in zip(*(logprobs(one.forward(data, "cross_entropy").result()) for one in (run, other)), strict=True):
        np.testing.assert_allclose(mine, his, atol=1e-5)


def masked(logprobs: Tensor, mask: Tensor, values: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -(scale * logprobs * mask * values).sum(), {"custom/kept:sum": mask.sum()}


def test_a_handles_inputs_are_the_rows_own_whatever_they_are_called(service: tinker.ServiceClient) -> None:
    """mask and values are names that gradserve.loss fills; a loss of the public SDK reads them from the datum."""
    handle = service.create_custom_loss(masked, {"logprobs": 1, "mask": 1, "values": 1, "scale": 0}).result()
    data = [
        datum(tokens, mask=[1.0] + [0.0] * (len(tokens) - 1), values=[2.0] * len(tokens), scale=np.float32(3.0))
        for tokens in sequences(4, seed=21)
    ]
    run = trained(service)
    found = run.forward_backward_custom(data, handle).result()
    first = [float(row[0]) for row in logprobs(found)]
    assert found.metrics["loss:sum"] == pytest.approx(-6.0 * sum(first), rel=1e-5)
    assert found.metrics["custom/kept:sum"] == len(data)


def on_the_client(rows: list[types.Datum], found: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    losses, tokens = [], 0.0
    for row, part in zip(rows, found, strict=True):
        weights = torch.tensor(row.loss_fn_inputs["weights"].tolist())
        loss, metrics = per_datum(part, weights)
        losses.append(loss)
        tokens += float(metrics["custom/tokens:sum"])
    return torch.stack(losses).sum(), {"custom/tokens:sum": tokens}


def test_bad_requests_are_refused_at_once_and_the_run_goes_on(service: tinker.ServiceClient) -> None:
    run = trained(service)
    loss = gradserve.loss(group_normalised, inputs={"reward": "float32[row]"})
    no_reward = supervised(2)
    wide = [datum(tokens, reward=[1.0] * len(tokens)) for tokens in sequences(2, shortest=3)]
    whole_numbers = [datum(tokens) for tokens in sequences(2)]
    for row in whole_numbers:
        row.loss_fn_inputs["reward"] = tensor([1], np.int64)
    for data, said in (
        (no_reward, r"data\[0\].loss_fn_inputs.reward"),
        (wide, "one number"),
        (whole_numbers, "is int64; the loss takes float32"),
    ):
        with pytest.raises(tinker.BadRequestError, match=said):
            run.forward_backward(data, loss).result()  # type: ignore[arg-type]
    with pytest.raises(tinker.BadRequestError, match="has no settings"):
        run.forward_backward(rewarded(), loss, {"beta": 1.0}).result()  # type: ignore[arg-type]
    with pytest.raises(tinker.NotFoundError, match="There is no graph"):
        run.forward_backward(rewarded(), "custom", {"loss_id": "0" * 64}).result()
    with pytest.raises(tinker.BadRequestError, match=r"aten\.system"):
        run.forward_backward(rewarded(), loss.replace("aten.mul", "aten.system", 1)).result()  # type: ignore[arg-type]
    assert run.forward_backward(rewarded(), loss).result().metrics["advantage:mean"] > 0  # type: ignore[arg-type]


def test_a_loss_survives_a_restart(tiny_models: dict[str, str], tmp_path: Path) -> None:
    """The server reads it from its own store again, and other tenants never see it."""
    loss = gradserve.loss(ppo)
    data, _, _ = ratio_data()
    port, server = serve_on({"tiny": tiny_models["tiny"]}, tmp_path)
    try:
        run = trained(client(f"http://127.0.0.1:{port}"))
        before = run.forward_backward(data, loss).result().metrics  # type: ignore[arg-type]
        stop(server)
        _, server = serve_on({"tiny": tiny_models["tiny"]}, tmp_path, port)
        assert run.forward_backward(data, "custom", {"loss_id": loss.digest}).result().metrics == before
    finally:
        stop(server)
