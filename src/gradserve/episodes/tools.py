"""Tools: plain Python functions that a model may call, and their JSON schemas.

A schema comes from the signature and the docstring: its first paragraph, and ``name: text`` lines under ``Args:``.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gradserve.episodes.episode import Message
from gradserve.episodes.errors import EnvironmentUnusable

Tool: TypeAlias = Callable[..., Any]
"""Sync or async; its parameters are named and typed, what it returns is a text or JSON."""

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class ToolCallRefused(Exception):
    """The model called what is not there, or with arguments that the tool does not take; the text is for the model."""


def schema_of(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates take it: ``{"type": "function", "function": {"name", "description", "parameters"}}``.

    Raises EnvironmentUnusable when the signature can't be said in JSON.
    """
    if not callable(tool) or not hasattr(tool, "__name__"):
        raise EnvironmentUnusable(f"{tool!r} is no tool: a tool is a function with a name")
    summary, described = _docstring(tool)
    parameters = _parameters_of(tool)
    properties = {
        name: _type_schema(annotation, f"{tool.__name__}({name})")
        | ({"description": described[name]} if name in described else {})
        for name, (annotation, _) in parameters.items()
    }
    needed = [name for name, (_, optional) in parameters.items() if not optional]
    return {
        "type": "function",
        "function": {
            "name": tool.__name__,
            "description": summary,
            "parameters": {"type": "object", "properties": properties, "required": needed},
        },
    }


def bound(tools: Iterable[Tool], call: Mapping[str, Any]) -> tuple[Tool, dict[str, Any]]:
    """The tool and the arguments of one of a reply's ``tool_calls``. Raises ToolCallRefused."""
    name, arguments = call["function"]["name"], dict(call["function"]["arguments"])
    by_name = {tool.__name__: tool for tool in tools}
    if name not in by_name:
        raise ToolCallRefused(f"there is no tool {name!r}; there are {', '.join(by_name) or 'none'}")
    tool = by_name[name]
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        raise ToolCallRefused(f"{name}: {error}; it takes {', '.join(_parameters_of(tool)) or 'nothing'}") from error
    return tool, arguments


def answer(name: str, content: object) -> Message:
    """The tool's message with what it returned: a text as it is, anything else as JSON."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    return {"role": "tool", "name": name, "content": text}


def _parameters_of(tool: Tool) -> dict[str, tuple[Any, bool]]:
    """Annotation and whether it may be left out, by name."""
    try:
        hints = typing.get_type_hints(tool)
    except NameError as error:
        raise EnvironmentUnusable(f"the tool {tool.__name__} has an annotation that is not defined: {error}") from error
    found: dict[str, tuple[Any, bool]] = {}
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EnvironmentUnusable(
                f"the tool {tool.__name__} takes {str(parameter)!r}; a model gives arguments by name: name each one"
            )
        found[name] = (hints.get(name, str), parameter.default is not parameter.empty)
    return found


def _type_schema(annotation: Any, where: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return {}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        kinds = [_type_schema(kind, where) for kind in inner if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin in (list, Sequence):
        return {"type": "array", "items": _type_schema(inner[0], where)}
    if (origin or annotation) in _NAMES:
        return {"type": _NAMES[origin or annotation]}
    raise EnvironmentUnusable(
        f"the type of {where}, {annotation!r}, can't be said in JSON; use str, int, float, bool, list, dict or Literal"
    )


def _docstring(tool: Tool) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the text of each parameter under ``Args:``."""
    text = inspect.getdoc(tool) or ""
    summary, _, _ = text.partition("\n\n")
    found = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
    lines = re.findall(r"^[ \t]+(\w+)(?: \([^)]*\))?:[ \t]*(.*)$", found[1], re.MULTILINE) if found else []
    return " ".join(summary.split()), dict(lines)
