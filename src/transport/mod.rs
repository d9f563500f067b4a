//! Moves bytes: control frames, and block writes over lanes. Knows no transfer states.
//!
//! What may live here: the [`Transport`] trait, its providers ([`tcp`], [`sim`]) and what they share
//! ([`landing`]). What may not: deciding what a transfer may do. A provider executes what the
//! engine asks and reports what happened; all calls return at once, all results are [`Event`]s.

pub mod landing;
pub mod sim;
pub mod tcp;

mod placement;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::protocol::{BlockRange, Generation, LaneId, Round, Ticket, TransferId};
pub use landing::{Landing, LandingError, LaneSet};
pub use placement::{DigestTable, Placement, PlacementError};

/// One control connection to one peer, and the lanes that were opened under it. Made by the
/// transport, never reused. Lanes die with their link.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

impl fmt::Debug for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "link {}", self.0)
    }
}

/// Which end of a lane this is. A lane carries writes one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LaneRole {
    /// Lands writes in its own memory, and may fence.
    Reader,
    /// Posts writes.
    Writer,
}

bitflags::bitflags! {
    /// What a transport does by itself. Goes into the Hello. `[I13]`
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Capabilities: u32 {
        /// A lane's marker proves that all writes before it on that lane are placed.
        const MARKER = 1;
        /// A fence makes further writes through a lane impossible, and says when it holds.
        const FENCE = 1 << 1;
        /// Source and landed bytes are digested.
        const DIGEST = 1 << 2;
        /// The reader itself confines every write to the live grant.
        const CONFINED = 1 << 3;
    }
}

/// What became of a posted write or marker. Only `Success` is success; what a provider can't name
/// is `Unknown`, and that is failure. `[I8]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompletionStatus {
    /// The transport accepted every byte; on a network that does not say that they are placed.
    Success,
    /// It was never begun: [`Transport::cancel`] came first. No byte left.
    Cancelled,
    /// The lane died first. Some, all or none of it may land on a live reader: never a proof.
    Flushed,
    /// The reader refused it.
    Refused,
    /// Any status that this code does not know.
    Unknown(u32),
}

/// Blocks to write, all of one transfer, over one lane.
#[derive(Clone, Debug)]
pub struct WriteRequest {
    /// The transfer.
    pub transfer: TransferId,
    /// The grant's generation, stated in every frame and checked by the reader.
    pub generation: Generation,
    /// Comes back in [`Event::WriteDone`].
    pub ticket: Ticket,
    /// What to write. Bounded by the engine's window. `[I6]`
    pub blocks: Vec<BlockRange>,
    /// Where the bytes are. Holds the memory alive and pinned. `[I4]`
    pub source: Arc<Placement>,
    /// Where to digest each block before its first byte is posted
    /// ([`DigestTable::add_source`]). `None` if integrity is off.
    pub digests: Option<Arc<DigestTable>>,
}

/// What happened. Order is kept per lane and per link.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A control connection stands.
    LinkUp {
        /// The link: for a dialled one, what [`Transport::connect`] returned.
        link: LinkId,
        /// The peer's address as seen here.
        peer: String,
        /// This side dialled.
        dialled: bool,
    },
    /// A control connection ended, or a dial failed. Its lanes are down too; each still wants its
    /// [`Transport::fence_lane`] on the reader's side.
    LinkDown {
        /// The link.
        link: LinkId,
        /// What the system said.
        why: String,
    },
    /// A control frame came in.
    Control {
        /// From this link.
        link: LinkId,
        /// At most [`MAX_CONTROL_LEN`] bytes.
        frame: Vec<u8>,
    },
    /// A lane is ready: as a writer for posting, as a reader for landing.
    LaneUp {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
        /// Which end this is.
        role: LaneRole,
    },
    /// A lane ended without a fence. Writer: every outstanding request has been or will be
    /// completed with [`CompletionStatus::Flushed`]. Reader: bytes may still be on the way, so
    /// this proves nothing; fence it.
    LaneDown {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
        /// Which end this is.
        role: LaneRole,
        /// What the system said.
        why: String,
    },
    /// The reader's end is out of service: no byte of this lane lands from here on. A proof.
    LaneFenced {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
    },
    /// A write or marker ended. Exactly one per [`Transport::post_write`] and
    /// [`Transport::post_marker`]; from then on the source isn't read for it. `[I4]`
    WriteDone {
        /// The lane it was posted on.
        lane: LaneId,
        /// Its transfer.
        transfer: TransferId,
        /// Its ticket.
        ticket: Ticket,
        /// How it ended.
        status: CompletionStatus,
    },
    /// The reader met a marker: every write of the transfer that was posted before it on this
    /// lane is placed.
    MarkerSeen {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
        /// The transfer that the marker ends.
        transfer: TransferId,
        /// Which of its rounds.
        round: Round,
    },
    /// The reader refused a write before a byte of it landed, and took the lane down (a
    /// [`Event::LaneDown`] follows).
    WriteRefused {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
        /// The transfer that the frame named.
        transfer: TransferId,
        /// Why.
        why: LandingError,
    },
    /// A landing is closed: no byte of the transfer lands from here on (with
    /// [`Capabilities::CONFINED`]), and the digests of what landed are in its [`DigestTable`].
    LandingClosed {
        /// The transfer.
        transfer: TransferId,
        /// Bytes that landed, each block counted once.
        landed_bytes: u64,
    },
    /// An I/O thread died. Health must fail. `[I14]`
    WorkerDied {
        /// Which, and why.
        why: String,
    },
}

/// Where a transport puts its events. May block when the engine is behind, which is the
/// back-pressure on peers that flood.
pub type EventSink = Arc<dyn Fn(Event) + Send + Sync>;

/// The longest control frame, in bytes.
pub const MAX_CONTROL_LEN: usize = 64 * 1024;

/// Why a call was refused at once.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The address can't be parsed or resolved.
    #[error("address {address:?} is unusable: {why}")]
    Address {
        /// As given.
        address: String,
        /// What is wrong with it.
        why: String,
    },
    /// The system refused.
    #[error("{what}: {why}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        why: String,
    },
    /// No such link, or it is down.
    #[error("{0:?} is not up")]
    NoLink(LinkId),
    /// No such lane under that link.
    #[error("{0:?} is not open")]
    NoLane(LaneId),
    /// The peer's lane parameters make no sense.
    #[error("the peer's lane parameters are malformed: {0}")]
    LaneParams(String),
    /// Longer than [`MAX_CONTROL_LEN`].
    #[error("a control frame of {len} bytes exceeds {MAX_CONTROL_LEN}")]
    ControlTooLong {
        /// Its length.
        len: usize,
    },
    /// So many control bytes wait to be sent that more are refused.
    #[error("{queued} control bytes wait for the peer already")]
    Congested {
        /// Bytes queued.
        queued: usize,
    },
}

/// A provider. Every call returns at once and is safe from any thread; a request made on a lane or
/// link that has gone is completed by an event, never dropped in silence.
pub trait Transport: Send + Sync {
    /// The provider's name: `tcp`, `sim`, ...
    fn name(&self) -> &'static str;

    /// What it does by itself.
    fn capabilities(&self) -> Capabilities;

    /// Where it listens, if it does.
    fn listen_address(&self) -> Option<String>;

    /// Dials. [`Event::LinkUp`] or [`Event::LinkDown`] follows within `timeout`.
    fn connect(&self, address: &str, timeout: Duration) -> Result<LinkId, TransportError>;

    /// Queues a control frame of at most [`MAX_CONTROL_LEN`] bytes.
    fn send_control(&self, link: LinkId, frame: &[u8]) -> Result<(), TransportError>;

    /// Closes a link and the lanes under it.
    fn close_link(&self, link: LinkId);

    /// Makes this side's half of a lane and returns the parameters that the other side needs.
    /// The reader prepares first, then the writer with the reader's parameters in hand.
    fn prepare_lane(
        &self,
        link: LinkId,
        lane: LaneId,
        role: LaneRole,
    ) -> Result<Vec<u8>, TransportError>;

    /// Joins the halves; [`Event::LaneUp`] or [`Event::LaneDown`] follows within `timeout`.
    fn start_lane(
        &self,
        link: LinkId,
        lane: LaneId,
        role: LaneRole,
        peer_params: &[u8],
        timeout: Duration,
    ) -> Result<(), TransportError>;

    /// Reader: takes the lane out of service, then [`Event::LaneFenced`], also for a lane that is
    /// down or unknown. Idempotent.
    fn fence_lane(&self, link: LinkId, lane: LaneId);

    /// Writer: closes this end; outstanding requests complete as [`CompletionStatus::Flushed`].
    fn kill_lane(&self, link: LinkId, lane: LaneId);

    /// Writer: posts blocks. One [`Event::WriteDone`].
    fn post_write(&self, link: LinkId, lane: LaneId, write: WriteRequest);

    /// Writer: posts the in-band marker after all earlier writes on this lane. One
    /// [`Event::WriteDone`].
    fn post_marker(
        &self,
        link: LinkId,
        lane: LaneId,
        transfer: TransferId,
        round: Round,
        ticket: Ticket,
    );

    /// Writer: completes what of the transfer is queued and not begun as
    /// [`CompletionStatus::Cancelled`]. Markers are not cancelled.
    fn cancel(&self, transfer: TransferId);

    /// Reader: lets the transfer land.
    fn open_landing(&self, landing: Landing);

    /// Reader: stops landing, then [`Event::LandingClosed`]. Frames that are still on the way are
    /// read and thrown away; their markers are reported. Idempotent.
    fn close_landing(&self, transfer: TransferId);

    /// Reader: forgets a closed landing. A frame for it is a violation from now on.
    fn forget_landing(&self, transfer: TransferId);

    /// Reader: takes back what landed over a fenced lane: its blocks may be written again.
    fn unland(&self, transfer: TransferId, lane: LaneId);

    /// Stops all threads, after closing everything. Blocks for at most a second or so.
    fn shutdown(&self);
}
