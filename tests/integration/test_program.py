"""``gradserve program`` on what a real server was asked; every figure by hand from the sizes of the tiny models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import save
from torch import Tensor

import gradserve
from gradserve.cli import main
from gradserve.client.modules import ModuleClient
from gradserve.compiler import capture_module
from gradserve.wire import graph as ir
from gradserve.wire.control import EnvSpec, PPOConfig, RolloutSpec
from tests.modules import examples
from tests.processes import serve_on, stop
from tests.sdk import adam, client, datum

Ask = Callable[..., Result]

TASK_TOKENS = 16
HIDDEN, KV, INNER, LAYERS, VOCABULARY = 64, 32, 128, 2, 320  # checked against config.json below

MATRICES = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * INNER) + VOCABULARY * HIDDEN
RANK = 2
ADAPTER = RANK * (LAYERS * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV) + 3 * (HIDDEN + INNER)) + VOCABULARY + HIDDEN)


@pytest.fixture(scope="module")
def place(tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server that cuts small, and its data directory."""
    folder = tmp_path_factory.mktemp("program")
    port, server = serve_on(tiny_models, folder, GRADSERVE_TASK_TOKENS=str(TASK_TOKENS))
    yield f"http://127.0.0.1:{port}", folder
    stop(server)


@pytest.fixture
def ask(place: tuple[str, Path], tiny_models: dict[str, str]) -> Ask:
    """The command, asking the server and reading its directory: both must say the same."""
    url, folder = place
    common = {"GRADSERVE_TASK_TOKENS": str(TASK_TOKENS), "GRADSERVE_MODELS": json.dumps(tiny_models)}

    def run(*arguments: str) -> Result:
        told = CliRunner(env=common | {"GRADSERVE_URL": url, "TINKER_API_KEY": "tml-test"}).invoke(
            main, ["program", *arguments]
        )
        read = CliRunner(env=common).invoke(main, ["program", *arguments, "--data-dir", str(folder)])
        assert told.exit_code == read.exit_code
        if told.exit_code == 0:
            assert told.stdout == read.stdout
        return told

    return run


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_sizes_of_the_tiny_model(tiny_models: dict[str, str]) -> None:
    config = json.loads((Path(tiny_models["tiny"]) / "config.json").read_text())
    keys = config["num_key_value_heads"] * config.get("head_dim", HIDDEN // config["num_attention_heads"])
    found = [
        config["hidden_size"],
        keys,
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["vocab_size"],
    ]
    assert found == [HIDDEN, KV, INNER, LAYERS, VOCABULARY]


def normalised(logprobs: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """A loss that must see the whole request: divided by its number of tokens."""
    return -(logprobs * advantages * mask).sum() / mask.sum()


def test_a_run_of_a_language_model(place: tuple[str, Path], ask: Ask) -> None:
    run = client(place[0]).create_lora_training_client(base_model="tiny", rank=RANK, seed=1).result()
    rows = [datum([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], advantages=[1.0] * 10) for _ in range(2)]
    supervised = [datum([5, 6, 7, 8], weights=[1.0] * 4)]
    loss = gradserve.loss(normalised)
    run.forward_backward(supervised, "cross_entropy").result()
    gradserve.forward_backward(run, rows, loss).result()
    run.optim_step(adam()).result()
    run.forward(supervised, "cross_entropy").result()
    name, forward, own = run.model_id, 2 * (MATRICES + ADAPTER), 2 * ADAPTER
    weights = ask("--seq", "1", name).stdout.split("tiny+")[1][:8]
    graph = loss.digest[:8]

    assert lines(ask(name, "--seq", "1")) == [
        f"forward_backward #1 of {name} at version 0: done",
        f"program {name}:op:1, cut at {TASK_TOKENS} tokens",
        f"  %0 = grad tiny+{weights} cross_entropy rows=1 tokens=4"
        f"  bytes={4 * 4 + 4 * ADAPTER} flops={4 * (2 * forward + own)}",
    ]
    found = lines(ask(name, "--seq", "2"))
    loss_flops = _flops_of(ask, loss.digest)
    assert found == [
        f"forward_backward #2 of {name} at version 0: done",
        f"program {name}:op:2, cut at {TASK_TOKENS} tokens",
        f"  %0 = score tiny+{weights} graph:{graph} rows=1 tokens=10  bytes=40 flops={10 * forward}",
        f"  %1 = score tiny+{weights} graph:{graph} rows=1 tokens=10  bytes=40 flops={10 * forward}",
        f"  %2 = loss graph:{graph} rows=2 %0 %1  bytes=80 flops={loss_flops}",
        f"  %3 = grad tiny+{weights} graph:{graph} rows=1 tokens=10 cotangents=%2.0"
        f"  bytes={40 + 4 * ADAPTER} flops={10 * (2 * forward + own)}",
        f"  %4 = grad tiny+{weights} graph:{graph} rows=1 tokens=10 cotangents=%2.1"
        f"  bytes={40 + 4 * ADAPTER} flops={10 * (2 * forward + own)}",
        f"  %5 = reduce %3 %4  bytes={4 * ADAPTER} flops={ADAPTER}",
        f"graph {graph} = normalised: gradserve program {loss.digest}",
    ]
    assert lines(ask(name, "--seq", "3"))[2:] == [
        f"  %0 = adamw weights=v0 moments=none gradients=#1 #2  bytes={3 * 4 * ADAPTER} flops=-"
    ]
    newest = lines(ask(name))
    assert newest[0] == f"forward_backward #4 of {name} at version 1: done"
    assert re.fullmatch(
        rf"  %0 = forward tiny\+[0-9a-f]{{8}} cross_entropy rows=1 tokens=4  bytes=16 flops={4 * forward}", newest[2]
    )


def _flops_of(ask: Ask, digest: str) -> int:
    """Forward and backward of a graph at B=2, T=10, as the command itself says of the graph."""
    text = ask(digest, "--size", "B=2", "--size", "T=10").stdout
    return sum(int(found) for found in re.findall(r"^(?:forward|backward) .*flops=(\d+)$", text, re.MULTILINE))


def test_a_graph(place: tuple[str, Path], ask: Ask) -> None:
    def squared(logprobs: Tensor, mask: Tensor) -> Tensor:
        return (logprobs * logprobs * mask).sum()

    loss = gradserve.loss(squared)
    run = client(place[0]).create_lora_training_client(base_model="tiny", rank=RANK, seed=1).result()
    gradserve.forward_backward(run, [datum([5, 6, 7])], loss).result()
    assert lines(ask(loss.digest, "--size", "B=3", "--size", "T=5")) == [
        *ir.to_text(loss.graph).splitlines(),
        "at B=3, T=5",
        # Two arrays of 15 float32 read, one written; the sum writes one number.
        "  mul    aten.mul.Tensor   float32[3, 5]  bytes=60 flops=30",
        "  mul_1  aten.mul.Tensor   float32[3, 5]  bytes=60 flops=30",
        "  sum_1  aten.sum.default  float32[]      bytes=4 flops=15",
        "forward   bytes=124 flops=75",
        *_measured_in_the_test(loss.graph),
    ]
    assert "at B=32, T=128" in lines(ask(loss.digest))


def _measured_in_the_test(graph: ir.Graph) -> list[str]:
    from gradserve.compute.engine.graphs import measure

    cost = measure(graph, {"B": 3, "T": 5})
    return [f"backward  bytes={cost.backward_bytes} flops={cost.backward_flops}", f"peak      bytes={cost.peak_bytes}"]


def test_a_run_of_ppo(place: tuple[str, Path], ask: Ask) -> None:
    module, batch = examples()["mlp"]
    graph, tensors = capture_module(module, batch)
    run = ModuleClient.create(client(place[0]), ir.encode(graph).decode(), save(tensors))
    env = EnvSpec("CartPole-v1")
    run.rollout(RolloutSpec(env, num_envs=4, steps=8, seed=1, envs_per_task=2)).result()
    run.update(env, PPOConfig(epochs=3, minibatch_size=16), seed=0).result()
    run.save("a").result()
    # Linear layers 4x16, 16x16, 16x2 and 16x1: 2 per weight and row, one per tanh; the squeeze is a view.
    per_row = 2 * (4 * 16 + 16 * 16 + 16 * 2 + 16) + 2 * 16
    numbers = sum(parameter.numel() for parameter in module.parameters())
    short, name = run.graph[:8], run.run_id
    policy = f"rollout graph:{short} weights=v0 CartPole-v1"
    assert lines(ask(name, "--seq", "1")) == [
        f"rollout #1 of {name} at version 0: done",
        f"program {name}:op:1, cut at {TASK_TOKENS} tokens",
        f"  %0 = {policy} environments=0..1 steps=8  bytes=- flops={8 * 2 * per_row}",
        f"  %1 = {policy} environments=2..3 steps=8  bytes=- flops={8 * 2 * per_row}",
        f"graph {short} = ActorCritic: gradserve program {run.graph}",
    ]
    assert lines(ask(name))[2] == (
        f"  %0 = ppo graph:{short} weights=v0 trajectories=#1.0 #1.1 epochs=3"
        f"  bytes={3 * 4 * numbers} flops={3 * 3 * 32 * per_row}"
    )
    assert lines(ask(name, "--seq", "3"))[2] == f"  %0 = persist v1 v1  bytes={3 * 4 * numbers} flops=-"


def test_what_is_not_there_is_said(place: tuple[str, Path], ask: Ask) -> None:
    run = client(place[0]).create_lora_training_client(base_model="tiny", rank=RANK, seed=1).result()
    for arguments, words in (
        (["nobody:train:0"], "nobody:train:0"),
        ([run.model_id], f"No request that trains of {run.model_id}|no request that trains of {run.model_id}"),
        ([run.model_id, "--seq", "9"], f"[nN]o request #9 of {run.model_id}"),
        (["f" * 64], "no graph f{64}|no graph 'f{64}'"),
        ([run.model_id, "--size", "B=3"], "64 hexadecimal digits"),
        (["f" * 64, "--seq", "1"], "goes with a RUN"),
        (["f" * 64, "--size", "B"], "not NAME=N"),
    ):
        answer = ask(*arguments)
        assert answer.exit_code != 0, arguments
        assert re.search(words, answer.output), answer.output


def test_nothing_but_a_measurement_imports_torch() -> None:
    import subprocess
    import sys

    code = "import sys, gradserve.cli.program; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
