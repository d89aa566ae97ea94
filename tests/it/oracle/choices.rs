//! What pipelines and strangers do next, drawn from a history's numbers.

use std::collections::{BTreeMap, BTreeSet};

use super::history::History;
use super::pipeline::{Files, files_of};
use super::rows::{Filter, Op, Query};
use crate::support::Order;

/// Days that histories write to: few, so that everything meets.
const DAYS: std::ops::Range<u32> = 20..24;

impl History {
    pub(super) fn op_of(&mut self, name: &str, files: &Files) -> Op {
        let dice = self.random.below(100);
        match name.split('/').next().unwrap() {
            "ingest" => match dice {
                0..80 => Op::Append(self.new_rows(2)),
                80..90 => self.replace_days(),
                _ => self.overwrite_where(),
            },
            "load" => match dice {
                0..40 => Op::Append(self.new_rows(3)),
                40..60 => self.replace_days(),
                60..82 => self.overwrite_where(),
                82..89 => Op::Compact(self.some_days()),
                89..96 => self.update(files),
                _ => Op::DeleteDays(self.some_days()),
            },
            "transform" => match dice {
                0..55 => self.overwrite_where(),
                55..85 => self.replace_days(),
                85..93 => Op::DeleteDays(self.some_days()),
                _ => Op::Append(self.new_rows(1)),
            },
            _ => match dice {
                0..70 => self.insert_if_absent(files),
                _ => Op::Append(self.new_rows(1)),
            },
        }
    }

    pub(super) async fn stranger(&mut self) -> Op {
        let files = files_of(&self.house, "main").await;
        match self.random.below(100) {
            0..50 => Op::Append(self.new_rows(2)),
            50..75 => self.replace_days(),
            75..85 => Op::DeleteDays(self.some_days()),
            _ => self.update(&files),
        }
    }

    pub(super) fn replace_days(&mut self) -> Op {
        let days = self.some_days();
        let rows = days.iter().flat_map(|day| self.rows_of(*day, 2)).collect();
        Op::ReplaceDays { days, rows }
    }

    pub(super) fn overwrite_where(&mut self) -> Op {
        let day = self.day();
        let filter = match self.random.below(4) {
            0 => Filter::Status("late".to_owned()),
            1 => Filter::Even(day),
            2 => Filter::Days(day, (day + 1).min(DAYS.end - 1)),
            _ => Filter::Days(day, day),
        };
        let query = match self.random.below(6) {
            0 => Query::Values(Vec::new()),
            1 => Query::Feed { version: self.random.below(self.feed.versions.len()) },
            2 => Query::Dearer,
            3 => {
                let id = self.id();
                return Op::OverwriteWhere {
                    filter: Filter::Days(day, day),
                    query: Query::Count { id, day },
                };
            }
            _ => {
                let mut rows = self.rows_of(day, 2);
                if filter == Filter::Status("late".to_owned()) {
                    rows.iter_mut().for_each(|row| row.status = "late".to_owned());
                }
                rows.retain(|row| filter.matches(row));
                Query::Values(rows)
            }
        };
        Op::OverwriteWhere { filter, query }
    }

    /// Some files of a day that has others as well; whole days would be a replacement (rule C7).
    pub(super) fn update(&mut self, files: &Files) -> Op {
        let mut by_day: BTreeMap<u32, Vec<&Vec<Order>>> = BTreeMap::new();
        for rows in files.values() {
            by_day.entry(rows[0].day).or_default().push(rows);
        }
        let candidates: Vec<BTreeSet<i64>> = by_day
            .values()
            .filter(|of_day| of_day.len() > 1)
            .map(|of_day| of_day[0].iter().map(|row| row.id).collect())
            .filter(|ids: &BTreeSet<i64>| {
                let holders = files.values().filter(|rows| rows.iter().any(|row| ids.contains(&row.id)));
                holders.count() == 1
            })
            .collect();
        match candidates.is_empty() {
            true => Op::Append(self.new_rows(1)),
            false => Op::Update { ids: self.random.pick(&candidates).clone() },
        }
    }

    pub(super) fn insert_if_absent(&mut self, files: &Files) -> Op {
        let mut rows = self.new_rows(2);
        if let Some(known) = files.values().flatten().next() {
            rows.push(known.clone());
        }
        Op::InsertIfAbsent(rows)
    }

    pub(super) fn new_rows(&mut self, most: usize) -> Vec<Order> {
        let mut rows = Vec::new();
        for _ in 0..=self.random.below(most) {
            let day = self.day();
            rows.extend(self.rows_of(day, 1));
        }
        rows
    }

    /// Up to `most` rows of a day. One in twelve brings an order that may be there already.
    pub(super) fn rows_of(&mut self, day: u32, most: usize) -> Vec<Order> {
        let mut rows: Vec<Order> = Vec::new();
        for _ in 0..=self.random.below(most) {
            let id = if self.random.chance(8) {
                1 + i64::try_from(self.random.below(usize::try_from(self.next_id).unwrap())).unwrap()
            } else {
                self.id()
            };
            let status = if self.random.chance(30) { "late" } else { "new" };
            if rows.iter().all(|row| row.id != id) {
                rows.push(Order { id, day, status: status.to_owned(), cents: 100 * id });
            }
        }
        rows
    }

    pub(super) fn id(&mut self) -> i64 {
        self.next_id += 1;
        self.next_id
    }

    pub(super) fn day(&mut self) -> u32 {
        DAYS.start + u32::try_from(self.random.below(DAYS.len())).unwrap()
    }

    pub(super) fn some_days(&mut self) -> BTreeSet<u32> {
        (0..=self.random.below(2)).map(|_| self.day()).collect()
    }
}
