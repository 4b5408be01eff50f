"""kill -9 of the worker while it streams: the consumer gets every token once, as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from gradserve.compute.local import LocalExecutor
from gradserve.compute.tasks import BaseSpec, Done, SampleTask, WorkerSpec
from gradserve.orchestration.dispatch import Dispatcher
from gradserve.orchestration.streams import TokenStream
from gradserve.wire.data import as_tokens
from gradserve.wire.ops import Sample, SamplingParams

OP = Sample("tiny", None, as_tokens([40, 41]), 8, SamplingParams(200, seed=1))


def test_a_stream_survives_its_worker(tmp_path: Path, tiny_models: dict[str, str]) -> None:
    bases = (BaseSpec("tiny", tiny_models["tiny"]),)
    spec = WorkerSpec("w", 1, bases, str(tmp_path / "fast"), str(tmp_path / "durable"), 64 << 20, 256)
    executor = LocalExecutor([spec])
    dispatcher = Dispatcher(executor, attempts=3)
    executor.on_change = dispatcher.pump

    async def scenario() -> tuple[Done, dict[int, bytes], int]:
        await executor.start()
        stream = TokenStream()
        running = asyncio.create_task(dispatcher.run(SampleTask("a", OP, stream=True), "s", stream))
        running.add_done_callback(lambda _: stream.close())
        seen: dict[int, bytes] = dict.fromkeys(range(8), b"")
        async for report in stream:
            if seen[7] == b"" and report.index == 7:
                (worker,) = executor.workers()
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)
            seen[report.index] += report.tokens
        outcome = await running
        lost = dispatcher.lost.total()
        await dispatcher.close()
        await executor.close()
        assert isinstance(outcome, Done)
        return outcome, seen, lost

    outcome, seen, lost = asyncio.run(scenario())
    assert outcome.sample is not None
    assert lost == 1
    assert [seen[index] for index in range(8)] == [sequence.tokens for sequence in outcome.sample.sequences]
