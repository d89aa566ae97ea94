use super::*;
use crate::table::test_orders::orders;
use crate::validate::builtin::{lineage, schema};

#[tokio::test]
async fn lineage_is_exactly_the_planned_cars() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let a = lab.snapshot(Some(base), &orders(1, &[2]), &[]).await;
    let b = lab.snapshot(Some(a), &orders(1, &[3]), &[]).await;
    let c = lab.snapshot(Some(b), &orders(1, &[4]), &[]).await;
    let policy = Digest::new("p");
    let facts = &lab.table.facts;
    let cars = [car(&lab, 11, Some(base), &[a]).await, car(&lab, 12, Some(a), &[b, c]).await];

    for at in [0, 1] {
        assert_eq!(lineage(facts, Some(base), &cars, at, &policy).unwrap().result, CheckResult::Passed);
    }
    // A snapshot between that nobody planned, another base, a head that is not there, an unknown car.
    let skipped = [car(&lab, 12, Some(base), &[a, c]).await];
    for (base, cars) in [(Some(base), &skipped[..]), (Some(a), &cars[..1]), (None, &cars[..1])] {
        let evidence = lineage(facts, base, cars, 0, &policy).unwrap();
        assert_eq!(evidence.result, failed(ReasonCode::LineageCheck), "{base:?}");
        assert_eq!(evidence.violations[0].requests, [cars[0].request]);
    }
    assert!(lineage(facts, Some(base), &cars, 2, &policy).is_none());
    let first = [car(&lab, 11, None, &[base]).await];
    assert_eq!(lineage(facts, None, &first, 0, &policy).unwrap().result, CheckResult::Passed);
}

#[tokio::test]
async fn schema_asks_whether_what_was_written_can_be_read() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let policy = Digest::new("p");
    let mut of_old = car(&lab, 11, None, &[a]).await;
    lab.reorder_and_add();
    let evidence = schema(&lab.table.facts, &of_old, &policy).unwrap();
    assert_eq!((evidence.result.clone(), measured(&evidence, "schema")), (CheckResult::Passed, "1"));

    lab.evolve(|fields| {
        let mut required = fields[1].as_ref().clone();
        required.required = true;
        fields[1] = required.into();
    });
    let evidence = schema(&lab.table.facts, &of_old, &policy).unwrap();
    assert_eq!(evidence.result, failed(ReasonCode::SchemaCheck));
    assert!(evidence.sample[0].contains("region"), "{evidence:?}");

    of_old.written = vec![SchemaId(99)];
    could_not_run(&schema(&lab.table.facts, &of_old, &policy).unwrap());
}
