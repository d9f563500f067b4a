//! What the I/O threads and the callers share: the links that are up, the way to each thread, and
//! the counters.
//!
//! Everything else belongs to one thread. Which one follows from the ids alone, so a request about
//! a lane always reaches the thread that owned it, even after the lane and its link are gone: that
//! is what lets a fence be answered with certainty.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use crossbeam_channel::Sender;

use super::config::TcpConfig;
use super::lane_writer::Job;
use super::preamble::{LaneParams, Secret};
use crate::protocol::{LaneId, TransferId};
use crate::transport::landing::LandingTable;
use crate::transport::{Event, EventSink, LaneRole, LinkId};

/// One end of one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct LaneKey {
    pub(super) link: LinkId,
    pub(super) lane: LaneId,
    pub(super) role: LaneRole,
}

/// A request to an I/O thread.
pub(super) enum Command {
    /// An accepted connection turned out to be a control link.
    AcceptLink {
        link: LinkId,
        stream: mio::net::TcpStream,
        peer: SocketAddr,
    },
    /// Dial one of these addresses, in order.
    Dial {
        link: LinkId,
        addresses: Vec<SocketAddr>,
        deadline: Instant,
    },
    /// Wait for [`Command::Resolved`].
    Resolving {
        link: LinkId,
        deadline: Instant,
    },
    /// What the name stands for, or why it stands for nothing.
    Resolved {
        link: LinkId,
        addresses: Result<Vec<SocketAddr>, String>,
    },
    /// A frame with its length in front.
    Control {
        link: LinkId,
        bytes: Vec<u8>,
    },
    CloseLink(LinkId),
    /// The link is gone: so are its lanes.
    LinkGone(LinkId),
    PrepareLane {
        key: LaneKey,
        secret: Secret,
        dials: bool,
    },
    /// `dial` is where, if this side dials.
    StartLane {
        key: LaneKey,
        peer: LaneParams,
        dial: Option<SocketAddr>,
        deadline: Instant,
    },
    /// An accepted connection claims to be this lane's.
    Attach {
        key: LaneKey,
        secret: Secret,
        stream: mio::net::TcpStream,
    },
    Fence(LaneKey),
    Kill(LaneKey),
    Post {
        key: LaneKey,
        job: Job,
    },
    Cancel(TransferId),
    /// Report this. Callers never run the sink: it may block on the very thread that calls.
    Report(Event),
    Shutdown,
}

/// The way to one I/O thread. Unbounded, since a caller must never wait for a thread that may be
/// waiting for the caller; what is in it is bounded by the engine's window and by
/// [`TcpConfig::control_queue_bytes`].
pub(super) struct Mailbox {
    sender: Sender<Command>,
    waker: mio::Waker,
    /// A wake-up is on its way that the thread has not acted on.
    pub(super) woken: AtomicBool,
}

impl Mailbox {
    pub(super) fn new(sender: Sender<Command>, waker: mio::Waker) -> Mailbox {
        Mailbox { sender, waker, woken: AtomicBool::new(false) }
    }

    fn send(&self, command: Command) {
        // After shutdown there is nobody left to tell.
        if self.sender.send(command).is_ok() && !self.woken.swap(true, Ordering::AcqRel) {
            // Only an exhausted counter could fail, and then the thread is awake anyway.
            let _ = self.waker.wake();
        }
    }
}

/// What callers need to know of a link.
pub(super) struct LinkShared {
    /// This side dialled.
    pub(super) dialled: bool,
    /// The address that answered, if this side dialled.
    pub(super) address: OnceLock<SocketAddr>,
    pub(super) up: AtomicBool,
    /// Control bytes that wait for the kernel.
    pub(super) queued: AtomicUsize,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What came in and was turned away, counted since the start.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct TcpCounters { $($(#[$doc])* pub $name: u64,)* }

        #[derive(Default)]
        pub(super) struct Counters { $(pub(super) $name: AtomicU64,)* }

        impl Counters {
            pub(super) fn snapshot(&self) -> TcpCounters {
                TcpCounters { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Connections accepted.
    accepted,
    /// Connections whose first bytes were not this protocol's.
    garbage_preambles,
    /// Connections that never said what they are.
    half_open_expired,
    /// Connections dropped for newer ones before they said what they are.
    half_open_evicted,
    /// Connections for a lane that isn't waiting for them, or with the wrong secret.
    lanes_refused,
    /// Control connections past the limit.
    links_refused,
    /// Control links closed for a frame that was too long.
    control_malformed,
    /// Lanes closed for a frame that is none.
    frames_malformed,
    /// Lanes closed for a write that the landing table refused.
    writes_refused,
}

impl Counters {
    pub(super) fn bump(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// See the module.
pub(super) struct Shared {
    pub(super) config: TcpConfig,
    pub(super) sink: EventSink,
    pub(super) landings: LandingTable,
    pub(super) counters: Counters,
    mailboxes: Vec<Mailbox>,
    links: RwLock<HashMap<LinkId, Arc<LinkShared>>>,
    next_link: AtomicU64,
}

type Links = HashMap<LinkId, Arc<LinkShared>>;

impl Shared {
    pub(super) fn new(config: TcpConfig, sink: EventSink, mailboxes: Vec<Mailbox>) -> Shared {
        Shared {
            config,
            sink,
            landings: LandingTable::default(),
            counters: Counters::default(),
            mailboxes,
            links: RwLock::default(),
            next_link: AtomicU64::new(1),
        }
    }

    pub(super) fn mailbox(&self, worker: usize) -> &Mailbox {
        &self.mailboxes[worker]
    }

    fn link_worker(&self, link: LinkId) -> usize {
        (link.0 % self.mailboxes.len() as u64) as usize
    }

    /// Neighbouring lanes, and the two directions, go to different threads.
    fn lane_worker(&self, key: &LaneKey) -> usize {
        let role = u64::from(key.role == LaneRole::Writer);
        let spread = key.link.0.wrapping_add(1 + role).wrapping_add(u64::from(key.lane.index));
        (spread % self.mailboxes.len() as u64) as usize
    }

    /// Sends to the owner of a link.
    pub(super) fn to_link(&self, link: LinkId, command: Command) {
        self.mailboxes[self.link_worker(link)].send(command);
    }

    /// Sends to the owner of a lane.
    pub(super) fn to_lane(&self, key: &LaneKey, command: Command) {
        self.mailboxes[self.lane_worker(key)].send(command);
    }

    /// Sends to every thread.
    pub(super) fn to_all(&self, command: impl Fn() -> Command) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.send(command()));
    }

    /// Has an event reported by an I/O thread.
    pub(super) fn report(&self, event: Event) {
        self.mailboxes[0].send(Command::Report(event));
    }

    pub(super) fn links(&self) -> RwLockReadGuard<'_, Links> {
        self.links.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn links_mut(&self) -> RwLockWriteGuard<'_, Links> {
        self.links.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new link, unless there are too many.
    pub(super) fn new_link(&self, dialled: bool) -> Option<LinkId> {
        let mut links = self.links_mut();
        if links.len() >= self.config.max_links {
            return None;
        }
        let link = LinkId(self.next_link.fetch_add(1, Ordering::Relaxed));
        let shared = LinkShared {
            dialled,
            address: OnceLock::new(),
            up: AtomicBool::new(false),
            queued: AtomicUsize::new(0),
        };
        links.insert(link, Arc::new(shared));
        Some(link)
    }

    /// Forgets a link and tells every thread. Whoever prepares or starts a lane does it under the
    /// read lock, so no lane comes after this notice.
    pub(super) fn drop_link(&self, link: LinkId) {
        self.links_mut().remove(&link);
        self.to_all(|| Command::LinkGone(link));
    }
}
