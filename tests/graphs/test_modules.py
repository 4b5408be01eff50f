"""A captured module is the module: outputs and gradients have the same bits, also after a hundred optimizer steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradserve.compiler import CaptureError, capture_module, capture_program
from gradserve.compute.engine.graphs import measure
from tests.graphs.cases import ActorCritic, Normalised, Transformer, policies, same_bits, sent

STEPS = 100


def named(result: Any) -> dict[str, Tensor]:
    if isinstance(result, dict):
        return result
    return {"output": result} if isinstance(result, Tensor) else {f"output.{i}": part for i, part in enumerate(result)}


@pytest.mark.parametrize("name", policies())
def test_outputs_and_gradients_have_the_same_bits(name: str) -> None:
    module, batch = policies()[name]
    graph, tensors = capture_module(module, batch)
    assert set(tensors) == set(graph.names("parameter") + graph.names("buffer"))
    executable = sent(graph)
    (input_name,) = graph.names("input")
    for rows in (1, 5):
        values = torch.cat([batch, batch])[:rows]
        parameters = {
            key: value.clone().requires_grad_(key in graph.names("parameter")) for key, value in tensors.items()
        }
        module.zero_grad()
        expected = named(module(values))
        found = executable.run({input_name: values, **parameters})
        assert set(found) == set(expected)
        assert all(same_bits(found[key], value) for key, value in expected.items())
        torch.autograd.backward(torch.stack([value.square().sum() for value in expected.values()]).sum())
        torch.autograd.backward(torch.stack([found[key].square().sum() for key in expected]).sum())
        for key, parameter in module.named_parameters():
            assert same_bits(parameters[key].grad, parameter.grad), key
    assert measure(executable, {"B": 5}).flops > 0


def test_tied_parameters_are_one_input() -> None:
    graph, tensors = capture_module(Transformer(), torch.randint(0, 11, (3, 7)))
    assert "embedding.weight" in tensors
    assert "head.weight" not in tensors
    assert "head.weight" not in [given.name for given in graph.inputs]


def test_a_parameter_that_is_not_trained_is_a_buffer() -> None:
    module = ActorCritic()
    module.log_std.requires_grad_(False)
    graph, _ = capture_module(module, torch.randn(3, 4))
    assert graph.names("buffer") == ["log_std", "mean"]


def policy_loss(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out = module(batch["observation"])
    normal = torch.distributions.Normal(out["mean"], out["std"].expand_as(out["mean"]))
    log_prob: Tensor = normal.log_prob(batch["action"])  # type: ignore[no-untyped-call]
    entropy: Tensor = normal.entropy()  # type: ignore[no-untyped-call]
    ratio = (log_prob.sum(-1) - batch["old_logprobs"]).exp()
    policy = -torch.minimum(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"]).mean()
    value = (out["value"] - batch["return"]).square().mean()
    return policy + 0.5 * value - 0.01 * entropy.sum(-1).mean(), {"value": value}


def test_a_hundred_adam_steps_are_equal() -> None:
    torch.manual_seed(1)
    module = ActorCritic()
    batch = {
        "observation": torch.randn(64, 4),
        "action": torch.randn(64, 2),
        "old_logprobs": torch.randn(64) - 2,
        "advantage": torch.randn(64),
        "return": torch.randn(64),
    }
    graph, tensors = capture_program(policy_loss, module, batch)
    executable = sent(graph)
    eager = copy.deepcopy(module)
    parameters = {key: value.clone().requires_grad_(key in graph.names("parameter")) for key, value in tensors.items()}
    ours = torch.optim.Adam([parameters[name] for name in graph.names("parameter")], lr=1e-2)
    theirs = torch.optim.Adam(eager.parameters(), lr=1e-2)
    first = last = 0.0
    for step in range(STEPS):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        found = executable.run({**batch, **parameters})
        expected, metrics = policy_loss(eager, batch)
        assert same_bits(found["loss"], expected), step
        assert same_bits(found["metrics.value"], metrics["value"].detach()), step
        torch.autograd.backward(found["loss"])
        torch.autograd.backward(expected)
        ours.step()
        theirs.step()
        first, last = first or expected.item(), expected.item()
    assert last < first
    for name, parameter in eager.named_parameters():
        assert same_bits(parameters[name].detach(), parameter.detach()), name


def test_a_dict_is_arguments_by_name_or_the_one_argument() -> None:
    class Two(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left @ right.mT

    class Whole(nn.Module):
        def forward(self, observation: dict[str, Tensor]) -> Tensor:
            return observation["left"] + observation["right"]

    example = {"left": torch.randn(3, 4), "right": torch.randn(3, 4)}
    for module in (Two(), Whole()):
        arguments = example if isinstance(module, Two) else {"observation": example}
        assert same_bits(sent(capture_module(module, example)[0]).run(example)["output"], module(**arguments))


def test_a_batch_may_lie_in_another_dimension() -> None:
    module = nn.GRU(4, 8)
    graph, tensors = capture_module(module, {"input": torch.randn(5, 3, 4)}, batch_dims={"input": 1})
    values = torch.randn(5, 7, 4)
    assert same_bits(sent(graph).run({"input": values, **tensors})["output.0"], module(values)[0])


@pytest.mark.parametrize(
    ("module", "cure"),
    [
        (nn.BatchNorm1d(4), "module.eval()"),
        (nn.BatchNorm1d(4, affine=False), "module.eval()"),
        (nn.Dropout(0.5), "dropout: p=0 or module.eval()"),
        (Normalised(), "module.eval()"),
        (nn.GRU(4, 8, 2, dropout=0.1, batch_first=True), "dropout: p=0 or module.eval()"),
        (nn.Embedding(5, 3, sparse=True), "sparse=True"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_random_or_writes_is_refused_with_the_cure(module: nn.Module, cure: str) -> None:
    examples = {nn.GRU: torch.randn(3, 5, 4), nn.Embedding: torch.ones(3, 2, dtype=torch.int64)}
    with pytest.raises(CaptureError) as refused:
        capture_module(module, examples.get(type(module), torch.randn(3, 4)))
    assert cure in str(refused.value)


def test_dropout_that_drops_nothing_is_left_out() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    graph, _ = capture_module(module, torch.randn(3, 4))
    assert [node.op for node in graph.nodes] == ["aten.linear.default"]
