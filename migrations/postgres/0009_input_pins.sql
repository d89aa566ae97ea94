-- Refs on the tables that a waiting request's recorded operations read, so that their snapshots outlive an expiry (rule R2).
-- Written down before the ref is set, taken away after it is removed.
CREATE TABLE input_pin (
    request BIGINT NOT NULL REFERENCES merge_request (id),
    table_name TEXT COLLATE "C" NOT NULL,
    ref_name TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (request, table_name, ref_name)
);
