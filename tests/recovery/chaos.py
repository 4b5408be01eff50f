"""Kill anything at any moment, and compare with an undisturbed run, bit for bit.

    python -m tests.recovery.chaos --injections 100 --out benchmarks/baselines/NAME.json     (make chaos)

Two scripts on the public SDK, supervised and RL (GRPO), each made twice: undisturbed, and while a monkey kills worker,
server, both, or cuts the power, at every point of an Op's life that it can see from outside:

    accepted    its row is in the journal and has not ended
    dispatched  a few milliseconds later
    computed    an object has appeared since, and the row has not ended
    recorded    the row has ended; the answer is on its way
    answered    the script has the result
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sqlite3
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tinker

from gradserve.compute.objects import shared_memory_root
from tests.models import build_tiny
from tests.recovery.disaster import Machine, machine
from tests.sdk import adam, client, datum, prompt, supervised

STAGES = ("accepted", "dispatched", "computed", "recorded", "answered")
VICTIMS = ("worker", "server", "both", "power")
_PATIENCE_S = 20.0


class Diary:
    """What the scripts have got answers to; the monkey looks at it."""

    def __init__(self) -> None:
        self.answered = 0

    def note(self, value: Any) -> Any:
        self.answered += 1
        return value


def sft(run: tinker.TrainingClient, diary: Diary, steps: int) -> None:
    """Supervised steps, as a user pipelines them."""
    for step in range(steps):
        gradient = run.forward_backward(supervised(4, seed=100 + step), "cross_entropy")
        update = run.optim_step(adam(1e-3))
        diary.note(gradient.result())
        diary.note(update.result())


def grpo(run: tinker.TrainingClient, diary: Diary, steps: int) -> None:
    """Groups of samples, rewarded for even tokens, their advantages, importance sampling."""
    for step in range(steps):
        sampler = diary.note(run.save_weights_and_get_sampling_client())
        sampler = sampler.result() if hasattr(sampler, "result") else sampler
        start = [30 + step % 50, 40, 50]
        parameters = tinker.SamplingParams(max_tokens=8, seed=step, temperature=1.0, stop=[])
        found = diary.note(sampler.sample(prompt(start), 4, parameters).result())
        rewards = np.array([np.mean([token % 2 == 0 for token in s.tokens]) for s in found.sequences])
        data = []
        for sequence, advantage in zip(found.sequences, rewards - rewards.mean(), strict=True):
            tokens = [*start, *sequence.tokens]
            blank = [0.0] * (len(start) - 1)
            data.append(
                datum(
                    tokens[:-1],
                    target_tokens=tokens[1:],
                    logprobs=[*blank, *(sequence.logprobs or [])],
                    advantages=[*blank, *[float(advantage)] * len(sequence.tokens)],
                )
            )
        diary.note(run.forward_backward(data, "importance_sampling").result())
        diary.note(run.optim_step(adam(1e-3)).result())


SCRIPTS: dict[str, Callable[[tinker.TrainingClient, Diary, int], None]] = {"sft": sft, "grpo": grpo}


class Monkey(threading.Thread):
    """Kills until told to stop; ``record`` says what it did and how long the service was away."""

    def __init__(self, here: Machine, diary: Diary, seed: int, pause_s: float) -> None:
        super().__init__(daemon=True)
        self._here = here
        self._diary = diary
        self._random = random.Random(seed)
        self._pause_s = pause_s
        self._over = threading.Event()
        self._journal = here.data_dir / "gradserve.db"
        self.error: BaseException | None = None
        self.record: list[dict[str, Any]] = []

    def end(self) -> None:
        """Let the injection that is under way come to its end."""
        self._over.set()
        self.join()
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        try:
            plan = [(stage, victim) for stage in STAGES for victim in VICTIMS]
            self._random.shuffle(plan)
            while not self._over.is_set():
                stage, victim = plan[len(self.record) % len(plan)]
                if self._reached(stage):
                    self._strike(stage, victim)
                self._over.wait(self._random.uniform(0, self._pause_s))
        except BaseException as error:
            self.error = error

    def _strike(self, stage: str, victim: str) -> None:
        struck = time.monotonic()
        ended = self._ended()
        if victim == "worker":
            self._here.kill_workers()
        else:
            if victim == "power":
                self._here.cut_power()
            else:
                if victim == "both":
                    self._here.kill_workers()
                self._here.kill_server()
            self._here.start()
        while not self._over.is_set() and self._ended() == ended:
            time.sleep(0.005)
        if not self._over.is_set():
            seconds = round(time.monotonic() - struck, 2)
            self.record.append({"stage": stage, "victim": victim, "back_after_s": seconds})

    def _reached(self, stage: str) -> bool:
        """Wait for the stage of some Op; False when the scripts ended first."""
        deadline = time.monotonic() + _PATIENCE_S
        answered, ended, objects = self._diary.answered, self._ended(), self._objects()
        while not self._over.is_set() and time.monotonic() < deadline:
            if stage == "answered" and self._diary.answered > answered:
                return True
            if stage == "recorded" and self._ended() > ended:
                return True
            if stage in ("accepted", "dispatched", "computed") and self._open():
                if stage == "accepted":
                    return True
                if stage == "dispatched":
                    time.sleep(self._random.uniform(0.0, 0.02))
                    return True
                if self._objects() - objects:
                    return True
            time.sleep(0.001)
        return False

    def _ask(self, sql: str) -> int:
        while True:
            try:
                journal = sqlite3.connect(f"file:{self._journal}?mode=ro", uri=True, timeout=5)
                with contextlib.closing(journal):
                    found: int = journal.execute(sql).fetchone()[0]
                return found
            except sqlite3.OperationalError:  # a server is just coming up
                time.sleep(0.01)

    def _open(self) -> int:
        return self._ask("SELECT count(*) FROM ops WHERE state = 'accepted'")

    def _ended(self) -> int:
        return self._ask("SELECT count(*) FROM ops WHERE state IN ('done', 'failed')")

    def _objects(self) -> set[str]:
        root = shared_memory_root(self._here.data_dir)
        return {file.name for file in root.glob("*.safetensors")} if root.is_dir() else set()


def play(
    here: Machine, steps: int, diary: Diary, at_once: bool, at_the_end: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """All scripts; what became of their runs, after ``at_the_end`` has brought peace."""
    runs: dict[str, tinker.TrainingClient] = {}
    services = [client(here.url) for _ in SCRIPTS]
    for name, service in zip(SCRIPTS, services, strict=True):
        runs[name] = service.create_lora_training_client(base_model="tiny", rank=4, seed=len(runs)).result()
    if at_once:
        with ThreadPoolExecutor(len(SCRIPTS)) as pool:
            for ended in [pool.submit(script, runs[name], diary, steps) for name, script in SCRIPTS.items()]:
                ended.result()
    else:
        for name, script in SCRIPTS.items():
            script(runs[name], diary, steps)
    at_the_end()
    states = {name: _state(here, run.model_id) for name, run in runs.items()}
    for service in services:
        service.close("success").result()
    return states


def _state(here: Machine, run_id: str) -> dict[str, Any]:
    row = here.get(f"runs/{run_id}")["run"]
    lines = here.get(f"runs/{run_id}/ledger?limit=1000")
    return {
        "version": row["version"],
        "weights": row["weights"],
        "moments": row["moments"],
        "lines": sorted((line["kind"], line["seq"]) for line in lines["lines"]),
        "tokens": [lines["total"][f"{kind}_tokens"] for kind in ("train", "sample")]
        + [lines["total"]["prefill_tokens"] + lines["total"]["cached_tokens"]],
        "cursor": row["cursor"],
    }


def storm(models: dict[str, str], folder: Path, steps: int, seed: int, pause_s: float, at_once: bool) -> dict[str, Any]:
    """One undisturbed and one disturbed playing of the scripts, compared."""
    mode = {"GRADSERVE_NUMERICS": "batch_invariant"} if at_once else {}
    with machine(models, folder / "quiet", **mode) as here:
        wanted = play(here, steps, Diary(), at_once)
    with machine(models, folder / "storm", **mode, GRADSERVE_TASK_ATTEMPTS="1000") as here:
        diary = Diary()
        monkey = Monkey(here, diary, seed, pause_s)
        monkey.start()
        found = play(here, steps, diary, at_once, monkey.end)
    return {"wanted": wanted, "found": found, "injections": monkey.record}


def differences(played: dict[str, Any]) -> dict[str, int]:
    """What must all be zero."""
    counts: Counter[str] = Counter()
    for name, wanted in played["wanted"].items():
        found = played["found"][name]
        counts["lost steps"] += max(0, wanted["version"] - found["version"])
        counts["doubled steps"] += max(0, found["version"] - wanted["version"])
        counts["other weights"] += found["weights"] != wanted["weights"]
        counts["other moments"] += found["moments"] != wanted["moments"]
        there, here = Counter(map(tuple, wanted["lines"])), Counter(map(tuple, found["lines"]))
        counts["missing ledger lines"] += (there - here).total()
        counts["doubled ledger lines"] += (here - there).total()
        counts["other tokens billed"] += found["tokens"] != wanted["tokens"]
    return dict(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40, help="of each script, per round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", action="store_true", help="both scripts at once, in batch_invariant mode")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    injections: list[dict[str, Any]] = []
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        models = {"tiny": str(build_tiny(Path(folder) / "tiny", family="llama", seed=1))}
        while len(injections) < arguments.injections:
            seed = arguments.seed + len(injections)
            data = Path(folder) / str(len(injections))
            played = storm(models, data, arguments.steps, seed, 0.3, arguments.at_once)
            injections += played["injections"]
            wrong.update(differences(played))
            print(f"{len(injections)} injections, {dict(wrong)}", flush=True)
    text = json.dumps(report(injections, wrong, arguments.at_once), indent=1) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    raise SystemExit(1 if wrong.total() else 0)


def report(injections: list[dict[str, Any]], wrong: Counter[str], at_once: bool) -> dict[str, Any]:
    """The record that is kept."""
    by_victim = {victim: [one["back_after_s"] for one in injections if one["victim"] == victim] for victim in VICTIMS}
    return {
        "bench": "chaos",
        "scripts": "at once, batch_invariant" if at_once else "one after the other, fast",
        "injections": len(injections),
        "stages": dict(Counter(one["stage"] for one in injections)),
        "must_be_zero": dict(wrong),
        "back_after_s": {
            name: {"n": len(found), "p50": statistics.median(found), "p95": _p95(found)}
            for name, found in {"all": [one["back_after_s"] for one in injections], **by_victim}.items()
            if found
        },
    }


def _p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


if __name__ == "__main__":
    main()
