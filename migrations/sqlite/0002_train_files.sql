-- Files that were written for a train's candidates, as JSON: a successor of a worker that died deletes them.
ALTER TABLE train ADD COLUMN written TEXT;
