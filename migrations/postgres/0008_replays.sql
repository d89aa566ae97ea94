-- Trains whose operations are run again now. Every file of theirs is noted before it is written, so that a successor of a
-- worker that died finds it; with the train's own row, which names the files from then on, both go.
CREATE TABLE unrecorded_train (
    train TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    table_uuid TEXT COLLATE "C" NOT NULL,
    target TEXT COLLATE "C" NOT NULL,
    first_sequence_number BIGINT NOT NULL,
    at_ms BIGINT NOT NULL
);
CREATE INDEX unrecorded_train_table ON unrecorded_train (table_uuid);
CREATE TABLE unrecorded_file (
    train TEXT COLLATE "C" NOT NULL,
    path TEXT COLLATE "C" NOT NULL,
    kind TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (train, path)
);
-- How far the operation of a request has got that is run again, or had got the last time.
CREATE TABLE replay (
    request BIGINT NOT NULL PRIMARY KEY REFERENCES merge_request (id),
    train TEXT COLLATE "C" NOT NULL,
    started_at_ms BIGINT NOT NULL,
    at_ms BIGINT NOT NULL,
    rows_to_read BIGINT NOT NULL,
    rows_read BIGINT NOT NULL,
    rows_written BIGINT NOT NULL,
    files_written BIGINT NOT NULL,
    checkpoints BIGINT NOT NULL,
    last_checkpoint_ms BIGINT
);
