//! The public API, and the thread that drives the protocol over a transport.
//!
//! What may live here: handles, timers, and carrying actions out. What may not: deciding what a
//! transfer may do ([`crate::protocol`]), or touching bytes ([`crate::transport`]).

mod command;
mod config;
mod core;
mod driver;
mod pages;
mod pool;
mod receive;
mod send;
mod shared;
mod slot;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::protocol::sender::{Announced, OfferId};
use crate::protocol::{Binding, Cause, Hello, Incarnation, Label, LedgerCounts, Slice};
use crate::transport::TransportError;

use command::Command;
pub use config::{Builder, EngineConfig, MAX_DEADLINE};
pub use driver::Driver;
pub use pages::{ReadGuard, SealedPages, UnverifiedPages};
pub use pool::{Lease, Pool, PoolError, PoolOptions};
pub use receive::{Part, ReceiveHandle};
pub use send::{Completion, Request, SendHandle, Source};
use shared::Shared;
use slot::Slot;

/// Why a call on an [`Engine`] failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The transport refused.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The peer refused the session, or never answered.
    #[error("no session with {address}: {cause}; {}: {}", cause.class(), cause.remedy())]
    Connect {
        /// What was dialled.
        address: String,
        /// Why.
        cause: Cause,
    },
    /// The operating system has no randomness or no thread for this engine.
    #[error("{what}: {why}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        why: String,
    },
    /// A setting out of range.
    #[error("setting {name}: {why}")]
    Setting {
        /// Which.
        name: &'static str,
        /// What is wrong with it.
        why: String,
    },
}

/// A peer that a session stands with. Cheap to clone. Names one run of the peer: after a restart
/// it is another peer.
#[derive(Clone, Debug)]
pub struct Peer {
    incarnation: Incarnation,
    hello: Arc<Hello>,
}

impl Peer {
    /// Which run of which engine.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// What it calls itself: a name for people.
    pub fn name(&self) -> &str {
        self.hello.name.as_str()
    }

    /// What it announced when the session began: limits and pools with their real sizes. `[I16]`
    pub fn hello(&self) -> &Hello {
        &self.hello
    }
}

/// What an engine says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Health {
    /// Why it isn't well; empty if it is.
    pub faults: Vec<String>,
}

impl Health {
    /// No faults.
    pub fn is_ok(&self) -> bool {
        self.faults.is_empty()
    }
}

/// What [`Engine::drain`] left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainReport {
    /// Transfers that were aborted because the deadline passed.
    pub aborted: usize,
    /// Transfers whose lanes aren't proven quiet yet.
    pub undrained: usize,
}

/// One node's end: it receives into its pools and sends from them. All methods are safe from any
/// thread. Dropping it aborts what is live, closes everything and joins its threads.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    core: Option<JoinHandle<()>>,
}

impl Engine {
    /// Settings to start from.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Who this is.
    pub fn incarnation(&self) -> Incarnation {
        self.shared.incarnation
    }

    /// Where peers can dial, if this engine listens.
    pub fn listen_address(&self) -> Option<String> {
        self.shared.transport.listen_address()
    }

    /// The transport in use.
    pub fn transport_name(&self) -> &'static str {
        self.shared.transport.name()
    }

    /// Opens a session, or finds the one that stands. Blocks for at most `timeout` and a little.
    pub fn connect(&self, address: &str, timeout: Duration) -> Result<Peer, EngineError> {
        let refused = |cause| EngineError::Connect { address: address.to_owned(), cause };
        let (slot, resolver) = Slot::new(Err(Cause::ShuttingDown {}));
        let address = address.to_owned();
        self.shared.command(Command::Connect { address: address.clone(), timeout, resolver });
        let guard = timeout + Duration::from_secs(5);
        match slot.wait(guard) {
            Some(Ok((incarnation, hello))) => Ok(Peer { incarnation, hello }),
            Some(Err(cause)) => Err(refused(cause)),
            None => Err(refused(Cause::DeadlineExceeded {})),
        }
    }

    /// Peers that a session stands with now, whoever dialled.
    pub fn peers(&self) -> Vec<Peer> {
        let peers = self.shared.peers();
        peers.into_iter().map(|(incarnation, hello)| Peer { incarnation, hello }).collect()
    }

    /// Receives into `lease` what the sender has under `label`, if it is for the same request.
    /// Nothing blocks; whatever goes wrong comes out of the handle, by the deadline.
    pub fn receive(
        &self,
        peer: &Peer,
        label: Label,
        binding: Binding,
        lease: Lease,
        deadline: Duration,
    ) -> ReceiveHandle<SealedPages> {
        self.receive_parts(vec![Part::whole(peer, label, binding, &lease)], lease, deadline)
    }

    /// As [`Engine::receive`], without digests: what comes out is of another type. `[I12]`
    pub fn receive_unverified(
        &self,
        peer: &Peer,
        label: Label,
        binding: Binding,
        lease: Lease,
        deadline: Duration,
    ) -> ReceiveHandle<UnverifiedPages> {
        let parts = vec![Part::whole(peer, label, binding, &lease)];
        ReceiveHandle::open(&self.shared, parts, lease, deadline, false)
    }

    /// Receives one lease from several senders, whose parts must cover it exactly: every byte of
    /// every page once. Any part's failure ends all. `[I1]`
    pub fn receive_parts(
        &self,
        parts: Vec<Part>,
        lease: Lease,
        deadline: Duration,
    ) -> ReceiveHandle<SealedPages> {
        ReceiveHandle::open(&self.shared, parts, lease, deadline, true)
    }

    /// A request under `label` is known, and not decided on: refuse it or admit it. Grants for it
    /// wait meanwhile. `peer`: only that receiver may have it.
    pub fn announce(&self, label: Label, peer: Option<&Peer>, deadline: Duration) -> Request {
        let offer = Announced::new(OfferId(self.shared.next_offer()));
        Request::open(&self.shared, offer, label, peer.map(Peer::incarnation), deadline)
    }

    /// Announces and admits in one: sends `source` to the receiver that grants `label`.
    pub fn send(
        &self,
        label: Label,
        binding: Binding,
        source: Source,
        deadline: Duration,
    ) -> SendHandle {
        self.announce(label, None, deadline).admit(binding, source)
    }

    /// Refuses whoever asks for `label`, now or later: this side will not send.
    pub fn refuse(&self, label: Label, why: &str) {
        self.announce(label, None, MAX_DEADLINE).refuse(why);
    }

    /// Ends orderly: new transfers are refused from now on, live ones may end until `deadline`,
    /// then they are aborted. Blocks for at most `deadline` and a few seconds. `None` if the engine
    /// could not say: its thread died (see [`Engine::health`]) or hangs.
    pub fn drain(&self, deadline: Duration) -> Option<DrainReport> {
        let (slot, resolver) = Slot::new(None);
        self.shared.command(Command::Drain { deadline, resolver });
        slot.wait(deadline + Duration::from_secs(10)).flatten()
    }

    /// Whether everything this engine needs is alive. `[I14]`
    pub fn health(&self) -> Health {
        self.shared.health()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.command(Command::Shutdown);
        if let Some(core) = self.core.take() {
            // The core catches its panics; there is nothing to learn from the join.
            let _ = core.join();
        }
    }
}

/// What of a lease one part covers, as the protocol wants it.
type Slices = Vec<Slice>;

/// How many pages of a pool are in which state.
pub type PoolCounts = LedgerCounts;
