//! The control messages. Every message about a transfer is acknowledged, resent until it is, and
//! harmless when it comes twice. `[I7]`

use super::cause::Cause;
use super::extent::Extent;
use super::ids::{Generation, Incarnation, LaneId, PageIndex, Round, TransferId};
use super::label::{Binding, Label};
use super::layout::Fingerprint;
use super::wire::{Text, wire_enum, wire_struct};

/// First bytes of every Hello.
pub const MAGIC: u32 = u32::from_le_bytes(*b"slft");
/// The newest protocol version that this code speaks.
pub const VERSION: u16 = 1;
/// The oldest.
pub const MIN_VERSION: u16 = 1;

wire_struct! {
    /// One pool, as its owner announces it. `[I16]`
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub struct PoolCapacity {
        /// The pool's name.
        pub name: Text,
        /// Its pages.
        pub page_count: u32,
        /// Tokens that a page holds; 0 if it isn't paged by tokens.
        pub tokens_per_page: u32,
    }
}

wire_struct! {
    /// What each side tells the other first.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub struct Hello {
        /// [`MAGIC`].
        pub magic: u32,
        /// Oldest version that this side speaks.
        pub min_version: u16,
        /// Newest version that this side speaks.
        pub max_version: u16,
        /// Who this is.
        pub incarnation: Incarnation,
        /// A name for people: host and process.
        pub name: Text,
        /// The session that the dialler wants to go on with, or the one that the listener chose.
        pub session: Option<u64>,
        /// Capability bits (`transport::Capabilities`), as far as this side has them.
        pub capabilities: u32,
        /// The name of the transport.
        pub transport: Text,
        /// Most pages of one grant.
        pub max_grant_pages: u32,
        /// Most bytes in flight per lane.
        pub window_bytes: u64,
        /// Silence after which this side gives the other up, in milliseconds.
        pub liveness_ms: u32,
        /// Pools, with their real sizes.
        pub pools: Vec<PoolCapacity>,
        /// Room for the authentication exchange; empty without it.
        pub auth: Vec<u8>,
    }
}

wire_struct! {
    /// One component of a grant.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub struct GrantComponent {
        /// The receiver's pool.
        pub layout: Fingerprint,
        /// The receiver's pages, in logical order.
        pub pages: Vec<PageIndex>,
        /// What to write of each page.
        pub extents: Vec<Extent>,
        /// The extents are the whole page.
        pub whole_pages: bool,
    }
}

wire_struct! {
    /// What the receiver lets one sender write.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub struct Grant {
        /// The transfer.
        pub id: TransferId,
        /// Finds the sender's half.
        pub label: Label,
        /// What request it is for.
        pub binding: Binding,
        /// The generation of the granted pages.
        pub generation: Generation,
        /// Time left, in milliseconds.
        pub deadline_ms: u32,
        /// Whether digests are wanted.
        pub integrity: bool,
        /// The receiver's transfers below this counter have ended. `[I10]`
        pub oldest_live: u64,
        /// What is granted.
        pub components: Vec<GrantComponent>,
    }
}

wire_struct! {
    /// What the sender wrote of one component.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub struct ManifestComponent {
        /// Pages.
        pub page_count: u32,
        /// One digest per page; none with integrity off.
        pub digests: Vec<u64>,
        /// Wrapping sum of the digests.
        pub total: u64,
    }
}

wire_struct! {
    /// What the sender wrote. Compared with the grant. `[I1]`
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub struct Manifest {
        /// The generation that was written.
        pub generation: Generation,
        /// Blocks, each counted once.
        pub block_count: u32,
        /// Bytes, each counted once.
        pub bytes: u64,
        /// Per component.
        pub components: Vec<ManifestComponent>,
        /// Every lane that was used in any round and not given up by a resume.
        pub lanes: Vec<LaneId>,
    }
}

wire_struct! {
    /// How a sender's lane ended for one transfer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct LaneDrain {
        /// The lane.
        pub lane: LaneId,
        /// `false`: the marker was posted after the last write and completed. `true`: the lane is
        /// dead, and only the receiver's own fence proves anything.
        pub needs_fence: bool,
    }
}

wire_enum! {
    /// A control message.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub enum Message {
        /// Dialler to listener, first.
        1 => Hello {
            /// What this side says of itself.
            hello: Hello,
        },
        /// Listener to dialler: the session stands.
        2 => Welcome {
            /// What this side says of itself.
            hello: Hello,
            /// The session that the dialler named goes on; else it is a new one, and the old
            /// one's transfers are over.
            resumed: bool,
        },
        /// The session is refused or over.
        3 => Bye {
            /// Why.
            cause: Cause,
        },
        /// Keeps the session alive.
        4 => Ping { },
        /// Answers [`Message::Ping`].
        5 => Pong { },
        /// Reader to writer: a lane is prepared.
        10 => LaneOffer {
            /// The lane.
            lane: LaneId,
            /// The transport's parameters.
            params: Vec<u8>,
        },
        /// Writer to reader: this end is prepared too.
        11 => LaneAnswer {
            /// The lane.
            lane: LaneId,
            /// The transport's parameters.
            params: Vec<u8>,
        },
        /// Writer to reader: this end of the lane is closed, or never opened.
        12 => LaneGone {
            /// The lane.
            lane: LaneId,
        },
        /// Receiver to sender.
        20 => Grant {
            /// The grant.
            grant: Grant,
        },
        /// Sender to receiver: matched and checked; writing begins.
        21 => Accept {
            /// The transfer.
            id: TransferId,
            /// Bytes that will be written.
            bytes: u64,
            /// The only lanes that will be used, unless a [`Message::Resume`] names more.
            lanes: Vec<LaneId>,
        },
        /// Sender to receiver: nothing was or will be written.
        22 => Refuse {
            /// The transfer.
            id: TransferId,
            /// Why.
            cause: Cause,
        },
        /// Sender to receiver: every write of the round succeeded, and so did the markers.
        23 => Complete {
            /// The transfer.
            id: TransferId,
            /// The round.
            round: Round,
            /// What was written.
            manifest: Manifest,
        },
        /// Receiver to sender: the pages are sealed (or taken unverified).
        24 => Verified {
            /// The transfer.
            id: TransferId,
        },
        /// Either side: it is over.
        25 => Abort {
            /// The transfer.
            id: TransferId,
            /// Why.
            cause: Cause,
        },
        /// Sender to receiver: no write of this transfer is in flight here and none will be
        /// posted. `[I5]`
        26 => Drained {
            /// The transfer.
            id: TransferId,
            /// The round.
            round: Round,
            /// Why.
            cause: Cause,
            /// How each lane that it may have used ended.
            lanes: Vec<LaneDrain>,
        },
        /// Receiver to sender: go on after these lanes were fenced.
        27 => Resume {
            /// The transfer.
            id: TransferId,
            /// Counts resumes from 1.
            round: Round,
            /// Fenced: write again what went over these.
            dead: Vec<LaneId>,
            /// May be used from now on, besides the accepted ones that live.
            lanes: Vec<LaneId>,
        },
        /// Receiver to sender: an abort that came after the seal. Complete stands. `[I9]`
        28 => TooLate {
            /// The transfer.
            id: TransferId,
        },
        /// Either side: no such transfer is live here. `[I10]`
        29 => Stale {
            /// The transfer.
            id: TransferId,
        },
        /// Either side: a message came in and was acted on. Says nothing of writes.
        30 => Ack {
            /// The transfer.
            id: TransferId,
            /// [`Message::code`] of what is acknowledged.
            of: u8,
            /// Its round, for [`Message::Resume`] and [`Message::Complete`].
            round: Round,
        },
        /// Either side, after a session came back: these transfers between us are live here.
        31 => Live {
            /// The transfers.
            ids: Vec<TransferId>,
        },
    }
}

impl Message {
    /// Most transfers in one [`Message::Live`].
    pub const MAX_LIVE: usize = 1024;
    /// Code of [`Message::Grant`].
    pub const GRANT: u8 = 20;
    /// Code of [`Message::Accept`].
    pub const ACCEPT: u8 = 21;
    /// Code of [`Message::Complete`].
    pub const COMPLETE: u8 = 23;
    /// Code of [`Message::Abort`].
    pub const ABORT: u8 = 25;

    /// The transfer that the message is about.
    pub fn transfer(&self) -> Option<TransferId> {
        match self {
            Message::Grant { grant } => Some(grant.id),
            Message::Accept { id, .. }
            | Message::Refuse { id, .. }
            | Message::Complete { id, .. }
            | Message::Verified { id }
            | Message::Abort { id, .. }
            | Message::Drained { id, .. }
            | Message::Resume { id, .. }
            | Message::TooLate { id }
            | Message::Stale { id }
            | Message::Ack { id, .. } => Some(*id),
            _ => None,
        }
    }

    /// The round that an acknowledgement of this message states.
    pub fn round(&self) -> Round {
        match self {
            Message::Complete { round, .. } | Message::Resume { round, .. } => *round,
            _ => Round(0),
        }
    }

    /// The acknowledgement of this message; `None` for messages that want none.
    pub fn ack(&self) -> Option<Message> {
        let wants_ack = matches!(self.code(), 20..=27);
        let id = self.transfer().filter(|_| wants_ack)?;
        Some(Message::Ack { id, of: self.code(), round: self.round() })
    }
}
