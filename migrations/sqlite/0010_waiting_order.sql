-- The first of each class are read for every train, however many wait behind them. Takes the place of
-- merge_request_order, by which all were numbered.
DROP INDEX merge_request_order;
CREATE INDEX merge_request_class ON merge_request (table_uuid, target, class, COALESCE(set_id, id), id)
    WHERE ended_at_ms IS NULL;
-- Branches that more than one open request names.
CREATE INDEX merge_request_source ON merge_request (table_uuid, source) WHERE ended_at_ms IS NULL;
