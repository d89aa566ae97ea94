-- Runs of a pipeline's own command that makes a request's branch again. `branch` is its temporary branch, named before it
-- is made and never used twice; `base` is where that was made; `outcome` is NULL while the run is under way.
CREATE TABLE external_run (
    request BIGINT NOT NULL REFERENCES merge_request (id),
    run BIGINT NOT NULL,
    table_uuid TEXT COLLATE "C" NOT NULL,
    pinned BIGINT NOT NULL,
    branch TEXT COLLATE "C" NOT NULL UNIQUE,
    epoch BIGINT NOT NULL,
    base BIGINT,
    head BIGINT,
    outcome TEXT COLLATE "C",
    status BIGINT,
    text TEXT COLLATE "C",
    output TEXT COLLATE "C",
    ordered_at_ms BIGINT NOT NULL,
    started_at_ms BIGINT,
    ended_at_ms BIGINT,
    PRIMARY KEY (request, run)
);
CREATE INDEX external_run_under_way ON external_run (epoch) WHERE outcome IS NULL;
