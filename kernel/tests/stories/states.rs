//! The transition function of request states, every state against every event.

use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::{RequestEvent, RequestState};

const CODE: ReasonCode = ReasonCode::OverlapsAhead;
const OTHER: ReasonCode = ReasonCode::Conflict;

const STATES: [RequestState; 13] = [
    RequestState::Queued,
    RequestState::Held(CODE),
    RequestState::Planning,
    RequestState::Staged,
    RequestState::Checking,
    RequestState::Landing,
    RequestState::Unknown,
    RequestState::InReview,
    RequestState::Landed,
    RequestState::AlreadyPublished,
    RequestState::Refused(CODE),
    RequestState::Withdrawn(CODE),
    RequestState::Cancelled,
];

const EVENTS: [RequestEvent; 13] = [
    RequestEvent::Admit,
    RequestEvent::Hold(OTHER),
    RequestEvent::Requeue,
    RequestEvent::Stage,
    RequestEvent::Check,
    RequestEvent::WriteIntent,
    RequestEvent::LoseAnswer,
    RequestEvent::Land,
    RequestEvent::FindPublished,
    RequestEvent::Refuse(OTHER),
    RequestEvent::Withdraw(OTHER),
    RequestEvent::AskReview,
    RequestEvent::Cancel,
];

/// Rows are states and columns events, both in the order above; `-` is refused. The state before is the
/// first word.
const TABLE: &str = "
queued            planning held queued -      -        -       -       -      already-published refused withdrawn in-review cancelled
held              planning held queued -      -        -       -       -      already-published refused withdrawn in-review cancelled
planning          -        held queued staged -        -       -       -      already-published refused withdrawn in-review cancelled
staged            -        held queued -      checking -       -       -      already-published refused withdrawn in-review -
checking          -        held queued -      -        landing -       -      already-published refused withdrawn in-review -
landing           -        -    queued -      -        -       unknown landed -                 -       -         -         -
unknown           -        -    queued -      -        -       -       landed -                 -       -         -         -
in-review         planning held queued -      -        -       -       -      already-published refused withdrawn in-review cancelled
landed            -        -    -      -      -        -       -       -      -                 -       -         -         -
already-published -        -    -      -      -        -       -       -      -                 -       -         -         -
refused           -        -    -      -      -        -       -       -      -                 -       -         -         -
withdrawn         -        -    -      -      -        -       -       -      -                 -       -         -         -
cancelled         -        -    -      -      -        -       -       -      -                 -       -         -         -
";

#[test]
fn every_state_answers_every_event_as_written_down() {
    let rows: Vec<Vec<&str>> =
        TABLE.lines().filter(|l| !l.is_empty()).map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), STATES.len());
    for (state, row) in STATES.iter().zip(&rows) {
        assert_eq!(state.word(), row[0]);
        assert_eq!(row.len(), EVENTS.len() + 1, "{state}");
        for (event, expected) in EVENTS.iter().zip(&row[1..]) {
            match state.after(*event) {
                Ok(next) => assert_eq!(next.word(), *expected, "{state} after {event:?}"),
                Err(error) => {
                    assert_eq!("-", *expected, "{state} after {event:?}");
                    assert_eq!((error.from, error.event), (*state, *event));
                }
            }
        }
    }
}

#[test]
fn final_states_never_change() {
    for state in STATES.into_iter().filter(|s| s.is_final()) {
        assert!(EVENTS.iter().all(|event| state.after(*event).is_err()), "{state}");
    }
    assert_eq!(STATES.iter().filter(|s| s.is_final()).count(), 5);
    assert!(STATES.iter().all(|s| !(s.is_final() && s.is_waiting())));
}

#[test]
fn promise_4_only_the_catalogs_answer_or_a_requeue_leads_out_of_a_landing() {
    for state in [RequestState::Landing, RequestState::Unknown] {
        let mut reached: Vec<&str> =
            EVENTS.iter().filter_map(|event| state.after(*event).ok()).map(RequestState::word).collect();
        reached.retain(|word| *word != "unknown");
        assert_eq!(reached, ["queued", "landed"], "out of {state}");
    }
    for state in STATES {
        for event in EVENTS {
            if state.after(event) == Ok(RequestState::Landed) {
                assert!(matches!(state, RequestState::Landing | RequestState::Unknown), "{state}");
                assert_eq!(event, RequestEvent::Land);
            }
        }
    }
}

#[test]
fn a_given_reason_is_the_new_states_reason() {
    for (event, expected) in [
        (RequestEvent::Hold(OTHER), RequestState::Held(OTHER)),
        (RequestEvent::Refuse(OTHER), RequestState::Refused(OTHER)),
        (RequestEvent::Withdraw(OTHER), RequestState::Withdrawn(OTHER)),
    ] {
        assert_eq!(RequestState::Held(CODE).after(event), Ok(expected));
        assert_eq!(expected.reason(), Some(OTHER));
    }
}

#[test]
fn every_final_state_can_be_reached_and_every_open_one_can_end() {
    let mut reached = vec![RequestState::Queued];
    let mut at = 0;
    while at < reached.len() {
        for event in EVENTS {
            if let Ok(next) = reached[at].after(event)
                && !reached.iter().any(|state| state.word() == next.word())
            {
                reached.push(next);
            }
        }
        at += 1;
    }
    assert_eq!(reached.len(), STATES.len(), "{reached:?}");
    for state in STATES.into_iter().filter(|s| !s.is_final()) {
        // By a requeue, if by nothing else.
        assert_eq!(state.after(RequestEvent::Requeue), Ok(RequestState::Queued));
    }
}

#[test]
fn stored_words_and_reasons_read_back_and_no_other_pair_does() {
    let words: Vec<&str> = STATES.iter().map(|s| s.word()).collect();
    for code in ReasonCode::ALL {
        assert_eq!(ReasonCode::from_code(code.code()), Some(*code));
        assert!(!code.meaning().is_empty() && !code.next_action().is_empty(), "{code}");
    }
    for word in words.iter().copied().chain(["", "Queued", "merged"]) {
        for reason in [None, Some(CODE)] {
            let known = STATES.iter().find(|s| s.word() == word && s.reason() == reason);
            assert_eq!(RequestState::from_parts(word, reason), known.copied(), "{word} {reason:?}");
        }
    }
}

#[test]
fn reason_codes_are_distinct_words() {
    let mut codes: Vec<&str> = ReasonCode::ALL.iter().map(|c| c.code()).collect();
    codes.sort_unstable();
    codes.dedup();
    assert_eq!(codes.len(), ReasonCode::ALL.len());
    assert!(codes.iter().all(|c| c.chars().all(|ch| ch.is_ascii_lowercase() || ch == '-')), "{codes:?}");
    assert_eq!(ReasonCode::from_code("Conflict"), None);
}

#[test]
fn states_read_as_people_say_them() {
    assert_eq!(RequestState::Held(CODE).to_string(), "held(overlaps-ahead)");
    assert_eq!(RequestState::Queued.to_string(), "queued");
    let error = RequestState::Landed.after(RequestEvent::Cancel).unwrap_err();
    assert_eq!(error.to_string(), "a request that is landed cannot take Cancel");
}
