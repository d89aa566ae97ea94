//! Idempotency keys (specification, `Idempotency-Key`): a commit without an answer is sent again under its key, where the
//! server says that it knows keys, as long as it says that it knows them.
//!
//! Nothing rests on them (0012): the temporary branch settles a landing anyway. So a server whose word was found wrong
//! (`doctor`) is not believed, and nothing else changes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use reqwest::header::{HeaderName, HeaderValue};
use uuid::Uuid;

use super::wire::CatalogConfig;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Times that a commit is sent under one key.
const KEYED_ATTEMPTS: u32 = 3;
/// Longest time that a key is used, whatever the server offers: nobody waits longer for one commit.
const LONGEST_USE: Duration = Duration::from_secs(30 * 60);

/// What the server says of keys.
pub(super) struct Keys {
    /// How long one may be used, from when it is first sent; `None`: it knows no keys.
    lifetime: Option<Duration>,
    /// Its word was found wrong.
    distrusted: AtomicBool,
}

impl Keys {
    pub fn of(config: &CatalogConfig) -> Self {
        let lifetime = config.idempotency_key_lifetime.as_deref().and_then(|text| {
            let read = duration(text);
            if read.is_none() {
                tracing::warn!("'{text}' is no duration: idempotency keys of this catalog are not used");
            }
            read
        });
        Self { lifetime, distrusted: AtomicBool::new(false) }
    }

    pub fn are_known(&self) -> bool {
        self.lifetime.is_some() && !self.distrusted.load(Ordering::Relaxed)
    }

    pub fn distrust(&self) {
        self.distrusted.store(true, Ordering::Relaxed);
    }

    /// For the sendings of one commit.
    pub fn for_one_commit(&self) -> Sendings {
        let known = self.lifetime.filter(|_| self.are_known());
        let until = known.and_then(|lifetime| Instant::now().checked_add(lifetime.min(LONGEST_USE)));
        let header = until.and_then(|_| header(Uuid::now_v7()));
        Sendings { attempts: if header.is_some() { KEYED_ATTEMPTS } else { 1 }, header, until }
    }
}

/// The key as a header; a new one for each commit, of version 7 as the specification wants it.
pub(super) fn header(key: Uuid) -> Option<(HeaderName, HeaderValue)> {
    HeaderValue::from_str(&key.to_string()).ok().map(|value| (IDEMPOTENCY_KEY, value))
}

/// How often one commit is sent, and under which key.
pub(super) struct Sendings {
    header: Option<(HeaderName, HeaderValue)>,
    attempts: u32,
    until: Option<Instant>,
}

impl Sendings {
    pub fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        self.header.as_slice()
    }

    /// May it be sent again, `pause` from now, after `sent` sendings without an answer?
    pub fn again(&self, sent: u32, pause: Duration) -> bool {
        let in_time = |until: Instant| Instant::now().checked_add(pause).is_some_and(|then| then < until);
        sent < self.attempts && self.until.is_some_and(in_time)
    }
}

/// An ISO 8601 duration in weeks, days, hours, minutes and seconds: what a lifetime is made of.
fn duration(text: &str) -> Option<Duration> {
    let (date, time) = match text.trim().strip_prefix('P')?.split_once('T') {
        Some((_, "")) => return None,
        Some((date, time)) => (date, time),
        None => (text.trim().strip_prefix('P')?, ""),
    };
    if date.is_empty() && time.is_empty() {
        return None;
    }
    let days = sum_of(date, &[('W', 7 * 86_400), ('D', 86_400)])?;
    let hours = sum_of(time, &[('H', 3_600), ('M', 60), ('S', 1)])?;
    let sum = days + hours;
    (sum > 0.0).then(|| Duration::try_from_secs_f64(sum).ok())?
}

/// Numbers with their units, each unit once at most and in this order.
fn sum_of(text: &str, units: &[(char, u32)]) -> Option<f64> {
    let (mut sum, mut rest, mut units) = (0.0, text, units.iter());
    while !rest.is_empty() {
        let at = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at_checked(at)?;
        let unit = tail.chars().next()?;
        let (_, seconds) = units.find(|(name, _)| *name == unit)?;
        sum += number.parse::<f64>().ok()? * f64::from(*seconds);
        rest = tail.get(unit.len_utf8()..)?;
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(lifetime: Option<&str>) -> Keys {
        let config = CatalogConfig {
            idempotency_key_lifetime: lifetime.map(str::to_owned),
            ..CatalogConfig::default()
        };
        Keys::of(&config)
    }

    #[test]
    fn durations_are_read_as_iso_8601_writes_them() {
        for (text, seconds) in [
            ("PT30M", 1_800.0),
            ("PT24H", 86_400.0),
            ("P1D", 86_400.0),
            ("P2W", 1_209_600.0),
            ("P1DT2H3M4.5S", 93_784.5),
            (" PT1S ", 1.0),
        ] {
            assert_eq!(duration(text).map(|d| d.as_secs_f64()), Some(seconds), "{text}");
        }
        for text in [
            "", "P", "PT", "P1DT", "30M", "PT30", "PTM", "PT5M1H", "P1M", "PT-5M", "PT0S", "soon", "PT1.2.3S",
        ] {
            assert_eq!(duration(text), None, "{text}");
        }
    }

    #[test]
    fn a_commit_is_sent_again_only_under_a_key_that_is_still_known() {
        let known = keys(Some("PT30M")).for_one_commit();
        assert_eq!(known.headers().len(), 1);
        assert!(known.again(1, Duration::ZERO) && known.again(2, Duration::ZERO));
        assert!(!known.again(KEYED_ATTEMPTS, Duration::ZERO));
        // Its lifetime would be over by then.
        assert!(!known.again(1, Duration::from_secs(31 * 60)));
        for none in [keys(None), keys(Some("for ever"))] {
            let once = none.for_one_commit();
            assert!(!none.are_known() && once.headers().is_empty() && !once.again(1, Duration::ZERO));
        }
        let distrusted = keys(Some("PT30M"));
        distrusted.distrust();
        assert!(!distrusted.are_known() && distrusted.for_one_commit().headers().is_empty());
    }

    #[test]
    fn each_commit_has_a_key_of_its_own() {
        let keys = keys(Some("PT30M"));
        assert_ne!(keys.for_one_commit().headers(), keys.for_one_commit().headers());
    }
}
