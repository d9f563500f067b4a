//! Checks that scenarios share.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use sealift::protocol::{Cause, Incarnation, Label, Phase, TransferError, TransferId};

/// No wait of a test is longer. Reaching it is a failure, not a verdict on anything.
pub const GUARD: Duration = Duration::from_secs(10);

/// Waits until `holds`, and fails the test at the guard.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + GUARD;
    while !holds() {
        assert!(Instant::now() < until, "not within {GUARD:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What an error has to say.
#[derive(Clone, Debug)]
pub struct Expect {
    pub transfer: Option<TransferId>,
    pub label: Label,
    pub peer: Option<Incarnation>,
    pub phase: Phase,
    pub done: RangeInclusive<u64>,
    pub total: u64,
    pub cause: Cause,
}

/// Every field is as expected, and the text for people says all of it.
#[track_caller]
pub fn assert_error(error: &TransferError, expect: Expect) {
    assert_eq!(error.cause, expect.cause, "{error}");
    assert_eq!(error.transfer, expect.transfer, "{error}");
    assert_eq!(error.label, expect.label, "{error}");
    assert_eq!(error.peer, expect.peer, "{error}");
    assert_eq!(error.phase, expect.phase, "{error}");
    assert!(expect.done.contains(&error.bytes_done), "{error}; expected {:?}", expect.done);
    assert_eq!(error.bytes_total, expect.total, "{error}");
    assert_eq!(error.class(), error.cause.class());

    let text = error.to_string();
    let transfer = expect.transfer.map_or("(not opened)".to_owned(), |id| id.to_string());
    let peer = expect.peer.map_or("no peer yet".to_owned(), |peer| peer.to_string());
    let bytes = format!("{} of {} bytes", error.bytes_done, error.bytes_total);
    let remedy = format!("{}: {}", error.class(), error.cause.remedy());
    let phase = format!("phase {}", error.phase);
    let parts = [transfer, expect.label.to_string(), peer, phase, bytes, remedy];
    for part in parts.into_iter().chain([expect.cause.to_string()]) {
        assert!(text.contains(&part), "{text:?} doesn't say {part:?}");
    }
}
