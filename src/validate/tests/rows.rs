use super::*;
use crate::table::test_orders::{Order, order, orders};

const NOT_NULL: &str = "type = \"not-null\"\ncolumns = [\"region\", \"status\"]";
const STATUSES: &str = "type = \"accepted-values\"\ncolumn = \"status\"\nvalues = [\"paid\", \"open\"]";
const REGIONS: &str = "type = \"referential\"\ncolumns = [\"region\"]\n\
    references = { table = \"shop.regions\", columns = [\"region\"] }";

fn null_status(id: i64) -> Order {
    Order { status: None, ..order(id) }
}

fn status(id: i64, status: &'static str) -> Order {
    Order { status: Some(status), ..order(id) }
}

#[tokio::test]
async fn not_null_counts_by_column_and_blames_each_car_for_its_own() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[null_status(1)], &[]).await;
    let a = lab.snapshot(Some(base), &orders(1, &[2]), &[]).await;
    let b = lab.snapshot(Some(a), &[null_status(3), order(4)], &[]).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await, car(&lab, 12, Some(a), &[b]).await];

    let evidence = run(&lab, &cars, NOT_NULL).await;

    assert_eq!(evidence.result, failed(ReasonCode::NotNull));
    assert_eq!(blamed(&evidence), [(vec![12], false, 1)]);
    assert_eq!(evidence.sample, ["region=eu status=null order_id=3 day=1 amount=1.0 price=1.00"]);
    assert_eq!((measured(&evidence, "nulls(region)"), measured(&evidence, "nulls(status)")), ("0", "1"));

    assert_eq!(run(&lab, &cars[..1], NOT_NULL).await.result, CheckResult::Passed);
    let strict = run(&lab, &cars[..1], &format!("compare = \"strict\"\n{NOT_NULL}")).await;
    assert_eq!(blamed(&strict), [(vec![], true, 1)]);
}

#[tokio::test]
async fn rows_of_the_base_are_not_read_when_nothing_depends_on_them() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 2, 3, 4]), &[]).await;
    let a = lab.snapshot(Some(base), &orders(1, &[5]), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await];
    let evidence = run(&lab, &cars, NOT_NULL).await;
    assert_eq!((evidence.result, evidence.rows_scanned), (CheckResult::Passed, 1));
}

#[tokio::test]
async fn an_overwrite_with_no_more_nulls_than_before_is_no_worse() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[null_status(1), order(2)], &[]).await;
    let files = lab.files_of_day(base, 1).await;
    let same = lab.snapshot(Some(base), &[null_status(1), order(3)], &files).await;
    let worse = lab.snapshot(Some(base), &[null_status(1), null_status(3)], &files).await;
    let same = [car(&lab, 11, Some(base), &[same]).await];
    let worse = [car(&lab, 12, Some(base), &[worse]).await];
    assert_eq!(run(&lab, &same, NOT_NULL).await.result, CheckResult::Passed);
    assert_eq!(blamed(&run(&lab, &worse, NOT_NULL).await), [(vec![12], false, 1)]);
}

#[tokio::test]
async fn e5_a_for_all_check_passes_when_everything_was_removed() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[null_status(1)], &[]).await;
    let files = lab.files_of_day(base, 1).await;
    let emptied = lab.snapshot(Some(base), &[], &files).await;
    let cars = [car(&lab, 11, Some(base), &[emptied]).await];
    for check in [NOT_NULL, STATUSES, "type = \"duplicate-key\"\ncolumns = [\"order_id\"]"] {
        assert_eq!(run(&lab, &cars, check).await.result, CheckResult::Passed, "{check}");
    }
}

#[tokio::test]
async fn accepted_values_names_the_values_and_ignores_nulls() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[status(1, "lost")], &[]).await;
    let rows = [status(2, "lost"), status(3, "Paid"), status(4, "Paid"), status(5, "open"), null_status(6)];
    let a = lab.snapshot(Some(base), &rows, &[]).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await];

    let evidence = run(&lab, &cars, STATUSES).await;

    assert_eq!(evidence.result, failed(ReasonCode::AcceptedValues));
    let mut sample = evidence.sample.clone();
    sample.sort();
    assert_eq!(sample, ["status=Paid", "status=lost"]);
    assert_eq!(measured(&evidence, "rows with them"), "3");
    assert_eq!(blamed(&evidence), [(vec![11], false, 2)]);
}

#[tokio::test]
async fn accepted_values_are_values_of_the_column() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1, 2]), &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await];
    let ids = |values: &str| format!("type = \"accepted-values\"\ncolumn = \"order_id\"\nvalues = {values}");
    assert_eq!(run(&lab, &cars, &ids(r#"["1", "2"]"#)).await.result, CheckResult::Passed);
    assert_eq!(run(&lab, &cars, &ids(r#"["1"]"#)).await.sample, ["order_id=2"]);
    assert!(could_not_run(&run(&lab, &cars, &ids(r#"["one"]"#)).await).contains("'one'"));
}

#[tokio::test]
async fn accepted_values_of_an_overwrite_compare_with_the_parent() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[status(1, "lost"), order(2)], &[]).await;
    let files = lab.files_of_day(base, 1).await;
    let same = lab.snapshot(Some(base), &[status(1, "lost"), order(3)], &files).await;
    let worse = lab.snapshot(Some(base), &[status(1, "lost"), status(3, "lost")], &files).await;
    let same = [car(&lab, 11, Some(base), &[same]).await];
    let worse = [car(&lab, 12, Some(base), &[worse]).await];
    assert_eq!(run(&lab, &same, STATUSES).await.result, CheckResult::Passed);
    assert_eq!(blamed(&run(&lab, &worse, STATUSES).await), [(vec![12], true, 1)]);
}

#[tokio::test]
async fn referential_looks_keys_up_in_a_pinned_head() {
    let mut lab = OrdersLab::new().await;
    let mut regions = lab.another("shop.regions").await;
    let pin = lab.snapshot_of(&mut regions, None, &orders(1, &[1]), &[]).await;
    let region = |id: i64, region| Order { region, ..order(id) };
    let rows = [region(1, Some("eu")), region(2, Some("mars")), region(3, Some("mars")), region(4, None)];
    let a = lab.snapshot(None, &rows, &[]).await;
    let b = lab.snapshot(Some(a), &[region(5, Some("eu"))], &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await, car(&lab, 12, Some(a), &[b]).await];
    let tables = Tables(Some((regions, pin)));

    let found = run_for(&lab, &cars, REGIONS, &[0, 1], Path::new("/"), &tables).await;

    assert_eq!(found.len(), 1);
    assert_eq!(found[0].result, failed(ReasonCode::Referential));
    assert_eq!(found[0].sample, ["region=mars"]);
    assert_eq!(blamed(&found[0]), [(vec![11], false, 1)]);
    assert_eq!(measured(&found[0], "rows with them"), "2");
    assert_eq!(measured(&found[0], "shop.regions"), format!("snapshot {pin}"));

    let unknown = run_for(&lab, &cars, REGIONS, &[0], Path::new("/"), &Tables::default()).await;
    assert!(could_not_run(&unknown[0]).contains("shop.regions"));
    let wrong = REGIONS.replace("[\"region\"] }", "[\"nation\"] }");
    let missing = run_for(&lab, &cars, &wrong, &[0], Path::new("/"), &tables).await;
    assert!(could_not_run(&missing[0]).contains("shop.regions.nation"));
}
