"""The text of a reply as a message: tool calls in the common form ``<tool_call>{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

import json
import re
from typing import Any

from gradserve.episodes.episode import Message

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def message_of(text: str) -> Message:
    """``{"role": "assistant", "content": ...}``, with ``tool_calls`` if there are any.

    A call that can't be read (cut off, no JSON, no name) stays in the text, and ``malformed_tool_calls`` says for each
    what is wrong with it.
    """
    calls: list[dict[str, Any]] = []
    malformed: list[str] = []

    def take(found: re.Match[str]) -> str:
        try:
            calls.append(_call_of(found))
        except ValueError as error:
            malformed.append(str(error))
            return found[0]
        return ""

    content = _CALL.sub(take, text)
    message: dict[str, Any] = {"role": "assistant", "content": content.strip() if calls else content}
    if calls:
        message["tool_calls"] = calls
    if malformed:
        message["malformed_tool_calls"] = malformed
    return message


def _call_of(found: re.Match[str]) -> dict[str, Any]:
    if not found[0].endswith("</tool_call>"):
        raise ValueError("a tool call does not end with </tool_call>")
    try:
        call = json.loads(found[1])
    except ValueError as error:
        raise ValueError(f"a tool call is not JSON: {error}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('a tool call is not of the form {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of the tool call {call['name']!r} are not an object")
    return {"type": "function", "function": {"name": call["name"], "arguments": arguments}}
