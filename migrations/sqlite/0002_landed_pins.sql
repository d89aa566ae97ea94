-- Receipts are looked up by the head that was pinned, for every request that is planned.
CREATE INDEX merge_request_landed ON merge_request (table_uuid, target, pinned) WHERE state = 'landed';
