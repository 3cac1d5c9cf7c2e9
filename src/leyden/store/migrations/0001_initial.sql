-- One row per word of the design. Times are Unix seconds. `change` orders every change of any rollout.

CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counters VALUES ('change', 0);

CREATE TABLE models (
    name TEXT PRIMARY KEY,
    engines TEXT NOT NULL,              -- JSON list of base URLs
    version INTEGER NOT NULL,
    lineage TEXT NOT NULL,
    context_tokens INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE groups (
    group_id TEXT PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('train', 'eval')),
    step INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    size INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('active', 'consumed', 'discarded')),
    task TEXT NOT NULL,                 -- JSON
    sampling TEXT                       -- JSON; NULL: the run file's sampling (train), the harness's own (eval)
) WITHOUT ROWID;
CREATE UNIQUE INDEX live_groups ON groups (kind, step, slot) WHERE state <> 'discarded';

CREATE TABLE rollouts (
    rollout_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups (group_id),
    member INTEGER NOT NULL,
    state TEXT NOT NULL,
    change INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0, -- the current one; 0: none yet
    spared INTEGER NOT NULL DEFAULT 0,  -- attempts given back by a controller that stopped: they count against no limit
    failure TEXT,
    reason TEXT,
    created REAL NOT NULL,
    finished REAL,
    UNIQUE (group_id, member)
) WITHOUT ROWID;
CREATE INDEX rollouts_by_change ON rollouts (change);

CREATE TABLE attempts (
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id),
    attempt INTEGER NOT NULL,
    controller TEXT NOT NULL,
    started REAL NOT NULL,
    exited REAL,
    exit_code INTEGER,
    timed_out INTEGER NOT NULL DEFAULT 0,
    exit_reason TEXT,
    incomplete TEXT,                    -- why the record of this attempt is not exact; NULL: it is
    reward REAL,
    held_s REAL NOT NULL DEFAULT 0,
    turns INTEGER NOT NULL DEFAULT 0,   -- committed ones
    sampled_tokens INTEGER NOT NULL DEFAULT 0,
    min_version INTEGER,
    max_version INTEGER,
    PRIMARY KEY (rollout_id, attempt)
) WITHOUT ROWID;

CREATE TABLE turns (
    turn_id INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL,
    request_key BLOB NOT NULL,          -- digest of the parsed request, to recognise a retry
    created REAL NOT NULL,
    committed REAL,
    parent_id INTEGER,
    fork_cause TEXT,
    delta BLOB,                         -- int32 little-endian: prompt ids that the parent's path does not hold
    sampled BLOB,                       -- int32
    logprobs BLOB,                      -- float32; NULL: the engine gave none that is finite
    spans TEXT,                         -- JSON [[version, count], ...]
    finish_reason TEXT,
    node BLOB,                          -- zstd JSON: what continuity needs to find this turn again
    wire BLOB,                          -- zstd JSON of the request as it came, if kept
    FOREIGN KEY (rollout_id, attempt) REFERENCES attempts (rollout_id, attempt)
);
CREATE INDEX turns_by_attempt ON turns (rollout_id, attempt, turn_id);
CREATE INDEX open_turns ON turns (turn_id) WHERE state = 'open';

CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,
    created REAL NOT NULL
);
CREATE INDEX events_by_rollout ON events (rollout_id, seq);
