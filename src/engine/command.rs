//! What handles ask of the core, and what else the core reads.

use std::sync::Arc;
use std::time::Duration;

use super::DrainReport;
use super::pages::Held;
use super::slot::Resolver;
use crate::protocol::receiver::{LeaseComponent, OpenPart};
use crate::protocol::sender::{Admitted, Announced, Completing, OfferId, SourceComponent};
use crate::protocol::{Binding, BlockRange, Cause, Hello, Incarnation, Label, TransferError};
use crate::transport::{Event, Placement};

pub(crate) type ReceiveResult = Result<Held, TransferError>;
pub(crate) type SendResult = Result<(), TransferError>;
pub(crate) type ConnectResult = Result<(Incarnation, Arc<Hello>), Cause>;

/// Names one receive of the API before the protocol names its assembly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ReceiveKey(pub(crate) u64);

#[derive(Debug)]
pub(crate) enum Command {
    Connect {
        address: String,
        timeout: Duration,
        resolver: Resolver<ConnectResult>,
    },
    Receive {
        key: ReceiveKey,
        lease: Vec<LeaseComponent>,
        parts: Vec<OpenPart>,
        deadline: Duration,
        integrity: bool,
        resolver: Resolver<ReceiveResult>,
    },
    AbortReceive {
        key: ReceiveKey,
        why: &'static str,
    },
    Announce {
        announced: Announced,
        label: Label,
        peer: Option<Incarnation>,
        deadline: Duration,
    },
    Refuse {
        offer: OfferId,
        why: String,
    },
    Admit {
        offer: Admitted,
        binding: Binding,
        components: Vec<SourceComponent>,
        placement: Option<Arc<Placement>>,
        resolver: Resolver<SendResult>,
        source_free: Resolver<()>,
    },
    Write {
        offer: OfferId,
        ranges: Vec<BlockRange>,
    },
    Complete {
        completing: Completing,
    },
    AbortSend {
        offer: OfferId,
        why: String,
    },
    Drain {
        deadline: Duration,
        resolver: Resolver<Option<DrainReport>>,
    },
    Shutdown,
}

/// What the core reads.
#[derive(Debug)]
pub(crate) enum Input {
    Command(Box<Command>),
    Event(Event),
}
