-- What `doctor` found a catalog able to do, on a scratch table. It can only take away from what the catalog says of
-- itself: enqueue refuses what cannot work.
CREATE TABLE catalog_capability (
    catalog TEXT NOT NULL,
    capability TEXT NOT NULL,
    able INTEGER NOT NULL CHECK (able IN (0, 1)),
    found_at_ms INTEGER NOT NULL,
    PRIMARY KEY (catalog, capability)
);
