"""The vllm sampler around an engine that isn't vLLM: peft reads the folders, so a right answer proves them right too.

vLLM itself is tested by `make vllm` (tests/vllm_backend).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradserve.compute.catalog import ModelUnusable
from gradserve.compute.engine import vllm_adapters
from gradserve.compute.engine.vllm_adapters import no_change
from gradserve.compute.engine.vllm_engine import Drawn, PeftFolder, VllmEngine, padded_rank
from gradserve.compute.engine.vllm_sampler import VllmSampler
from gradserve.compute.tasks import Done, Failed, Outcome, Progress, SampleTask
from gradserve.wire.ops import Sample
from tests.numerics.lab import Lab, all_tokens, ask, floats, ids, logprobs, row, sample_of, tokens
from tests.numerics.peft_engine import PeftEngine

ATOL = 1e-5
"""|log-prob of the engine - log-prob of the trainer| on the tiny models, float32."""

RANK = 4
PROBED = 256
"""Four drawn tokens, the 64 best at each."""


class Setup:
    """A lab with a vllm sampler on ``engines``; a new one is made whenever the sampler asks for one."""

    def __init__(self, lab: Lab, folders: Path, make: Callable[[Path], PeftEngine] = PeftEngine) -> None:
        self.lab = lab
        self.folders = folders
        self.engines: list[PeftEngine] = []
        self.told: list[str] = []

        def start(_: Any) -> PeftEngine:
            self.engines.append(make(lab.models["llama"]))
            return self.engines[-1]

        self.sampler = VllmSampler("llama", lab.bases, lab.arrays, start, folders, RANK, self.told.append)

    @property
    def engine(self) -> PeftEngine:
        return self.engines[-1]

    def run(self, *ops: Sample) -> list[Outcome]:
        for index, op in enumerate(ops):
            self.sampler.add(SampleTask(str(index), op))
        return self.outcomes(len(ops))

    def outcomes(self, count: int) -> list[Outcome]:
        found: dict[str, Outcome] = {}
        while self.sampler.busy:
            for outcome in self.sampler.step():
                assert isinstance(outcome, Done | Failed)
                assert outcome.task_id not in found
                found[outcome.task_id] = outcome
        return [found[str(index)] for index in range(count)]

    def done(self, *ops: Sample) -> list[Done]:
        outcomes = self.run(*ops)
        for outcome in outcomes:
            assert isinstance(outcome, Done), outcome
        return outcomes  # type: ignore[return-value]

    def failed(self, op: Sample) -> Failed:
        (outcome,) = self.run(op)
        assert isinstance(outcome, Failed), outcome
        return outcome


@pytest.fixture
def setup(lab: Lab, tmp_path: Path) -> Setup:
    return Setup(lab, tmp_path / "folders")


def trained(lab: Lab, op: Sample, sequence: list[int]) -> Any:
    """The trainer's log-probs of a sampled sequence."""
    prompt = np.frombuffer(op.prompt, "<i4")
    weights = op.weights or lab.arrays.put(no_change(lab.base("llama")))
    whole = np.concatenate([prompt, np.array(sequence, dtype=np.int32)])
    return lab.forward("llama", weights, [row(whole)])[0][len(prompt) - 1 : -1]


def test_samples_come_from_the_model_that_trains(setup: Setup) -> None:
    lab = setup.lab
    adapters = [lab.adapter("llama", seed=1), lab.adapter("llama", seed=2, rank=2, train_unembed=False), None]
    ops = [ask("llama", ids(i, 3 + i), weights, n=2, seed=i, max_tokens=6) for i, weights in enumerate([*adapters] * 2)]
    for op, done in zip(ops, setup.done(*ops), strict=True):
        for sequence in sample_of(done).sequences:
            assert len(tokens(sequence)) == 6
            expected = trained(lab, op, tokens(sequence))
            np.testing.assert_allclose(logprobs(sequence), expected, atol=ATOL, rtol=0)
        assert done.usage.prefill_tokens == len(op.prompt) // 4
        assert done.usage.sample_tokens == 12
        assert 0 < done.metrics["sampler_trainer_diff:mean"] <= done.metrics["sampler_trainer_diff:max"] < ATOL


def test_each_set_of_weights_is_compared_once_and_the_figures_are_told(setup: Setup) -> None:
    weights = setup.lab.adapter("llama")
    setup.done(ask("llama", ids(0, 3), weights), ask("llama", ids(1, 3), weights), ask("llama", ids(2, 3)))
    setup.done(ask("llama", ids(0, 3), weights))
    assert [line.split(":")[0] for line in setup.told] == [f"vLLM, weights {weights[:12]}", "vLLM, weights base"]
    assert all(f"({PROBED} log-probs, bound 1e-03)" in line for line in setup.told)


def _skip_head(engine: PeftEngine, adapter: PeftFolder) -> None:
    engine.models[adapter.number].base_model.model.lm_head.lora_B["default"].weight.data.zero_()


def _skip_a_layer(engine: PeftEngine, adapter: PeftFolder) -> None:
    engine.models[adapter.number].base_model.model.model.layers[1].mlp.down_proj.lora_B["default"].weight.data.zero_()


def _double_the_scale(engine: PeftEngine, adapter: PeftFolder) -> None:
    engine.models[adapter.number].base_model.model.lm_head.scaling["default"] *= 2


def _not_a_number(engine: PeftEngine, adapter: PeftFolder) -> None:
    engine.models[adapter.number].base_model.model.lm_head.lora_B["default"].weight.data.fill_(torch.nan)


@pytest.mark.parametrize("spoil", [_skip_head, _skip_a_layer, _double_the_scale, _not_a_number])
def test_weights_that_the_engine_applies_otherwise_are_refused(
    lab: Lab, tmp_path: Path, spoil: Callable[[PeftEngine, PeftFolder], None]
) -> None:
    bad, good = lab.adapter("llama", seed=1), lab.adapter("llama", seed=2)

    class Spoilt(PeftEngine):
        def load(self, adapter: PeftFolder) -> None:
            super().load(adapter)
            if adapter.name == bad:
                spoil(self, adapter)

    setup = Setup(lab, tmp_path / "folders", Spoilt)
    refused, taken = setup.run(ask("llama", ids(0, 3), bad), ask("llama", ids(0, 3), good))
    assert isinstance(refused, Failed)
    assert refused.kind == "user"
    assert "differ from the trainer's by" in refused.message
    assert "bound 1e-03" in refused.message
    assert isinstance(taken, Done)
    assert not [key for key in setup.engine.submitted if key.startswith("0#")], "nothing was sampled from them"


def test_the_bound_is_on_the_worst_log_prob(lab: Lab, tmp_path: Path) -> None:
    """A single log-prob beyond it is enough."""

    class Off(PeftEngine):
        def _draw(self, running: Any) -> Any:
            token = super()._draw(running)
            if token.best:
                token.best[-1] = (token.best[-1][0], token.best[-1][1] + self.error)
            return token

        error = 0.0

    setup = Setup(lab, tmp_path / "folders", Off)
    for error, outcome in ((9e-4, Done), (1.1e-3, Failed)):
        Off.error = error
        assert isinstance(setup.run(ask("llama", ids(0, 3), lab.adapter("llama", seed=int(error * 1e5))))[0], outcome)


def test_the_least_recently_used_adapter_goes_and_comes_back(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_adapters.Adapters.__init__, "__defaults__", (2,))
    lab = setup.lab
    first, second, third = (lab.adapter("llama", seed=seed) for seed in range(3))
    setup.done(ask("llama", ids(0, 3), first))
    setup.done(ask("llama", ids(0, 3), second))
    setup.done(ask("llama", ids(0, 3), first))
    setup.done(ask("llama", ids(0, 3), third))
    assert {folder.name for folder in setup.folders.iterdir()} == {first, third}
    assert len(setup.engine.models) == 2
    before = setup.done(ask("llama", ids(0, 3), first, seed=5))
    setup.done(ask("llama", ids(0, 3), second))
    after = setup.done(ask("llama", ids(0, 3), first, seed=5))
    assert all_tokens([sample_of(before[0])]) == all_tokens([sample_of(after[0])])


def test_adapters_in_use_stay(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at once where two are kept; PeftEngine refuses to unload one that a sequence runs on."""
    monkeypatch.setattr(vllm_adapters.Adapters.__init__, "__defaults__", (2,))
    ops = [ask("llama", ids(0, 3), setup.lab.adapter("llama", seed=seed), max_tokens=3 + seed) for seed in range(4)]
    setup.done(*ops)
    assert len(setup.engine.models) == len(list(setup.folders.iterdir())) == 2


def test_weights_that_cannot_be_sampled_are_refused(setup: Setup) -> None:
    lab = setup.lab
    assert "rank 5" in setup.failed(ask("llama", ids(0, 3), lab.adapter("llama", rank=5))).message
    full = lab.arrays.put({"model.norm.weight": torch.ones(64)})
    assert "not a LoRA adapter" in setup.failed(ask("llama", ids(0, 3), full)).message
    name = "base_model.model.model.layers.7.mlp.up_proj.lora_"
    other = lab.arrays.put({f"{name}A.weight": torch.ones(2, 64), f"{name}B.weight": torch.ones(128, 2)})
    assert "model.layers.7.mlp.up_proj" in setup.failed(ask("llama", ids(0, 3), other)).message


def test_a_seed_repeats_and_samples_differ(setup: Setup) -> None:
    op = ask("llama", ids(0, 3), n=3, seed=7)
    first, again = setup.done(op)[0], setup.done(ask("llama", ids(1, 9), seed=1), op)[1]
    sequences = all_tokens([sample_of(first)])
    assert sequences == all_tokens([sample_of(again)])
    assert len({tuple(sequence) for sequence in sequences}) == 3


def test_stops(setup: Setup) -> None:
    greedy = ask("llama", ids(0, 3), temperature=0.0)
    drawn = tokens(sample_of(setup.done(greedy)[0]).sequences[0])
    text = setup.lab.base("llama").tokenizer.decode(drawn[3:4])
    by_token, by_text = setup.done(
        ask("llama", ids(0, 3), temperature=0.0, stop_tokens=(drawn[2],)),
        ask("llama", ids(0, 3), temperature=0.0, stop_strings=(text,)),
    )
    (stopped,) = sample_of(by_token).sequences
    assert tokens(stopped) == drawn[: drawn.index(drawn[2]) + 1]
    assert stopped.stopped
    (stopped,) = sample_of(by_text).sequences
    assert tokens(stopped) == drawn[: len(tokens(stopped))]
    assert text in setup.lab.base("llama").tokenizer.decode(tokens(stopped))
    assert text not in setup.lab.base("llama").tokenizer.decode(tokens(stopped)[:-1])
    assert stopped.stopped
    assert setup.engine.aborted == ["1#0"]


@pytest.mark.parametrize("length", [1, 12])
def test_scores_are_those_of_the_built_in_sampler(setup: Setup, length: int) -> None:
    targets = np.arange(2 * (length - 1)).reshape(length - 1, 2).astype(np.int64)
    op = ask(
        "llama",
        ids(0, length),
        setup.lab.adapter("llama"),
        temperature=0.0,
        prompt_logprobs=True,
        topk_prompt=3,
        topk_sample=3,
        targets=targets if length > 1 else None,
    )
    (mine,) = (sample_of(done) for done in setup.done(op))
    (theirs,) = setup.lab.sample([op])
    assert mine.prompt_logprobs is not None
    assert theirs.prompt_logprobs is not None
    np.testing.assert_allclose(
        np.frombuffer(mine.prompt_logprobs, "<f4"), np.frombuffer(theirs.prompt_logprobs, "<f4"), atol=ATOL, rtol=0
    )
    if length > 1:
        assert mine.target_prompt_logprobs is not None
        assert theirs.target_prompt_logprobs is not None
        np.testing.assert_allclose(
            floats(mine.target_prompt_logprobs), floats(theirs.target_prompt_logprobs), atol=ATOL, rtol=0
        )
    for my, their in ((mine.topk_prompt, theirs.topk_prompt), (mine.sequences[0].topk, theirs.sequences[0].topk)):
        assert my is not None
        assert their is not None
        assert my.token_ids == their.token_ids
        np.testing.assert_allclose(floats(my.logprobs), floats(their.logprobs), atol=ATOL, rtol=0)


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_vllm_would_change_are_refused(setup: Setup, temperature: float) -> None:
    failed = setup.failed(ask("llama", ids(0, 3), temperature=temperature))
    assert failed.kind == "user"
    assert str(temperature) in failed.message


def test_a_prompt_that_fills_the_context_is_refused(setup: Setup) -> None:
    context = setup.lab.base("llama").context
    assert "fills the context" in setup.failed(ask("llama", ids(0, context))).message
    (longest,) = setup.done(ask("llama", ids(0, context - 2), max_tokens=9))
    assert len(tokens(sample_of(longest).sequences[0])) == 2


class Breaks(PeftEngine):
    """Raises in its fourth pass after the probe's."""

    passes = 0

    def step(self) -> Any:
        self.passes += 1
        if self.passes == 8:
            raise RuntimeError("out of luck")
        return super().step()


def test_an_engine_that_breaks_fails_what_it_had_and_is_replaced(lab: Lab, tmp_path: Path) -> None:
    setup = Setup(lab, tmp_path / "folders", Breaks)
    broken = setup.run(ask("llama", ids(0, 3)), ask("llama", ids(1, 3), lab.adapter("llama")))
    for outcome in broken:
        assert isinstance(outcome, Failed)
        assert outcome.kind == "internal"
        assert "out of luck" in outcome.message
    setup.done(ask("llama", ids(0, 3), max_tokens=2))
    assert len(setup.engines) == 2


def test_an_engine_that_ends_a_sequence_early_is_not_believed(lab: Lab, tmp_path: Path) -> None:
    class Hasty(PeftEngine):
        def step(self) -> Any:
            for part in super().step():
                yield Drawn(part.key, part.tokens, part.cached, ended=part.ended or "#" in part.key)

    assert "before its limit" in Setup(lab, tmp_path / "folders", Hasty).failed(ask("llama", ids(0, 3))).message


def test_cancel(setup: Setup) -> None:
    for index in range(3):
        setup.sampler.add(SampleTask(str(index), ask("llama", ids(index, 3), n=2)))
    waiting = setup.sampler.cancel("0")
    assert isinstance(waiting, Failed)
    assert waiting.kind == "cancelled"
    while "2#1" not in setup.engine.submitted:
        assert setup.sampler.step() == []
    running = setup.sampler.cancel("1")
    assert isinstance(running, Failed)
    assert setup.engine.aborted == ["1#0", "1#1"]
    assert setup.sampler.cancel("1") is None
    left = []
    while setup.sampler.busy:
        left += setup.sampler.step()
    assert [(type(outcome), outcome.task_id) for outcome in left] == [(Done, "2")]


def test_a_stream_gives_every_token_before_the_outcome(setup: Setup) -> None:
    setup.sampler.add(SampleTask("s", ask("llama", ids(0, 3), n=2, max_tokens=5), stream=True))
    messages: list[Outcome | Progress] = []
    while setup.sampler.busy:
        messages += setup.sampler.step()
    *parts, done = messages
    assert isinstance(done, Done)
    for index, sequence in enumerate(sample_of(done).sequences):
        mine = [part for part in parts if isinstance(part, Progress) and part.index == index]
        assert len(mine) == 5
        assert b"".join(part.tokens for part in mine) == sequence.tokens
        assert b"".join(part.logprobs for part in mine) == sequence.logprobs


def test_without_vllm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModelUnusable, match=r"gradserve\[vllm\]"):
        VllmEngine("nowhere", 128, 1 << 20, 64, 8, 4)


def test_ranks_are_rounded_up_to_those_of_vllm() -> None:
    assert [padded_rank(rank) for rank in (1, 2, 8, 9, 64)] == [1, 8, 8, 16, 64]
    with pytest.raises(ValueError, match="65"):
        padded_rank(65)
