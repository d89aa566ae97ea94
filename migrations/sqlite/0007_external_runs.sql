-- Runs of a pipeline's own command that makes a request's branch again. `branch` is its temporary branch, named before it
-- is made and never used twice; `base` is where that was made; `outcome` is NULL while the run is under way.
CREATE TABLE external_run (
    request INTEGER NOT NULL REFERENCES merge_request (id),
    run INTEGER NOT NULL,
    table_uuid TEXT NOT NULL,
    pinned INTEGER NOT NULL,
    branch TEXT NOT NULL UNIQUE,
    epoch INTEGER NOT NULL,
    base INTEGER,
    head INTEGER,
    outcome TEXT,
    status INTEGER,
    text TEXT,
    output TEXT,
    ordered_at_ms INTEGER NOT NULL,
    started_at_ms INTEGER,
    ended_at_ms INTEGER,
    PRIMARY KEY (request, run)
) STRICT;
CREATE INDEX external_run_under_way ON external_run (epoch) WHERE outcome IS NULL;
