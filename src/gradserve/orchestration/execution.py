"""Running Programs: each step as soon as those it needs are done, on whatever workers have room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import msgspec

from gradserve.compute.objects import ObjectStore
from gradserve.compute.tasks import Done, Failed, Outcome, SampleTask, Task
from gradserve.orchestration.dispatch import Dispatcher, TaskCancelled
from gradserve.orchestration.held import Held
from gradserve.orchestration.program import Compute, Persist, Program
from gradserve.orchestration.streams import TokenStream

log = logging.getLogger(__name__)


class Execution:
    """``cancelled`` holds ids of Ops of which no further Task may start."""

    def __init__(self, dispatcher: Dispatcher, objects: ObjectStore, held: Held) -> None:
        self._dispatcher = dispatcher
        self._objects = objects
        self._held = held
        self._streams: dict[str, TokenStream] = {}
        self.cancelled: set[str] = set()

    async def run(self, program: Program, queue: str, held: list[str]) -> list[Outcome]:
        """The outcomes of all steps; of those up to a failure, where there is one.

        What the steps made is noted in ``held`` and kept from the janitor until the caller releases it. Raises
        AttemptsExhausted, TaskCancelled, ObjectCorrupt, ObjectMissing, OSError.
        """
        log.debug("%s", program)
        outcomes: dict[int, Outcome] = {}
        waiting = dict(enumerate(program.steps))
        while waiting:
            computed = {
                number: step
                for number, step in waiting.items()
                if isinstance(step, Compute) and outcomes.keys() >= set(step.after)
            }
            persisted = [step for step in waiting.values() if isinstance(step, Persist)]
            waiting = {n: step for n, step in waiting.items() if isinstance(step, Compute) and n not in computed}
            results = await asyncio.gather(
                *(self._compute(program.op_id, step.bind(outcomes), queue, held) for step in computed.values())
            )
            outcomes.update(zip(computed, results, strict=True))
            if any(isinstance(outcome, Failed) for outcome in results):
                break
            for step in persisted:
                for digest in step.digests:
                    await asyncio.to_thread(self._objects.persist, digest)
        return [outcomes[number] for number in sorted(outcomes)]

    async def _compute(self, op_id: str, task: Task, queue: str, held: list[str]) -> Outcome:
        """Run one Task. What it made is kept from the janitor from now on, however long its siblings take."""
        if op_id in self.cancelled:
            raise TaskCancelled(task.id)
        stream = self._streams.get(op_id)
        if stream is not None and isinstance(task, SampleTask):
            task = msgspec.structs.replace(task, stream=True)
        outcome = await self._dispatcher.run(task, queue, stream)
        if isinstance(outcome, Done):
            held.extend(outcome.objects.values())
            self._held.add(outcome.objects.values())
        return outcome

    @contextlib.contextmanager
    def stream(self, op_id: str) -> Iterator[TokenStream]:
        """The tokens of a sample as they are sampled, for one consumer inside the server.

        Enter before the Op is submitted. The stream ends when the Op has ended, well or not, and its result, which has
        all the tokens, is in the store; of an Op that ended earlier (a replay) nothing comes, not even the end.
        """
        stream = self._streams[op_id] = TokenStream()
        try:
            yield stream
        finally:
            del self._streams[op_id]

    def ended(self, op_id: str) -> None:
        """The Op's result is in the store."""
        if op_id in self._streams:
            self._streams[op_id].close()
