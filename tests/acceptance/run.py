"""Run the cookbook's recipe tests against a gradserve server that is started for them, and stopped after.

    python -m tests.acceptance.run [--work DIR] [--base-url URL] [RECIPE ...]

RECIPE is the middle of a file name in the cookbook's ``tests/recipes/test_recipe_RECIPE.py``. The exit status is 0 if
every test passed. Prepare the workspace first: ``python -m tests.acceptance.prepare``.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from .workspace import DEFAULT_ROOT, MODEL_NAMES, MORE_ARGUMENTS, Workspace

DEFAULT_RECIPES = (
    "math_rl",
    "chat_sl",
    "rolling_checkpoints",
    "dpo",
    "shorter",
    "rlhf_pipeline",
    "off_policy_reasoning",
    "on_policy_distillation",
    "on_policy_multi_teacher",
    "guess_number",
    "twenty_questions",
)
"""Every recipe test that needs neither a hub nor a package, a data set or an image model that is not on PyPI."""

SMALLER = {"guess_number": "eval_every=0", "twenty_questions": "eval_every=0"}
"""Recipe arguments added to those of the test, unless ``--full``: either game evaluates with thousands of episodes."""

API_KEY = "tml-acceptance-suite-0000"
HEALTHY_WITHIN_S = 120.0
STOPPED_WITHIN_S = 30.0
LOG_LINES_SHOWN = 40


@dataclass(frozen=True)
class Result:
    """One test: ``test_dpo`` passed in 36.1 s. ``message`` is empty unless it failed."""

    recipe: str
    test: str
    outcome: str
    seconds: float
    message: str = ""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(work: Workspace, command: str, run_dir: Path) -> Iterator[str]:
    """A server of the tiny model under all names, with its own data directory. Yields its address."""
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    models = [part for name in MODEL_NAMES for part in ("--model", f"{name}={work.model}")]
    log_path = run_dir / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*shlex.split(command), "--port", str(port), *models],
            cwd=run_dir,
            env={**work.offline_environment(run_dir / "hf"), "GRADSERVE_DATA_DIR": str(run_dir / "data")},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until_healthy(process, base_url, log_path)
            yield base_url
        finally:
            stop(process)


def wait_until_healthy(process: subprocess.Popen[bytes], base_url: str, log: Path) -> None:
    """Return when the server answers; raise with the end of its log if it ends or takes too long."""
    deadline = time.monotonic() + HEALTHY_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{base_url}/api/v1/healthz", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    why = "took too long" if process.returncode is None else f"ended with status {process.returncode}"
    raise RuntimeError(f"the server {why}; the end of {log}:\n{tail(log)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """As a user would, with Ctrl-C; then, if something of it is left, the whole process group for good."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            print(f"the server did not stop within {STOPPED_WITHIN_S:.0f} s of SIGINT: killed", flush=True)
    end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and its descendants."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def run_recipe_tests(work: Workspace, recipe: str, base_url: str, run_dir: Path, more: str) -> list[Result]:
    """All tests of one recipe, by the cookbook's own pytest configuration, their output in a log file.

    ``more`` are words that are added to the arguments with which the tests start the recipe.
    """
    report, log_path = run_dir / f"{recipe}.xml", run_dir / f"{recipe}.log"
    environment = {
        **work.offline_environment(run_dir / "hf"),
        "TINKER_BASE_URL": base_url,
        "TINKER_API_KEY": os.environ.get("TINKER_API_KEY", API_KEY),
        "TINKER_TELEMETRY": "0",
        "TINKER_COOKBOOK_RUNS_DIR": str(run_dir / "recipe-runs"),
        MORE_ARGUMENTS: more,
    }
    command = [
        *(work.python, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"),
        *("-c", work.cookbook / "pyproject.toml", "--rootdir", work.cookbook, "--junit-xml", report),
        work.cookbook / "tests" / "recipes" / f"test_recipe_{recipe}.py",
    ]
    began = time.monotonic()
    with log_path.open("wb") as log:
        tests = subprocess.Popen(
            [str(part) for part in command],
            cwd=work.recipes_cwd,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            tests.wait()
        finally:
            end_group(tests)  # an interrupted run leaves no recipe behind
    results = read_report(recipe, report) if report.is_file() else []
    if not results or (tests.returncode != 0 and all(result.outcome == "passed" for result in results)):
        message = f"pytest ended with status {tests.returncode}, see {log_path}\n{tail(log_path)}"
        results.append(Result(recipe, "(pytest)", "failed", time.monotonic() - began, message))
    return results


def read_report(recipe: str, report: Path) -> list[Result]:
    """The test cases of a JUnit file. A skipped test is not a passed one."""
    results = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome, message = "passed", ""
        for kind in ("failure", "error", "skipped"):
            fault = case.find(kind)
            if fault is not None:
                outcome = "skipped" if kind == "skipped" else "failed"
                message = fault.get("message") or fault.text or ""
        results.append(Result(recipe, case.get("name", "?"), outcome, float(case.get("time", "0")), message))
    return results


def ended_cpu_s() -> float:
    """Processor seconds of all processes below this one that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tail(path: Path) -> str:
    """The last lines of a text file."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


def line(result: Result) -> str:
    """One row of the table."""
    return f"{result.recipe:24} {result.test:34} {result.outcome:8} {result.seconds:8.1f} s"


def run(work: Workspace, recipes: list[str], base_url: str, run_dir: Path, smaller: Mapping[str, str]) -> bool:
    """Run the recipes one after the other and print the table. True if all passed."""
    results: list[Result] = []
    for recipe in recipes:
        more = smaller.get(recipe, "")
        for result in run_recipe_tests(work, recipe, base_url, run_dir, more):
            print(line(result), f"with {more}" if more else "", flush=True)
            results.append(result)
    failed = [result for result in results if result.outcome != "passed"]
    for result in failed:
        print(f"\n=== {result.recipe} {result.test} {result.outcome}\n{result.message.strip()}", flush=True)
    total = sum(result.seconds for result in results)
    print(f"\nlogs: {run_dir}\n{len(results)} tests, {total:.0f} s; processor time of clients: {ended_cpu_s():.0f} s")
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed", flush=True)
    return not failed


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside_us = Path(sys.executable).with_name("gradserve")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"default: {' '.join(DEFAULT_RECIPES)}")
    parser.add_argument("--work", type=Path, default=DEFAULT_ROOT, help="the prepared workspace (default: %(default)s)")
    parser.add_argument("--base-url", help="a running server to use; it must serve the recipes' model names")
    parser.add_argument("--full", action="store_true", help=f"without the smaller settings: {SMALLER}")
    parser.add_argument(
        "--server",
        default=f"{shlex.quote(str(beside_us))} serve",
        help="the command that starts a server; --port and --model are added (default: %(default)s)",
    )
    arguments = parser.parse_args()
    work = Workspace(arguments.work.resolve())
    recipes = arguments.recipes or list(DEFAULT_RECIPES)
    if not work.stamp.is_file():
        parser.error(f"{work.root} is not prepared: run python -m tests.acceptance.prepare --work {arguments.work}")
    unknown = [r for r in recipes if not (work.cookbook / f"tests/recipes/test_recipe_{r}.py").is_file()]
    if unknown:
        parser.error(f"no such recipe test: {', '.join(unknown)}")
    run_dir = work.runs / time.strftime("%Y%m%d-%H%M%S")
    run_dir.mkdir(parents=True)
    smaller = {} if arguments.full else SMALLER
    if arguments.base_url:
        return 0 if run(work, recipes, arguments.base_url, run_dir, smaller) else 1
    # As Ctrl-C does: leave through the context manager, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with server(work, arguments.server, run_dir) as base_url:
        passed = run(work, recipes, base_url, run_dir, smaller)
    print(f"processor time with the server: {ended_cpu_s():.0f} s", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
