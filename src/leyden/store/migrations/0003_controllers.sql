-- Who runs harnesses, and when a void attempt may be followed by the next.

ALTER TABLE rollouts ADD COLUMN retry_at REAL NOT NULL DEFAULT 0;  -- not to be claimed before; Unix seconds
CREATE TABLE controllers (controller TEXT PRIMARY KEY, seen REAL NOT NULL) WITHOUT ROWID;
