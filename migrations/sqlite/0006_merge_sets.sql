-- Several tables as one request. A set is its parts, one request a table; its id is that of the first of them. How many
-- they are stands in each, so that a set of which a row is lost is never landed by halves.
ALTER TABLE merge_request ADD COLUMN set_id INTEGER REFERENCES merge_request (id);
ALTER TABLE merge_request ADD COLUMN set_parts INTEGER;
-- The order of a lane: the parts of a set arrived with its first one.
CREATE INDEX merge_request_order ON merge_request (table_uuid, target, COALESCE(set_id, id), id)
    WHERE ended_at_ms IS NULL;
CREATE INDEX merge_request_set ON merge_request (set_id, id) WHERE set_id IS NOT NULL;
-- One intent a table, written and settled together with the others of the set.
ALTER TABLE landing ADD COLUMN set_id INTEGER REFERENCES merge_request (id);
CREATE INDEX landing_set ON landing (set_id, id) WHERE set_id IS NOT NULL;
-- Other tables that a check read, each at its snapshot, as JSON. NULL in rows of an older release.
ALTER TABLE evidence ADD COLUMN inputs TEXT;
