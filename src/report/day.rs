//! A calendar day in a time zone, as a range of instants. A day is 23 or 25 hours long where the clock
//! changes; a day that a zone skipped altogether is empty.

use chrono::{Days, NaiveDate, NaiveDateTime, NaiveTime, TimeDelta, TimeZone as _};
use chrono_tz::Tz;
use serde::Serialize;

use crate::near::nearest;

/// Gaps in local time are looked across in steps of this many minutes: every known change of a clock is a
/// multiple of it.
const GAP_STEP_MINUTES: i64 = 15;
/// No gap in local time is longer: a zone that crosses the date line skips a day.
const MAX_GAP_HOURS: i64 = 26;

/// `[start, end)` in milliseconds since the epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Day {
    pub date: NaiveDate,
    /// IANA name.
    pub timezone: String,
    pub start_ms: i64,
    pub end_ms: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DayError {
    #[error("'{0}' is no date")]
    Date(String),
    #[error("'{name}' is no time zone")]
    Zone { name: String, near: Option<&'static str> },
    #[error("{0} is outside of what can be computed")]
    Range(NaiveDate),
}

impl DayError {
    pub fn next(&self) -> String {
        match self {
            Self::Date(_) => "write it as 2013-08-20".to_owned(),
            Self::Zone { near: Some(near), .. } => format!("did you mean '{near}'?"),
            Self::Zone { near: None, .. } => "write an IANA name, such as America/New_York or UTC".to_owned(),
            Self::Range(_) => "name a nearer date".to_owned(),
        }
    }
}

impl Day {
    pub fn parse(date: &str, timezone: &str) -> Result<Self, DayError> {
        let day = NaiveDate::parse_from_str(date, "%Y-%m-%d").map_err(|_| DayError::Date(date.to_owned()))?;
        let zone: Tz = timezone.parse().map_err(|_| DayError::Zone {
            name: timezone.to_owned(),
            near: nearest(timezone, chrono_tz::TZ_VARIANTS.iter().map(|zone| zone.name())),
        })?;
        let next = day.checked_add_days(Days::new(1)).ok_or(DayError::Range(day))?;
        Ok(Self {
            date: day,
            timezone: zone.name().to_owned(),
            start_ms: first_instant(day, zone).ok_or(DayError::Range(day))?,
            end_ms: first_instant(next, zone).ok_or(DayError::Range(day))?,
        })
    }

    /// Today's date in a zone.
    pub fn today(timezone: &str, now_ms: i64) -> Result<String, DayError> {
        // The zone's own error message is wanted, whatever the date.
        Self::parse("2000-01-01", timezone)?;
        let zone: Tz = timezone.parse().unwrap_or(Tz::UTC);
        let now = zone.timestamp_millis_opt(now_ms).earliest();
        Ok(now.map(|now| now.date_naive().to_string()).unwrap_or_default())
    }

    pub fn hours(&self) -> f64 {
        (self.end_ms - self.start_ms) as f64 / 3_600_000.0
    }
}

/// The first instant of a date: midnight, or the first local time after it that exists.
fn first_instant(date: NaiveDate, zone: Tz) -> Option<i64> {
    let mut local: NaiveDateTime = date.and_time(NaiveTime::MIN);
    let last = local.checked_add_signed(TimeDelta::hours(MAX_GAP_HOURS))?;
    while local <= last {
        // Where midnight comes twice the day begins with the first.
        if let Some(instant) = zone.from_local_datetime(&local).earliest() {
            return Some(instant.timestamp_millis());
        }
        local = local.checked_add_signed(TimeDelta::minutes(GAP_STEP_MINUTES))?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hours(date: &str, zone: &str) -> f64 {
        Day::parse(date, zone).unwrap().hours()
    }

    #[test]
    fn a_day_begins_at_local_midnight() {
        let day = Day::parse("2013-08-20", "America/New_York").unwrap();
        // 04:00 UTC under daylight saving time.
        assert_eq!(day.start_ms, 1_376_971_200_000);
        assert_eq!(day.hours(), 24.0);
    }

    #[test]
    fn days_on_which_the_clock_changes_have_23_or_25_hours() {
        assert_eq!(hours("2013-03-10", "America/New_York"), 23.0);
        assert_eq!(hours("2013-11-03", "America/New_York"), 25.0);
        assert_eq!(hours("2013-04-07", "Australia/Lord_Howe"), 24.5);
    }

    #[test]
    fn neighbouring_days_meet_without_gap_or_overlap() {
        for zone in ["America/New_York", "America/Sao_Paulo", "Asia/Kathmandu", "Pacific/Apia"] {
            for (one, two) in [("2013-03-09", "2013-03-10"), ("2013-10-19", "2013-10-20")] {
                let (one, two) = (Day::parse(one, zone).unwrap(), Day::parse(two, zone).unwrap());
                assert_eq!(one.end_ms, two.start_ms, "{zone}");
            }
        }
    }

    #[test]
    fn a_missing_midnight_and_a_skipped_day_are_days_too() {
        // Clocks went from 00:00 to 01:00.
        assert_eq!(hours("2013-10-20", "America/Sao_Paulo"), 23.0);
        // Samoa crossed the date line and had no 30 December.
        assert_eq!(hours("2011-12-30", "Pacific/Apia"), 0.0);
        assert_eq!(hours("2011-12-31", "Pacific/Apia"), 24.0);
    }

    #[test]
    fn wrong_dates_and_zones_say_what_to_write() {
        assert_eq!(Day::parse("20.8.2013", "UTC").unwrap_err().next(), "write it as 2013-08-20");
        assert_eq!(Day::parse("2013-02-30", "UTC").unwrap_err(), DayError::Date("2013-02-30".to_owned()));
        let error = Day::parse("2013-08-20", "america/new_york").unwrap_err();
        assert_eq!(error.next(), "did you mean 'America/New_York'?");
    }

    #[test]
    fn today_depends_on_the_zone() {
        let ms = 1_376_971_200_000 - 1; // 2013-08-20 03:59:59.999 UTC
        assert_eq!(Day::today("UTC", ms).unwrap(), "2013-08-20");
        assert_eq!(Day::today("America/New_York", ms).unwrap(), "2013-08-19");
    }
}
