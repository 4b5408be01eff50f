"""The rollout file's tables, and two views that people may query with any SQLite tool.

``samples`` has a row for each episode, ``groups`` one for each group::

    sqlite3 rollouts.sqlite 'SELECT step, reward, completion FROM samples ORDER BY reward DESC LIMIT 9'


Arrays are blobs: ids as little-endian int32, log-probs as little-endian float64.
"""

from __future__ import annotations

APPLICATION = 0x67726F6C
"""In the file's header: it is a rollout file ("grol")."""
VERSION = 1

SCHEMA = f"""
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};

CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    time REAL NOT NULL  -- seconds since 1970
) STRICT;

CREATE TABLE row_groups (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL REFERENCES steps ON DELETE CASCADE,
    number INTEGER NOT NULL,  -- in the step, from 0
    row_key TEXT NOT NULL,    -- equal for equal rows
    row_text TEXT NOT NULL,   -- JSON, for people
    row_packed BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    UNIQUE (step, number)
) STRICT;

CREATE TABLE episodes (
    id INTEGER PRIMARY KEY,
    group_id INTEGER NOT NULL REFERENCES row_groups ON DELETE CASCADE,
    number INTEGER NOT NULL,  -- in the group, from 0
    reward REAL,
    parts TEXT NOT NULL,      -- JSON
    failure TEXT,
    failure_detail TEXT,
    prompt TEXT NOT NULL,
    completion TEXT NOT NULL,
    messages_packed BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    UNIQUE (group_id, number)
) STRICT;

CREATE TABLE turns (
    episode_id INTEGER NOT NULL REFERENCES episodes ON DELETE CASCADE,
    number INTEGER NOT NULL,  -- in the episode, from 0
    version INTEGER NOT NULL,
    stop_reason TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL,
    prompt BLOB NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    UNIQUE (episode_id, number)
) STRICT;

CREATE VIEW samples AS
SELECT
    g.step, g.number AS group_number, e.number AS sample, e.reward, e.parts, e.failure, e.failure_detail,
    (SELECT stop_reason FROM turns AS t WHERE t.episode_id = e.id ORDER BY t.number DESC LIMIT 1) AS stop_reason,
    (SELECT min(version) FROM turns AS t WHERE t.episode_id = e.id) AS version,
    (SELECT count(*) FROM turns AS t WHERE t.episode_id = e.id) AS turns,
    (SELECT coalesce(sum(prompt_tokens), 0) FROM turns AS t WHERE t.episode_id = e.id) AS prompt_tokens,
    (SELECT coalesce(sum(sampled_tokens), 0) FROM turns AS t WHERE t.episode_id = e.id) AS sampled_tokens,
    e.prompt, e.completion, g.row_text AS "row", g.row_key,
    datetime(s.time, 'unixepoch') AS time_utc, e.id AS episode_id, g.id AS group_id
FROM episodes AS e JOIN row_groups AS g ON g.id = e.group_id JOIN steps AS s ON s.step = g.step;

CREATE VIEW groups AS
SELECT
    g.step, g.number AS group_number, count(*) AS samples, count(e.failure) AS failed,
    avg(CASE WHEN e.failure IS NULL THEN e.reward END) AS mean_reward,
    min(CASE WHEN e.failure IS NULL THEN e.reward END) AS min_reward,
    max(CASE WHEN e.failure IS NULL THEN e.reward END) AS max_reward,
    g.row_text AS "row", g.row_key, datetime(s.time, 'unixepoch') AS time_utc, g.id AS group_id
FROM episodes AS e JOIN row_groups AS g ON g.id = e.group_id JOIN steps AS s ON s.step = g.step
GROUP BY g.id;
"""
