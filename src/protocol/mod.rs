//! The protocol as pure state machines: events in (timers are events), actions out.
//!
//! What may live here: ids, layouts, the page ledger, messages and their codec, the sender, the
//! receiver and the session. What may not: I/O, a clock (time comes in as a [`Time`]), threads,
//! `unsafe`. The same code is model-checked, simulated and shipped.
#![forbid(unsafe_code)]

mod blocks;
mod cause;
mod coverage;
mod extent;
mod ids;
mod label;
mod layout;
pub mod ledger;
mod message;
mod outbox;
pub mod parts;
pub mod receiver;
pub mod sender;
pub mod session;
#[cfg(test)]
mod tests;
pub mod wire;

pub use blocks::{BlockError, BlockMap, BlockPlace, BlockRange, ComponentShape};
pub use cause::{Cause, Class, Phase, TransferError};
pub use coverage::{CoverageError, Slice, check_exact};
pub use extent::{Extent, ExtentError};
pub use ids::{
    BlockIndex, ComponentIndex, Generation, Incarnation, LaneId, PageIndex, PlaneIndex, PoolId,
    Round, Ticket, Time, TransferId,
};
pub use label::{Binding, Label};
pub use layout::{Fingerprint, PoolLayout};
pub use ledger::{Ledger, LedgerCounts, LedgerError, PageState};
pub use message::{
    Grant, GrantComponent, Hello, LaneDrain, MAGIC, MIN_VERSION, Manifest, ManifestComponent,
    Message, PoolCapacity, VERSION,
};

/// The total of page digests: their wrapping sum.
pub fn wrapping_total(digests: &[u64]) -> u64 {
    digests.iter().fold(0, |sum, digest| sum.wrapping_add(*digest))
}
