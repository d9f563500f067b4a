//! What goes into the sender, and what it asks for.

use std::time::Duration;

use super::OfferId;
use crate::protocol::cause::TransferError;
use crate::protocol::ids::{Generation, Incarnation, LaneId, Round, Ticket, TransferId};
use crate::protocol::layout::Fingerprint;
use crate::protocol::message::Message;
use crate::protocol::{BlockRange, Extent};

/// Limits in time and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SenderSettings {
    /// First resend of an unacknowledged message.
    pub resend: Duration,
    /// How long a failed transfer's writes may take to end before their lanes are given up.
    pub drain_grace: Duration,
    /// Most bytes of one posted write, unless one block is longer.
    pub chunk_bytes: u64,
    /// Most blocks of one posted write.
    pub chunk_blocks: u32,
    /// Most bytes in flight on one lane, over all transfers.
    pub lane_window_bytes: u64,
    /// Most writes in flight on one lane, over all transfers.
    pub lane_window_writes: u32,
    /// Most bytes in flight of one transfer, over all lanes.
    pub transfer_window_bytes: u64,
    /// Most grants that wait for their send.
    pub max_pending_grants: usize,
    /// Most pages of one grant, and of all that wait.
    pub max_grant_pages: u64,
    /// Most ended transfers of which the last word is kept. Past it, everything up to the newest of
    /// the peer is answered as stale.
    pub max_tombstones: usize,
    /// Most refused labels that are remembered; the oldest goes first.
    pub max_refused_labels: usize,
}

impl Default for SenderSettings {
    fn default() -> Self {
        SenderSettings {
            resend: Duration::from_millis(500),
            drain_grace: Duration::from_millis(500),
            chunk_bytes: 1 << 20,
            chunk_blocks: 1024,
            lane_window_bytes: 4 << 20,
            lane_window_writes: 64,
            transfer_window_bytes: 16 << 20,
            max_pending_grants: 4096,
            max_grant_pages: 4 << 20,
            max_tombstones: 65_536,
            max_refused_labels: 65_536,
        }
    }
}

/// How a posted write or marker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteEnd {
    /// The transport says success.
    Success,
    /// It was taken back before it began.
    Cancelled,
    /// Anything else, known or not: the lane is lost for the transfer. `[I8]`
    Failed,
}

/// One component of what is sent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceComponent {
    /// The sender's pool.
    pub layout: Fingerprint,
    /// Pages.
    pub page_count: u32,
    /// What of each page; as many as the grant has, each as long.
    pub extents: Vec<Extent>,
    /// The extents are the whole page.
    pub whole_pages: bool,
}

/// What to do next. In order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SenderAction {
    /// Send a message to a peer.
    Send {
        /// To.
        peer: Incarnation,
        /// What.
        message: Message,
    },
    /// A grant met its send: from now on the transfer has this id.
    Matched {
        /// Which send.
        offer: OfferId,
        /// The transfer.
        id: TransferId,
        /// The receiver.
        peer: Incarnation,
        /// Digest what is written.
        integrity: bool,
    },
    /// Post a write; [`super::Sender::on_write_done`] must follow.
    Post {
        /// The transfer.
        id: TransferId,
        /// The receiver.
        peer: Incarnation,
        /// Over this lane.
        lane: LaneId,
        /// Names the write.
        ticket: Ticket,
        /// The grant's.
        generation: Generation,
        /// What.
        blocks: Vec<BlockRange>,
        /// Add the blocks' digests before the first byte leaves.
        digest: bool,
    },
    /// Post the in-band marker; [`super::Sender::on_write_done`] must follow.
    Marker {
        /// The transfer.
        id: TransferId,
        /// The receiver.
        peer: Incarnation,
        /// Over this lane.
        lane: LaneId,
        /// Of this round.
        round: Round,
        /// Names the marker.
        ticket: Ticket,
    },
    /// Take back what is queued and not begun.
    Cancel {
        /// The transfer.
        id: TransferId,
    },
    /// Close this end of a lane.
    KillLane {
        /// The receiver.
        peer: Incarnation,
        /// The lane.
        lane: LaneId,
    },
    /// Report the digests of what was written to [`super::Sender::on_digests`].
    Digest {
        /// The transfer.
        id: TransferId,
    },
    /// The one terminal event of a send. `[I9]`
    Finished {
        /// Which.
        offer: OfferId,
        /// Verified by the receiver, or why not.
        outcome: Result<(), TransferError>,
    },
    /// Nothing reads the source any more: it may be reused. Once per admitted send. `[I4]`
    SourceFree {
        /// Which.
        offer: OfferId,
    },
}
