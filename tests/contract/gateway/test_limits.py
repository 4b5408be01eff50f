"""Bodies: compressed, too large in either form, and what is left of their seq."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zstandard

from gradserve.wire.ops import ForwardBackward, decode_body
from tests.contract.gateway.gate import Gate, batch, opened, problem, row

LIMIT = 400 << 10


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    with opened(tmp_path_factory.mktemp("limits"), max_body_bytes=LIMIT) as gate:
        yield gate


def zstd(data: bytes, *, declare: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=declare).compress(data)


def big(run: str, seq: int, rows: int = 200) -> bytes:
    random = np.random.default_rng(seq)
    return batch(run, seq, *(row(random.integers(0, 320, 400).tolist()) for _ in range(rows)))


@pytest.mark.parametrize("declare", [True, False])
def test_zstd(gate: Gate, declare: bool) -> None:
    run = gate.run()
    plain = batch(run, 1, row([1, 2, 3]), row([4]))
    answer = gate.forward_backward(zstd(plain, declare=declare), **{"Content-Encoding": "zstd"})
    assert answer.status_code == 200, answer.text
    body = decode_body(gate.op(answer.json()["request_id"]).body)
    assert isinstance(body, ForwardBackward)
    assert [r.length for r in body.rows] == [3, 1]
    assert gate.forward_backward(plain).json() == answer.json(), "the encoding is not part of the request"


def test_many_frames(gate: Gate) -> None:
    run = gate.run()
    plain = batch(run, 1, row([1, 2, 3]))
    frames = zstd(plain[:20]) + zstd(plain[20:])
    assert gate.forward_backward(frames, **{"Content-Encoding": "zstd"}).status_code == 200


@pytest.mark.parametrize("declare", [True, False])
def test_bomb(gate: Gate, declare: bool) -> None:
    bomb = zstd(b"\0" * (LIMIT * 100), declare=declare)
    assert len(bomb) < LIMIT // 10
    answer = gate.forward_backward(bomb, **{"Content-Encoding": "zstd"})
    assert (answer.status_code, problem(answer)["code"]) == (413, "body.too_large")


@pytest.mark.parametrize("form", ["plain", "zstd", "zstd undeclared"])
def test_too_large_batch_consumes_its_seq(gate: Gate, form: str) -> None:
    run = gate.run()
    body = big(run, 1)
    assert len(body) > LIMIT
    headers = {}
    if form != "plain":
        body = zstd(body, declare=form == "zstd")
        headers = {"Content-Encoding": "zstd"}
    answer = gate.forward_backward(body, **headers)
    assert (answer.status_code, problem(answer)["code"]) == (413, "body.too_large")
    assert gate.cursor(run) == 1
    assert gate.forward_backward(batch(run, 2)).status_code == 200


def test_cut_off_batch_consumes_its_seq(gate: Gate) -> None:
    run = gate.run()
    answer = gate.forward_backward(batch(run, 1)[:-3])
    assert (answer.status_code, problem(answer)["code"]) == (400, "body.malformed")
    assert gate.cursor(run) == 1


def test_large_batch_within_the_limit(tmp_path_factory: pytest.TempPathFactory) -> None:
    with opened(tmp_path_factory.mktemp("large")) as gate:
        run = gate.run()
        body = big(run, 1, rows=400)
        assert len(body) > 1 << 20, "checked beside the event loop"
        assert gate.forward_backward(body).status_code == 200
        bad = big(run, 2, rows=400) + batch("", 0, row([320], target_tokens=np.array([1])))
        answer = gate.forward_backward(bad)
        assert (problem(answer)["code"], problem(answer)["index"]) == ("data.vocabulary", 400)


@pytest.mark.parametrize(
    ("encoding", "content", "code"),
    [("zstd", b"not zstd", "body.encoding"), ("zstd", b"", "body.encoding"), ("gzip", b"x", "body.encoding")],
)
def test_bad_encodings(gate: Gate, encoding: str, content: bytes, code: str) -> None:
    answer = gate.forward_backward(content, **{"Content-Encoding": encoding})
    assert (answer.status_code, problem(answer)["code"]) == (400, code)


def test_cut_off_zstd(gate: Gate) -> None:
    run = gate.run()
    answer = gate.forward_backward(zstd(batch(run, 1))[:-4], **{"Content-Encoding": "zstd"})
    assert answer.status_code == 400
    problem(answer)
