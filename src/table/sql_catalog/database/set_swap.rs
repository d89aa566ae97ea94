//! The pointers of several tables, moved in one transaction: all, or none.

use mergeberg_kernel::ids::TableName;

use super::super::super::catalog::CatalogError;
use super::{BUSY_ATTEMPTS, CatalogDatabase, SWAP, Statement};
use crate::database::query;

/// The row stays as it is, and nobody else moves it before the transaction is over.
const STAY: Statement = tables_only!(
    "UPDATE iceberg_tables SET metadata_location = metadata_location \
     WHERE catalog_name = $1 AND table_namespace = $2 AND table_name = $3 AND metadata_location = $4"
);

/// One table's pointer, from where it must be to where it goes.
#[derive(Clone, Copy, Debug)]
pub struct Move<'a> {
    pub table: &'a TableName,
    pub from: &'a str,
    /// `None`: it stays where it is.
    pub to: Option<&'a str>,
}

/// What became of a conditional swap of several pointers.
#[derive(Debug)]
pub enum SetSwap {
    Done,
    /// The pointer at this position of the caller's list is not where it was expected; none was moved.
    Stale(usize),
    /// Nothing was applied.
    NotApplied(CatalogError),
    /// The commit was sent and its answer was lost.
    Unknown(String),
}

impl CatalogDatabase {
    /// Moves every pointer, if each is where it is expected.
    pub async fn swap_all(&self, moves: &[Move<'_>]) -> SetSwap {
        let mut attempt = 1;
        loop {
            match self.try_swap_all(moves).await {
                Err(error) if self.place.is_busy(&error) && attempt < BUSY_ATTEMPTS => attempt += 1,
                Err(error) => return SetSwap::NotApplied(self.place.unwritten(error)),
                Ok(swap) => return swap,
            }
        }
    }

    /// One attempt. An error means that nothing was applied: dropping the transaction rolls it back.
    async fn try_swap_all(&self, moves: &[Move<'_>]) -> Result<SetSwap, sqlx::Error> {
        let mut transaction = self.begin().await?;
        // In one order everywhere: where rows are locked one by one, two such transactions never wait for each other.
        let mut order: Vec<(usize, &Move<'_>)> = moves.iter().enumerate().collect();
        order.sort_by_key(|(_, one)| one.table);
        for (at, Move { table, from, to }) in order {
            let found = match to {
                Some(to) => {
                    query(SWAP.on(self.layout))
                        .bind(*to)
                        .bind(*from)
                        .bind(&self.catalog)
                        .bind(table.namespace_text())
                        .bind(&table.name)
                        .execute(&mut transaction)
                        .await?
                }
                None => {
                    query(STAY.on(self.layout))
                        .bind(&self.catalog)
                        .bind(table.namespace_text())
                        .bind(&table.name)
                        .bind(*from)
                        .execute(&mut transaction)
                        .await?
                }
            };
            if found != 1 {
                transaction.rollback().await?;
                return Ok(SetSwap::Stale(at));
            }
        }
        match transaction.commit().await {
            Ok(()) => Ok(SetSwap::Done),
            Err(error) if self.place.is_undone(&error) => Err(error),
            Err(error) => {
                Ok(SetSwap::Unknown(format!("the commit in {} failed half-way: {error}", self.place)))
            }
        }
    }
}
