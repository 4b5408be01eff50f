"""Two libraries' trainings side by side: each in a process of its own, by turns, its value against processor seconds.

    python -m benchmarks.versus rl_gradserve --model DIR --settings '{"task": "digits", "seed": 0, ...}'

runs one script of user_scripts and prints its points as JSON: [processor seconds of the process tree since the first
step was begun, value] after each optimizer step. rl_trl.py and sft_trl.py run it for both and compare.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from .run import conditions
from .trainer_tasks import REWARDS, ROWS, chats

SCRIPTS = Path(__file__).parent / "user_scripts"
ROOT = Path(__file__).parent.parent
SERVED = "the-model"
"""The name under which a server of gradserve is told the model's directory."""

Point = tuple[float, float]


def tree_cpu_s() -> float:
    """Processor seconds so far of this process and all that it has started, those that ended among them."""
    here = psutil.Process()
    times = [process.cpu_times() for process in [here, *here.children(recursive=True)]]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


class Recorder:
    """Notes the value after each step; a callback of either library.

    The clock starts when the loop over steps begins, so that neither imports nor the loading of model and tokenizer
    count; they are ``start_cpu_s``. gradserve's trainers tell no beginning: ``_tell_when_it_begins`` listens for it.
    """

    def __init__(self, ours: str, theirs: str) -> None:
        self.ours, self.theirs = ours, theirs
        self.start_cpu_s = 0.0
        self.points: list[Point] = []

    def begin(self) -> None:
        """The first step is about to be asked for."""
        self.start_cpu_s = tree_cpu_s()

    def __call__(self, event: Any) -> None:
        """Of gradserve."""
        if event.kind == "step":
            self._note(event.metrics[self.ours])

    def for_trl(self) -> Any:
        """Of TRL."""
        from transformers import TrainerCallback

        outer = self

        class Callback(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                outer.begin()

            def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
                if outer.theirs in logs:
                    outer._note(logs[outer.theirs])

        return Callback()

    def _note(self, value: float) -> None:
        self.points.append((round(tree_cpu_s() - self.start_cpu_s, 2), round(float(value), 4)))


def run_here(script: str, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train in this process; its points."""
    recorder = Recorder("reward/mean", "reward") if script.startswith("rl_") else Recorder("loss", "loss")
    given = dict(settings)
    if script.startswith("rl_"):
        task = given.pop("task")
        arguments: list[Any] = [ROWS[task](), REWARDS[task]]
    else:
        arguments = [chats(given["seed"], given.pop("rows"))]
    callback: Any = recorder
    if script.endswith("_trl"):
        callback = recorder.for_trl()
    else:
        os.environ["GRADSERVE_MODELS"] = json.dumps({SERVED: model})
        model = SERVED
        _tell_when_it_begins(recorder)
    module = importlib.import_module(f"benchmarks.user_scripts.{script}")
    module.train(model, *arguments, callback=callback, **given)
    return {"start_cpu_s": round(recorder.start_cpu_s, 2), "points": recorder.points}


def _tell_when_it_begins(recorder: Recorder) -> None:
    from gradserve.algorithms.training_loop import TrainingLoop

    loop = TrainingLoop.run

    def told(*given: Any) -> Any:
        recorder.begin()
        return loop(*given)

    TrainingLoop.run = told  # type: ignore[assignment, method-assign]


def run_apart(python: str, script: str, model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The same in a process of its own with that interpreter, on one thread, in a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "OMP_NUM_THREADS": "1",
            "GRADSERVE_WORKER_THREADS": "1",
            "GRADSERVE_DATA_DIR": folder,
            "HF_HUB_OFFLINE": "1",
            "TINKER_TELEMETRY": "0",
        }
        command = [python, "-m", "benchmarks.versus", script, "--model", str(model), "--settings", json.dumps(settings)]
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{script} ended with status {ran.returncode}:\n{ran.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def trailing(points: Sequence[Point], window: int) -> list[Point]:
    """The mean value of the last ``window`` steps, at each step that has so many behind it."""
    values = [value for _, value in points]
    return [
        (points[end - 1][0], sum(values[end - window : end]) / window) for end in range(window, len(values) + 1)
    ]  # fmt: skip


def reached(points: Sequence[Point], aim: float, rising: bool) -> float | None:
    """Processor seconds until the value was at the aim or past it; None: never."""
    return next((seconds for seconds, value in points if (value >= aim if rising else value <= aim)), None)


def at(points: Sequence[Point], seconds: float) -> float:
    """The value of the last step that had ended by then; the first one's where none had."""
    ended = [value for spent, value in points if spent <= seconds]
    return ended[-1] if ended else points[0][1]


def code_lines(script: str) -> int:
    """Lines of code of a script, without imports, docstrings, comments and blank lines."""
    source = (SCRIPTS / f"{script}.py").read_text()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and (text or isinstance(node, ast.Import | ast.ImportFrom)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(number not in left_out and bool(line.split("#")[0].strip()) for number, line in lines)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What rl_trl and sft_trl are asked alike."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="the interpreter that has trl")
    parser.add_argument("--model", required=True, help="NAME=DIRECTORY")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    return parser


def add_runs(
    kind: str,
    name: str,
    model: Path,
    settings: dict[str, Any],
    asked: argparse.Namespace,
    summary: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """Run both scripts for each seed at the same time; the record in ``asked.out`` is whole after each seed."""
    pythons = {"gradserve": sys.executable, "trl": asked.trl_python}
    record = json.loads(asked.out.read_text()) if asked.out.exists() else {"conditions": conditions(), "models": {}}
    record["code_lines"] = {library: code_lines(f"{kind}_{library}") for library in pythons}
    entry = record["models"].setdefault(name, {"settings": settings, "runs": []})
    if entry["settings"] != settings:
        raise ValueError(f"{asked.out} has runs of {name} with {entry['settings']}: give another file")
    for seed in asked.seeds:
        with ThreadPoolExecutor() as pool:
            begun = {
                library: pool.submit(run_apart, python, f"{kind}_{library}", model, settings | {"seed": seed})
                for library, python in pythons.items()
            }
            entry["runs"].append({"seed": seed} | {library: future.result() for library, future in begun.items()})
        entry["summary"] = summary(entry["runs"])
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps({"seed": seed, **entry["summary"]["seeds"][-1]}), flush=True)
    print(json.dumps({"lines": record["code_lines"], **entry["summary"]["ratios"]}))


def main() -> None:
    """One script, in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=["rl_gradserve", "rl_trl", "sft_gradserve", "sft_trl"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    asked = parser.parse_args()
    found = run_here(asked.script, asked.model, asked.settings)
    sys.stdout.flush()
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
