# Who may write which branch of a table, for a proxy in front of an Iceberg REST catalog (see ../access.md).
#
# Asked with {"principal", "method", "path", "body"} of each request, `path` as it was sent, `body` parsed. What no rule
# allows is refused: creating and dropping, other updates than those below, a body that could not be read.
package catalog.branches

default allow := false

allow if input.principal in data.catalog.queues

# Tokens are fetched by those who have none yet.
allow if {
	input.method == "POST"
	path == data.catalog.tokens
}

allow if {
	prefixes
	input.method in {"GET", "HEAD"}
	is_readable
}

# A commit, if each of its updates may be done.
allow if {
	prefixes
	input.method == "POST"
	is_commit
	is_array(input.body.updates)
	count(refused) == 0
}

# Engines report what they read and wrote.
allow if {
	prefixes
	input.method == "POST"
	is_metrics
}

# The branches of a pipeline, by what their names begin with.
prefixes := data.catalog.pipelines[input.principal]

path := split(input.path, "?")[0]

is_readable if path == data.catalog.config

is_readable if startswith(path, data.catalog.base)

# Not decoded: a slash in a name is %2F here, and no part of its own.
parts := split(trim_prefix(path, data.catalog.base), "/") if startswith(path, data.catalog.base)

is_commit if {
	count(parts) == 4
	parts[0] == "namespaces"
	parts[2] == "tables"
}

is_metrics if {
	count(parts) == 5
	parts[0] == "namespaces"
	parts[2] == "tables"
	parts[4] == "metrics"
}

# The updates that this principal may not do, for the answer to it.
refused contains told(update) if {
	some update in input.body.updates
	not may_do(update)
}

# No ref names the snapshot, so nobody reads it.
may_do(update) if update.action == "add-snapshot"

may_do(update) if {
	update.action in {"set-snapshot-ref", "remove-snapshot-ref"}
	some prefix in prefixes
	startswith(update["ref-name"], prefix)
}

told(update) := sprintf("%s %s", [object.get(update, "action", "?"), object.get(update, "ref-name", "")])
