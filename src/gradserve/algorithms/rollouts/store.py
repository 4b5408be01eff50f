"""Every group that was trained on, in one SQLite file: looked into while the training goes on, and replayed after it.

The invariant: a step is in the file whole or not at all, once, and what ``replay`` gives is what ``append`` was given,
to the bit. Each record carries a CRC-32 of its values, so that a damaged one is never trained on again.

The file is for local disks: SQLite's write-ahead log does not work over network file systems.
"""

from __future__ import annotations

import functools
import json
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypedDict, Unpack, cast

import numpy as np

from gradserve.algorithms.rollouts.tables import APPLICATION, SCHEMA, VERSION
from gradserve.data.errors import DataError
from gradserve.data.row import digest, pack, unpack
from gradserve.episodes.episode import Episode, Message, StopReason, Turn
from gradserve.rewards.contract import Failure, FailureKind

Group = Sequence[Episode]
"""All tries at one row."""
Decode: TypeAlias = Callable[[Sequence[int]], str]
Values: TypeAlias = tuple[Any, ...]
"""Of a table's columns; without its keys until they are inserted."""

_IDS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f8")


class RolloutFileError(Exception):
    """The file can't be used: it is damaged, of another kind or version, missing or not writable. The text names it."""


@dataclass(frozen=True)
class Sample:
    """An episode as people look at it. ``version`` and ``stop_reason`` are None when it failed before any reply."""

    step: int
    group: int
    sample: int
    reward: float | None
    parts: dict[str, float]
    failure: str | None
    failure_detail: str | None
    stop_reason: str | None
    version: int | None
    turns: int
    prompt_tokens: int
    sampled_tokens: int
    prompt: str
    completion: str
    row: str
    row_key: str
    time_utc: str


@dataclass(frozen=True)
class Summary:
    """Counts, and the rewards of the samples that did not fail; None where there are none."""

    samples: int
    steps: int
    failed: int
    mean_reward: float | None
    min_reward: float | None
    max_reward: float | None


class Conditions(TypedDict, total=False):
    """What a sample must meet; None: anything. Bounds include themselves, and a failed sample meets none of them."""

    step: int | None
    min_reward: float | None
    max_reward: float | None
    failed: bool | None


Order: TypeAlias = Literal["step", "worst", "best"]


class RolloutStore:
    """``RolloutStore(log_dir / "rollouts.sqlite")``; a context manager, to be used from any thread.

    ``decode`` turns ids into the text that is kept for people; without it the text is taken from the messages. With
    ``read_only`` nothing is changed and the file must exist; a training may write to it at the same time.
    """

    def __init__(self, file: str | Path, decode: Decode | None = None, *, read_only: bool = False) -> None:
        self.file = Path(file)
        self._decode = decode
        self._lock = threading.RLock()
        if read_only and not self.file.is_file():
            raise RolloutFileError(f"there is no rollout file {self.file}")
        with self._errors():
            self._db = _connect(self.file, read_only)
            try:
                self._prepare(read_only)
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        """Also brings the write-ahead log into the file."""
        with self._lock, self._errors():
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # Writing

    def append(self, step: int, groups: Sequence[Group]) -> None:
        """Keep what step ``step`` was trained on; on disk when this returns, and whole if the power goes meanwhile.

        Raises ValueError for a step that is not after the last one, an empty group, a group whose episodes are not
        tries at one row, or values that can't be kept (a row of an unknown type, a reward that is not finite).
        """
        decode = functools.cache(self._decode) if self._decode else None  # a group has one prompt
        records = [_group_record(group, decode) for group in groups]
        with self._transaction():
            last = self.last_step()
            if last is not None and step <= last:
                raise ValueError(
                    f"step {step} is not after step {last}, the last of {self.file}; cut({step - 1}) first"
                )
            self._db.execute("INSERT INTO steps VALUES (?, ?)", (step, time.time()))
            for number, (group, episodes) in enumerate(records):
                group_id = self._insert("row_groups", (None, step, number, *group))
                for index, (episode, turns) in enumerate(episodes):
                    episode_id = self._insert("episodes", (None, group_id, index, *episode))
                    for place, turn in enumerate(turns):
                        self._insert("turns", (episode_id, place, *turn))

    def cut(self, step: int) -> int:
        """Forget all after ``step``, as a resume from there will do it again; how many steps that were."""
        with self._transaction():
            return self._db.execute("DELETE FROM steps WHERE step > ?", (step,)).rowcount

    # Reading

    def last_step(self) -> int | None:
        """None while there is none."""
        (found,) = self._rows("SELECT max(step) FROM steps")
        return cast("int | None", found[0])

    def query(self, *, limit: int | None = None, **conditions: Unpack[Conditions]) -> list[Episode]:
        """The episodes that meet all conditions, in the order of training; ``query(step=3, min_reward=1.0)``."""
        ids = self._rows(*_selection("episode_id", conditions, limit=limit))
        return [self._episode(episode_id) for (episode_id,) in ids]

    def samples(
        self, *, order: Order = "step", limit: int | None = None, **conditions: Unpack[Conditions]
    ) -> list[Sample]:
        """As ``query``, for people. ``order`` worst or best: those with a reward, the lowest or the highest first."""
        rows = self._rows(*_selection(_SAMPLE, conditions, order, limit))
        names = [field.name for field in fields(Sample)]
        found = (dict(zip(names, row, strict=True)) for row in rows)
        return [Sample(**row | {"parts": self._parts(row["parts"])}) for row in found]

    def summary(self, **conditions: Unpack[Conditions]) -> Summary:
        """Of all samples that meet the conditions."""
        sql, parameters = _selection("step, failure, CASE WHEN failure IS NULL THEN reward END AS earned", conditions)
        totals = "count(*), count(DISTINCT step), count(failure), avg(earned), min(earned), max(earned)"
        (found,) = self._rows(f"SELECT {totals} FROM ({sql})", parameters)
        return Summary(*found)

    def replay(self, from_step: int = 0, to_step: int | None = None) -> Iterator[tuple[int, list[list[Episode]]]]:
        """(step, its groups) of each step between, both included, exactly as they were appended."""
        last = to_step if to_step is not None else (1 << 63) - 1
        steps = self._rows("SELECT step FROM steps WHERE step BETWEEN ? AND ? ORDER BY step", (from_step, last))
        for (step,) in steps:
            groups = self._rows("SELECT id FROM row_groups WHERE step = ? ORDER BY number", (step,))
            yield step, [self._group(group_id) for (group_id,) in groups]

    # The file

    def _prepare(self, read_only: bool) -> None:
        (application,), (version,) = (self._db.execute(f"PRAGMA {name}").fetchone() for name in _HEADER)
        if (application, version) == (APPLICATION, VERSION):
            return
        empty = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
        if read_only or not empty or application:
            what = f"has version {version}, not {VERSION}" if application == APPLICATION else "is no rollout file"
            raise RolloutFileError(f"{self.file} {what}")
        self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite itself rolls back where the disk is full
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's errors with the file's name."""
        try:
            yield
        except sqlite3.Error as error:
            raise RolloutFileError(_in_words(self.file, error)) from error

    def _insert(self, table: str, values: Values) -> int:
        marks = ", ".join("?" * len(values))
        return cast(int, self._db.execute(f"INSERT INTO {table} VALUES ({marks})", values).lastrowid)

    def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._errors():
            return self._db.execute(sql, parameters).fetchall()

    # Records

    def _group(self, group_id: int) -> list[Episode]:
        ids = self._rows("SELECT id FROM episodes WHERE group_id = ? ORDER BY number", (group_id,))
        return [self._episode(episode_id) for (episode_id,) in ids]

    def _episode(self, episode_id: int) -> Episode:
        (found,) = self._rows("SELECT * FROM episodes WHERE id = ?", (episode_id,))
        _, group_id, _, *values, checksum = found
        self._check(values, checksum, "episodes", episode_id)
        reward, parts, failure, detail, _, _, messages = values
        return Episode(
            row=self._row(group_id),
            turns=tuple(self._turns(episode_id)),
            messages=tuple(cast("list[Message]", unpack(messages))),
            reward=reward,
            parts=self._parts(parts),
            failure=None if failure is None else Failure(cast(FailureKind, failure), detail),
        )

    def _row(self, group_id: int) -> dict[str, Any]:
        (found,) = self._rows("SELECT * FROM row_groups WHERE id = ?", (group_id,))
        _, _, _, *values, checksum = found
        self._check(values, checksum, "row_groups", group_id)
        return cast("dict[str, Any]", unpack(values[-1]))

    def _turns(self, episode_id: int) -> Iterator[Turn]:
        for _, number, *values, checksum in self._rows(
            "SELECT * FROM turns WHERE episode_id = ? ORDER BY number", (episode_id,)
        ):
            self._check(values, checksum, f"turn {number} of episodes", episode_id)
            version, stop_reason, given, sampled, prompt, tokens, logprobs = values
            yield Turn(
                self._array(prompt, _IDS, given),
                self._array(tokens, _IDS, sampled),
                self._array(logprobs, _LOGPROBS, sampled),
                version,
                cast(StopReason, stop_reason),
            )

    def _parts(self, text: str) -> dict[str, float]:
        try:
            return cast("dict[str, float]", json.loads(text))
        except ValueError as error:
            raise RolloutFileError(f"{self.file} is damaged: the parts of a reward are {text[:80]!r}") from error

    def _array(self, data: bytes, dtype: np.dtype[Any], length: int) -> tuple[Any, ...]:
        if len(data) != length * dtype.itemsize:
            raise RolloutFileError(f"{self.file} is damaged: {length} values of {dtype} have {len(data)} bytes")
        return tuple(np.frombuffer(data, dtype).tolist())

    def _check(self, values: Sequence[Any], checksum: int, table: str, record: int) -> None:
        if _checksum(values) != checksum:
            raise RolloutFileError(f"{self.file} is damaged: {table} {record} has not the checksum it was kept with")


_HEADER = ("application_id", "user_version")


def _connect(file: Path, read_only: bool) -> sqlite3.Connection:
    mode = "ro" if read_only else "rwc"
    uri = f"{file.absolute().as_uri()}?mode={mode}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=30.0)
    if not read_only:
        db.execute("PRAGMA page_size = 16384")  # of a new file: turns of some kB leave a third of 4 kB pages unused
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # in this mode: the log is on disk before a commit returns
        db.execute("PRAGMA foreign_keys = ON")
    return db


def _in_words(file: Path, error: sqlite3.Error) -> str:
    if isinstance(error, sqlite3.OperationalError | sqlite3.ProgrammingError):
        return f"{file} can't be used: {error}"
    return f"{file} is damaged or no rollout file: {error}"


_SAMPLE = (
    "step, group_number, sample, reward, parts, failure, failure_detail, stop_reason, version, turns, "
    'prompt_tokens, sampled_tokens, prompt, completion, "row", row_key, time_utc'
)
_HAS_REWARD = "failure IS NULL AND reward IS NOT NULL"
_CONDITIONS = {
    "step": "step = ?",
    "min_reward": f"{_HAS_REWARD} AND reward >= ?",
    "max_reward": f"{_HAS_REWARD} AND reward <= ?",
    "failed": "(failure IS NOT NULL) = ?",
}
_ORDERS: dict[Order, tuple[str, str]] = {
    "step": ("true", ""),
    "worst": (_HAS_REWARD, "reward ASC, "),
    "best": (_HAS_REWARD, "reward DESC, "),
}


def _selection(
    columns: str, conditions: Conditions, order: Order = "step", limit: int | None = None
) -> tuple[str, list[Any]]:
    """The query over the view ``samples``, and its parameters."""
    asked = {name: value for name, value in conditions.items() if value is not None}
    needed, first = _ORDERS[order]
    where = " AND ".join([needed, *(_CONDITIONS[name] for name in asked)])
    sql = f"SELECT {columns} FROM samples WHERE {where} ORDER BY {first}step, group_number, sample LIMIT ?"
    return sql, [*asked.values(), -1 if limit is None else limit]


# What is inserted


def _group_record(group: Group, decode: Decode | None) -> tuple[Values, list[tuple[Values, list[Values]]]]:
    """Of a group and of its episodes: the values of their tables after the keys."""
    if not group:
        raise ValueError("a group without episodes can't be kept")
    row = group[0].row
    try:
        key = digest(row)
        if any(episode.row is not row and digest(episode.row) != key for episode in group):
            raise ValueError("the episodes of a group are tries at one row, and these have different rows")
        values = (key.hex(), json.dumps(row, ensure_ascii=False, default=repr), pack(row))
        return (*values, _checksum(values)), [_episode_record(episode, decode) for episode in group]
    except DataError as error:
        raise ValueError(f"a row or a message can't be kept: {error}") from error


def _episode_record(episode: Episode, decode: Decode | None) -> tuple[Values, list[Values]]:
    numbers = [*episode.parts.values(), *([] if episode.reward is None else [episode.reward])]
    if not np.isfinite(numbers).all():
        raise ValueError(f"the reward {episode.reward} with parts {dict(episode.parts)} is not finite")
    failure = episode.failure
    values = (
        None if episode.reward is None else float(episode.reward),
        json.dumps({name: float(value) for name, value in episode.parts.items()}, ensure_ascii=False),
        failure.kind if failure else None,
        failure.detail if failure else None,
        *(_decoded(episode, decode) if decode and episode.turns else _from_messages(episode.messages)),
        pack(list(episode.messages)),
    )
    return (*values, _checksum(values)), [_turn_record(turn) for turn in episode.turns]


def _turn_record(turn: Turn) -> Values:
    values = (
        int(turn.version),
        turn.stop_reason,
        len(turn.prompt),
        len(turn.tokens),
        _ids(turn.prompt),
        _ids(turn.tokens),
        np.array(turn.logprobs, _LOGPROBS).tobytes(),
    )
    return (*values, _checksum(values))


def _ids(tokens: Sequence[int]) -> bytes:
    wide = np.array(tokens, np.int64)
    if wide.size and not (wide.min() >= 0 and wide.max() <= np.iinfo(_IDS).max):
        raise ValueError(f"token ids lie between 0 and {np.iinfo(_IDS).max}, and some of {wide.tolist()[:8]} do not")
    return wide.astype(_IDS).tobytes()


def _checksum(values: Sequence[Any]) -> int:
    """Of what SQLite gives back for them, type by type."""
    return zlib.crc32(pack(list(values)))


# Text for people


def _decoded(episode: Episode, decode: Decode) -> tuple[str, str]:
    first = len(episode.turns[0].prompt)
    return decode(episode.tokens[:first]), decode(episode.tokens[first:])


def _from_messages(messages: Sequence[Message]) -> tuple[str, str]:
    """What came before the first reply, and the rest: a lone message's content, or ``role: content`` lines."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return _said(messages[:first]), _said(messages[first:])


def _said(messages: Sequence[Message]) -> str:
    contents = [_content(message) for message in messages]
    if len(contents) == 1:
        return contents[0]
    return "\n".join(f"{message['role']}: {content}" for message, content in zip(messages, contents, strict=True))


def _content(message: Message) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=repr)
    calls = message.get("tool_calls")
    return text if not calls else f"{text}{json.dumps(calls, ensure_ascii=False, default=repr)}"
