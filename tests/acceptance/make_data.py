"""Tiny stand-ins for the data sets that the recipes load by name, each with the columns that the recipe reads.

``datasets.load_dataset("openai/gsm8k", "main")`` finds ``./openai/gsm8k``, whose README.md declares the splits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Splits = Mapping[str, Iterable[Row]]


def make_data(root: Path) -> None:
    """Write every data set below ``root``. The same bytes each time; a file that already holds them is not touched."""
    chats = [_chat(i) for i in range(3000)]  # chat_sl takes 256 a step, and evaluates on whole batches
    preferences = [_preference(i) for i in range(4000)]  # dpo takes 256 a step
    sums = [_sum(a, b) for a in range(20) for b in range(20)]
    write_dataset(root / "HuggingFaceH4/no_robots", {"train": chats, "test": chats[:256]})
    write_dataset(root / "Anthropic/hh-rlhf", {"train": preferences, "test": preferences[:64]})
    write_dataset(root / "openai/gsm8k", {"train": sums, "test": sums[:40]}, config="main")
    write_dataset(root / "allenai/tulu-3-sft-mixture", {"train": [_tulu(chat) for chat in chats[:2500]]})
    write_dataset(root / "zwhe99/DeepMath-103K", {"train": [_product(a, b) for a in range(40) for b in range(40)]})
    write_dataset(root / "open-thoughts/OpenThoughts3-1.2M", {"train": [_thought(i) for i in range(400)]})


def write_dataset(directory: Path, splits: Splits, config: str = "default") -> None:
    """One JSON Lines file for each split, and the card that names them."""
    directory.mkdir(parents=True, exist_ok=True)
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        _write(directory / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        card += [f"  - split: {split}", f"    path: {split}.jsonl"]
    _write(directory / "README.md", "\n".join([*card, "---", ""]))


def _write(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def _chat(i: int) -> Row:
    return {
        "prompt": f"p{i}",
        "prompt_id": str(i),
        "messages": [
            {"role": "user", "content": f"Say {i}"},
            {"role": "assistant", "content": str(i) * 3},
        ],
        "category": "repeat",
    }


def _tulu(chat: Row) -> Row:
    return {"id": chat["prompt_id"], "messages": chat["messages"]}


def _preference(i: int) -> Row:
    asked = f"\n\nHuman: say {i}\n\nAssistant:"
    return {"chosen": f"{asked} good {i}", "rejected": f"{asked} bad {i}"}


def _sum(a: int, b: int) -> Row:
    return {"question": f"What is {a}+{b}?", "answer": f"sum\n#### {a + b}"}


def _product(a: int, b: int) -> Row:
    return {"question": f"What is {a}*{b}?", "final_answer": str(a * b), "difficulty": 5.0, "topic": "products"}


def _thought(i: int) -> Row:
    return {
        "conversations": [
            {"from": "human", "value": f"q{i}"},
            {"from": "gpt", "value": f"<think>t</think>a{i}"},
        ]
    }
