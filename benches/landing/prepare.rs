//! Makes a case's table, its branches and its queue, and keeps their states. Nothing here is measured.

use std::sync::Arc;

use mergeberg::ledger::Ledger;
use mergeberg::table::sql_catalog::SqlCatalog;

use crate::case::{Place, State};
use crate::support::events::{CATALOG, Case, House, POLICY, definition, now_ms, table_name};

pub async fn open_catalog(
    place: &Place,
    clock: Arc<dyn Fn() -> i64 + Send + Sync>,
) -> anyhow::Result<SqlCatalog> {
    let uri = place.catalog().display().to_string();
    Ok(SqlCatalog::open(CATALOG, &uri, &place.warehouse(), clock).await?)
}

pub async fn prepare(place: &Place, case: &Case) -> anyhow::Result<()> {
    std::fs::create_dir_all(place.policies())?;
    std::fs::write(place.policies().join("events.toml"), POLICY)?;
    place.write_case(case)?;

    let uri = place.catalog().display().to_string();
    let catalog = SqlCatalog::create(CATALOG, &uri, &place.warehouse(), Arc::new(now_ms)).await?;
    catalog.create_namespace("bench").await?;
    catalog.define_table(&table_name()?, &definition()).await?;

    let mut house = House::new(Arc::new(catalog))?;
    house.fill_days(case).await?;
    house.write_history(case).await?;
    place.keep(State::Plain)?;

    let ledger = Ledger::open_or_create(place.ledger()).await?;
    let paths = house.write_branches(case, &ledger).await?;
    std::fs::write(place.shards(), paths.join("\n"))?;
    ledger.close().await;
    place.keep(State::Queued)
}
