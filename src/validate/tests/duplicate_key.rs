use super::*;
use crate::table::test_orders::{Order, order, orders};

const BY_DAY: &str = "type = \"duplicate-key\"\ncolumns = [\"order_id\"]";
const IN_TABLE: &str = "type = \"duplicate-key\"\ncolumns = [\"order_id\"]\nscope = \"table\"";

#[tokio::test]
async fn o13_two_appends_of_the_same_new_key_are_caught_and_blamed_together() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 2]), &[]).await;
    let one = lab.snapshot(Some(base), &orders(2, &[7]), &[]).await;
    let two = lab.snapshot(Some(one), &orders(2, &[7, 8]), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[one]).await, car(&lab, 12, Some(one), &[two]).await];

    let evidence = run(&lab, &cars, BY_DAY).await;

    assert_eq!(evidence.candidate, two);
    assert_eq!(evidence.result, failed(ReasonCode::DuplicateKey));
    assert_eq!(blamed(&evidence), [(vec![11, 12], false, 1)]);
    assert_eq!(evidence.sample, ["order_id=7"]);
    assert_eq!(evidence.scope, "1 partition");
    assert_eq!(measured(&evidence, "duplicate keys"), "1");
}

#[tokio::test]
async fn o13_variant_keys_in_different_partitions_are_only_caught_table_wide() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let one = lab.snapshot(Some(base), &orders(2, &[7]), &[]).await;
    let two = lab.snapshot(Some(one), &orders(3, &[7]), &[]).await;
    let first = car(&lab, 11, Some(base), &[one]).await;
    let second = car(&lab, 12, Some(one), &[two]).await;
    let cars = [first, second];

    let evidence = run(&lab, &cars, IN_TABLE).await;
    assert_eq!(
        (evidence.result.clone(), evidence.scope.as_str()),
        (failed(ReasonCode::DuplicateKey), "table")
    );
    assert_eq!(blamed(&evidence), [(vec![11, 12], false, 1)]);

    // "Unique within a partition" holds: the key also says the day.
    let within = "type = \"duplicate-key\"\ncolumns = [\"order_id\", \"day\"]";
    assert_eq!(run(&lab, &cars, within).await.result, CheckResult::Passed);
}

#[tokio::test]
async fn one_scan_serves_the_whole_train_and_reads_touched_partitions_only() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[orders(1, &[1, 2, 3]), orders(2, &[4])].concat(), &[]).await;
    let one = lab.snapshot(Some(base), &orders(2, &[5]), &[]).await;
    let two = lab.snapshot(Some(one), &orders(2, &[6]), &[]).await;
    let three = lab.snapshot(Some(two), &orders(2, &[7]), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[one, two]).await, car(&lab, 12, Some(two), &[three]).await];

    let evidence = run(&lab, &cars, BY_DAY).await;

    assert_eq!(evidence.result, CheckResult::Passed);
    assert_eq!(evidence.candidate, three);
    // Rows 5, 6, 7, each once; day 1 is not read, nor is row 4, beside whose file no key lies.
    assert_eq!(evidence.rows_scanned, 3);
    assert!(evidence.bytes_scanned > 0);
    assert!(evidence.violations.is_empty() && evidence.sample.is_empty());
}

#[tokio::test]
async fn a_dirty_base_is_nobodys_fault_until_someone_adds_to_it() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 1, 2]), &[]).await;
    let clean = lab.snapshot(Some(base), &orders(1, &[3]), &[]).await;
    let worse = lab.snapshot(Some(clean), &orders(1, &[1, 2]), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[clean]).await, car(&lab, 12, Some(clean), &[worse]).await];

    assert_eq!(run(&lab, &cars[..1], BY_DAY).await.result, CheckResult::Passed);

    let evidence = run(&lab, &cars, BY_DAY).await;
    assert_eq!(blamed(&evidence), [(vec![12], true, 2)]);

    let strict = run(&lab, &cars[..1], &format!("compare = \"strict\"\n{BY_DAY}")).await;
    assert_eq!(strict.result, failed(ReasonCode::DuplicateKey));
    assert_eq!(blamed(&strict), [(vec![], true, 1)]);
}

#[tokio::test]
async fn blame_is_grouped_by_who_brings_the_rows() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let a = lab.snapshot(Some(base), &orders(1, &[10, 20, 30, 30]), &[]).await;
    let b = lab.snapshot(Some(a), &orders(1, &[10, 1, 40]), &[]).await;
    let c = lab.snapshot(Some(b), &orders(1, &[10, 20, 30]), &[]).await;
    let cars = [
        car(&lab, 11, Some(base), &[a]).await,
        car(&lab, 12, Some(a), &[b]).await,
        car(&lab, 13, Some(b), &[c]).await,
    ];

    let evidence = run(&lab, &cars, BY_DAY).await;

    let mut found = blamed(&evidence);
    found.sort();
    // Key 30 is wrong in car 11 alone, so car 13 is not blamed for it.
    let expected: [(Vec<i64>, bool, u64); 4] =
        [(vec![11], false, 1), (vec![11, 12, 13], false, 1), (vec![11, 13], false, 1), (vec![12], true, 1)];
    assert_eq!(found, expected);
    assert_eq!(measured(&evidence, "duplicate keys"), "4");
}

#[tokio::test]
async fn a_check_is_asked_for_by_some_cars_only() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let a = lab.snapshot(Some(base), &orders(1, &[5, 5]), &[]).await;
    let b = lab.snapshot(Some(a), &orders(1, &[6]), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await, car(&lab, 12, Some(a), &[b]).await];
    let tables = Tables::default();

    let second_only = run_for(&lab, &cars, BY_DAY, &[1], Path::new("/"), &tables).await;
    assert_eq!(second_only[0].result, CheckResult::Passed);
    assert!(run_for(&lab, &cars, BY_DAY, &[], Path::new("/"), &tables).await.is_empty());
}

#[tokio::test]
async fn o14_two_nulls_are_one_key_or_a_violation() {
    let mut lab = OrdersLab::new().await;
    let null_region = |id| Order { region: None, ..order(id) };
    let base = lab.snapshot(None, &[null_region(5)], &[]).await;
    let b = lab.snapshot(Some(base), &[null_region(5), null_region(6), order(7)], &[]).await;
    let cars = [car(&lab, 11, Some(base), &[b]).await];
    let key = "type = \"duplicate-key\"\ncolumns = [\"order_id\", \"region\"]";

    let equal = run(&lab, &cars, key).await;
    assert_eq!(equal.result, failed(ReasonCode::DuplicateKey));
    assert_eq!(equal.sample, ["order_id=5 region=null"]);

    let strict_rule = run(&lab, &cars, &format!("{key}\nnulls = \"violation\"")).await;
    assert_eq!(strict_rule.result, failed(ReasonCode::NullInKey));
    assert_eq!(measured(&strict_rule, "keys with a null"), "2");
    assert_eq!(measured(&strict_rule, "duplicate keys"), "0");
    assert_eq!(blamed(&strict_rule), [(vec![11], false, 2)]);
}

#[tokio::test]
async fn an_overwrite_is_compared_with_its_parent() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[orders(1, &[1, 1, 2]), orders(2, &[9])].concat(), &[]).await;
    let day_1 = lab.files_of_day(base, 1).await;
    // The dirty key is carried over as it was, and key 3 is new: no worse.
    let same = lab.snapshot(Some(base), &orders(1, &[1, 1, 2, 3]), &day_1).await;
    // Key 2 is doubled.
    let worse = lab.snapshot(Some(base), &orders(1, &[1, 1, 2, 2]), &day_1).await;
    let same = [car(&lab, 11, Some(base), &[same]).await];
    let worse = [car(&lab, 12, Some(base), &[worse]).await];

    let evidence = run(&lab, &same, BY_DAY).await;
    assert_eq!(evidence.result, CheckResult::Passed);
    // Three rows before, four after, day 2 untouched.
    assert_eq!(evidence.rows_scanned, 7);

    let evidence = run(&lab, &worse, BY_DAY).await;
    assert_eq!(blamed(&evidence), [(vec![12], true, 1)]);
    assert_eq!(evidence.sample, ["order_id=2"]);

    let strict = run(&lab, &same, &format!("compare = \"strict\"\n{BY_DAY}")).await;
    assert_eq!(strict.result, failed(ReasonCode::DuplicateKey));
}

#[tokio::test]
async fn a_train_with_an_overwrite_is_looked_at_a_car_at_a_time() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let day_1 = lab.files_of_day(base, 1).await;
    let a = lab.snapshot(Some(base), &orders(1, &[1, 2]), &day_1).await;
    let b = lab.snapshot(Some(a), &orders(1, &[2]), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await, car(&lab, 12, Some(a), &[b]).await];

    let found = run_for(&lab, &cars, BY_DAY, &[0, 1], Path::new("/"), &Tables::default()).await;

    assert_eq!(found.iter().map(|e| e.candidate).collect::<Vec<_>>(), [a, b]);
    assert_eq!(found[0].result, CheckResult::Passed);
    assert_eq!(blamed(&found[1]), [(vec![12], true, 1)]);
}

#[tokio::test]
async fn a_first_publish_has_no_base() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1, 1]), &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await];
    assert_eq!(blamed(&run(&lab, &cars, BY_DAY).await), [(vec![11], false, 1)]);
}

#[tokio::test]
async fn o18_a_dropped_column_makes_the_check_impossible() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    lab.drop_column("status");
    let cars = [car(&lab, 11, None, &[a]).await];

    let evidence = run(&lab, &cars, "type = \"not-null\"\ncolumns = [\"status\"]").await;

    let error = could_not_run(&evidence);
    assert!(error.contains("'status'") && error.contains("schema 1"), "{error}");
    assert_eq!(measured(&evidence, "schema"), "1");
    // What is still there is checked under the new schema.
    assert_eq!(run(&lab, &cars, BY_DAY).await.result, CheckResult::Passed);
}

#[tokio::test]
async fn any_column_name_works() {
    let name = "Order \"Id\" .ö'";
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let a = lab.snapshot(Some(base), &orders(1, &[1]), &[]).await;
    lab.evolve(|fields| {
        let mut renamed = fields[0].as_ref().clone();
        renamed.name = name.to_owned();
        fields[0] = renamed.into();
    });
    let cars = [car(&lab, 11, Some(base), &[a]).await];
    let columns = toml::Value::Array(vec![name.into()]);
    let evidence = run(&lab, &cars, &format!("type = \"duplicate-key\"\ncolumns = {columns}")).await;
    assert_eq!(evidence.sample, [format!("{name}=1")]);
    let folded = run(&lab, &cars, "type = \"duplicate-key\"\ncolumns = [\"ORDER_ID\"]").await;
    could_not_run(&folded);
}

#[tokio::test]
async fn a_missing_data_file_is_not_a_pass() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let path = lab.live(a).await[0].fact.path.clone();
    lab.table.file_io.delete(&path).await.unwrap();
    let cars = [car(&lab, 11, None, &[a]).await];
    let evidence = run(&lab, &cars, BY_DAY).await;
    assert!(could_not_run(&evidence).contains(&*path));
}

#[tokio::test]
async fn many_cars_and_many_keys() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &(0..20_000).collect::<Vec<_>>()), &[]).await;
    let mut cars = Vec::new();
    let mut head = base;
    // Past one word of origins.
    for at in 0..70 {
        let next = lab.snapshot(Some(head), &orders(1, &[100_000 + at, 200_000 + at / 2]), &[]).await;
        cars.push(car(&lab, at + 1, Some(head), &[next]).await);
        head = next;
    }
    let evidence = run(&lab, &cars, BY_DAY).await;
    assert_eq!(evidence.violations.len(), 35);
    assert!(blamed(&evidence).contains(&(vec![69, 70], false, 1)));
    // No key lies among those of the base.
    assert_eq!(evidence.rows_scanned, 140);
}

/// Decision 0033: what is left out cannot have one of the keys.
#[tokio::test]
async fn files_whose_bounds_leave_no_room_for_the_keys_are_not_read() {
    let mut lab = OrdersLab::new().await;
    let low = lab.snapshot(None, &orders(1, &[10, 19]), &[]).await;
    let middle = lab.snapshot(Some(low), &orders(1, &[20, 24, 29]), &[]).await;
    let base = lab.snapshot(Some(middle), &orders(1, &[30, 39]), &[]).await;
    let read = |evidence: &Evidence, result: CheckResult| {
        assert_eq!(evidence.result, result);
        evidence.rows_scanned
    };
    for (keys, result, rows) in [
        (vec![22], CheckResult::Passed, 1 + 3),
        (vec![19], failed(ReasonCode::DuplicateKey), 1 + 2),
        (vec![29, 30], failed(ReasonCode::DuplicateKey), 2 + 3 + 2),
        (vec![9, 40], CheckResult::Passed, 2 + 2 + 3 + 2),
        (vec![9], CheckResult::Passed, 1),
        (vec![40], CheckResult::Passed, 1),
    ] {
        let next = lab.snapshot(Some(base), &orders(1, &keys), &[]).await;
        let cars = [car(&lab, 11, Some(base), &[next]).await];
        assert_eq!(read(&run(&lab, &cars, BY_DAY).await, result), rows, "{keys:?}");
    }
    // A null meets a null, whatever the other values are.
    let null = |id: Option<i64>| vec![Order { id, region: Some("eu"), ..order(0) }];
    let with_null = lab.snapshot(Some(base), &null(None), &[]).await;
    let next = lab.snapshot(Some(with_null), &[null(None), orders(1, &[99])].concat(), &[]).await;
    let cars = [car(&lab, 11, Some(with_null), &[next]).await];
    assert_eq!(read(&run(&lab, &cars, BY_DAY).await, failed(ReasonCode::DuplicateKey)), 2 + 1);
    // Text is no such column: only the day's other column spares.
    let both = "type = \"duplicate-key\"\ncolumns = [\"status\", \"order_id\"]";
    let next = lab.snapshot(Some(base), &orders(1, &[22]), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[next]).await];
    assert_eq!(read(&run(&lab, &cars, both).await, CheckResult::Passed), 1 + 3);
    let text = "type = \"duplicate-key\"\ncolumns = [\"status\"]";
    assert_eq!(run(&lab, &cars, text).await.rows_scanned, 1 + 2 + 3 + 2);
}
