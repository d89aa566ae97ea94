//! Operations of records: typed forms beside statements, and what is refused when a record is made.

use mergeberg_kernel::record::{Columns, MergeAction, Names, Operation, Record, RecordError, When};
use serde_json::{Value, json};

fn parse(text: &str) -> Result<Record, RecordError> {
    Record::parse(text, &"shop.orders".parse().unwrap())
}

// Typed forms.

#[test]
fn deletes_updates_and_merges_have_typed_forms() {
    let record = parse(r#"{"v":1,"id":"x","op":"delete-where","where":"status = 'void'"}"#).unwrap();
    let Operation::DeleteWhere { filter, .. } = &record.operation else { panic!("{record:?}") };
    assert_eq!(filter.to_string(), "status = 'void'");
    assert_eq!((record.names, record.reads_target), (Names::Exact, false));

    let record = parse(
        r#"{"v":1,"id":"x","op":"update-where","where":"id IN (SELECT id FROM target WHERE amount < 0)",
        "set":{"amount":"amount * 2","status":"'paid'"}}"#,
    )
    .unwrap();
    let Operation::UpdateWhere { set, .. } = &record.operation else { panic!("{record:?}") };
    assert_eq!(set.len(), 2);
    assert!(record.reads_target, "a subquery reads it");

    let record = parse(
        r#"{"v":1,"id":"x","op":"merge-into","source":"SELECT * FROM up","on":"target.id = source.id",
        "when-matched":[{"and":"source.gone","delete":true},{"update":"*"}],
        "when-not-matched":[{"insert":{"id":"source.id"}},{"insert":"*"}],
        "when-not-matched-by-source":[{"update":{"status":"'old'"}}],
        "inputs":{"up":{"table":"raw.up","snapshot-id":7}}}"#,
    )
    .unwrap();
    let Operation::MergeInto(merge) = &record.operation else { panic!("{record:?}") };
    let kinds: Vec<When> = merge.clauses.iter().map(|clause| clause.when).collect();
    assert_eq!(
        kinds,
        [When::Matched, When::Matched, When::NotMatched, When::NotMatched, When::NotMatchedBySource]
    );
    assert_eq!(merge.clauses[1].action, MergeAction::UpdateAll);
    assert!(!record.reads_target);
}

#[test]
fn what_the_parser_would_read_wrongly_is_refused() {
    let with =
        |filter: &str| parse(&json!({"v": 1, "id": "x", "op": "delete-where", "where": filter}).to_string());
    let error = with("a IS NOT DISTINCT FROM b AND c = 1").unwrap_err();
    assert!(error.to_string().contains("parentheses"), "{error}");
    assert!(with("(a IS NOT DISTINCT FROM b) AND c = 1").is_ok());
    assert!(with("c = 1 AND a IS DISTINCT FROM b").is_ok());
}

// Statements.

fn statement(sql: &str) -> Result<Record, RecordError> {
    statement_with(sql, "static", json!({}))
}

fn statement_with(sql: &str, mode: &str, parameters: Value) -> Result<Record, RecordError> {
    let record = json!({
        "v": 1, "id": "x", "op": "sql", "sql": sql, "overwrite-mode": mode, "parameters": parameters,
        "inputs": {"up": {"table": "raw.up", "snapshot-id": 7}},
    });
    parse(&record.to_string())
}

fn shown(sql: &str) -> String {
    let record = statement(sql).unwrap_or_else(|error| panic!("{sql}: {error}"));
    format!("{:?}", record.operation)
}

#[test]
fn inserts_are_what_they_do_to_the_table() {
    for blind in [
        "INSERT INTO shop.orders SELECT * FROM raw.up",
        "insert into prod.shop.orders (id, status) values (1, 'a'), (2, uuid())",
        "INSERT INTO TABLE shop.orders.branch_audit SELECT * FROM up",
        "INSERT INTO shop.orders BY NAME SELECT 1 AS id",
        "INSERT INTO `Shop`.`Orders` WITH x AS (SELECT 1) SELECT * FROM x",
    ] {
        assert_eq!(statement(blind).map(|r| r.operation), Ok(Operation::Append), "{blind}");
    }
    let derived = statement(
        "INSERT INTO shop.orders SELECT u.* FROM up u LEFT ANTI JOIN prod.shop.orders o ON u.id = o.id",
    )
    .unwrap();
    assert!(matches!(derived.operation, Operation::InsertInto { .. }), "{derived:?}");
    assert!(derived.reads_target);

    let dynamic = |sql: &str| statement_with(sql, "dynamic", json!({})).unwrap().operation;
    assert_eq!(dynamic("INSERT OVERWRITE shop.orders SELECT * FROM up"), Operation::ReplacePartitions);
    let reading = dynamic("INSERT OVERWRITE shop.orders SELECT id, status FROM shop.orders");
    assert!(matches!(reading, Operation::OverwritePartitions { .. }), "{reading:?}");

    let fixed =
        "INSERT OVERWRITE TABLE shop.orders PARTITION (day = '2013-08-20', hour) SELECT id, hour FROM up";
    let Operation::OverwriteWhere { filter, rows } = statement(fixed).unwrap().operation else {
        panic!("static")
    };
    assert_eq!(filter.to_string(), "day = '2013-08-20'");
    let Columns::ByPosition { names, constants } = rows.columns else { panic!("by position") };
    assert_eq!((names.len(), constants.len()), (0, 1));
    let named = "INSERT OVERWRITE shop.orders PARTITION (day = 20) (id, hour) SELECT id, hour FROM up";
    let Operation::OverwriteWhere { rows, .. } = statement(named).unwrap().operation else {
        panic!("static")
    };
    let Columns::ByPosition { names, .. } = rows.columns else { panic!("by position") };
    assert_eq!(names, ["id", "hour"]);
    let all = "INSERT OVERWRITE shop.orders SELECT * FROM up";
    let Operation::OverwriteWhere { filter, .. } = statement(all).unwrap().operation else {
        panic!("static")
    };
    assert_eq!(filter.to_string(), "true", "without a partition clause everything is replaced");
}

#[test]
fn spark_writes_stars_backticks_and_double_quotes() {
    let text = shown(
        r#"MERGE INTO shop.orders AS t USING (SELECT * FROM raw.up WHERE `Kind` = "it's") AS s ON t.id = s.id
        WHEN MATCHED AND s.op = 'D' THEN DELETE
        WHEN MATCHED AND s.note = 'a\'b' THEN UPDATE SET t.status = s.status, amount = t.amount + 1
        WHEN MATCHED THEN UPDATE SET *
        WHEN NOT MATCHED AND s.op <> 'D' THEN INSERT *
        WHEN NOT MATCHED THEN INSERT (id, status) VALUES (s.id, 'none')
        WHEN NOT MATCHED BY SOURCE AND t.status = 'x' THEN UPDATE SET status = 'y'
        WHEN NOT MATCHED BY SOURCE THEN DELETE;"#,
    );
    let parts =
        ["UpdateAll", "InsertAll", "`t.id = s.id`", "it''s", "a''b", r#""kind""#, r#"column: "amount""#];
    for part in parts {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let merge = statement("MERGE INTO shop.orders USING up ON orders.id = up.id WHEN MATCHED THEN DELETE");
    let Operation::MergeInto(merge) = merge.unwrap().operation else { panic!("merge") };
    assert_eq!((merge.target.as_str(), merge.source.as_str()), ("orders", "up"));
}

#[test]
fn fields_inside_of_columns_are_told_from_aliases() {
    let set = |sql: &str| match statement(sql).unwrap().operation {
        Operation::UpdateWhere { set, .. } => {
            set.into_iter().map(|one| (one.column, one.fields.join("/"))).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    let place = |column: &str, fields: &str| (column.to_owned(), fields.to_owned());
    assert_eq!(
        set("UPDATE shop.orders AS t SET t.a = 1, T.who.name = 'x', who.At.x = 2, orders.b = 3"),
        [place("a", ""), place("who", "name"), place("who", "At/x"), place("orders", "b")]
    );
    for twice in ["who = NULL, who.name = 'x'", "who.at.x = 1, WHO.at = NULL", "a = 1, t.A = 2"] {
        let error = statement(&format!("UPDATE shop.orders t SET {twice}")).unwrap_err();
        assert!(error.to_string().contains("is set twice"), "{twice}: {error}");
    }
    for unknown in [
        "UPDATE shop.orders SET who.name = DEFAULT",
        "MERGE INTO shop.orders t USING up s ON t.id = s.id WHEN NOT MATCHED THEN INSERT (id, who.name) VALUES (1, 'x')",
    ] {
        let error = statement(unknown).unwrap_err();
        assert!(error.to_string().contains("field inside a column"), "{unknown}: {error}");
    }
}

#[test]
fn only_functions_that_do_the_same_are_let_through() {
    let text = shown("UPDATE shop.orders SET a = concat(b, 'x', c), d = if(e > 1, f, g), h = lower(trim(i))");
    assert!(text.contains("(b) || ('x') || (c)"), "{text}");
    assert!(text.contains("CASE WHEN e > 1 THEN f ELSE g END"), "{text}");
    for unknown in [
        "UPDATE shop.orders SET a = date_format(b, 'yyyy')",
        "DELETE FROM shop.orders WHERE locate('a', b) > 1",
        "DELETE FROM shop.orders WHERE substring(b, -2) = 'xx'",
        "DELETE FROM shop.orders WHERE to_date(b, 'MM/dd/yyyy') < '2013-08-20'",
        "INSERT OVERWRITE shop.orders SELECT my_udf(a) FROM raw.up",
        "MERGE INTO shop.orders t USING up s ON t.id = hash(s.id) WHEN MATCHED THEN DELETE",
    ] {
        let error = statement(unknown).expect_err(unknown);
        assert!(error.to_string().contains("not known to do the same"), "{unknown}: {error}");
    }
    assert!(statement("DELETE FROM shop.orders WHERE substring(b, 2, 3) = 'xx'").is_ok());
    // Nothing is run again: the files say it.
    assert!(statement("INSERT INTO shop.orders SELECT my_udf(a) FROM raw.up").is_ok());
}

#[test]
fn what_sparks_words_mean_is_written_out() {
    let filter = |text: &str| shown(&format!("DELETE FROM shop.orders WHERE {text}"));
    for (spark, meant) in [
        ("a BETWEEN 1 AND '2'", "(a >= 1 AND a <= '2')"),
        ("a NOT BETWEEN 1 AND 2", "NOT (a >= 1 AND a <= 2)"),
        ("a IN (1, '2', b)", "((a = 1 OR a = '2') OR a = b)"),
        ("a NOT IN (1)", "NOT (a = 1)"),
        ("CASE a WHEN '1' THEN 2 END = b", "CASE WHEN a = '1' THEN CAST(2 AS INT) END = b"),
        ("nullif(a, '3') = 1", "CASE WHEN a = '3' THEN NULL ELSE a END = 1"),
        ("-a = 1", "(0 - (a)) = 1"),
        ("a = -1", "a = -1"),
        ("a = 10L", "a = CAST(10 AS BIGINT)"),
        ("a = 1e3", "a = CAST('1e3' AS DOUBLE)"),
        ("a = CAST(b AS DECIMAL)", "CAST(b AS DECIMAL(10,0))"),
        ("a = TIMESTAMP '2026-08-20 00:00:00'", "TIMESTAMP(6) WITH TIME ZONE '2026-08-20 00:00:00'"),
        ("a = CAST(b AS TIMESTAMP_NTZ)", "CAST(b AS TIMESTAMP(6) WITHOUT TIME ZONE)"),
        ("a = to_timestamp(b)", "CAST(b AS TIMESTAMP(6) WITH TIME ZONE)"),
    ] {
        let text = filter(spark);
        assert!(text.contains(meant), "{spark}: {text}");
    }
    for number in ["1.5BD", "3S", "2.5D"] {
        let error = statement(&format!("DELETE FROM shop.orders WHERE a = {number}")).expect_err(number);
        assert!(error.to_string().contains("write it with CAST"), "{error}");
    }
    // As many values as a record can hold do not nest deeper than a few.
    let many: Vec<String> = (0..5000).map(|value| value.to_string()).collect();
    assert!(statement(&format!("DELETE FROM shop.orders WHERE a IN ({})", many.join(", "))).is_ok());
}

#[test]
fn a_statement_names_the_zone_of_its_session() {
    let with = |zone: Value| {
        parse(
            &json!({
                "v": 1, "id": "x", "op": "sql", "sql": "DELETE FROM shop.orders", "session-timezone": zone,
            })
            .to_string(),
        )
    };
    assert_eq!(with(json!("Europe/Berlin")).unwrap().time_zone, "Europe/Berlin");
    assert_eq!(with(json!("Etc/UTC")).unwrap().time_zone, "UTC");
    assert_eq!(statement("DELETE FROM shop.orders").unwrap().time_zone, "UTC");
    for wrong in [json!(""), json!("Europe/Berlin'"), json!(2)] {
        assert!(matches!(with(wrong), Err(RecordError::Malformed(_))));
    }
    let typed = r#"{"v":1,"id":"x","op":"delete-where","where":"true","session-timezone":"UTC"}"#;
    assert!(matches!(parse(typed), Err(RecordError::Malformed(_))), "its times are in UTC");
}

#[test]
fn deletes_and_updates_of_statements() {
    assert!(shown("DELETE FROM shop.orders").contains("`true`"));
    assert!(shown("DELETE FROM shop.orders o WHERE o.id = 3").contains(r#"target: "o""#));
    assert!(shown("UPDATE shop.orders SET status = 'x' WHERE id = 3").contains(r#"column: "status""#));
    let record = statement("DELETE FROM shop.orders WHERE id IN (SELECT id FROM raw.up)").unwrap();
    assert!(!record.reads_target);
    let record = statement("DELETE FROM shop.orders WHERE id IN (SELECT max(id) FROM shop.orders)").unwrap();
    assert!(record.reads_target);
}

#[test]
fn a_statement_pins_what_it_reads_at_a_version() {
    let record = statement(
        "INSERT OVERWRITE shop.orders SELECT * FROM raw.other VERSION AS OF 5 o JOIN raw.up VERSION AS OF 8 u \
        ON o.id = u.id JOIN raw.third.snapshot_id_9 t ON t.id = o.id",
    )
    .unwrap();
    let pins: Vec<(&str, i64)> =
        record.inputs.iter().map(|(alias, pin)| (alias.as_str(), pin.snapshot_id.0)).collect();
    assert_eq!(pins, [("raw.other@5", 5), ("raw.third@9", 9), ("raw.up@8", 8), ("up", 7)]);
}

#[test]
fn parameters_become_values() {
    let sql = "DELETE FROM shop.orders WHERE day = :day AND amount < :limit AND ok = :ok";
    let given = json!({"day": "2013-08-20", "limit": -1.5, "ok": true});
    let text = format!("{:?}", statement_with(sql, "static", given).unwrap().operation);
    assert!(text.contains("day = '2013-08-20' AND amount < -1.5 AND ok = true"), "{text}");
    let error = statement_with(sql, "static", json!({"day": "x"})).unwrap_err();
    assert!(error.to_string().contains(":limit"), "{error}");
    // A value stays a value.
    let given = json!({"day": "' OR true OR '", "limit": 1, "ok": null});
    let text = format!("{:?}", statement_with(sql, "static", given).unwrap().operation);
    assert!(text.contains("day = ''' OR true OR '''"), "{text}");
}

#[test]
fn rule_s1_a_statement_reads_and_writes_nothing_but_what_is_named() {
    for sql in [
        "DELETE FROM shop.orders WHERE id IN (SELECT id FROM raw.secrets)",
        "UPDATE shop.orders SET status = (SELECT max(s) FROM hr.salaries)",
        "INSERT OVERWRITE shop.orders SELECT * FROM raw.up, other.up",
        "MERGE INTO shop.orders t USING raw.down s ON t.id = s.id WHEN MATCHED THEN DELETE",
        "MERGE INTO shop.orders t USING up s ON t.id IN (SELECT x FROM hr.salaries) WHEN MATCHED THEN DELETE",
    ] {
        let error = statement(sql).expect_err(sql);
        assert!(matches!(error, RecordError::Unpinned(_)), "{sql}: {error}");
    }
    let typed = r#"{"v":1,"id":"x","op":"delete-where","where":"id IN (SELECT id FROM hr.salaries)"}"#;
    assert!(matches!(parse(typed), Err(RecordError::Unpinned(_))));

    for sql in [
        "DELETE FROM raw.up",
        "UPDATE hr.salaries SET pay = 1",
        "INSERT INTO shop.orders_old SELECT 1",
        "MERGE INTO up USING shop.orders o ON true WHEN MATCHED THEN DELETE",
    ] {
        let error = statement(sql).expect_err(sql);
        assert!(matches!(error, RecordError::OtherTarget { .. }), "{sql}: {error}");
    }
    for pins in [
        "INSERT OVERWRITE shop.orders SELECT * FROM shop.orders VERSION AS OF 3",
        "INSERT OVERWRITE shop.orders SELECT * FROM shop.orders.snapshot_id_3",
    ] {
        let error = statement(pins).expect_err(pins);
        assert!(matches!(error, RecordError::PinsTarget { .. }), "{pins}: {error}");
    }
    for refused in [
        "DROP TABLE shop.orders",
        "SELECT 1",
        "DELETE FROM shop.orders; DELETE FROM shop.orders",
        ";",
        "INSERT OVERWRITE shop.orders SELECT * FROM raw.up TIMESTAMP AS OF '2013-08-20'",
        "INSERT OVERWRITE shop.orders SELECT * FROM read_files('/etc/passwd')",
        "INSERT OVERWRITE DIRECTORY '/tmp/x' SELECT * FROM raw.up",
        "UPDATE shop.orders SET a = 1, A = 2",
        "MERGE INTO shop.orders t USING up s ON t.id IN (SELECT id FROM up) WHEN MATCHED THEN DELETE",
    ] {
        let error = statement(refused).expect_err(refused);
        assert!(matches!(error, RecordError::Sql(_)), "{refused}: {error:?}");
    }
}

#[test]
fn what_varies_is_told_when_the_record_is_made() {
    for sql in [
        "UPDATE shop.orders SET at = current_timestamp()",
        "UPDATE shop.orders SET at = current_date",
        "DELETE FROM shop.orders WHERE rand() < 0.5",
        "INSERT OVERWRITE shop.orders SELECT uuid() FROM raw.up",
        "INSERT OVERWRITE shop.orders SELECT * FROM raw.up LIMIT 3",
        "INSERT OVERWRITE shop.orders SELECT * FROM (SELECT * FROM raw.up LIMIT 3) x ORDER BY 1",
        "INSERT OVERWRITE shop.orders SELECT * FROM raw.up TABLESAMPLE (10 PERCENT)",
        "MERGE INTO shop.orders t USING up s ON t.id = s.id WHEN MATCHED THEN UPDATE SET at = NOW()",
    ] {
        let error = statement(sql).expect_err(sql);
        assert!(matches!(error, RecordError::NotDeterministic(_)), "{sql}: {error}");
    }
    let typed = r#"{"v":1,"id":"x","op":"overwrite-where","where":"a = 1","query":"SELECT random()"}"#;
    assert!(matches!(parse(typed), Err(RecordError::NotDeterministic(_))));
    for sql in [
        // Files that are added again are what they are.
        "INSERT INTO shop.orders SELECT uuid(), current_timestamp()",
        "INSERT OVERWRITE shop.orders SELECT * FROM raw.up ORDER BY id LIMIT 3",
    ] {
        assert!(statement(sql).is_ok(), "{sql}: {:?}", statement(sql));
    }
}
