"""Chat templates: masks against segments written by hand, and what must be refused."""

from __future__ import annotations

from typing import Any

import pytest

from gradserve.episodes.chat import ChatTemplate
from gradserve.episodes.errors import RowUnusable, TemplateUnusable
from gradserve.episodes.plain import PlainText
from gradserve.episodes.rows import rendered
from gradserve.episodes.tokens import Rendered
from tests.templates import ENDLESS, LLAMA3, QWEN3, REASONER, SMOLLM2, spaced, with_template

TALK = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "2 and 2?"},
    {"role": "assistant", "content": "It is 4"},
    {"role": "user", "content": "3 and 3?"},
    {"role": "assistant", "content": "6"},
]
THINKING = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>\nx\n</think>\n\nb"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "<think>\ny\n</think>\n\nd"},
]


def by_hand(tokenizer: Any, *segments: tuple[str, int]) -> Rendered:
    """Every segment encoded by itself, with its weight."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in segments]
    weights = [float(weight) for part, (_, weight) in zip(ids, segments, strict=True) for _ in part]
    return Rendered(tuple(token for part in ids for token in part), tuple(weights))


def test_every_assistant_turn_is_trained_and_nothing_else() -> None:
    tokenizer = with_template(SMOLLM2)
    [row] = ChatTemplate(tokenizer).training_rows(TALK)
    assert row == by_hand(
        tokenizer,
        ("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2 and 2?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("It is 4<|im_end|>", 1),
        ("\n<|im_start|>user\n3 and 3?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("6<|im_end|>", 1),
        ("\n", 0),
    )
    assert list(row.tokens) == tokenizer.apply_chat_template(TALK, return_dict=False)
    assert row.trained == len(tokenizer.encode("It is 4")) + 3


def test_the_last_turn_only_and_turns_of_weight_0() -> None:
    tokenizer = with_template(LLAMA3)
    template = ChatTemplate(tokenizer)
    head = "<|header|>{}<|header_end|>\n\n"
    before = (
        f"<|begin|>{head.format('system')}Add.<|eot|>{head.format('user')}2 and 2?<|eot|>{head.format('assistant')}"
    )
    again = f"{head.format('user')}3 and 3?<|eot|>{head.format('assistant')}"
    [row] = template.training_rows(TALK, train="last")
    assert row == by_hand(tokenizer, (f"{before}It is 4<|eot|>{again}", 0), ("6<|eot|>", 1))
    unwanted = [{**message, "weight": 0 if message["content"] == "6" else None} for message in TALK]
    [row] = template.training_rows(unwanted)
    assert row == by_hand(tokenizer, (before, 0), ("It is 4<|eot|>", 1))
    with pytest.raises(RowUnusable, match="no assistant's message to train on among system, user"):
        template.training_rows(TALK[:2])
    with pytest.raises(RowUnusable, match="message 5 has the weight"):
        template.training_rows([*TALK[:4], {**TALK[4], "weight": 0.5}])


def test_a_template_that_rewrites_earlier_turns_is_refused_or_split() -> None:
    tokenizer = with_template(QWEN3)
    with pytest.raises(TemplateUnusable) as refused:
        ChatTemplate(tokenizer).training_rows(THINKING)
    said = str(refused.value)
    assert "message 2 (assistant)" in said
    assert r"assistant\n<think>\nx\n</think>\n\nb<|im_end|>" in said
    assert r"assistant\nb<|im_end|>\n<|im_start|>user" in said
    assert "on_rewrite='split'" in said

    first, second = ChatTemplate(tokenizer, on_rewrite="split").training_rows(THINKING)
    asked = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert first == by_hand(tokenizer, (asked, 0), ("<think>\nx\n</think>\n\nb<|im_end|>", 1), ("\n", 0))
    again = f"{asked}b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert second == by_hand(tokenizer, (again, 0), ("<think>\ny\n</think>\n\nd<|im_end|>", 1), ("\n", 0))
    assert ChatTemplate(tokenizer).training_rows(THINKING, train="last") == [second]
    assert len(ChatTemplate(tokenizer, on_rewrite="split").training_rows(THINKING[:2])) == 1


def test_a_generation_prompt_that_the_turn_does_not_begin_with_is_refused_always() -> None:
    for on_rewrite in ("refuse", "split"):
        template = ChatTemplate(with_template(REASONER), on_rewrite=on_rewrite)
        with pytest.raises(TemplateUnusable, match=r"message 3 \(assistant\): .*<think>.* shows it as .*It is 4"):
            template.training_rows(TALK[:3])


def test_a_token_across_the_generation_prompt_is_not_trained_on() -> None:
    """The whole text would have one token for "tt", of which the model is only ever given the first half."""
    straddling = SMOLLM2.replace("<|im_start|>assistant\n", "<|im_start|>assistant\nt").replace(
        "message['content']", "('t' if message['role'] == 'assistant' else '') + message['content']"
    )
    tokenizer = with_template(straddling)
    tokenizer.add_tokens(["tt"])
    talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "to"}]
    assert tokenizer.convert_tokens_to_ids("tt") in tokenizer.apply_chat_template(talk, return_dict=False)
    template = ChatTemplate(tokenizer)
    [row] = template.training_rows(talk)
    prompt = template.prompt(talk[:1])
    assert row.tokens[: len(prompt)] == prompt
    assert tokenizer.decode(row.tokens) == tokenizer.apply_chat_template(talk, tokenize=False)
    assert [token for token, weight in zip(row.tokens, row.weights, strict=True) if weight] == [
        *tokenizer.encode("to"),
        tokenizer.eos_token_id,
    ]


def test_a_tokenizer_that_puts_a_space_before_every_text() -> None:
    """Encoded by itself " yo" would be two tokens, as it never is behind the prompt."""
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '</s>' if m.role == 'assistant' else ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    tokenizer = spaced(["user:", "hi", "assistant:", "yo"], source)
    [row] = ChatTemplate(tokenizer).training_rows(talk)
    assert tokenizer.convert_ids_to_tokens(row.tokens) == ["▁user:", "▁hi", "▁assistant:", "▁yo", "</s>"]
    assert row.weights == (0.0, 0.0, 0.0, 1.0, 1.0)
    tokenizer.chat_template = source.replace("assistant:{%", "assistant: {%")  # now the space is before the cut
    with pytest.raises(TemplateUnusable, match="can't be encoded one after the other without changing the text"):
        ChatTemplate(tokenizer).training_rows(talk)


def test_what_cannot_be_a_template_is_refused_with_a_cure() -> None:
    with pytest.raises(TemplateUnusable, match=r"no chat template.*prompt and completion or of text.*chat_template ="):
        ChatTemplate(with_template(None))
    with pytest.raises(TemplateUnusable, match="no special token: a model trained with it would not learn to stop"):
        ChatTemplate(with_template(ENDLESS))
    with pytest.raises(TemplateUnusable, match="does not show the text of an assistant's message as it is"):
        ChatTemplate(with_template(SMOLLM2.replace("message['content']", "message['content'] | lower")))
    fussy = "{% if messages[0].role == 'system' %}{{ raise_exception('roles must alternate') }}{% endif %}" + SMOLLM2
    with pytest.raises(TemplateUnusable, match="refuses messages of system, user: roles must alternate"):
        ChatTemplate(with_template(fussy)).prompt(TALK[:2])
    with pytest.raises(RowUnusable, match=r"message 2 \(user\) has '<\|im_end\|>' in its text"):
        ChatTemplate(with_template(SMOLLM2)).training_rows(
            [TALK[0], {"role": "user", "content": "<|im_end|>"}, TALK[2]]
        )
    other = [{"role": "user", "content": "what is <|eot|>?"}, TALK[2]]  # a special token that builds no turn here
    assert len(ChatTemplate(with_template(SMOLLM2)).training_rows(other)) == 1
    with pytest.raises(ValueError, match="'refuse' or 'split'"):
        ChatTemplate(with_template(SMOLLM2), on_rewrite="ignore")  # type: ignore[arg-type]


def test_replies_end_at_the_templates_end_of_turn_and_carry_tool_calls() -> None:
    tokenizer = with_template(LLAMA3)
    template = ChatTemplate(tokenizer)
    end, eos = tokenizer.convert_tokens_to_ids("<|eot|>"), tokenizer.eos_token_id
    assert template.stop == [end, eos]
    assert template.reply([*tokenizer.encode("It is 4 "), end]) == {"role": "assistant", "content": "It is 4 "}
    assert template.reply(tokenizer.encode("It is")) == {"role": "assistant", "content": "It is"}
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    called = f'  Let me see.\n{good}<tool_call>{{"name": 3}}</tool_call>'
    message = template.reply([*tokenizer.encode(called), end])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert message["content"] == 'Let me see.\n<tool_call>{"name": 3}</tool_call>'
    assert message["malformed_tool_calls"] == ['a tool call is not of the form {"name": ..., "arguments": {...}}']
    for broken, why in (('{"name": "add"', "not JSON"), ('{"name": "add", "arguments": 3}', "are not an object")):
        broken = f"<tool_call>{broken}</tool_call>"
        message = template.reply(tokenizer.encode(broken))
        assert message["content"] == broken
        assert why in message["malformed_tool_calls"][0]
    cut = template.reply(tokenizer.encode('<tool_call>{"name": "add"}'))
    assert cut["malformed_tool_calls"] == ["a tool call does not end with </tool_call>"]


@pytest.mark.parametrize("source", [SMOLLM2, LLAMA3])
def test_a_continuation_makes_the_templates_own_tokens(source: str) -> None:
    tokenizer = with_template(source)
    template = ChatTemplate(tokenizer)
    end = template.stop[0]
    prompt, reply = template.prompt(TALK[:2]), tokenizer.encode("It is 4")
    expected = template.prompt(TALK[:4])
    assert (*prompt, *reply, end, *template.continuation([*reply, end], TALK[:3], TALK[3:4])) == expected
    cut = template.continuation(reply, TALK[:3], TALK[3:4])
    assert cut[0] == end  # the end that was not sampled comes with what follows
    assert (*prompt, *reply, *cut) == expected
    other = tokenizer.eos_token_id if end != tokenizer.eos_token_id else 0
    assert template.continuation([*reply, other], TALK[:3], TALK[3:4]) == cut  # another end is not the template's


def test_a_continuation_does_not_depend_on_what_the_template_does_to_earlier_turns() -> None:
    tokenizer = with_template(QWEN3)
    template = ChatTemplate(tokenizer)
    sampled = [*tokenizer.encode(THINKING[1]["content"]), template.end_of_turn]
    following = template.continuation(sampled, THINKING[:2], THINKING[2:3])
    assert tokenizer.decode(following) == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    called = template.reply([*tokenizer.encode('<tool_call>{"name": "add"}</tool_call>'), template.end_of_turn])
    history, new = [*THINKING[:1], called], [{"role": "tool", "name": "add", "content": "7"}]
    answered = tokenizer.decode(template.continuation([template.end_of_turn], history, new))
    assert answered == ("\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_plain_rows() -> None:
    tokenizer = with_template(SMOLLM2)
    end = tokenizer.eos_token_id
    [row] = rendered({"prompt": "2 + 2 =", "completion": " 4", "id": 9}, tokenizer)
    assert row == by_hand(tokenizer, ("2 + 2 =", 0), (" 4<|im_end|>", 1))
    [row] = rendered({"prompt": "is", "completion": "t<|im_end|>"}, ChatTemplate(tokenizer))
    assert row.tokens == (*tokenizer.encode("is"), *tokenizer.encode("t"), end)  # "ist" would be one token
    [row] = rendered({"prompt": "", "completion": "the end"}, tokenizer)
    assert row.weights == (0.0, *[1.0] * (len(row.tokens) - 1))  # nothing predicts the first token
    [row] = rendered({"text": "the end"}, with_template(None))
    assert row.tokens == (*tokenizer.encode("the end"), end)
    assert row.weights == (0.0, *[1.0] * (len(row.tokens) - 1))
    assert rendered({"messages": TALK}, tokenizer) == ChatTemplate(tokenizer).training_rows(TALK)
    assert len(rendered({"messages": THINKING}, with_template(QWEN3), on_rewrite="split")) == 2
    with pytest.raises(ValueError, match="the ChatTemplate's own"):
        rendered({"messages": THINKING}, ChatTemplate(with_template(QWEN3)), on_rewrite="split")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"question": "a", "id": 1},
            "columns question, id; trained on are messages, or prompt and completion, or text",
        ),
        ({"prompt": "a"}, "columns prompt; trained on are"),
        ({"text": "a", "messages": TALK}, "messages as well as text"),
        ({"prompt": TALK, "completion": "a"}, "prompt is a list, not a text"),
        ({"messages": [{"content": "a"}]}, "messages is not a list of"),
        ({"text": ""}, "no text to train on"),
    ],
)
def test_rows_of_no_form_are_refused_by_their_columns(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RowUnusable, match=said):
        rendered(row, with_template(SMOLLM2))


def test_models_without_a_template_are_played_in_plain_text() -> None:
    tokenizer = with_template(None)
    template = PlainText(tokenizer)
    assert template.prompt([{"role": "user", "content": "2 + 2 ="}]) == tuple(tokenizer.encode("2 + 2 ="))
    assert template.reply([*tokenizer.encode(" 4"), tokenizer.eos_token_id]) == {"role": "assistant", "content": " 4"}
    new = [{"role": "user", "content": "\n3 + 3 ="}]
    assert template.continuation([7], [{"role": "assistant", "content": ""}], new) == tuple(
        tokenizer.encode("\n3 + 3 =")
    )
    with pytest.raises(TemplateUnusable, match="tools need a chat template"):
        template.prompt(new, [{"type": "function"}])
