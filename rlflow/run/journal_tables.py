"""The tables of journal.sqlite."""

from __future__ import annotations

FORMAT = 2  # PRAGMA user_version
_FIRST = """
CREATE TABLE attempts (
    number INTEGER NOT NULL,    -- of the group: the place of its task in the order in which the source gave them
    sample INTEGER NOT NULL,    -- which attempt of the group, from 0
    attempt INTEGER NOT NULL,   -- how often it was issued: results of earlier times are refused
    task TEXT NOT NULL,
    planned INTEGER NOT NULL,   -- the step that it was issued for, from 0; part of the group's id
    group_id TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('issued', 'running', 'done', 'claimed', 'trained', 'dropped')),
    reason TEXT,                -- of `dropped`, or of the last time that it was issued again
    again INTEGER NOT NULL DEFAULT 0,  -- how often it became too old
    min_version INTEGER,        -- least weight version of the trained tokens; of `running`, that at its start
    max_version INTEGER,
    begun_s REAL,               -- when it was played, seconds since 1970
    ended_s REAL,
    worker TEXT,                -- that played it; '' for the driver itself
    step INTEGER,               -- that claimed or dropped it, counted from 1 as in metrics.jsonl
    payload BLOB,               -- the trajectory, until a checkpoint makes it superfluous
    PRIMARY KEY (number, sample)
) WITHOUT ROWID;
CREATE INDEX attempts_by_state ON attempts (state, number);
CREATE INDEX attempts_by_plan ON attempts (planned, task);
CREATE TABLE marks (step INTEGER PRIMARY KEY, issued INTEGER NOT NULL);  -- groups issued when a checkpoint was written
CREATE TABLE phases (name TEXT NOT NULL, begun_s REAL NOT NULL, ended_s REAL NOT NULL);  -- what the trainer did
"""
_LOSSES = """
CREATE TABLE losses (       -- attempts that ended with the worker that played them, and were issued again
    number INTEGER NOT NULL, sample INTEGER NOT NULL, attempt INTEGER NOT NULL, group_id TEXT NOT NULL,
    worker TEXT NOT NULL, reason TEXT NOT NULL, begun_s REAL, ended_s REAL NOT NULL
);
"""
FROM_1 = f"ALTER TABLE attempts ADD COLUMN worker TEXT; {_LOSSES}"
"""From what format 1 had."""
TABLES = _FIRST + _LOSSES
