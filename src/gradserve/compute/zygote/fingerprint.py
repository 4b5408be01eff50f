"""A name for all that a loaded base depends on, so that a server never takes over a zygote that is not its own kind."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path

from gradserve.compute.tasks import WorkerSpec

_PACKAGE = Path(__file__).parents[2]
_LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers", "numpy")
_ENVIRONMENT = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "CUDA_", "HF_", "MALLOC_", "PYTHON")
"""Variables that begin so change how libraries load or compute; a process reads them once."""


def fingerprint(spec: WorkerSpec) -> str:
    """Hex digest of code, libraries, environment, model files and how they are loaded. Reads no file's contents."""
    what = {
        "python": sys.version,
        "gradserve": _stamps(_PACKAGE, "*.py"),
        "libraries": [importlib.metadata.version(name) for name in _LIBRARIES],
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)},
        "bases": [[base.name, base.path, _stamps(Path(base.path), "*")] for base in spec.bases],
        "loading": [spec.device, spec.dtype, spec.numerics, spec.threads],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _stamps(folder: Path, pattern: str) -> list[tuple[str, int, int]]:
    """(name, bytes, time of the last change in ns) of the files below ``folder``."""
    found = []
    for file in sorted(folder.rglob(pattern)):
        if file.is_file():
            stat = file.stat()
            found.append((str(file.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return found
