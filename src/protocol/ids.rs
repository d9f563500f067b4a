//! Identities and quantities as newtypes, so that they can't be mixed up.

use std::fmt;
use std::time::Duration;

macro_rules! newtype {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $inner);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self, f)
            }
        }
    };
}

newtype!(
    /// A physical page of a pool, counted from 0.
    PageIndex(u32), "page "
);
newtype!(
    /// A plane of a pool (one layer's K or V, or one state buffer), counted from 0.
    PlaneIndex(u16), "plane "
);
newtype!(
    /// A component of a transfer (main KV, sliding-window state, aux row), counted from 0.
    ComponentIndex(u16), "component "
);
newtype!(
    /// A pool of one engine, counted from 0 in the order of registration.
    PoolId(u16), "pool "
);
newtype!(
    /// The number of one block in a transfer; see [`super::BlockMap`].
    BlockIndex(u32), "block "
);
newtype!(
    /// A value per physical page: fresh at every grant, changed again at release. `[I10]`
    Generation(u64), "generation "
);
newtype!(
    /// Names one posted write or marker until its completion is reaped.
    Ticket(u64), "ticket "
);
newtype!(
    /// How often a transfer was resumed after a fence; part of every marker and `Complete`.
    Round(u16), "round "
);

/// One run of one engine: random, never reused, so a restarted peer is another peer. `[I10]`
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Incarnation(pub u64);

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Names one transfer for ever: made by the receiver, from its incarnation and a counter. `[I10]`
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TransferId {
    /// The receiver that opened the transfer.
    pub receiver: Incarnation,
    /// Counts the receiver's transfers from 1; 0 is no transfer.
    pub counter: u64,
}

impl fmt::Debug for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.receiver, self.counter)
    }
}

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// One life of one lane. The reader of the lane makes it; an epoch is never used twice by one
/// incarnation, so nothing of a fenced lane can be taken for its successor's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LaneId {
    /// Position among the lanes of one direction of one session.
    pub index: u16,
    /// Counts every lane that the reader ever opened, over all peers.
    pub epoch: u64,
}

impl fmt::Debug for LaneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lane {}.{}", self.index, self.epoch)
    }
}

impl fmt::Display for LaneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Nanoseconds of a monotonic clock that starts with the engine. The protocol never reads a
/// clock: whoever drives it passes the time in.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Time(pub u64);

impl Time {
    /// The latest time; used as "no timer is set".
    pub const NEVER: Time = Time(u64::MAX);

    /// This time plus `span`, capped at [`Time::NEVER`].
    pub fn after(self, span: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// How long from `self` until `later`; zero if that has passed.
    pub fn until(self, later: Time) -> Duration {
        Duration::from_nanos(later.0.saturating_sub(self.0))
    }
}
