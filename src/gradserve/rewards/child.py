"""The process that calls a reward: ``python -m gradserve.rewards.child``, one JSON line in, one out, in lockstep.

The first line names the reward and the time limit, and the answer says which parameters it takes or why it can't be
loaded. Every further line is a Sample; its answer is an Outcome or a Failure. End of input ends the process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any, TextIO

from gradserve.rewards.contract import (
    Failure,
    InvalidValue,
    Outcome,
    Reward,
    RewardUnusable,
    Sample,
    accepted_parameters,
    arguments,
    outcome_of,
)
from gradserve.rewards.naming import Reference, resolve


def main() -> None:
    """Load, then answer until the input ends."""
    requests, answers = _take_over_streams()
    hello = json.loads(requests.readline())
    try:
        reward = resolve(Reference(**hello["reference"]))
        accepted = accepted_parameters(reward)
    except BaseException as error:
        _write(answers, {"unusable": str(error) if isinstance(error, RewardUnusable) else _traceback(error)})
        return
    _write(answers, {"accepted": accepted})
    with asyncio.Runner() as loop:  # one for all samples: what an async reward opens (a session) belongs to its loop
        for line in requests:
            # Ends this process from a thread that needs no GIL, and prints where it hung. The parent kills it as well;
            # this one also works when the parent is gone.
            faulthandler.dump_traceback_later(hello["timeout_s"], exit=True)
            result = call(reward, Sample(**json.loads(line)), accepted, loop)
            faulthandler.cancel_dump_traceback_later()
            _write(answers, asdict(result))


def call(reward: Reward, sample: Sample, accepted: tuple[str, ...], loop: asyncio.Runner) -> Outcome | Failure:
    """One call; what it raises is a crash, sys.exit included."""
    began = time.perf_counter()
    try:
        returned = reward(**arguments(sample, accepted))
        if inspect.isawaitable(returned):
            returned = loop.run(_awaited(returned))
        return outcome_of(returned, time.perf_counter() - began)
    except InvalidValue as error:
        return Failure("invalid_value", str(error))
    except BaseException as error:
        return Failure("crash", _traceback(error))


async def _awaited(returned: Any) -> Any:
    return await returned


def _take_over_streams() -> tuple[TextIO, TextIO]:
    """The two pipes, out of reach of the reward: what it prints goes to stderr, and it has nothing to read."""
    requests = os.fdopen(os.dup(0), encoding="ascii")
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers


def _write(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-5, chain=False)).strip()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
