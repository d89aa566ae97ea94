-- Trains whose operations are run again now. Every file of theirs is noted before it is written, so that a successor of a
-- worker that died finds it; with the train's own row, which names the files from then on, both go.
CREATE TABLE unrecorded_train (
    train                 TEXT    NOT NULL PRIMARY KEY,
    table_uuid            TEXT    NOT NULL,
    target                TEXT    NOT NULL,
    first_sequence_number INTEGER NOT NULL,
    at_ms                 INTEGER NOT NULL
);
CREATE INDEX unrecorded_train_table ON unrecorded_train (table_uuid);
CREATE TABLE unrecorded_file (
    train TEXT NOT NULL,
    path  TEXT NOT NULL,
    kind  TEXT NOT NULL,
    PRIMARY KEY (train, path)
);
-- How far the operation of a request has got that is run again, or had got the last time.
CREATE TABLE replay (
    request            INTEGER NOT NULL PRIMARY KEY REFERENCES merge_request (id),
    train              TEXT    NOT NULL,
    started_at_ms      INTEGER NOT NULL,
    at_ms              INTEGER NOT NULL,
    rows_to_read       INTEGER NOT NULL,
    rows_read          INTEGER NOT NULL,
    rows_written       INTEGER NOT NULL,
    files_written      INTEGER NOT NULL,
    checkpoints        INTEGER NOT NULL,
    last_checkpoint_ms INTEGER
);
