"""Where a sequence ends: token, text, length. What ended it is part of it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from gradserve.compute.engine.stops import TextStops
from tests.numerics.lab import Lab, ask, ids, tokens


@pytest.fixture
def free_run(lab: Lab) -> list[int]:
    """Forty tokens that nothing stops."""
    return tokens(lab.sample([ask("llama", ids(0, 5), seed=3, max_tokens=40)])[0].sequences[0])


def test_a_stop_token_is_the_last(lab: Lab, free_run: list[int]) -> None:
    stop = free_run[12]
    end = free_run.index(stop)
    (result,) = lab.sample([ask("llama", ids(0, 5), seed=3, max_tokens=40, stop_tokens=(stop, 999))])
    assert tokens(result.sequences[0]) == free_run[: end + 1]
    assert result.sequences[0].stopped
    assert len(result.sequences[0].logprobs) == 4 * (end + 1)


def test_the_last_allowed_token_may_stop(lab: Lab, free_run: list[int]) -> None:
    (result,) = lab.sample([ask("llama", ids(0, 5), seed=3, max_tokens=1, stop_tokens=(free_run[0],))])
    assert result.sequences[0].stopped


def test_nothing_stops_without_stops(lab: Lab) -> None:
    (result,) = lab.sample([ask("llama", ids(0, 5), seed=3, max_tokens=60)])
    assert (len(tokens(result.sequences[0])), result.sequences[0].stopped) == (60, False)


def test_a_stop_string_across_tokens(lab: Lab, free_run: list[int]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(lab.models["llama"])
    end = next(  # two tokens of plain text that come together
        index
        for index in range(1, 40)
        if all(len(tokenizer.decode([t]).strip("\ufffd")) > 0 and t < 290 for t in free_run[index - 1 : index + 1])
    )
    text = tokenizer.decode(free_run[end - 1])[-1] + tokenizer.decode(free_run[end])[0]
    first = next(index for index in range(40) if text in tokenizer.decode(free_run[: index + 1]))
    (result,) = lab.sample([ask("llama", ids(0, 5), seed=3, max_tokens=40, stop_strings=("never", text))])
    assert tokens(result.sequences[0]) == free_run[: first + 1]
    assert result.sequences[0].stopped


@pytest.fixture
def tokenizer(lab: Lab) -> Any:
    return AutoTokenizer.from_pretrained(lab.models["llama"])


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("hello END more", "END", "hello END"),
        ("is it é? yes", "é", "is it é"),
        ("日本語 text", "本", "日本"),
        ("a<|im_end|>b", "<|im_end|>", "a<|im_end|>"),
        ("aab aaab", "aaab", "aab aaab"),
    ],
)
def test_text_is_found_as_it_grows(tokenizer: Any, text: str, stop: str, kept: str) -> None:
    stops, taken = TextStops(tokenizer, (stop,)), []
    for token in tokenizer.encode(text):
        taken.append(token)
        if stops.found(taken):
            break
    else:
        pytest.fail("not found")
    assert tokenizer.decode(taken) == kept


def test_text_that_never_comes_is_never_found(tokenizer: Any) -> None:
    stops = TextStops(tokenizer, ("xyz",))
    whole = tokenizer.encode("x y z xy 日本 zyx" * 20)
    assert not any(stops.found(whole[: index + 1]) for index in range(len(whole)))
