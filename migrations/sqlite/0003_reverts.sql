-- A request that takes back a landed one, and why. Only the ledger says so: a snapshot's summary never does.
ALTER TABLE merge_request ADD COLUMN reverts INTEGER REFERENCES merge_request (id);
ALTER TABLE merge_request ADD COLUMN reverts_reason TEXT;
CREATE INDEX merge_request_reverts ON merge_request (reverts) WHERE reverts IS NOT NULL;
