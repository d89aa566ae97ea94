-- Records of operations that snapshots name by their id (mergeberg.operation-id). Written once, never changed: what
-- was run again must be what was recorded.
CREATE TABLE operation (
    table_uuid TEXT NOT NULL,
    id TEXT NOT NULL,
    table_name TEXT NOT NULL,
    record TEXT NOT NULL,
    digest TEXT NOT NULL,
    principal TEXT NOT NULL,
    recorded_at_ms INTEGER NOT NULL,
    PRIMARY KEY (table_uuid, id)
);
