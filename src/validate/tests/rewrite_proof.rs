use super::*;
use crate::table::manifests::{LiveFile, LiveFiles};
use crate::table::test_orders::{Order, order, orders};
use crate::validate::RewriteProver;
use mergeberg_kernel::change::RewriteProof;

fn prover() -> RewriteProver {
    RewriteProver::new(Arc::new(Engine::with_bounds(2, TEST_MEMORY_BYTES).unwrap()))
}

/// Files that hold these rows.
async fn files(lab: &mut OrdersLab, rows: &[Order]) -> Vec<LiveFile> {
    let snapshot = lab.snapshot(None, rows, &[]).await;
    lab.live(snapshot).await
}

/// Data files without any delete file.
fn plain(data: &[LiveFile]) -> LiveFiles {
    LiveFiles { data: data.to_vec(), deletes: Vec::new() }
}

async fn prove(
    prover: &RewriteProver,
    lab: &OrdersLab,
    removed: &[LiveFile],
    added: &[LiveFile],
) -> Result<RewriteProof, crate::validate::CheckError> {
    prover.prove(&lab.table, plain(removed), plain(added)).await
}

#[tokio::test]
async fn order_and_file_boundaries_do_not_matter() {
    let mut lab = OrdersLab::new().await;
    let mut removed = files(&mut lab, &orders(1, &[1, 2])).await;
    removed.extend(files(&mut lab, &orders(1, &[3, 3])).await);
    let added = files(&mut lab, &orders(1, &[3, 2, 3, 1])).await;
    let prover = prover();
    assert_eq!(prove(&prover, &lab, &removed, &added).await.unwrap(), RewriteProof::Content);

    // From memory: the files are not read again.
    for file in removed.iter().chain(&added) {
        lab.table.file_io.delete(&file.fact.path).await.unwrap();
    }
    assert_eq!(prove(&prover, &lab, &removed, &added).await.unwrap(), RewriteProof::Content);
    let fresh = self::prover();
    assert!(prove(&fresh, &lab, &removed, &added).await.is_err());
}

#[tokio::test]
async fn equal_counts_alone_prove_nothing() {
    let mut lab = OrdersLab::new().await;
    let before = [order(1), order(2)];
    let removed = files(&mut lab, &before).await;
    let with = |second: Order| [order(1), second];
    for changed in [
        with(Order { status: Some("open"), ..order(2) }),
        with(Order { status: None, ..order(2) }),
        with(Order { amount: Some(1.0 + f64::EPSILON), ..order(2) }),
        with(order(1)),
    ] {
        let added = files(&mut lab, &changed).await;
        let proof = prove(&prover(), &lab, &removed, &added).await.unwrap();
        assert_eq!(proof, RewriteProof::None, "{changed:?}");
    }
}

#[tokio::test]
async fn rows_that_cancel_as_multisets_are_told_apart() {
    let mut lab = OrdersLab::new().await;
    let removed = files(&mut lab, &orders(1, &[1, 1, 2])).await;
    let added = files(&mut lab, &orders(1, &[1, 2, 2])).await;
    assert_eq!(prove(&prover(), &lab, &removed, &added).await.unwrap(), RewriteProof::None);
}

#[tokio::test]
async fn values_count_as_stored() {
    let amount = |amount: f64| [Order { amount: Some(amount), ..order(1) }];
    let mut lab = OrdersLab::new().await;
    let zero = files(&mut lab, &amount(0.0)).await;
    let minus_zero = files(&mut lab, &amount(-0.0)).await;
    let nan = files(&mut lab, &amount(f64::NAN)).await;
    let nan_again = files(&mut lab, &amount(f64::NAN)).await;
    let prover = prover();
    assert_eq!(prove(&prover, &lab, &zero, &minus_zero).await.unwrap(), RewriteProof::None);
    assert_eq!(prove(&prover, &lab, &nan, &nan_again).await.unwrap(), RewriteProof::Content);
}

#[tokio::test]
async fn different_counts_are_rejected_without_reading() {
    let mut lab = OrdersLab::new().await;
    let removed = files(&mut lab, &orders(1, &[1])).await;
    let added = files(&mut lab, &orders(1, &[1, 1])).await;
    lab.table.file_io.delete(&removed[0].fact.path).await.unwrap();
    assert_eq!(prove(&prover(), &lab, &removed, &added).await.unwrap(), RewriteProof::None);
}
