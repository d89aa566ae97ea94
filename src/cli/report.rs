//! `report daily`: gathers rows of ledger and catalog; the kernel computes, `report` renders.

use clap::{Args, Subcommand};
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::lineage::ChainEnd;
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::summary::{Balance, DayRows, EndedRequest, OpenRequest, TargetHistory, day_figures};

use super::answer::Answer;
use super::context::Context;
use super::exit::Exit;
use super::request::OPEN_WORDS;
use crate::error::UserError;
use crate::ledger::{ForeignKind, ForeignRow, Ledger, RequestFilter, RequestRow, TargetHead};
use crate::report::{DailyReport, Day, DayError, Format, NotCounted};
use crate::table::catalog::{Catalog, CatalogError};

#[derive(Debug, Subcommand)]
pub enum ReportCommand {
    /// The queue summary of one day: the requests that ended in it.
    Daily(DailyArgs),
}

#[derive(Debug, Args)]
pub struct DailyArgs {
    /// The day, such as 2013-08-20 [default: today].
    #[arg(long)]
    pub date: Option<String>,
    /// IANA time zone in which the day is a day.
    #[arg(long, default_value = "UTC", value_name = "ZONE")]
    pub timezone: String,
    /// How it is printed; --json is the same as json.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

impl From<DayError> for UserError {
    fn from(error: DayError) -> Self {
        let next = error.next();
        Self::new(ReasonCode::InvalidArgument, error.to_string()).with_next(next)
    }
}

pub async fn run(context: &Context, command: ReportCommand) -> Result<Answer, UserError> {
    let ReportCommand::Daily(DailyArgs { date, timezone, format }) = command;
    let now_ms = context.now_ms();
    let date = match date {
        Some(date) => date,
        None => Day::today(&timezone, now_ms)?,
    };
    let day = Day::parse(&date, &timezone)?;
    let ledger = context.ledger().await?;
    // A queue that has worked on nothing yet has a report all the same, and needs no catalog for it.
    let catalog = match ledger.target_heads().await?.is_empty() {
        true => None,
        false => Some(context.catalog().await?.as_ref()),
    };
    let report = daily(ledger, catalog, day, now_ms).await?;
    let exit = if report.adds_up() { Exit::Ok } else { Exit::of_error(ReasonCode::ReportUnbalanced) };
    Ok(Answer { text: report.render(format), json: report.to_json(), exit })
}

/// The report of a day as `now_ms` sees it. For other faces as well. Without a catalog no target is counted.
pub async fn daily(
    ledger: &Ledger,
    catalog: Option<&dyn Catalog>,
    day: Day,
    now_ms: i64,
) -> Result<DailyReport, UserError> {
    let all = RequestFilter { limit: Some(u32::MAX), ..RequestFilter::default() };
    let ended = RequestFilter { ended_between: Some((day.start_ms, day.end_ms)), ..all.clone() };
    let open = RequestFilter { states: OPEN_WORDS.iter().map(|w| (*w).to_owned()).collect(), ..all };
    let mut rows = DayRows {
        ended: ledger.requests(&ended).await?.iter().filter_map(ended_request).collect(),
        open: ledger.requests(&open).await?.iter().map(open_request).collect(),
        ..DayRows::default()
    };
    let mut balances = Vec::new();
    let mut not_counted = Vec::new();
    for head in ledger.target_heads().await? {
        let foreign = ledger.foreign(&head.table_uuid, &head.target).await?;
        for row in &foreign {
            if (day.start_ms..day.end_ms).contains(&row.seen_at_ms) {
                match row.kind {
                    ForeignKind::Maintenance => rows.maintenance += 1,
                    ForeignKind::Bypass => rows.bypasses += 1,
                }
            }
        }
        let facts = match catalog {
            Some(catalog) => facts_of(catalog, &head).await?,
            None => Err("the catalog was not asked".to_owned()),
        };
        match facts {
            Ok(facts) => {
                let landed = landed_since(ledger, &head).await?;
                balances.push(Balance::of(&history(&facts, &head, landed, &foreign)));
            }
            Err(why) => {
                not_counted.push(NotCounted { table: head.table, target: head.target, why });
            }
        }
    }
    Ok(DailyReport { day, figures: day_figures(&rows, now_ms), balances, not_counted })
}

fn ended_request(row: &RequestRow) -> Option<EndedRequest> {
    Some(EndedRequest {
        request: row.id,
        class: row.class.clone(),
        classification: row.classification.clone(),
        state: row.state,
        enqueued_ms: row.enqueued_at_ms,
        admitted_ms: row.admitted_at_ms,
        ended_ms: row.ended_at_ms?,
        set: row.set.map(|set| set.id),
    })
}

fn open_request(row: &RequestRow) -> OpenRequest {
    OpenRequest {
        request: row.id,
        class: row.class.clone(),
        state: row.state,
        enqueued_ms: row.enqueued_at_ms,
        set: row.set.map(|set| set.id),
    }
}

/// The table as the catalog has it, or why its target cannot be counted.
async fn facts_of(catalog: &dyn Catalog, head: &TargetHead) -> Result<Result<TableFacts, String>, UserError> {
    match catalog.load(&head.table).await {
        Ok(table) if table.facts.uuid == head.table_uuid => Ok(Ok(table.facts.clone())),
        Ok(_) => Ok(Err("the name belongs to another table now".to_owned())),
        Err(CatalogError::NotFound(_)) => Ok(Err("the table was dropped or renamed".to_owned())),
        // One table's trouble does not take the report away from the others.
        Err(error @ (CatalogError::Unreadable { .. } | CatalogError::Unsupported { .. })) => {
            Ok(Err(error.to_string()))
        }
        Err(error) => Err(error.into()),
    }
}

/// What the queue landed after it took over, or after an operator last adopted a head.
async fn landed_since(ledger: &Ledger, head: &TargetHead) -> Result<Vec<SnapshotId>, UserError> {
    let since_ms = head.adopted.as_ref().map_or(i64::MIN, |adopted| adopted.at_ms);
    let mut landed = Vec::new();
    for receipt in ledger.receipts(since_ms, i64::MAX).await? {
        let intent = receipt.intent;
        if intent.table_uuid == head.table_uuid && intent.target == head.target {
            landed.extend(intent.candidates);
        }
    }
    Ok(landed)
}

fn history(
    facts: &TableFacts,
    head: &TargetHead,
    landed: Vec<SnapshotId>,
    foreign: &[ForeignRow],
) -> TargetHistory {
    let (on_target, cut) = match facts.head(&head.target) {
        None => (Vec::new(), false),
        Some(now) => {
            let chain = facts.snapshots.chain(now);
            match head.baseline.and_then(|baseline| chain.ids.iter().position(|id| *id == baseline)) {
                Some(at) => (chain.ids[..at].to_vec(), false),
                // Without a baseline all of the chain is ours to explain. With one that is not in the
                // chain, its older part was expired (cut), or the target was rewound: that must show.
                None => (chain.ids, matches!(chain.end, ChainEnd::Cut(_))),
            }
        }
    };
    let since_ms = head.adopted.as_ref().map_or(i64::MIN, |adopted| adopted.at_ms);
    let of_kind = |kind| {
        foreign
            .iter()
            .filter(|row| row.kind == kind && row.seen_at_ms >= since_ms)
            .map(|row| row.snapshot)
            .collect()
    };
    TargetHistory {
        table: head.table.clone(),
        target: head.target.clone(),
        on_target,
        cut,
        landed,
        maintenance: of_kind(ForeignKind::Maintenance),
        bypass: of_kind(ForeignKind::Bypass),
    }
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::{Principal, RefName};

    use super::super::testing::facts;
    use super::*;
    use crate::ledger::Adoption;

    fn head(baseline: Option<i64>) -> TargetHead {
        TargetHead {
            table: "nyc.flights".parse().unwrap(),
            table_uuid: facts().uuid,
            target: RefName::main(),
            baseline: baseline.map(SnapshotId),
            last_known_head: None,
            last_landed_head: None,
            adopted: None,
        }
    }

    fn bypass(snapshot: i64, seen_at_ms: i64) -> ForeignRow {
        ForeignRow {
            table: "nyc.flights".parse().unwrap(),
            table_uuid: facts().uuid,
            target: RefName::main(),
            snapshot: SnapshotId(snapshot),
            kind: ForeignKind::Bypass,
            proof: None,
            text: String::new(),
            seen_at_ms,
        }
    }

    #[test]
    fn snapshots_are_counted_from_the_baseline_on() {
        let counted = history(&facts(), &head(Some(10)), vec![SnapshotId(20)], &[]);
        assert_eq!((counted.on_target.as_slice(), counted.cut), (&[SnapshotId(20)][..], false));
        assert!(Balance::of(&counted).holds());
        // First sight was an empty target: all of it is explained or it is not.
        let from_the_start = history(&facts(), &head(None), vec![SnapshotId(20)], &[bypass(10, 1)]);
        assert!(Balance::of(&from_the_start).holds());
    }

    #[test]
    fn an_expired_baseline_cuts_the_count_and_a_rewound_target_does_not_add_up() {
        let mut expired = facts();
        expired.snapshots.remove(SnapshotId(10));
        let counted = history(&expired, &head(Some(10)), vec![SnapshotId(20)], &[]);
        assert!(counted.cut && Balance::of(&counted).holds());

        // The baseline was 30; the target is at 20, on a complete line without it.
        let rewound = history(&facts(), &head(Some(30)), Vec::new(), &[]);
        assert!(!rewound.cut && !Balance::of(&rewound).holds());
    }

    #[test]
    fn what_was_before_an_adoption_is_not_counted_again() {
        let adopted = Adoption { by: Principal::new("ann"), at_ms: 100, reason: "restored".to_owned() };
        let head = TargetHead { adopted: Some(adopted), ..head(Some(10)) };
        let foreign = [bypass(7, 99), bypass(20, 100)];
        let counted = history(&facts(), &head, Vec::new(), &foreign);
        assert_eq!(counted.bypass, vec![SnapshotId(20)]);
        assert!(Balance::of(&counted).holds());
    }
}
