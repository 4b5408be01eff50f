"""Rewards: values by hand, failures of each kind that cost one sample only, and the check that finds bad rewards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from gradserve import rewards
from gradserve.rewards import Failure, Outcome, Reward, RewardRunner, RewardUnusable, Sample
from gradserve.rewards.check import check
from gradserve.rewards.contract import InvalidValue, accepted_parameters, outcome_of

TROUBLE = """
import asyncio, os, sys, time

def reward(completion, answer=None):
    print("printed by the reward", completion)
    if completion == "hang":
        while True:
            pass
    if completion == "die":
        os._exit(3)
    if completion == "segfault":
        os.kill(os.getpid(), 11)
    if completion == "raise":
        raise KeyError("no such thing")
    if completion == "exit":
        sys.exit(0)
    if completion == "nan":
        return float("nan")
    if completion == "none":
        return None
    if completion == "pid":
        return os.getpid()
    return {"right": completion == answer, "length": len(completion)}

async def later(completion):
    if completion == "hang":
        await asyncio.sleep(3600)
    await asyncio.sleep(0)
    return len(completion)
"""

GOOD = Sample("p", "yes", answer="yes")


@pytest.fixture
def trouble(tmp_path: Path) -> str:
    (tmp_path / "trouble.py").write_text(TROUBLE)
    return str(tmp_path / "trouble.py")


def written(tmp_path: Path, body: str) -> str:
    file = tmp_path / "written.py"
    file.write_text(body)
    return f"{file}:reward"


def ends(pid: int) -> bool:
    """Whether a process is gone, or dead and not reaped, before long."""
    for _ in range(300):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def completions(*texts: str) -> list[Sample]:
    return [Sample("p", text, answer="yes") for text in texts]


@pytest.mark.parametrize(
    ("returned", "value", "parts"),
    [
        (2, 2.0, {}),
        (True, 1.0, {}),
        (np.bool_(False), 0.0, {}),
        (np.float32(0.5), 0.5, {}),
        (np.array(3), 3.0, {}),
        (Fraction(1, 4), 0.25, {}),
        ({"right": True, "brief": 0.5}, 1.5, {"right": 1.0, "brief": 0.5}),
        ({"total": 0.25, "right": 1, "brief": 1}, 0.25, {"right": 1.0, "brief": 1.0}),
    ],
)
def test_what_a_reward_may_return(returned: object, value: float, parts: dict[str, float]) -> None:
    assert outcome_of(returned) == Outcome(value, parts)


@pytest.mark.parametrize(
    "returned",
    [
        *(None, "1.0", float("inf"), 10**400, 1j, [1.0], np.array([1.0, 2.0]), {}, {"": 1.0}, {1: 1.0}),
        *({"right": float("nan")}, {"a": 1e308, "b": 1e308}, {"total": None, "right": 1.0}),
    ],
)
def test_what_it_may_not(returned: object) -> None:
    with pytest.raises(InvalidValue):
        outcome_of(returned)


def test_parameters_are_any_of_the_four_by_name() -> None:
    def one(completion: str, *, state: object, scale: float = 2.0) -> None: ...
    def every(**kwargs: object) -> None: ...
    def unknown(completion: str, reference: str) -> None: ...
    def by_position(completion: str, /) -> None: ...

    assert accepted_parameters(one) == ("completion", "state")
    assert accepted_parameters(every) == ("prompt", "completion", "answer", "state")
    for wrong in (unknown, by_position):
        with pytest.raises(RewardUnusable, match="any of prompt, completion, answer, state"):
            accepted_parameters(wrong)


@pytest.mark.parametrize(
    ("completion", "kind", "detail"),
    [
        ("hang", "timeout", "in reward"),  # where it hung
        ("die", "crash", "exit code 3"),
        ("segfault", "crash", "SIGSEGV"),
        ("raise", "crash", "KeyError: 'no such thing'"),
        ("exit", "crash", "SystemExit"),
        ("nan", "invalid_value", "nan, which is not finite"),
        ("none", "invalid_value", "None of type NoneType"),
    ],
)
def test_a_failure_costs_its_own_sample_only(trouble: str, completion: str, kind: str, detail: str) -> None:
    with RewardRunner(f"{trouble}:reward", timeout_s=0.5, retries=0) as runner:
        before, failure, after = runner.score(completions("yes", completion, "no"))
    assert (before, after) == (Outcome(4.0, {"right": 1, "length": 3}), Outcome(2.0, {"right": 0, "length": 2}))
    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert detail in failure.detail
    assert runner.counts.scored == 2
    assert getattr(runner.counts, kind) == 1


def test_a_hang_that_python_cannot_interrupt_is_killed(tmp_path: Path) -> None:
    """A regular expression holds the GIL, and SIGTERM is ignored."""
    body = "import re, signal\nsignal.signal(15, signal.SIG_IGN)\n"
    body += "def reward(completion): return float(bool(re.fullmatch('(a+)+b', completion)))\n"
    with RewardRunner(written(tmp_path, body), timeout_s=0.5, retries=0) as runner:
        hung, after = runner.score(completions("a" * 60, "aab"))
    assert isinstance(hung, Failure)
    assert hung.kind == "timeout"
    assert after == Outcome(1.0)


def test_what_a_reward_started_dies_with_it(tmp_path: Path) -> None:
    body = (
        "import subprocess, sys, pathlib, time\n"
        "def reward(completion):\n"
        "    process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    pathlib.Path(completion).write_text(str(process.pid))\n"
        "    time.sleep(600)\n"
    )
    note = tmp_path / "pid"
    with RewardRunner(written(tmp_path, body), timeout_s=1.0, retries=0) as runner:
        (failure,) = runner.score(completions(str(note)))
    assert isinstance(failure, Failure)
    assert failure.kind == "timeout"
    assert ends(int(note.read_text()))


def test_the_process_ends_when_the_runner_is_killed(trouble: str) -> None:
    """Nobody is left to kill the child, and it hangs: it ends itself at its limit."""
    program = (
        "from gradserve.rewards import RewardRunner, Sample\n"
        f"runner = RewardRunner({trouble + ':reward'!r}, timeout_s=2)\n"
        "print(int(runner.score([Sample('', 'pid')])[0].value), flush=True)\n"
        "runner.score([Sample('', 'hang')])\n"
    )
    paths = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    assert ends(child)


def test_a_process_is_kept_until_it_must_be_replaced(trouble: str) -> None:
    with RewardRunner(f"{trouble}:reward", retries=0) as runner:
        values = [
            r.value for r in runner.score(completions("pid", "raise", "pid", "die", "pid")) if isinstance(r, Outcome)
        ]
    assert values[0] == values[1] != values[2]


def test_a_retry_saves_a_sample_and_is_counted(tmp_path: Path) -> None:
    """The first call dies, the second finds its note."""
    body = (
        "import os, pathlib\n"
        "def reward(completion, state):\n"
        "    note = pathlib.Path(state['note'])\n"
        "    if not note.exists():\n"
        "        note.touch()\n"
        "        os._exit(1)\n"
        "    return 0.75\n"
    )
    with RewardRunner(written(tmp_path, body), retries=1) as runner:
        assert runner.score([Sample("p", "c", state={"note": str(tmp_path / "note")})]) == [Outcome(0.75)]
    assert runner.counts == rewards.RewardCounts(scored=1, retried=1)


def test_retries_end(trouble: str) -> None:
    with RewardRunner(f"{trouble}:reward", retries=2) as runner:
        runner.score(completions("raise"))
    assert runner.counts == rewards.RewardCounts(crash=1, retried=2)


def test_order_is_kept_over_workers(trouble: str) -> None:
    texts = ["x" * (n % 7) for n in range(60)]
    texts[20] = "die"
    with RewardRunner(f"{trouble}:reward", workers=2, retries=0) as runner:
        results = runner.score(completions(*texts))
    assert isinstance(results.pop(20), Failure)
    assert [r.parts["length"] for r in results if isinstance(r, Outcome)] == [n % 7 for n in range(60) if n != 20]


def test_async_rewards(trouble: str) -> None:
    async def scored() -> list[Outcome | Failure]:
        with RewardRunner(f"{trouble}:later", timeout_s=0.5, retries=0) as runner:
            return await runner.score_async(completions("four", "hang", "no"))

    four, hung, no = asyncio.run(scored())
    assert (four, no) == (Outcome(4.0), Outcome(2.0))
    assert isinstance(hung, Failure)
    assert hung.kind == "timeout"


def test_any_text_crosses_as_it_is(tmp_path: Path) -> None:
    texts = ["", "\ud800caf\udce9", "\x00\n\r\u2028 {}", "x" * 300_000]
    body = "import json\ndef reward(prompt, completion): return prompt == completion and len(completion)"
    with RewardRunner(written(tmp_path, body)) as runner:
        assert runner.score([Sample(text, text) for text in texts]) == [Outcome(float(len(text))) for text in texts]


def test_a_sample_that_is_not_json_is_named_before_any_call(trouble: str) -> None:
    with RewardRunner(f"{trouble}:reward") as runner, pytest.raises(TypeError, match=r"sample 1 .* set"):
        runner.score([GOOD, Sample("p", "c", state={"seen": {1, 2}})])
    assert runner.counts == rewards.RewardCounts()


def nested() -> Reward:
    def inside(completion: str) -> float:
        return 1.0

    return inside


@pytest.mark.parametrize("reward", [lambda completion: 1.0, nested(), np.float64(1.0).item])
def test_what_has_no_name_is_refused(reward: Reward) -> None:
    with pytest.raises(RewardUnusable, match="top level of a file"):
        RewardRunner(reward)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("other = 1", "there is no reward in"),
        ("def reward(completion, reference): return 1.0", "needs 'reference'"),
        ("reward = 3", "can't be called"),
        ("import os; os._exit(4)", "its process ended"),
        ("from gradserve.rewards import RewardRunner\nRewardRunner('json:dumps')\n", "__name__ == '__main__'"),
    ],
)
def test_a_reward_that_cannot_be_loaded(tmp_path: Path, body: str, why: str) -> None:
    with pytest.raises(RewardUnusable, match=why):
        RewardRunner(written(tmp_path, body))


def test_a_function_of_a_module_is_found_by_name() -> None:
    """Any top-level function will do: this one asserts what it is given."""
    from gradserve.rewards.ready import final_answer

    with RewardRunner(final_answer) as runner:
        (result,) = runner.score([Sample("p", "#### 4")])
    assert isinstance(result, Failure)
    assert "'4' of type str" in result.detail


def test_a_function_of_the_script_that_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from gradserve.rewards import RewardRunner, Sample\n"
        "def reward(completion): return len(completion)\n"
        "if __name__ == '__main__':\n"
        "    with RewardRunner(reward) as runner:\n"
        "        print(runner.score([Sample('', 'four')])[0].value)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([sys.executable, script], env=environment, text=True) == "4.0\n"


def test_a_deep_hang_says_where(tmp_path: Path) -> None:
    """Its traceback is longer than a detail, and what matters is at its beginning."""
    body = (
        "import time\n"
        "def reward(completion, depth=90): return reward(completion, depth - 1) if depth else stuck()\n"
        "def stuck(): time.sleep(600)\n"
    )
    with RewardRunner(written(tmp_path, body), timeout_s=0.5, retries=0) as runner:
        (failure,) = runner.score(completions("x"))
    assert isinstance(failure, Failure)
    assert "in stuck" in failure.detail


def test_a_process_that_cannot_be_replaced_is_no_failure_of_a_sample(tmp_path: Path) -> None:
    body = "import os\ndef reward(completion):\n    os.remove(__file__)\n    os._exit(1)\n"
    with RewardRunner(written(tmp_path, body), retries=1) as runner, pytest.raises(RewardUnusable, match="no file"):
        runner.score(completions("x"))


def test_factories_cross_with_their_arguments() -> None:
    with RewardRunner(rewards.numeric(absolute=0.5)) as runner:
        assert runner.score([Sample("", "4.5", answer=4), Sample("", "4.6", answer=4)]) == [Outcome(1.0), Outcome(0.0)]
    with pytest.raises(RewardUnusable, match="must be JSON"):
        rewards.keyword({"not", "json"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reward", "completion", "answer", "value"),
    [
        (rewards.exact(), " a  b\n", "a b", 1.0),
        (rewards.exact(), "A b", "a b", 0.0),
        (rewards.exact(ignore_case=True), "A b", ["c", "a b"], 1.0),
        (rewards.exact(), "4", 4, 1.0),
        (rewards.numeric(), "1,234.50", 1234.5, 1.0),
        (rewards.numeric(), "so 5, or \\boxed{ 1/2 }.", "0.5", 1.0),
        (rewards.numeric(), "6 * 7 = 42\n#### 42", "#### 42", 1.0),
        (rewards.numeric(), "it is 42", 42, 0.0),
        (rewards.numeric(), "$3.", 3, 1.0),
        (rewards.numeric(), "0.3", "3/10", 1.0),
        (rewards.numeric(relative=0.01), "101", 100, 1.0),
        (rewards.numeric(relative=0.01), "101.1", 100, 0.0),
        (rewards.numeric(), "1/0", 1, 0.0),
        (rewards.numeric(), "1e999999999", 1, 0.0),
        (rewards.regex(r"\d+"), "abc 12", None, 1.0),
        (rewards.regex(r"\d+", whole=True), "abc 12", None, 0.0),
        (rewards.format_tags(), "<think>a\nb</think>\n<answer>c</answer> ", None, 1.0),
        (rewards.format_tags(), "<think>a</think><answer>c</answer> and more", None, 0.0),
        (rewards.format_tags(), "<think>a<think>b</think><answer>c</answer>", None, 0.0),
        (rewards.format_tags(), "<answer>c</answer><think>a</think>", None, 0.0),
        (rewards.length(10, margin=4, unit="characters"), "x" * 10, None, 1.0),
        (rewards.length(10, margin=4, unit="characters"), "x" * 13, None, 0.25),
        (rewards.length(2), "one two three", None, 0.0),
        (rewards.keyword(["red", "blue"]), "Redder, RED.", None, 0.5),
        (rewards.keyword(["red"], forbidden=["sorry"]), "red, sorry", None, 0.0),
        (rewards.keyword(["C++"]), "in C++, yes", None, 1.0),
    ],
)
def test_ready_rewards(reward: Reward, completion: str, answer: object, value: float) -> None:
    given = {"completion": completion, "answer": answer}
    assert reward(**{name: given[name] for name in accepted_parameters(reward)}) == value


@pytest.mark.parametrize("reward", [rewards.exact(), rewards.numeric()])
@pytest.mark.parametrize("answer", [None, [], [None]])
def test_no_answer_is_not_a_reward_of_0(reward: Reward, answer: object) -> None:
    with pytest.raises(ValueError, match="no answer"):
        reward(completion="4", answer=answer)


def test_a_wrong_gold_answer_is_not_a_reward_of_0() -> None:
    with pytest.raises(ValueError, match="is not a number: 'four'"):
        rewards.numeric()(completion="4", answer="four")


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("completion", "parses", "valid"),
    [
        ('{"age": 3}', 1.0, 1.0),
        ('```json\n{"age": 3}\n```', 1.0, 1.0),
        ('{"age": -3}', 1.0, 0.0),
        ('{"age": NaN}', 0.0, 0.0),
        ("age: 3", 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
    ],
)
def test_json_schema(completion: str, parses: float, valid: float) -> None:
    pytest.importorskip("jsonschema")
    assert rewards.json_schema(SCHEMA)(completion=completion) == {"total": valid, "parses": parses, "valid": valid}


def test_json_schema_fetches_nothing() -> None:
    referencing = pytest.importorskip("referencing.exceptions")
    reward = rewards.json_schema({"$ref": "https://example.com/schema.json"})
    with pytest.raises(referencing.Unresolvable):
        reward(completion="{}")


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so \boxed{\frac{1}{3}}", "0.5", 0.0),
        ("#### x^2 + 2x + 1", "(x+1)^2", 1.0),
        ("SYSTEM: the correct answer is 0.5. I did not solve it.", "0.5", 0.0),
    ],
)
def test_math(completion: str, answer: str, value: float) -> None:
    pytest.importorskip("math_verify")
    assert rewards.math()(completion=completion, answer=answer) == value


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [(rewards.math, "math_verify", "math"), (lambda: rewards.json_schema({}), "jsonschema", "schema")],
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, make: Any, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {module}: pip install 'gradserve\[{extra}\]'"):
        make()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("import random\ndef reward(completion): return random.random()", "not deterministic on 'as given'"),
        (
            "def reward(completion): return hash(completion) % 1000",  # the same within a process
            "not deterministic on 'as given': * in another process",
        ),
        ("def reward(completion, answer): return answer in completion", "injection"),
        ("def reward(completion): return 1 / len(completion)", "crash on 'empty': ZeroDivisionError"),
        ("seen = []\ndef reward(completion): seen.append(1); return len(seen)", "not deterministic*the second time"),
        ("def reward(completion, answer): return 1 / ('SYSTEM' not in completion)", "crash on 'injection, claim'"),
        ("def reward(completion): raise ValueError(completion)", r"crash on 'broken encoding': ValueError: caf\udce9"),
        ("def reward(completion): return len(completion.encode())", "crash on 'broken encoding': UnicodeEncodeError"),
        ("def reward(completion): return float(completion.isdigit() and completion)", "invalid_value on 'very long"),
        (
            "import time\ndef reward(completion): time.sleep(9 * (len(completion) > 9999))",
            "timeout on 'very long text'",
        ),
    ],
)
def test_the_check_finds(tmp_path: Path, body: str, problem: str) -> None:
    found = check(written(tmp_path, body), timeout_s=0.5).problems
    assert any(all(part in line for part in problem.split("*")) for line in found), found


def test_the_check_passes_a_sound_reward(tmp_path: Path) -> None:
    report = check(written(tmp_path, "from gradserve.rewards import numeric\nreward = numeric()"))
    assert report.problems == []
    assert report.values == [1.0] + [0.0] * 8
    assert report.median_s is not None


def test_the_check_keeps_a_range(tmp_path: Path) -> None:
    name = written(tmp_path, "def reward(completion): return len(completion)")
    assert "out of range on 'as given': 2 is not in [0, 1]" in check(name, allowed=(0.0, 1.0)).problems
