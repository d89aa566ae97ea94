package catalog.branches_test

import data.catalog.branches

table := "/api/catalog/v1/lake/namespaces/shop/tables/orders"

asked(principal, method, path, body) := {"principal": principal, "method": method, "path": path, "body": body}

commit(principal, updates) := asked(principal, "POST", table, {"requirements": [], "updates": updates})

added := {"action": "add-snapshot", "snapshot": {"snapshot-id": 7}}

set(name) := {"action": "set-snapshot-ref", "ref-name": name, "type": "branch", "snapshot-id": 7}

removed(name) := {"action": "remove-snapshot-ref", "ref-name": name}

test_a_pipeline_writes_its_own_branches if {
	branches.allow with input as commit("orders-load", [added, set("ingest/shard-07")])
	branches.allow with input as commit("orders-load", [removed("ingest/shard-07")])
	branches.allow with input as commit("orders-build", [added, set("backfill/2026")])
}

test_every_other_name_is_the_queues if {
	every name in {"main", "staging", "ingest", "Ingest/x", "transform/x", "mergeberg/tmp/q/1", ""} {
		not branches.allow with input as commit("orders-load", [added, set(name)])
		not branches.allow with input as commit("orders-load", [removed(name)])
		branches.allow with input as commit("mergeberg", [added, set(name), removed(name)])
	}
}

test_one_update_that_is_refused_refuses_the_commit if {
	updates := [added, set("ingest/a"), set("main")]
	not branches.allow with input as commit("orders-load", updates)
	branches.refused == {"set-snapshot-ref main"} with input as commit("orders-load", updates)
}

# Removing a snapshot removes the refs to it without a word; properties hold the queue's claim.
test_what_reaches_beyond_a_branch_is_the_queues if {
	every action in {"remove-snapshots", "set-properties", "remove-properties", "add-schema", "set-location", "upgrade-format-version", "?"} {
		update := {"action": action, "snapshot-ids": [7], "updates": {"mergeberg.queue": "x"}}
		not branches.allow with input as commit("orders-load", [update])
		branches.allow with input as commit("mergeberg", [update])
	}
	not branches.allow with input as commit("orders-load", [{"ref-name": "ingest/a"}])
}

test_a_staged_snapshot_moves_nothing if branches.allow with input as commit("orders-load", [added])

test_reading_is_for_those_who_are_known if {
	branches.allow with input as asked("orders-load", "GET", sprintf("%s?snapshots=refs", [table]), null)
	branches.allow with input as asked("orders-load", "GET", "/api/catalog/v1/config?warehouse=lake", null)
	not branches.allow with input as asked("stranger", "GET", table, null)
	not branches.allow with input as asked("orders-load", "GET", "/api/management/v1/principals", null)
}

test_a_stranger_gets_a_token_and_nothing_else if {
	branches.allow with input as {"method": "POST", "path": "/api/catalog/v1/oauth/tokens"}
	not branches.allow with input as {"method": "POST", "path": table, "body": {"updates": [added]}}
	not branches.allow with input as commit("stranger", [added, set("ingest/a")])
}

test_only_a_commit_that_can_be_read_is_allowed if {
	not branches.allow with input as asked("orders-load", "POST", table, null)
	not branches.allow with input as asked("orders-load", "POST", table, {"requirements": []})
	not branches.allow with input as asked("orders-load", "POST", table, {"updates": "none"})
	not branches.allow with input as {"principal": "orders-load", "method": "POST", "path": table}
}

test_other_requests_are_the_queues if {
	body := {"updates": [added]}
	every path in {
		"/api/catalog/v1/lake/namespaces/shop/tables",
		"/api/catalog/v1/lake/transactions/commit",
		"/api/catalog/v1/lake/tables/rename",
		"/api/catalog/v1/other/namespaces/shop/tables/orders",
		"/api/catalog/v1/lake/namespaces/shop/tables/a/b",
		"/api/catalog/v1/lake/namespaces/shop/tables/orders%2Fmetrics/x",
	} {
		not branches.allow with input as asked("orders-load", "POST", path, body)
	}
	not branches.allow with input as asked("orders-load", "DELETE", table, null)
	branches.allow with input as asked("orders-load", "POST", sprintf("%s/metrics", [table]), {"report-type": "scan"})
}
