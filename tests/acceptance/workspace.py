"""Where everything of the acceptance suite lies, and under which names the recipes ask for a model.

The recipes run with ``recipes_cwd`` as their working directory. The SDK and the cookbook take a model or data set name
that is also a local directory (``./Qwen/Qwen3-8B``) for that directory, so nothing is fetched from a hub.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

COOKBOOK = "0.6.1"
TORCH = "2.13.0"

DEFAULT_ROOT = Path(__file__).parents[2] / "acceptance-work"

MORE_ARGUMENTS = "GRADSERVE_ACCEPTANCE_ARGUMENTS"
"""The environment variable whose words the stand-in for ``uv`` adds to the arguments of a recipe."""

MODEL_NAMES = (
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3.6-27B",
    "Qwen/Qwen3.5-397B-A17B",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.5-9B-Base",
)
"""Every base model that the recipe tests name; one tiny model is served under all of them."""


@dataclass(frozen=True)
class Workspace:
    """The layout below one root directory, which may be deleted at any time and made again by prepare.py."""

    root: Path

    @property
    def venv(self) -> Path:
        """The cookbook's environment; gradserve is not in it."""
        return self.root / "venv"

    @property
    def python(self) -> Path:
        """The interpreter of ``venv``."""
        return self.venv / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Says for which requirements ``venv`` was last completed."""
        return self.venv / "prepared"

    @property
    def cookbook(self) -> Path:
        """The unpacked source distribution; its tests are not in the wheel."""
        return self.root / f"tinker_cookbook-{COOKBOOK}"

    @property
    def bin(self) -> Path:
        """Holds the stand-in for ``uv``."""
        return self.root / "bin"

    @property
    def model(self) -> Path:
        """The tiny model with its tokenizer, in Hugging Face layout."""
        return self.root / "model"

    @property
    def recipes_cwd(self) -> Path:
        """Where the recipes run: ``Qwen/...``, ``openai/gsm8k`` and so on are directories in it."""
        return self.root / "cwd"

    @property
    def runs(self) -> Path:
        """One directory for each run of run.py: logs, results, the server's data."""
        return self.root / "runs"

    def offline_environment(self, cache: Path) -> dict[str, str]:
        """This process's environment, changed so that no recipe looks for a hub or uses a cache but ``cache``.

        A new one for each run: ``datasets`` does not notice that a local data set has changed.
        """
        return {
            **os.environ,
            "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', '')}",
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
