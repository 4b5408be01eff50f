"""Measure one server in all scenarios and write the figures as JSON.

    python -m benchmarks.run --server-cmd 'gradserve serve --port {port} --data-dir {data} --model tiny=DIR' \\
        --model tiny --out benchmarks/baselines/cpu2-tiny-gradserve.json

In the command ``{port}``, ``{url}`` and ``{data}`` (a new empty directory) are filled in. Every scenario runs in a
process of its own; startup launches the server anew each time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import memory, sample, startup, tenants, train
from .common import Launch, Target, first_training_client, spread, started

SCENARIOS = ("startup", "train", "sample", "tenants")
MEASURES: dict[str, Callable[[Target], dict[str, Any]]] = {
    "train": train.measure,
    "sample": sample.measure,
    "tenants": tenants.measure,
}


def apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call in a fresh process, so that one scenario's client threads do not disturb the next one's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def run(launch: Launch, model: str, vocab: int, rank: int, scenarios: list[str], launches: int) -> dict[str, Any]:
    """All figures of the chosen scenarios."""
    record: dict[str, Any] = {}
    if "startup" in scenarios:
        trials = [apart(startup.measure, launch, model, vocab, rank) for _ in range(launches)]
        record["startup"] = {key: spread([trial[key] for trial in trials], digits=2) for key in trials[0]}
        show("startup", record["startup"])
    chosen = [name for name in SCENARIOS if name in scenarios and name in MEASURES]
    if not chosen:
        return record
    with started(launch) as server:
        server.wait_until_healthy()
        target = Target(server.base_url, model, vocab, rank)
        apart(_warm, target)
        record["memory_idle"] = memory.processes(server.process.pid)
        for name in chosen:
            with memory.Watch(server.process.pid) as watch:
                figures = apart(MEASURES[name], target)
            record[name] = {**figures, **watch.result()}
            show(name, record[name])
        record["memory_after"] = memory.processes(server.process.pid)
    return record


def _warm(target: Target) -> dict[str, Any]:
    """Wait until the model is there."""
    first_training_client(target)
    return {}


def show(name: str, figures: dict[str, Any]) -> None:
    """For whoever watches."""
    print(name, json.dumps(figures), flush=True)


def conditions() -> dict[str, Any]:
    """What a reader needs to know before comparing. ``load1`` above 1 means that something else was running."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "tinker": version("tinker"),
        "load1": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server-cmd", required=True, help="the command that starts the server")
    parser.add_argument("--model", required=True, help="the base model's name as the server knows it")
    parser.add_argument("--vocab", type=int, default=1024, help="its vocabulary (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank (default: %(default)s)")
    parser.add_argument("--launches", type=int, default=3, help="how often to measure startup (default: %(default)s)")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--name", default="", help="what to call the server in the record")
    parser.add_argument("--log", type=Path, default=Path("benchmark-server.log"), help="the server's output")
    parser.add_argument("--out", type=Path, help="file to write")
    arguments = parser.parse_args()
    # As Ctrl-C does: leave through the context managers, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    launch = Launch(arguments.server_cmd, arguments.log.resolve())
    record = {"server": arguments.name, "model": Path(arguments.model).name, "rank": arguments.rank, **conditions()}
    figures = run(launch, arguments.model, arguments.vocab, arguments.rank, arguments.scenarios, arguments.launches)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({**record, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
