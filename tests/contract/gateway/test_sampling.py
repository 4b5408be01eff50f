"""What a sampling request becomes: everything that the client left open is decided before it is written down."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradserve.wire.data import as_tokens
from gradserve.wire.ops import Sample, decode_body
from tests.contract.gateway.gate import Gate, prompt


def asked(gate: Gate, seq: int = 0, sampler: str | None = None, **fields: Any) -> Sample:
    answer = gate.sample(sampler or gate.sampler(), seq, **fields)
    assert answer.status_code == 200, answer.text
    body = decode_body(gate.op(answer.json()["request_id"]).body)
    assert isinstance(body, Sample)
    return body


def params(**given: Any) -> dict[str, Any]:
    return {"sampling_params": {"max_tokens": 4, **given}}


def test_defaults(gate: Gate) -> None:
    sample = asked(gate, prompt=prompt(1, 2, 3), sampling_params={})
    assert (sample.base, sample.weights) == ("tiny", None)
    assert sample.prompt == as_tokens([1, 2, 3])
    assert sample.params.max_tokens == 509, "up to the context"
    assert sample.params.stop_tokens == (2,), "the model's own end"
    assert (sample.params.temperature, sample.params.top_k, sample.params.top_p) == (1.0, -1, 1.0)
    assert not sample.prompt_logprobs


def test_stops(gate: Gate) -> None:
    for stop, tokens, strings in (
        ([], (), ()),
        ("###", (), ("###",)),
        (["a", "b"], (), ("a", "b")),
        ([7, 8], (7, 8), ()),
    ):
        given = asked(gate, **params(stop=stop)).params
        assert (given.stop_tokens, given.stop_strings) == (tokens, strings)


def test_greedy_seeded_and_filtered(gate: Gate) -> None:
    given = asked(gate, **params(temperature=0, top_k=1000, top_p=0.5, seed=42)).params
    assert (given.temperature, given.top_k, given.top_p, given.seed) == (0, 320, 0.5, 42)


def test_chunks_are_joined(gate: Gate) -> None:
    chunks = [{"type": "encoded_text", "tokens": tokens} for tokens in ([1], [2, 3])]
    assert asked(gate, prompt={"chunks": chunks}).prompt == as_tokens([1, 2, 3])


def test_the_last_token_of_the_context(gate: Gate) -> None:
    sample = asked(gate, prompt=prompt(*[1] * 511), sampling_params={"max_tokens": 1}, prompt_logprobs=True)
    assert sample.prompt_logprobs
    assert sample.params.max_tokens == 1


def test_targets_dense_and_sparse(gate: Gate) -> None:
    dense = {"data": [5, -1, -1, 6], "dtype": "int64", "shape": [2, 2]}
    sparse = {
        "data": [5, 6],
        "dtype": "int64",
        "shape": [2, 2],
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [0, 1],
    }
    for given in (dense, sparse):
        ids = asked(gate, target_prompt_logprobs=given).target_prompt_ids
        assert ids is not None
        assert np.array_equal(ids.numpy(), [[5, -1], [-1, 6]])


def test_stability_info_is_taken(gate: Gate) -> None:
    assert asked(gate, record_stability_info=True, topk_sample_logprobs=3).topk_sample_logprobs == 3


def test_weights_are_frozen_by_the_session(gate: Gate) -> None:
    session = gate.session()
    run = gate.run(session)
    for number, kind in enumerate(("weights", "sampler_weights"), 1):
        checkpoint = gate.save(run, number, "w", kind)
        sampler = gate.sampler(session, number, model_path=checkpoint.path)
        sample = asked(gate, 0, sampler)
        assert sample.weights == checkpoint.weights
        assert gate.op(f"{sampler}:op:0").run_id == run, "this run is billed"
        answer = gate.get(f"samplers/{sampler}").json()
        assert answer == {"sampler_id": sampler, "base_model": "/models/tiny", "model_path": checkpoint.path}
        assert gate.call("DELETE", f"training_runs/{run}/checkpoints/{kind}/w").status_code == 204
        assert asked(gate, 1, sampler).weights == checkpoint.weights, "the session outlives the name"


def test_variant_suffix_names_the_same_base(gate: Gate) -> None:
    sampler = gate.sampler(base_model="tiny:peft:262144")
    told = gate.get(f"samplers/{sampler}").json()["base_model"]
    assert told == "/models/tiny", "the SDK's sampling client looks for its tokenizer there"
    assert asked(gate, 0, gate.sampler(base_model=told)).base == "tiny"
