//! Why a transfer failed: one list for both ends, with its class and its remedy.

use std::fmt;

use super::ids::{ComponentIndex, Generation, Incarnation, LaneId, PageIndex, TransferId};
use super::label::Label;
use super::wire::{Text, wire_enum};

wire_enum! {
    /// The first thing that went wrong. It never changes afterwards. `[I2]`
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub enum Cause {
        /// The sender's application said no, before or after the grant.
        1 => Refused {
            /// The application's words.
            why: Text,
        },
        /// The sender's application gave up.
        2 => AbortedBySender {
            /// The application's words.
            why: Text,
        },
        /// The receiver's application gave up, or dropped the handle.
        3 => AbortedByReceiver {
            /// The application's words.
            why: Text,
        },
        /// The deadline passed.
        4 => DeadlineExceeded {},
        /// The peer was silent or unreachable for longer than the liveness limit.
        5 => PeerLost {
            /// What was seen.
            why: Text,
        },
        /// The sender wrote less than was granted. `[I1]`
        6 => IncompleteCoverage {
            /// Bytes granted.
            granted_bytes: u64,
            /// Bytes that the manifest states or that landed, the smaller.
            covered_bytes: u64,
        },
        /// The manifest states more than was granted, or another structure.
        7 => ManifestMismatch {
            /// Which field.
            field: Text,
            /// In the grant.
            granted: u64,
            /// In the manifest.
            stated: u64,
        },
        /// A write named blocks that the grant hasn't.
        8 => OutsideGrant {
            /// First block named.
            first_block: u32,
            /// Blocks in the grant.
            block_count: u32,
        },
        /// A block was written twice.
        9 => DuplicateBlock {
            /// The block.
            block: u32,
        },
        /// A write stated another generation than the grant's.
        10 => StaleGeneration {
            /// In the grant.
            granted: Generation,
            /// In the write.
            stated: Generation,
        },
        /// The bytes that landed aren't the bytes that were sent.
        11 => DigestMismatch {
            /// Component of the first wrong page.
            component: ComponentIndex,
            /// The first wrong page, in the receiver's pool.
            page: PageIndex,
            /// How many pages are wrong.
            wrong_pages: u32,
        },
        /// Grant and send are for different requests. `[I17]`
        12 => BindingMismatch {
            /// Which field.
            field: Text,
            /// In the grant.
            granted: Text,
            /// In the send.
            offered: Text,
        },
        /// The pools of the two sides are laid out differently.
        13 => LayoutMismatch {
            /// Component.
            component: ComponentIndex,
            /// Which field.
            field: Text,
            /// In the grant.
            granted: Text,
            /// In the send.
            offered: Text,
        },
        /// The sender has another number of pages than was granted.
        14 => PageCountMismatch {
            /// Component.
            component: ComponentIndex,
            /// Pages granted.
            granted: u32,
            /// Pages that the sender has.
            offered: u32,
        },
        /// The label is in use for another transfer.
        15 => DuplicateLabel {},
        /// The peer doesn't know the transfer, or ended it long ago. `[I10]`
        16 => StaleTransfer {},
        /// The request is larger than a pool or a limit. `[I16]`
        17 => CapacityExceeded {
            /// Of what.
            what: Text,
            /// Asked for.
            asked: u64,
            /// There is.
            limit: u64,
        },
        /// A lane failed, and the transfer couldn't be resumed over another.
        18 => LaneFailed {
            /// The lane.
            lane: LaneId,
            /// What the transport said.
            why: Text,
        },
        /// Too many pages are quarantined.
        19 => QuarantineFull {
            /// Pages quarantined.
            quarantined: u32,
            /// The budget.
            budget: u32,
        },
        /// There is nothing to transfer.
        20 => EmptyTransfer {},
        /// The peer broke the protocol.
        21 => ProtocolViolation {
            /// How.
            why: Text,
        },
        /// The engine shuts down.
        22 => ShuttingDown {},
        /// Another sender of the same assembly failed.
        23 => SiblingFailed {
            /// The transfer that failed.
            sibling: TransferId,
        },
        /// The peer can't do what was asked. `[I13]`
        24 => Unsupported {
            /// What.
            what: Text,
        },
        /// The pages aren't the ones that were granted any more.
        25 => PageState {
            /// The page.
            page: PageIndex,
            /// What the ledger said.
            why: Text,
        },
        /// `complete` was called before every block was written.
        26 => IncompleteWrite {
            /// Bytes of the grant.
            granted_bytes: u64,
            /// Bytes written or queued.
            written_bytes: u64,
        },
    }
}

/// What a caller can do about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// The same transfer may be tried again.
    Retry,
    /// The KV must be computed again: prefill once more.
    Recompute,
    /// Trying again ends the same way; fix the configuration or the code.
    Fatal,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Class::Retry => "retry",
            Class::Recompute => "recompute",
            Class::Fatal => "fatal",
        })
    }
}

impl Cause {
    /// What a caller can do.
    pub fn class(&self) -> Class {
        use Cause::*;
        match self {
            Refused { .. } | AbortedBySender { .. } | AbortedByReceiver { .. } => Class::Recompute,
            IncompleteCoverage { .. } | IncompleteWrite { .. } => Class::Recompute,
            DeadlineExceeded {} | PeerLost { .. } | DigestMismatch { .. } => Class::Retry,
            DuplicateLabel {} | StaleTransfer {} | LaneFailed { .. } => Class::Retry,
            QuarantineFull { .. } | ShuttingDown {} | SiblingFailed { .. } => Class::Retry,
            ManifestMismatch { .. } | OutsideGrant { .. } | DuplicateBlock { .. } => Class::Fatal,
            StaleGeneration { .. } | ProtocolViolation { .. } | PageState { .. } => Class::Fatal,
            BindingMismatch { .. } | LayoutMismatch { .. } | PageCountMismatch { .. } => {
                Class::Fatal
            }
            CapacityExceeded { .. } | EmptyTransfer {} | Unsupported { .. } => Class::Fatal,
        }
    }

    /// What to do, in a sentence.
    pub fn remedy(&self) -> &'static str {
        use Cause::*;
        match self {
            Refused { .. } => "fail the request, or prefill it again elsewhere",
            AbortedBySender { .. } | AbortedByReceiver { .. } => {
                "run prefill again if the request still matters"
            }
            DeadlineExceeded {} => {
                "retry; if it recurs, raise the deadline or look for a stalled peer"
            }
            PeerLost { .. } => "retry with another peer, or with this one once it is back",
            IncompleteCoverage { .. } | IncompleteWrite { .. } => {
                "compare what prefill admitted with what decode reserved; fail the request"
            }
            DigestMismatch { .. } => {
                "retry; if it recurs, take the node out of service: memory or network corrupts data"
            }
            BindingMismatch { .. } => "the label was reused for another request: use a fresh label",
            LayoutMismatch { .. } => {
                "start both sides with the same model, dtype, page size and parallelism"
            }
            PageCountMismatch { .. } => {
                "compare the prompt's length on both sides; fail the request"
            }
            DuplicateLabel {} => "use a label once at a time",
            StaleTransfer {} => "open a new transfer",
            CapacityExceeded { .. } => "refuse the request at admission, or enlarge the pool",
            LaneFailed { .. } => "retry; lanes are rebuilt in the background",
            QuarantineFull { .. } => {
                "wait for the fences in progress; if it stays, restart the silent peers"
            }
            EmptyTransfer {} => "don't transfer nothing: skip the transfer",
            ManifestMismatch { .. }
            | OutsideGrant { .. }
            | DuplicateBlock { .. }
            | StaleGeneration { .. }
            | ProtocolViolation { .. } => "the peer is broken or hostile: take it out of service",
            ShuttingDown {} => "retry with another peer",
            SiblingFailed { .. } => "see the sibling transfer's cause",
            Unsupported { .. } => "upgrade the peer, or opt down by name",
            PageState { .. } => "release or claim the page first: two owners use it",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Cause::*;
        match self {
            Refused { why } => write!(f, "refused by the sender: {why}"),
            AbortedBySender { why } => write!(f, "aborted by the sender: {why}"),
            AbortedByReceiver { why } => write!(f, "aborted by the receiver: {why}"),
            DeadlineExceeded {} => write!(f, "the deadline passed"),
            PeerLost { why } => write!(f, "the peer is lost: {why}"),
            IncompleteCoverage { granted_bytes, covered_bytes } => {
                write!(f, "incomplete coverage: {covered_bytes} of {granted_bytes} granted bytes")
            }
            ManifestMismatch { field, granted, stated } => {
                write!(f, "the manifest's {field} is {stated}, the grant's is {granted}")
            }
            OutsideGrant { first_block, block_count } => {
                write!(
                    f,
                    "a write at block {first_block} is outside the grant of {block_count} blocks"
                )
            }
            DuplicateBlock { block } => write!(f, "block {block} was written twice"),
            StaleGeneration { granted, stated } => {
                write!(f, "a write states {stated}, the grant is {granted}")
            }
            DigestMismatch { component, page, wrong_pages } => write!(
                f,
                "the digest of {wrong_pages} page(s) is wrong, first {page} of {component}"
            ),
            BindingMismatch { field, granted, offered } => write!(
                f,
                "grant and send are for different requests: {field} is {granted} in the grant, {offered} in the send"
            ),
            LayoutMismatch { component, field, granted, offered } => write!(
                f,
                "the layouts of {component} differ: {field} is {granted} in the grant, {offered} in the send"
            ),
            PageCountMismatch { component, granted, offered } => {
                write!(f, "{component}: {granted} pages are granted, the sender has {offered}")
            }
            DuplicateLabel {} => write!(f, "the label is in use"),
            StaleTransfer {} => write!(f, "the peer does not know this transfer (any more)"),
            CapacityExceeded { what, asked, limit } => {
                write!(f, "{what}: {asked} asked for, {limit} there")
            }
            LaneFailed { lane, why } => write!(f, "{lane} failed: {why}"),
            QuarantineFull { quarantined, budget } => {
                write!(f, "{quarantined} pages are quarantined, the budget is {budget}")
            }
            EmptyTransfer {} => write!(f, "there is nothing to transfer"),
            ProtocolViolation { why } => write!(f, "protocol violation: {why}"),
            ShuttingDown {} => write!(f, "the engine shuts down"),
            SiblingFailed { sibling } => write!(f, "sibling transfer {sibling} failed"),
            Unsupported { what } => write!(f, "the peer does not support {what}"),
            PageState { page, why } => write!(f, "{page}: {why}"),
            IncompleteWrite { granted_bytes, written_bytes } => write!(
                f,
                "complete was called after {written_bytes} of {granted_bytes} granted bytes were written"
            ),
        }
    }
}

/// Where in its life a transfer was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Local checks; nothing was sent.
    Admission,
    /// Waiting for the other side: a grant without a send, or a send without a grant.
    Matching,
    /// Writes are under way.
    Writing,
    /// Everything is written; waiting for markers, `Complete` or its answer.
    Completing,
    /// Digests are compared.
    Verifying,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Admission => "admission",
            Phase::Matching => "matching",
            Phase::Writing => "writing",
            Phase::Completing => "completing",
            Phase::Verifying => "verifying",
        })
    }
}

/// A failed transfer: which, with whom, when, how far, why, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub struct TransferError {
    /// The transfer; `None` if it failed before there was one.
    pub transfer: Option<TransferId>,
    /// The caller's label.
    pub label: Label,
    /// The other side; `None` if it isn't known yet.
    pub peer: Option<Incarnation>,
    /// Where in its life it was.
    pub phase: Phase,
    /// Bytes moved, as far as this side knows.
    pub bytes_done: u64,
    /// Bytes of the whole transfer.
    pub bytes_total: u64,
    /// The first cause.
    pub cause: Cause,
}

impl TransferError {
    /// What a caller can do.
    pub fn class(&self) -> Class {
        self.cause.class()
    }
}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TransferError { label, phase, bytes_done, bytes_total, cause, .. } = self;
        match self.transfer {
            Some(id) => write!(f, "transfer {id}")?,
            None => write!(f, "transfer (not opened)")?,
        }
        write!(f, " label {label}")?;
        match self.peer {
            Some(peer) => write!(f, " with peer {peer}")?,
            None => write!(f, " with no peer yet")?,
        }
        write!(f, ": {cause}; phase {phase}, {bytes_done} of {bytes_total} bytes done")?;
        write!(f, "; {}: {}", cause.class(), cause.remedy())
    }
}
