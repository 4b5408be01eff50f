"""Whatever a graph says, the answer is its result within bounds or Invalid: no other exception, no hang, no memory."""

from __future__ import annotations

import json
import resource
import time
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradserve.compiler import capture_loss, capture_module
from gradserve.compute.engine.graphs import Executable, Limits, measure
from gradserve.compute.engine.graphs.executable import dtype_of
from gradserve.wire.errors import Invalid
from gradserve.wire.graph import Graph, decode, encode
from tests.graphs.cases import dpo, entropy_and_kl, grpo, policies
from tests.graphs.mutations import Document, mutated, text_of

SIZES = {"B": 4, "T": 3}
LIMITS = Limits(node_bytes=32 << 20, peak_bytes=128 << 20, flops=10**9, seconds=5.0)
RSS_GROWTH = 400 << 20
"""Limits' peak, forward and backward of a run, and what torch itself loads on first use of an operator."""


@cache
def sound() -> list[Document]:
    """Graphs to start from."""
    graphs = [capture_loss(grpo, inputs={"rewards": "float32[row]"}), capture_loss(dpo), capture_loss(entropy_and_kl)]
    graphs += [capture_module(module, batch)[0] for name, (module, batch) in policies().items() if name != "cnn"]
    return [json.loads(encode(graph)) for graph in graphs]


def attempt(text: bytes) -> str:
    """What a server does with a graph that it is sent; "run" or the code of the refusal."""
    try:
        executable = Executable(decode(text), max_constant_bytes=1 << 20)
        measure(executable, SIZES, LIMITS)
        found = executable.run(values(executable.graph), deadline=time.monotonic() + LIMITS.seconds)
    except Invalid as refused:
        return refused.code if len(refused.detail) < 2000 else "a detail that is too long"
    loss = found.get("loss")
    if loss is not None and loss.requires_grad:
        torch.autograd.backward(loss)
    return "run"


def values(graph: Graph) -> dict[str, Tensor]:
    made = {}
    for each in graph.inputs:
        shape = [SIZES[size] if isinstance(size, str) else size for size in each.shape]
        dtype = torch.float32 if each.dtype == "any" else dtype_of(each.dtype)
        made[each.name] = torch.ones(shape, dtype=dtype).requires_grad_(
            dtype.is_floating_point and each.kind != "buffer"
        )
    return made


def resident_bytes() -> int:
    """The most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_the_sound_graphs_run() -> None:
    assert {attempt(json.dumps(document).encode()) for document in sound()} == {"run"}


@pytest.mark.timeout(120)
def test_mutated_graphs_are_refused_or_run_within_bounds() -> None:
    sound()
    before = resident_bytes()
    seen: dict[str, int] = {}

    @settings(max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32))
    def try_one(seed: int) -> None:
        random = Random(seed)
        answer = attempt(text_of(mutated(random.choice(sound()), random), random))
        seen[answer] = seen.get(answer, 0) + 1

    try_one()
    assert resident_bytes() - before < RSS_GROWTH
    assert all(answer == "run" or answer.startswith("graph_") for answer in seen)
    # The faults reach every stage: the text, the structure, the operators, the dry run, and some do no harm.
    assert {"run", "graph_format", "graph_reference", "graph_operator", "graph_node", "graph_too_large"} <= set(seen)


def test_a_dry_run_can_be_cut_anywhere() -> None:
    """A limit is met in the midst of torch's C++; raised from the wrong place, it would end the process."""
    executables = [Executable(decode(json.dumps(document))) for document in sound()]
    seen: dict[str, int] = {}

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(
        st.sampled_from(executables),
        st.sampled_from([10, 100, 1000, 10**6]),
        st.sampled_from([100, 1000, 3000, 10**4, 10**6]),
        st.sampled_from([50, 500, 1000, 5000, 10**6]),
        st.sampled_from([0.0, 5e-4, 1e-3, 5e-3, 1.0]),
    )
    def try_one(executable: Executable, node_bytes: int, peak_bytes: int, flops: int, seconds: float) -> None:
        try:
            measure(executable, SIZES, Limits(node_bytes, peak_bytes, flops, seconds))
            answer = "run"
        except Invalid as refused:
            answer = refused.code
        seen[answer] = seen.get(answer, 0) + 1

    try_one()
    assert set(seen) == {"run", "graph_too_large", "graph_time"}
