"""The vllm sampler with the real vLLM; the trainer's log-probs, in the same process, are the right answer.

Not part of `make test`, which doesn't install vLLM: `make vllm`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradserve.compute.engine.base import Base
from gradserve.compute.engine.vllm_adapters import no_change
from gradserve.compute.engine.vllm_engine import FAMILIES, VllmEngine
from gradserve.compute.engine.vllm_sampler import VllmSampler
from gradserve.compute.tasks import Done, Failed, SampleTask
from gradserve.wire.ops import Sample
from tests.models import build_tiny
from tests.numerics.lab import Lab, all_tokens, ask, ids, logprobs, row, sample_of, tokens

ATOL = 5e-5
"""|log-prob of vLLM - log-prob of the trainer| on the tiny models, float32. Seen: up to 1e-5."""

CONTEXT, WINDOW = 256, 24
KV_BYTES = 1 << 26
RANK = 8
ALL = [*FAMILIES, "mistral-window"]
WITHOUT_HEAD = ("mistral", "qwen2")
"""Families in which vLLM 0.32 takes no adapter on lm_head."""


class Real:
    """A lab with one model, ``m``, and a vllm sampler for it."""

    def __init__(self, root: Path, model: Path) -> None:
        self.told: list[str] = []
        self.engines: list[VllmEngine] = []
        self.lab = Lab(root / "objects", {"m": model})

        def start(base: Base) -> VllmEngine:
            self.engines.append(VllmEngine(str(model), base.context, KV_BYTES, 512, RANK, 4))
            return self.engines[-1]

        self.sampler = VllmSampler("m", self.lab.bases, self.lab.arrays, start, root / "f", RANK, self.told.append)

    def run(self, *ops: Sample) -> list[Done | Failed]:
        for index, op in enumerate(ops):
            self.sampler.add(SampleTask(str(index), op))
        found: dict[str, Done | Failed] = {}
        while self.sampler.busy:
            for outcome in self.sampler.step():
                assert isinstance(outcome, Done | Failed)
                found[outcome.task_id] = outcome
        return [found[str(index)] for index in range(len(ops))]

    def done(self, *ops: Sample) -> list[Done]:
        outcomes = self.run(*ops)
        for outcome in outcomes:
            assert isinstance(outcome, Done), outcome
        return outcomes  # type: ignore[return-value]

    def assert_trained(self, op: Sample, done: Done) -> None:
        """Every log-prob is the trainer's."""
        prompt = np.frombuffer(op.prompt, "<i4")
        weights = op.weights or self.lab.arrays.put(no_change(self.lab.base("m")))
        for sequence in sample_of(done).sequences:
            whole = np.concatenate([prompt, np.array(tokens(sequence), dtype=np.int32)])
            trained = self.lab.forward("m", weights, [row(whole)])[0][len(prompt) - 1 : -1]
            np.testing.assert_allclose(logprobs(sequence), trained, atol=ATOL, rtol=0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Real]:
    """One for each model, kept: an engine takes seconds to start."""
    made: dict[str, Real] = {}

    def get(name: str) -> Real:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            family, _, window = name.partition("-")
            made.clear()
            made[name] = Real(root, _model(root / "model", family, WINDOW if window else None))
        return made[name]

    return get


def _model(directory: Path, family: str, window: int | None) -> Path:
    """vLLM's attention on a CPU wants heads of a multiple of 32."""
    return build_tiny(directory, family, context=CONTEXT, hidden=128, tie=family != "qwen3", window=window)


@pytest.fixture
def llama(make: Callable[[str], Real]) -> Real:
    return make("llama")


@pytest.mark.parametrize("name", ALL)
def test_rows_of_all_kinds_in_one_pass_are_the_trainers(make: Callable[[str], Real], name: str) -> None:
    """Adapters of several ranks and targets, and rows without one, together; more of them than vLLM keeps loaded."""
    real = make(name)
    lab = real.lab
    head = not name.startswith(WITHOUT_HEAD)
    adapters = [
        None,
        lab.adapter("m", seed=1, rank=1, train_unembed=head),
        lab.adapter("m", seed=2, rank=8, train_unembed=head),
        lab.adapter("m", seed=3, train_unembed=False),
        lab.adapter("m", seed=4, train_attn=False, train_mlp=not head, train_unembed=head),
        lab.adapter("m", seed=5, train_mlp=False, train_unembed=head),
    ]
    ops = [
        ask("m", ids(i, 2 + 11 * (i % 5)), adapters[i % 6], n=1 + i % 2, seed=i, max_tokens=30, temperature=0.5 + i % 2)
        for i in range(12)
    ]
    for op, done in zip(ops, real.done(*ops), strict=True):
        real.assert_trained(op, done)
    assert len(real.told) == len(adapters)


@pytest.mark.parametrize("name", WITHOUT_HEAD)
def test_an_adapter_that_vllm_would_not_apply_whole_is_refused(make: Callable[[str], Real], name: str) -> None:
    (failed,) = make(name).run(ask("m", ids(0, 5), make(name).lab.adapter("m", seed=30)))
    assert isinstance(failed, Failed)
    assert failed.kind == "user"
    assert "lm_head" in failed.message
    assert "train_unembed=False" in failed.message


def test_a_model_that_vllm_cannot_run_says_so(make: Callable[[str], Real]) -> None:
    """A window on every second layer."""
    (failed,) = make("qwen3-window").run(ask("m", ids(0, 5)))
    assert isinstance(failed, Failed)
    assert failed.kind == "user"
    assert "vLLM can't run this model" in failed.message


def test_a_seed_repeats_whatever_shares_the_passes(llama: Real) -> None:
    weights = llama.lab.adapter("m")
    op = ask("m", ids(0, 9), weights, n=3, seed=11, max_tokens=40)
    (alone,) = llama.done(op)
    _, among, _ = llama.done(ask("m", ids(1, 30), seed=1, n=4, max_tokens=30), op, ask("m", ids(2, 3), weights, seed=2))
    assert all_tokens([sample_of(alone)]) == all_tokens([sample_of(among)])
    assert len({tuple(sequence) for sequence in all_tokens([sample_of(alone)])}) == 3


def test_greedy_is_the_built_in_samplers(llama: Real) -> None:
    ops = [ask("m", ids(i, 5 + i), llama.lab.adapter("m", seed=i), temperature=0.0, max_tokens=40) for i in range(3)]
    assert all_tokens([sample_of(done) for done in llama.done(*ops)]) == all_tokens(llama.lab.sample(ops))


def test_filters(llama: Real) -> None:
    """top_k 3: no token outside the three best of its position. A tiny top_p: the best one."""
    three, best = llama.done(
        ask("m", ids(0, 9), max_tokens=60, top_k=3, topk_sample=3, temperature=2.0),
        ask("m", ids(0, 9), max_tokens=20, top_p=1e-6, topk_sample=1),
    )
    for done, count in ((three, 3), (best, 1)):
        (sequence,) = sample_of(done).sequences
        assert sequence.topk is not None
        among = sequence.topk.token_ids.numpy()
        assert among.shape == (len(tokens(sequence)), count)
        assert all(token in among[at] for at, token in enumerate(tokens(sequence)))


def test_stops(llama: Real) -> None:
    (free,) = llama.done(ask("m", ids(3, 9), temperature=0.0, max_tokens=12))
    drawn = tokens(sample_of(free).sequences[0])
    text = llama.lab.base("m").tokenizer.decode(drawn[4:5])
    by_token, by_text = llama.done(
        ask("m", ids(3, 9), temperature=0.0, max_tokens=12, stop_tokens=(drawn[4],)),
        ask("m", ids(3, 9), temperature=0.0, max_tokens=12, stop_strings=(text,)),
    )
    (stopped,) = sample_of(by_token).sequences
    assert tokens(stopped) == drawn[: drawn.index(drawn[4]) + 1]
    assert stopped.stopped
    (stopped,) = sample_of(by_text).sequences
    assert len(tokens(stopped)) <= 5
    assert text in llama.lab.base("m").tokenizer.decode(tokens(stopped))
    assert stopped.stopped


def test_the_longest_sequence(llama: Real) -> None:
    op = ask("m", ids(0, CONTEXT - 40), llama.lab.adapter("m"), max_tokens=100)
    (done,) = llama.done(op)
    assert len(tokens(sample_of(done).sequences[0])) == 40
    llama.assert_trained(op, done)


def test_a_cached_prompt_is_metered_as_such(llama: Real) -> None:
    weights = llama.lab.adapter("m", seed=9)
    op = ask("m", ids(77, 200), weights, max_tokens=4)
    (first,) = llama.done(op)
    (again,) = llama.done(op)
    (other,) = llama.done(ask("m", ids(77, 200), llama.lab.adapter("m", seed=10), max_tokens=4))
    assert (first.usage.prefill_tokens, first.usage.cached_tokens) == (200, 0)
    assert (again.usage.prefill_tokens, again.usage.cached_tokens) == (72, 128)
    assert other.usage.cached_tokens == 0, "what one adapter computed is of no use to another"
    llama.assert_trained(op, again)


def test_prompt_scores_beside_others(llama: Real) -> None:
    """vLLM itself fails on these: an adapter on lm_head, prompt log-probs, two requests in a pass."""
    weights = llama.lab.adapter("m", seed=1)
    op = ask("m", ids(0, 30), weights, prompt_logprobs=True)
    scored, _ = llama.done(op, ask("m", ids(1, 30), weights))
    found = sample_of(scored).prompt_logprobs
    assert found is not None
    (expected,) = llama.lab.forward("m", weights, [row(ids(0, 30))])
    np.testing.assert_allclose(np.frombuffer(found, "<f4")[1:], expected[:-1], atol=ATOL, rtol=0)


def test_an_adapter_that_vllm_is_given_wrongly_is_refused(llama: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradserve.compute.engine import vllm_adapters

    monkeypatch.setattr(vllm_adapters, "peft_config", lambda base, rank, modules: {**_config(rank), "lora_alpha": 16})
    (failed,) = llama.run(ask("m", ids(0, 5), llama.lab.adapter("m", seed=20)))
    assert isinstance(failed, Failed)
    assert "differ from the trainer's" in failed.message


def _config(rank: int) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "target_modules": ["q_proj"]}


def test_a_pass_that_raises_costs_only_what_was_running(llama: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    op = ask("m", ids(0, 5), llama.lab.adapter("m", seed=1))
    llama.done(op)
    engine = llama.engines[-1]
    monkeypatch.setattr(engine, "step", lambda: (_ for _ in ()).throw(RuntimeError("out of luck")))
    (failed,) = llama.run(op)
    assert isinstance(failed, Failed)
    assert "out of luck" in failed.message
    (done,) = llama.done(op)
    llama.assert_trained(op, done)
    assert llama.engines[-1] is not engine
