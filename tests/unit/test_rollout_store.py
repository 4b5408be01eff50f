"""The rollout file: what goes in comes out to the bit; killed or damaged, it never gives half a step or a wrong one."""

from __future__ import annotations

import json
import math
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gradserve.algorithms.rollouts.store import RolloutFileError, RolloutStore
from gradserve.cli import main
from gradserve.episodes.episode import Episode, Turn
from gradserve.rewards.contract import Failure
from tests.disks import small_disk
from tests.unit.rollouts import episode

SUM: dict[str, Any] = {"prompt": "2 + 2?", "answer": "4", "of": [1.5, None]}
NAME: dict[str, Any] = {"prompt": "Who?", "answer": "Ada"}
# 1/3 and its neighbours differ in the last bit of a float64; float32 would lose that.
LOGPROBS = (-1 / 3, math.nextafter(-1 / 3, 0), -0.0, -1e-310)


def said(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text})


def two_groups(shift: int = 0) -> list[list[Episode]]:
    right = Episode(SUM, (Turn((5, 6), (7, 8, 9, shift), LOGPROBS, 11),), said("4"), 1.5, {"right": 1.0, "brief": 0.5})
    multi = (Turn((5,), (7, 2**31 - 1), (-0.25, -2.0), 11), Turn((), (3,), (-1.0,), 12, "length"))
    wrong = Episode(SUM, multi, (*said("5"), {"role": "tool", "content": "no"}), 0.0)
    lost = Episode(SUM, right.turns, said("?"), failure=Failure("crash", "Traceback ...\nZeroDivisionError: zero"))
    nothing = Episode(NAME, (), failure=Failure("timeout", "no reply"))
    return [[right, wrong, lost], [nothing, episode(-2.0, row=NAME)]]


def bits(groups: list[list[Episode]]) -> list[bytes]:
    return [struct.pack(f"{len(found.logprobs)}d", *found.logprobs) for group in groups for found in group]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.sqlite"


def test_replay_gives_back_what_was_appended_to_the_bit(file: Path) -> None:
    steps = {step: two_groups(step) for step in (1, 2, 5)}
    with RolloutStore(file) as store:
        for step, groups in steps.items():
            store.append(step, groups)
    with RolloutStore(file, read_only=True) as store:
        replayed = dict(store.replay())
        assert replayed == steps
        assert [bits(groups) for groups in replayed.values()] == [bits(groups) for groups in steps.values()]
        assert list(replayed[1][0][1].mask) == [0, 1, 1, 1]
        assert [step for step, _ in store.replay(2)] == [2, 5]
        assert [step for step, _ in store.replay(1, 2)] == [1, 2]


def test_each_step_is_there_once(file: Path) -> None:
    with RolloutStore(file) as store:
        assert store.last_step() is None
        for step in (1, 2, 3):
            store.append(step, two_groups(step))
        with pytest.raises(ValueError, match=r"step 3 is not after step 3, .*cut\(2\) first"):
            store.append(3, two_groups())
        assert store.cut(1) == 2
        assert store.cut(1) == 0
        store.append(2, two_groups(99))
        assert list(store.replay()) == [(1, two_groups(1)), (2, two_groups(99))]
        assert len(store.query()) == 10, "nothing of the steps that were cut is left"


def test_query(file: Path) -> None:
    groups = two_groups()
    right, wrong, lost, nothing, low = (found for group in groups for found in group)
    with RolloutStore(file) as store:
        store.append(1, groups)
        store.append(2, groups[1:])
        assert store.query(step=1) == [right, wrong, lost, nothing, low]
        assert store.query(min_reward=0.0) == [right, wrong]
        assert store.query(max_reward=0.0, step=1) == [wrong, low]
        assert store.query(failed=True) == [lost, nothing, nothing]
        assert store.query(failed=False, limit=2) == [right, wrong]
        assert [found.reward for found in store.samples(order="worst", limit=3)] == [-2.0, -2.0, 0.0]
        assert [found.reward for found in store.samples(order="best", step=1)] == [1.5, 0.0, -2.0]
        summary = store.summary()
        assert (summary.samples, summary.steps, summary.failed) == (7, 2, 3)
        assert (summary.mean_reward, summary.min_reward, summary.max_reward) == (-0.625, -2.0, 1.5)


def test_the_views_are_for_people(file: Path) -> None:
    with RolloutStore(file) as store:
        store.append(4, two_groups())
    with sqlite3.connect(file) as database:
        database.row_factory = sqlite3.Row
        samples = [dict(row) for row in database.execute("SELECT * FROM samples")]
        groups = [dict(row) for row in database.execute("SELECT * FROM groups")]
    database.close()
    assert samples[0]["prompt"] == "2 + 2?"
    assert samples[0]["completion"] == "4"
    assert json.loads(samples[0]["parts"]) == {"right": 1.0, "brief": 0.5}
    assert json.loads(samples[0]["row"]) == SUM
    assert samples[1]["completion"] == "assistant: 5\ntool: no"
    assert [samples[1][name] for name in ("version", "turns", "prompt_tokens", "sampled_tokens")] == [11, 2, 1, 3]
    assert samples[1]["stop_reason"] == "length"
    assert (samples[2]["failure"], samples[3]["failure"]) == ("crash", "timeout")
    assert len({row["row_key"] for row in samples}) == 2
    assert [(row["samples"], row["failed"], row["mean_reward"]) for row in groups] == [(3, 1, 0.75), (2, 1, -2.0)]


def test_text_by_the_tokenizer(file: Path) -> None:
    """What the policy read and wrote, with its special tokens, instead of the messages."""
    with RolloutStore(file, decode=lambda ids: " ".join(map(str, ids))) as store:
        store.append(1, two_groups())
        assert [(found.prompt, found.completion) for found in store.samples(limit=1)] == [("5 6", "7 8 9 0")]


# Killed

_CHILD = """
import os, signal, sys
from gradserve.algorithms.rollouts.store import RolloutStore
from tests.unit.test_rollout_store import big_group, two_groups

class Killed(RolloutStore):
    left = None
    def _insert(self, table, values):
        inserted = super()._insert(table, values)
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return inserted

store = Killed(sys.argv[1])
store.append(1, two_groups(1))
store.append(2, two_groups(2))
print("committed", flush=True)
store.left = int(sys.argv[2])
store.append(3, [big_group()])
"""
_BIG = 40
"""Episodes whose blobs, 240 kB each, do not fit SQLite's page cache of 2 MB: the log has pages of the open step."""


def big_group() -> list[Episode]:
    return [episode(1.0, 20_000) for _ in range(_BIG)]


@pytest.mark.parametrize("inserts", [1, 2 * _BIG + 1], ids=["at its first insert", "before its commit"])
def test_killed_in_the_middle_of_a_step(file: Path, inserts: int) -> None:
    """1. Two steps are appended. 2. kill -9 within the third. 3. The two are there, whole, and a third can follow."""
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(file), str(inserts)], capture_output=True, text=True, check=False
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert child.stdout == "committed\n"
    with RolloutStore(file, read_only=True) as store:
        assert [step for step, _ in store.replay()] == [1, 2]
    with RolloutStore(file) as store:
        assert list(store.replay()) == [(1, two_groups(1)), (2, two_groups(2))]
        assert len(store.query()) == 10
        store.append(3, two_groups(3))
        assert store.last_step() == 3


def test_a_commit_is_on_disk_before_append_returns(file: Path) -> None:
    """What SQLite promises for these two settings (sqlite.org/pragma.html); power is not cut here."""
    with RolloutStore(file) as store:
        assert store._rows("PRAGMA journal_mode") == [("wal",)]
        assert store._rows("PRAGMA synchronous") == [(2,)]


def test_a_full_disk_leaves_no_half_step(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk, RolloutStore(disk / "rollouts.sqlite") as store:
        store.append(1, two_groups(1))
        with pytest.raises(RolloutFileError, match=r"rollouts\.sqlite can't be used"):
            store.append(2, [big_group()])
        store.append(2, two_groups(2))
        assert list(store.replay()) == [(1, two_groups(1)), (2, two_groups(2))]


# Damaged


def test_any_changed_value_is_found(file: Path) -> None:
    """A value of each column that a replay gives back, changed behind the store's back."""
    with RolloutStore(file) as store:
        store.append(1, two_groups())
    changes = {
        "episodes": ["reward = 7.0", "parts = '{}'", "failure = 'crash'", "messages_packed = x'90'"],
        "turns": ["version = 3", "stop_reason = 'length'", "tokens = zeroblob(length(tokens))", "logprobs = x'00'"],
        "row_groups": ["row_packed = x'80'"],
    }
    for table, column in ((table, column) for table, columns in changes.items() for column in columns):
        database = sqlite3.connect(file, isolation_level=None)
        database.execute(f"UPDATE {table} SET {column}")
        database.close()
        with RolloutStore(file) as store:
            with pytest.raises(RolloutFileError, match=r"rollouts\.sqlite is damaged: .*checksum"):
                list(store.replay())
            store.cut(0)
            store.append(1, two_groups())


def test_a_file_overwritten_with_noise(file: Path) -> None:
    with RolloutStore(file) as store:
        store.append(1, [big_group()])
    data = bytearray(file.read_bytes())
    data[50_000:-50_000] = b"\xa5" * (len(data) - 100_000)
    file.write_bytes(data)
    with pytest.raises(RolloutFileError, match=r"rollouts\.sqlite is damaged"), RolloutStore(file) as store:
        list(store.replay())


def test_another_file(file: Path) -> None:
    content = b"not a database at all, but long enough" * 30
    file.write_bytes(content)
    with pytest.raises(RolloutFileError, match=r"rollouts\.sqlite is damaged or no rollout file"):
        RolloutStore(file)
    assert file.read_bytes() == content


def test_another_database_or_version(file: Path) -> None:
    database = sqlite3.connect(file)
    database.execute("CREATE TABLE mine (a)")
    database.close()
    with pytest.raises(RolloutFileError, match=r"rollouts\.sqlite is no rollout file"):
        RolloutStore(file)
    file.unlink()
    RolloutStore(file).close()
    database = sqlite3.connect(file)
    database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(RolloutFileError, match="has version 9, not 1"):
        RolloutStore(file)
    with pytest.raises(RolloutFileError, match="there is no rollout file"):
        RolloutStore(file.with_name("other"), read_only=True)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([[]], "without episodes"),
        ([[episode(1.0, row=SUM), episode(1.0, row=NAME)]], "different rows"),
        ([[episode(float("nan"))]], "not finite"),
        ([[episode(1.0, row={"prompt": object()})]], "can't be kept"),
        ([[Episode(SUM, (Turn((2**31,), (), (), 0),), reward=1.0)]], "token ids lie between"),
    ],
)
def test_refused_and_nothing_of_it_kept(file: Path, groups: list[list[Episode]], said: str) -> None:
    with RolloutStore(file) as store:
        with pytest.raises(ValueError, match=said):
            store.append(1, [two_groups()[0], *groups])
        assert store.last_step() is None


def test_a_reader_beside_the_writer_sees_whole_steps(file: Path) -> None:
    seen, done = set[int](), threading.Event()

    def read() -> None:
        with RolloutStore(file, read_only=True) as reader:
            while not done.is_set():
                seen.add(len(reader.query()))

    with RolloutStore(file) as store:
        thread = threading.Thread(target=read)
        thread.start()
        for step in range(1, 9):
            store.append(step, two_groups())
        done.set()
        thread.join()
    assert seen
    assert all(count % 5 == 0 for count in seen), seen


# gradserve rollouts


def show(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["rollouts", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_shows_the_worst_and_the_best(file: Path) -> None:
    with RolloutStore(file) as store:
        store.append(1, two_groups())
        store.append(2, two_groups())
    text = show(file.parent, "--limit", 1)
    assert text.startswith("10 samples of 2 steps, 4 failed; reward -0.1667 on average, -2 to 1.5\n")
    worst, best = text.split("\nbest\n")
    assert "step 1, group 1, sample 1: reward -2; 3 tokens by version 0" in worst
    assert "step 1, group 0, sample 0: reward 1.5 (right 1, brief 0.5); 4 tokens by version 11" in best
    assert "completion  4\n" in best
    assert '"answer": "4"' in best
    failed = show(file, "--failed", "--step", 2)
    assert "step 2, group 0, sample 2: failed, crash: ZeroDivisionError: zero" in failed
    assert "step 2, group 1, sample 0: failed, timeout: no reply; no reply" in failed
    assert "step 2, group 0, sample 1: reward 0; 3 tokens in 2 turns by version 11, cut at the limit" in show(
        file, "--sort", "step", "--step", 2
    )


def test_the_command_as_json(file: Path) -> None:
    with RolloutStore(file) as store:
        store.append(1, two_groups())
    lines = [json.loads(line) for line in show(file, "--json", "--min-reward", 0, "--sort", "best").splitlines()]
    assert [line["reward"] for line in lines] == [1.5, 0.0]
    assert lines[0]["parts"] == {"right": 1.0, "brief": 0.5}


def test_the_command_sends_no_control_characters(file: Path) -> None:
    with RolloutStore(file) as store:
        store.append(1, [[Episode(SUM, (), said("\x1b[2J\rgone"), 1.0)]])
    assert "\\x1b[2J\\rgone" in show(file)


def test_the_command_names_a_file_that_is_none(file: Path) -> None:
    file.write_bytes(b"no database, but as long as the header of one is" * 4)
    result = CliRunner().invoke(main, ["rollouts", str(file)])
    assert result.exit_code == 1
    assert "rollouts.sqlite is damaged or no rollout file" in result.output
