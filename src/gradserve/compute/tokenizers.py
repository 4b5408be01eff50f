"""The tokenizer of a model directory, for what looks at tokens without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradserve.compute.catalog import ModelUnusable


def load_tokenizer(directory: Path) -> Any:
    """A Hugging Face tokenizer from files alone; nothing is fetched. Raises ModelUnusable."""
    from transformers import AutoTokenizer  # seconds, with torch behind it

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{directory} has no tokenizer that can be loaded: {error}") from error
