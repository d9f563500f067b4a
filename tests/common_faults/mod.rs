//! What the fault tests share: nodes in this process and in processes of their own, the memory
//! that both can see, and what the kernel says of a process.
//!
//! A test binary is its own helper: [`child::Child`] runs it again with only `role_entry`, which
//! serves commands over stdin and stdout as long as its parent lives.

// Each test binary uses a part of this.
#![allow(dead_code)]

pub(crate) mod child;
pub(crate) mod memory;
pub(crate) mod node;
pub(crate) mod process;
pub(crate) mod receiver_survives;
pub(crate) mod sender_survives;

use std::time::{Duration, Instant};

use node::Spec;

/// What the sender has when it begins.
pub(crate) const OLD: u8 = 0x5a;
/// What is put into the source once it is free: must never arrive anywhere.
pub(crate) const NEW: u8 = 0xa5;
/// What is put into pages that were given back: must stay.
pub(crate) const CANARY: u8 = 0xc3;
/// What a later, healthy transfer moves.
pub(crate) const FRESH: u8 = 0x77;

/// Pages of every pool here, unless a test is about size.
pub(crate) const PAGES: u32 = 256;
/// A page that has landed when a transfer is well under way, and far from its end.
pub(crate) const MIDWAY: u32 = PAGES / 8;
/// How long a canary is watched after a stopped process goes on.
pub(crate) const WATCH: Duration = Duration::from_secs(2);
/// The acceptance's slack after a deadline or a liveness limit.
pub(crate) const SLACK: Duration = Duration::from_secs(1);
/// No step takes so long unless it hangs.
pub(crate) const HANG: Duration = Duration::from_secs(30);

/// What happens to the other process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// `kill -9`.
    Kill,
    /// SIGSTOP, and SIGCONT once the survivor has reused what it got back.
    Stop,
}

/// What ends the survivor's transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// A deadline that passes long before the peer is given up.
    Deadline,
    /// Liveness, or a link that doesn't come back, long before the deadline.
    Liveness,
}

impl End {
    pub(crate) fn deadline(self) -> Duration {
        match self {
            End::Deadline => Duration::from_millis(1200),
            End::Liveness => HANG,
        }
    }

    /// Settings of both nodes.
    pub(crate) fn spec(self) -> Spec {
        let (liveness, reconnect_grace) = match self {
            End::Deadline => (Duration::from_secs(20), Duration::from_secs(20)),
            End::Liveness => (Duration::from_millis(800), Duration::from_millis(500)),
        };
        Spec { liveness, reconnect_grace, ..Spec::default() }
    }

    /// The survivor failed for the right reason and in time. `begun` and `struck`: how long ago
    /// the transfer began and the fault came.
    pub(crate) fn check(self, fault: Fault, cause: &str, begun: Duration, struck: Duration) {
        let spec = self.spec();
        let silence = if fault == Fault::Stop { spec.liveness } else { spec.reconnect_grace };
        println!("{fault:?} {self:?}: {cause} {begun:?} after the start, {struck:?} after it");
        let (wanted, took, limit) = match self {
            End::Deadline => ("DeadlineExceeded", begun, self.deadline()),
            End::Liveness => ("PeerLost", struck, silence),
        };
        assert_eq!(cause, wanted);
        assert!(took < limit + SLACK, "the failure came after {took:?}; the limit is {limit:?}");
    }
}

/// Waits for something that comes soon or never.
pub(crate) fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < HANG, "{what}: not within {HANG:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
