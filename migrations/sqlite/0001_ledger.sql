-- The ledger of one queue (design, section 9). Times are milliseconds since the epoch, in the clock of
-- whoever wrote the row. Lists and objects are JSON text.

-- One row: which queue this is. Temporary and pin refs carry its id (rule R7).
CREATE TABLE queue (
    id            INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    queue_id      TEXT    NOT NULL,
    created_at_ms INTEGER NOT NULL,
    -- Counts what a sleeping worker has to be woken for: enqueued, cancelled, decided, adopted, released.
    wakes         INTEGER NOT NULL
) STRICT;

-- Leader election: one row, compare-and-swap on the expired lease (case O37).
CREATE TABLE committer (
    id           INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    holder       TEXT,
    epoch        INTEGER NOT NULL,
    heartbeat_ms INTEGER NOT NULL,
    lease_ms     INTEGER NOT NULL
) STRICT;
INSERT INTO committer (id, holder, epoch, heartbeat_ms, lease_ms) VALUES (1, NULL, 0, 0, 0);

-- The live row of a request. `ended_at_ms` is set exactly when the state is final.
CREATE TABLE merge_request (
    id              INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    table_name      TEXT    NOT NULL,
    table_uuid      TEXT    NOT NULL,
    source          TEXT    NOT NULL,
    pinned          INTEGER NOT NULL,
    target          TEXT    NOT NULL,
    class           TEXT    NOT NULL,
    principal       TEXT    NOT NULL,
    idempotency_key TEXT,
    schema_id       INTEGER NOT NULL,
    spec_id         INTEGER NOT NULL,
    sort_order_id   INTEGER NOT NULL,
    format_version  INTEGER NOT NULL,
    state           TEXT    NOT NULL,
    reason          TEXT,
    classification  TEXT,
    enqueued_at_ms  INTEGER NOT NULL,
    admitted_at_ms  INTEGER,
    ended_at_ms     INTEGER,
    attempts        INTEGER NOT NULL,
    train           TEXT,
    landed_snapshot INTEGER,
    detail          TEXT
) STRICT;
CREATE UNIQUE INDEX merge_request_key ON merge_request (idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX merge_request_open ON merge_request (table_uuid, target, id) WHERE ended_at_ms IS NULL;
-- Was this head published before?
CREATE INDEX merge_request_landed ON merge_request (table_uuid, target, pinned) WHERE state = 'landed';
CREATE INDEX merge_request_ended ON merge_request (ended_at_ms) WHERE ended_at_ms IS NOT NULL;

-- Every state that a request was in, append only.
CREATE TABLE merge_attempt (
    id      INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    request INTEGER NOT NULL REFERENCES merge_request (id),
    train   TEXT,
    at_ms   INTEGER NOT NULL,
    state   TEXT    NOT NULL,
    reason  TEXT,
    detail  TEXT
) STRICT;
CREATE INDEX merge_attempt_request ON merge_attempt (request, id);
CREATE TRIGGER merge_attempt_append_only BEFORE UPDATE ON merge_attempt
BEGIN SELECT RAISE (ABORT, 'merge_attempt is append only'); END;

-- `temp_ref` is unique for ever: names of temporary refs are never used twice (rule R7).
CREATE TABLE train (
    train        TEXT    NOT NULL PRIMARY KEY,
    table_uuid   TEXT    NOT NULL,
    target       TEXT    NOT NULL,
    temp_ref     TEXT    NOT NULL UNIQUE,
    planned_head INTEGER,
    tail         INTEGER NOT NULL,
    candidates   TEXT    NOT NULL,
    status       TEXT    NOT NULL,
    at_ms        INTEGER NOT NULL
) STRICT;
CREATE INDEX train_unfinished ON train (table_uuid) WHERE status IN ('staging', 'staged');

-- One check on one candidate snapshot.
CREATE TABLE evidence (
    id            INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    train         TEXT    NOT NULL,
    candidate     INTEGER NOT NULL,
    check_id      TEXT    NOT NULL,
    definition    TEXT    NOT NULL,
    policy        TEXT    NOT NULL,
    result        TEXT    NOT NULL,
    code          TEXT,
    error         TEXT,
    scope         TEXT    NOT NULL,
    measured      TEXT    NOT NULL,
    sample        TEXT    NOT NULL,
    violations    TEXT    NOT NULL,
    rows_scanned  INTEGER NOT NULL,
    bytes_scanned INTEGER NOT NULL,
    duration_ms   INTEGER NOT NULL,
    engine        TEXT    NOT NULL,
    at_ms         INTEGER NOT NULL
) STRICT;
CREATE INDEX evidence_candidate ON evidence (candidate, id);

-- The requests that a row of evidence speaks for.
CREATE TABLE evidence_request (
    evidence INTEGER NOT NULL REFERENCES evidence (id),
    position INTEGER NOT NULL,
    request  INTEGER NOT NULL REFERENCES merge_request (id),
    PRIMARY KEY (evidence, position)
) STRICT;
CREATE INDEX evidence_request_request ON evidence_request (request, evidence);

-- Intent and receipt. Open until `settled_at_ms` is set; `outcome` is then landed or not-landed. While it is
-- open, outcome is null (the answer may come) or unknown (nobody knows).
CREATE TABLE landing (
    id            INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    intent        TEXT    NOT NULL UNIQUE,
    train         TEXT    NOT NULL,
    table_name    TEXT    NOT NULL,
    table_uuid    TEXT    NOT NULL,
    target        TEXT    NOT NULL,
    planned_head  INTEGER,
    tail          INTEGER NOT NULL,
    candidates    TEXT    NOT NULL,
    temp_ref      TEXT    NOT NULL,
    cars          TEXT    NOT NULL,
    required      TEXT    NOT NULL,
    epoch         INTEGER NOT NULL,
    opened_at_ms  INTEGER NOT NULL,
    settled_at_ms INTEGER,
    outcome       TEXT
) STRICT;
CREATE UNIQUE INDEX landing_one_open ON landing (table_uuid, target) WHERE settled_at_ms IS NULL;
CREATE INDEX landing_landed ON landing (table_uuid, target, id) WHERE outcome = 'landed';
CREATE INDEX landing_train ON landing (train);

CREATE TABLE structure_accepted (
    table_uuid    TEXT    NOT NULL,
    schema_id     INTEGER NOT NULL,
    spec_id       INTEGER NOT NULL,
    sort_order_id INTEGER NOT NULL,
    accepted_by   TEXT    NOT NULL,
    at_ms         INTEGER NOT NULL,
    PRIMARY KEY (table_uuid, schema_id, spec_id, sort_order_id)
) STRICT;

-- One review item per table and structure; a lapsed one makes room for the next.
CREATE TABLE structure_review (
    id            INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    table_uuid    TEXT    NOT NULL,
    table_name    TEXT    NOT NULL,
    schema_id     INTEGER NOT NULL,
    spec_id       INTEGER NOT NULL,
    sort_order_id INTEGER NOT NULL,
    changes       TEXT    NOT NULL,
    policy        TEXT    NOT NULL,
    binding       TEXT    NOT NULL,
    opened_at_ms  INTEGER NOT NULL,
    state         TEXT    NOT NULL,
    decided_by    TEXT,
    decided_at_ms INTEGER,
    reason        TEXT
) STRICT;
CREATE UNIQUE INDEX structure_review_one ON structure_review (table_uuid, schema_id, spec_id, sort_order_id)
    WHERE state <> 'lapsed';

-- Commits on a target that the queue did not make.
CREATE TABLE foreign_snapshot (
    table_uuid  TEXT    NOT NULL,
    target      TEXT    NOT NULL,
    snapshot_id INTEGER NOT NULL,
    table_name  TEXT    NOT NULL,
    kind        TEXT    NOT NULL,
    proof       TEXT,
    text        TEXT    NOT NULL,
    seen_at_ms  INTEGER NOT NULL,
    PRIMARY KEY (table_uuid, target, snapshot_id)
) STRICT;

-- What the queue knows of a target's head.
CREATE TABLE target_head (
    table_uuid       TEXT    NOT NULL,
    target           TEXT    NOT NULL,
    table_name       TEXT    NOT NULL,
    baseline         INTEGER,
    last_known_head  INTEGER,
    last_landed_head INTEGER,
    adopted_by       TEXT,
    adopted_at_ms    INTEGER,
    adopted_reason   TEXT,
    PRIMARY KEY (table_uuid, target)
) STRICT;

-- Outbox, append only, written in the transaction of what it tells.
CREATE TABLE event (
    id         INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    at_ms      INTEGER NOT NULL,
    kind       TEXT    NOT NULL,
    request    INTEGER,
    table_name TEXT,
    text       TEXT    NOT NULL,
    data       TEXT
) STRICT;
CREATE TRIGGER event_append_only BEFORE UPDATE ON event
BEGIN SELECT RAISE (ABORT, 'event is append only'); END;
