//! What goes into the receiver, and what it asks for.

use std::time::Duration;

use crate::protocol::cause::TransferError;
use crate::protocol::coverage::Slice;
use crate::protocol::ids::{Generation, Incarnation, LaneId, PageIndex, PoolId, TransferId};
use crate::protocol::label::{Binding, Label};
use crate::protocol::layout::PoolLayout;
use crate::protocol::message::Message;

/// Names one assembly of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AssemblyId(pub u64);

/// Limits in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReceiverSettings {
    /// First resend of an unacknowledged message.
    pub resend: Duration,
    /// How long a failed transfer waits for its sender to drain before it fences the lanes.
    pub drain_grace: Duration,
    /// How long a sealed transfer goes on telling a sender that doesn't acknowledge.
    pub linger: Duration,
    /// Most resumes of one transfer.
    pub max_rounds: u16,
}

impl Default for ReceiverSettings {
    fn default() -> Self {
        ReceiverSettings {
            resend: Duration::from_millis(500),
            drain_grace: Duration::from_millis(500),
            linger: Duration::from_secs(10),
            max_rounds: 64,
        }
    }
}

/// Pages of one pool, leased under one generation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseComponent {
    /// The pool.
    pub pool: PoolId,
    /// Its layout.
    pub layout: PoolLayout,
    /// The pages, in logical order.
    pub pages: Vec<PageIndex>,
    /// Their generation.
    pub generation: Generation,
}

/// What one sender is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OpenPart {
    /// The sender.
    pub peer: Incarnation,
    /// Finds its half.
    pub label: Label,
    /// What request it is for.
    pub binding: Binding,
    /// What it shall write; at most one slice per lease component.
    pub slices: Vec<Slice>,
}

/// What to do next. In order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ReceiverAction {
    /// Send a message to a peer.
    Send {
        /// To.
        peer: Incarnation,
        /// What.
        message: Message,
    },
    /// Let the part's bytes land.
    OpenLanding {
        /// The assembly.
        assembly: AssemblyId,
        /// The part.
        id: TransferId,
        /// Who may write it.
        peer: Incarnation,
        /// Generation that every write must state.
        generation: Generation,
        /// What of the lease the part covers.
        slices: Vec<Slice>,
        /// Digest what lands.
        integrity: bool,
    },
    /// Stop its bytes from landing; [`super::Receiver::on_landing_closed`] must follow.
    CloseLanding {
        /// The part.
        id: TransferId,
    },
    /// No frame of it can come any more.
    ForgetLanding {
        /// The part.
        id: TransferId,
    },
    /// Take back what landed over a fenced lane.
    Unland {
        /// The part.
        id: TransferId,
        /// The lane.
        lane: LaneId,
    },
    /// Fence a lane; [`super::Receiver::on_lane_fenced`] must follow.
    Fence {
        /// Of this peer.
        peer: Incarnation,
        /// The lane.
        lane: LaneId,
    },
    /// The one terminal event of an assembly. `[I9]`
    Finished {
        /// Which.
        assembly: AssemblyId,
        /// Sealed (or, without integrity, verified by coverage alone), or why not.
        outcome: Result<(), TransferError>,
    },
    /// The pages of a failed assembly are free again. Pages to be zeroed first come with it.
    Released {
        /// Which.
        assembly: AssemblyId,
        /// Per pool: pages that must be zeroed, then reported to [`crate::protocol::Ledger::scrubbed`].
        scrub: Vec<(PoolId, Vec<PageIndex>)>,
    },
}
