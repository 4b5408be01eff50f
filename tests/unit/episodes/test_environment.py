"""How environments and tools are named, loaded and described."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from gradserve.episodes.environment import EnvironmentConfig, SingleTurn, environment_of
from gradserve.episodes.errors import EnvironmentUnusable
from gradserve.episodes.tools import schema_of

GAME = """
class Game:
    def __init__(self, size=3):
        self.size = size
    def start(self, row): return [{"role": "user", "content": "go"}]
    def reply(self, message): return None
class Half:
    def start(self, row): return []
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(GAME)
    return tmp_path / "game.py"


def test_an_environment_by_file_with_a_fresh_instance_for_each_episode(file: Path) -> None:
    config = environment_of({"environment": f"{file}:Game", "arguments": {"size": 5}, "max_turns": 4, "timeout_s": 2})
    one, other = config.make(), config.make()
    assert one is not other
    assert vars(one) == {"size": 5}
    assert (config.max_turns, config.max_context_tokens, config.timeout_s) == (4, None, 2)
    assert environment_of() == EnvironmentConfig(SingleTurn, 1)
    assert environment_of({"max_context_tokens": 64}).max_context_tokens == 64


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"max_turn": 4}, "no key 'max_turn'; did you mean 'max_turns'?"),
        ({"colour": 4}, "there are environment, arguments, max_turns"),
        ({"max_turns": 4}, "without one an episode is one reply"),
        ({"environment": "game.py"}, "write file.py:Class"),
        ({"environment": "FILE:Chess"}, "there is no Chess in"),
        ({"environment": "absent_module:Game"}, "can't be loaded: No module named 'absent_module'"),
        ({"environment": "FILE:Half"}, "Half lacks reply"),
        ({"environment": 3}, "a class or a function that makes one, not 3"),
        ({"environment": "FILE:Game", "max_turns": 0}, "max_turns is a whole number of at least 1, not 0"),
        ({"environment": "FILE:Game", "timeout_s": True}, "timeout_s is a number of seconds above 0, not True"),
    ],
)
def test_what_cannot_be_an_environment(file: Path, config: dict[str, Any], said: str) -> None:
    if isinstance(config.get("environment"), str):
        config = {**config, "environment": config["environment"].replace("FILE", str(file))}
    with pytest.raises(EnvironmentUnusable) as refused:
        environment_of(config)
    assert said in str(refused.value)


def test_a_function_may_make_it_and_is_checked_when_it_does() -> None:
    class Other:
        def start(self, row: Any) -> Any: ...
        def reply(self, message: Any) -> Any: ...

    assert isinstance(environment_of({"environment": lambda: Other()}).make(), Other)
    with pytest.raises(EnvironmentUnusable, match="made a int, which lacks start or reply"):
        environment_of({"environment": lambda: 3}).make()


def search(word: str, most: int = 3, kinds: list[Literal["noun", "verb"]] | None = None, exact: bool = False) -> str:
    """Find a word
    in the dictionary.

    Slowly.

    Args:
        word: the word, in any case
        most (int): how many
    """
    return word + str(most) + str(kinds) + str(exact)


def test_a_tools_schema_is_its_signature_and_docstring() -> None:
    assert schema_of(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find a word in the dictionary.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "the word, in any case"},
                    "most": {"type": "integer", "description": "how many"},
                    "kinds": {"type": "array", "items": {"enum": ["noun", "verb"]}},
                    "exact": {"type": "boolean"},
                },
                "required": ["word"],
            },
        },
    }


def takes_any(*words: str) -> None: ...
def takes_bytes(data: bytes) -> None: ...


@pytest.mark.parametrize(
    ("tool", "said"), [(takes_any, "name each one"), (takes_bytes, "can't be said in JSON"), (3, "is no tool")]
)
def test_tools_that_json_cannot_call(tool: Callable[..., Any], said: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=said):
        schema_of(tool)
