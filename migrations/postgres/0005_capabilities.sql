-- What `doctor` found a catalog able to do, as migration 5 of SQLite makes it.
CREATE TABLE catalog_capability (
    catalog     TEXT COLLATE "C" NOT NULL,
    capability  TEXT COLLATE "C" NOT NULL,
    able        BIGINT NOT NULL CHECK (able IN (0, 1)),
    found_at_ms BIGINT NOT NULL,
    PRIMARY KEY (catalog, capability)
);
