//! The TCP provider: for machines without an RDMA device.
//!
//! What may live here: connections, frames, and the threads that move them. What may not: what a
//! transfer may do. A fixed number of I/O threads serves all peers; one listening port takes both
//! control links and lanes, and whoever dialled the link dials its lanes, so that one open port and
//! one way through a NAT are enough.
//!
//! The reader confines every write to the live grant before a byte lands, whatever a frame claims
//! ([`crate::transport::landing`]), and data goes straight between registered memory and the
//! socket.

mod accept;
mod config;
mod control;
mod dial;
pub mod frame;
mod iov;
mod lane;
mod lane_reader;
mod lane_writer;
mod link;
pub mod preamble;
mod resolve;
mod shared;
mod socket;
#[cfg(test)]
mod tests;
mod worker;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

pub use config::TcpConfig;
use control::PREFIX_LEN;
use lane_writer::Job;
use preamble::{LaneParams, Secret, opposite};
use resolve::Resolver;
pub use shared::TcpCounters;
use shared::{Command, LaneKey, Mailbox, Shared};
use worker::Worker;

use super::{
    Capabilities, Event, EventSink, Landing, LaneRole, LinkId, MAX_CONTROL_LEN, Transport,
    TransportError, WriteRequest,
};
use crate::protocol::{LaneId, Round, Ticket, TransferId};

/// How long [`Transport::shutdown`] waits for the threads before it leaves them behind.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(1);

/// The TCP provider. Dropping it shuts it down.
pub struct TcpTransport {
    shared: Arc<Shared>,
    resolver: Resolver,
    address: Option<String>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Disconnected once every thread has ended.
    ended: Receiver<()>,
}

impl std::fmt::Debug for TcpTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpTransport").field("address", &self.address).finish_non_exhaustive()
    }
}

fn system(what: &'static str) -> impl Fn(std::io::Error) -> TransportError {
    move |error| TransportError::System { what, why: error.to_string() }
}

impl TcpTransport {
    /// Listens, if it is to, and starts the I/O threads. Everything that happens goes to `sink`,
    /// which may block but must not wait for a call on this transport.
    pub fn start(config: TcpConfig, sink: EventSink) -> Result<TcpTransport, TransportError> {
        let config = config.clamped();
        let listen = config.listen.as_deref().map(|address| socket::listen(address, &config));
        let mut listener = listen.transpose()?;
        let bound = listener.as_ref().map(mio::net::TcpListener::local_addr).transpose();
        let bound = bound.map_err(system("reading the bound address"))?;
        let address = bound.map(|bound| socket::advertised(bound, config.advertise.as_deref()));

        let mut seats = Vec::new();
        let mut mailboxes = Vec::new();
        for _ in 0..config.io_threads {
            let poll = mio::Poll::new().map_err(system("making a poll"))?;
            let waker = mio::Waker::new(poll.registry(), worker::WAKER);
            let (sender, commands) = crossbeam_channel::unbounded();
            mailboxes.push(Mailbox::new(sender, waker.map_err(system("making a waker"))?));
            seats.push((poll, commands));
        }
        let shared = Arc::new(Shared::new(config, sink, mailboxes));
        let (running, ended) = crossbeam_channel::bounded(0);
        let transport = TcpTransport {
            shared,
            resolver: Resolver::default(),
            address,
            threads: Mutex::default(),
            ended,
        };
        for (index, (poll, commands)) in seats.into_iter().enumerate() {
            // The first thread listens. On a failure the drop ends those that run already.
            transport.spawn(index, poll, commands, listener.take(), running.clone())?;
        }
        Ok(transport)
    }

    fn spawn(
        &self,
        index: usize,
        poll: mio::Poll,
        commands: Receiver<Command>,
        mut listener: Option<mio::net::TcpListener>,
        running: Sender<()>,
    ) -> Result<(), TransportError> {
        if let Some(listener) = &mut listener {
            let registered =
                poll.registry().register(listener, worker::LISTENER, mio::Interest::READABLE);
            registered.map_err(system("watching the listener"))?;
        }
        let shared = Arc::clone(&self.shared);
        let body = move || {
            Worker::new(index, shared, poll, commands, listener).run();
            drop(running);
        };
        let thread = std::thread::Builder::new().name(format!("sealift-tcp-{index}")).spawn(body);
        self.threads().push(thread.map_err(system("starting an I/O thread"))?);
        Ok(())
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was turned away so far.
    pub fn counters(&self) -> TcpCounters {
        self.shared.counters.snapshot()
    }

    fn begin_dial(
        &self,
        link: LinkId,
        host: &str,
        port: u16,
        deadline: Instant,
    ) -> Result<(), TransportError> {
        if let Ok(ip) = host.parse::<IpAddr>() {
            let addresses = vec![SocketAddr::new(ip, port)];
            self.shared.to_link(link, Command::Dial { link, addresses, deadline });
            return Ok(());
        }
        self.shared.to_link(link, Command::Resolving { link, deadline });
        self.resolver.submit(&self.shared, link, host, port)
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::MARKER | Capabilities::FENCE | Capabilities::DIGEST | Capabilities::CONFINED
    }

    fn listen_address(&self) -> Option<String> {
        self.address.clone()
    }

    fn connect(&self, address: &str, timeout: Duration) -> Result<LinkId, TransportError> {
        let deadline = deadline_in(timeout);
        let (host, port, last) = socket::split_address(address)?;
        if port != last || port == 0 {
            let why = "one port is needed, and not 0".to_owned();
            return Err(TransportError::Address { address: address.to_owned(), why });
        }
        let link = self.shared.new_link(true).ok_or(TransportError::System {
            what: "dialling",
            why: format!("{} links are as many as there may be", self.shared.config.max_links),
        })?;
        let begun = self.begin_dial(link, host, port, deadline);
        begun.inspect_err(|_| self.shared.drop_link(link))?;
        Ok(link)
    }

    fn send_control(&self, link: LinkId, frame: &[u8]) -> Result<(), TransportError> {
        if frame.len() > MAX_CONTROL_LEN {
            return Err(TransportError::ControlTooLong { len: frame.len() });
        }
        let shared = self.shared.links().get(&link).cloned();
        let shared = shared.filter(|shared| shared.up.load(Ordering::Acquire));
        let shared = shared.ok_or(TransportError::NoLink(link))?;
        let len = PREFIX_LEN + frame.len();
        let queued = shared.queued.fetch_add(len, Ordering::Relaxed);
        if queued + len > self.shared.config.control_queue_bytes {
            shared.queued.fetch_sub(len, Ordering::Relaxed);
            return Err(TransportError::Congested { queued });
        }
        let mut bytes = Vec::with_capacity(len);
        bytes.extend_from_slice(&(frame.len() as u32).to_le_bytes());
        bytes.extend_from_slice(frame);
        self.shared.to_link(link, Command::Control { link, bytes });
        Ok(())
    }

    fn close_link(&self, link: LinkId) {
        self.shared.to_link(link, Command::CloseLink(link));
    }

    fn prepare_lane(
        &self,
        link: LinkId,
        lane: LaneId,
        role: LaneRole,
    ) -> Result<Vec<u8>, TransportError> {
        let secret = Secret::new()?;
        let key = LaneKey { link, lane, role };
        // Held until the command is sent: see `Shared::drop_link`.
        let links = self.shared.links();
        let dials = links.get(&link).ok_or(TransportError::NoLink(link))?.dialled;
        self.shared.to_lane(&key, Command::PrepareLane { key, secret, dials });
        Ok(LaneParams { role, link, lane, secret }.encode())
    }

    fn start_lane(
        &self,
        link: LinkId,
        lane: LaneId,
        role: LaneRole,
        peer_params: &[u8],
        timeout: Duration,
    ) -> Result<(), TransportError> {
        let deadline = deadline_in(timeout);
        let malformed = |why: String| TransportError::LaneParams(why);
        let peer = LaneParams::decode(peer_params).map_err(|error| malformed(error.to_string()))?;
        if peer.lane != lane || peer.role != opposite(role) {
            return Err(malformed(format!("they are of {}, as {:?}", peer.lane, peer.role)));
        }
        let key = LaneKey { link, lane, role };
        // Held until the command is sent: see `Shared::drop_link`.
        let links = self.shared.links();
        let shared = links.get(&link).ok_or(TransportError::NoLink(link))?;
        let dial = match (shared.dialled, shared.address.get()) {
            (false, _) => None,
            (true, Some(&address)) => Some(address),
            (true, None) => return Err(TransportError::NoLink(link)),
        };
        self.shared.to_lane(&key, Command::StartLane { key, peer, dial, deadline });
        Ok(())
    }

    fn fence_lane(&self, link: LinkId, lane: LaneId) {
        let key = LaneKey { link, lane, role: LaneRole::Reader };
        self.shared.to_lane(&key, Command::Fence(key));
    }

    fn kill_lane(&self, link: LinkId, lane: LaneId) {
        let key = LaneKey { link, lane, role: LaneRole::Writer };
        self.shared.to_lane(&key, Command::Kill(key));
    }

    fn post_write(&self, link: LinkId, lane: LaneId, write: WriteRequest) {
        let key = LaneKey { link, lane, role: LaneRole::Writer };
        self.shared.to_lane(&key, Command::Post { key, job: Job::Write(write) });
    }

    fn post_marker(
        &self,
        link: LinkId,
        lane: LaneId,
        transfer: TransferId,
        round: Round,
        ticket: Ticket,
    ) {
        let key = LaneKey { link, lane, role: LaneRole::Writer };
        let job = Job::Marker { transfer, round, ticket };
        self.shared.to_lane(&key, Command::Post { key, job });
    }

    fn cancel(&self, transfer: TransferId) {
        self.shared.to_all(|| Command::Cancel(transfer));
    }

    fn open_landing(&self, landing: Landing) {
        self.shared.landings.open(landing);
    }

    fn close_landing(&self, transfer: TransferId) {
        if self.shared.landings.close(transfer) {
            self.shared.report(self.shared.landing_closed(transfer));
        }
    }

    fn forget_landing(&self, transfer: TransferId) {
        self.shared.landings.forget(transfer);
    }

    fn unland(&self, transfer: TransferId, lane: LaneId) {
        self.shared.landings.unland(transfer, lane);
    }

    fn shutdown(&self) {
        self.resolver.close();
        self.shared.to_all(|| Command::Shutdown);
        let threads = std::mem::take(&mut *self.threads());
        if self.ended.recv_timeout(SHUTDOWN_WAIT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("tcp: an I/O thread is stuck in the event sink and is left behind");
        }
        for thread in threads.into_iter().filter(JoinHandle::is_finished) {
            // A panic in it was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// No wait is without end: what is too long to be counted is a day.
fn deadline_in(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(Duration::from_secs(24 * 60 * 60))
}

impl Shared {
    /// The report that a landing is closed.
    fn landing_closed(&self, transfer: TransferId) -> Event {
        Event::LandingClosed { transfer, landed_bytes: self.landings.landed_bytes(transfer) }
    }
}
