//! The listener, and connections that have not said yet what they are.
//!
//! Nothing that a stranger sends can delay anybody else: the first bytes are of fixed length, a
//! bounded number of connections is waited for, each has a deadline, and where there are too many
//! the oldest goes, since honest peers speak at once.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::Token;
use socket2::SockRef;

use super::preamble::{PREAMBLE_LEN, Preamble, Reply, opposite};
use super::shared::{Command, Counters, LaneKey};
use super::socket::{self, Stream};
use super::worker::{Owner, Timer, Worker};

/// How long to wait before accepting again when the system has no descriptor to spare.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections accepted in one go, before others are served.
const ACCEPT_BATCH: usize = 64;

struct HalfOpen {
    stream: Stream,
    peer: SocketAddr,
    preamble: [u8; PREAMBLE_LEN],
    got: usize,
}

/// The listener and the connections that it brought.
pub(super) struct Acceptor {
    listener: Option<mio::net::TcpListener>,
    half_open: HashMap<Token, HalfOpen>,
    /// Oldest first, with their deadlines. Those that have moved on are skipped.
    order: VecDeque<(Instant, Token)>,
}

impl Acceptor {
    pub(super) fn new(listener: Option<mio::net::TcpListener>) -> Acceptor {
        Acceptor { listener, half_open: HashMap::new(), order: VecDeque::new() }
    }

    pub(super) fn stream(&mut self, token: Token) -> Option<&mut Stream> {
        self.half_open.get_mut(&token).map(|half| &mut half.stream)
    }

    /// Stops listening and drops what is half open.
    pub(super) fn close(&mut self) {
        self.listener = None;
        self.half_open.clear();
        self.order.clear();
    }
}

impl Worker {
    pub(super) fn accept_all(&mut self) {
        for _ in 0..ACCEPT_BATCH {
            let Some(listener) = &self.acceptor.listener else { return };
            match listener.accept() {
                Ok((io, peer)) => self.half_open(io, peer),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    // The caller gave up, or a signal came: the next one may be waiting.
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                    _ => {
                        tracing::warn!("accepting: {error}");
                        return self.set_timer(Instant::now() + ACCEPT_PAUSE, Timer::Accept);
                    }
                },
            }
        }
        // Readiness is reported once: come back without being told.
        self.set_timer(Instant::now(), Timer::Accept);
    }

    fn half_open(&mut self, io: mio::net::TcpStream, peer: SocketAddr) {
        Counters::bump(&self.shared.counters.accepted);
        self.make_room();
        let tuned = socket::tune(SockRef::from(&io), &self.shared.config);
        match tuned.and_then(|()| self.watch(io, Owner::HalfOpen)) {
            Ok(stream) => {
                let token = stream.token;
                let half = HalfOpen { stream, peer, preamble: [0; PREAMBLE_LEN], got: 0 };
                self.acceptor.half_open.insert(token, half);
                let deadline = Instant::now() + self.shared.config.handshake_timeout;
                if self.acceptor.order.is_empty() {
                    self.set_timer(deadline, Timer::HalfOpen);
                }
                self.acceptor.order.push_back((deadline, token));
            }
            Err(error) => tracing::debug!("dropping a connection of {peer}: {error}"),
        }
    }

    /// Lets the oldest go until one more fits.
    fn make_room(&mut self) {
        let limit = self.shared.config.max_half_open;
        while self.acceptor.half_open.len() >= limit {
            let Some((_, oldest)) = self.acceptor.order.pop_front() else { break };
            if self.drop_half_open(oldest) {
                Counters::bump(&self.shared.counters.half_open_evicted);
            }
        }
        // Those that moved on behind one that stays must not pile up.
        let Acceptor { half_open, order, .. } = &mut self.acceptor;
        if order.len() > 2 * limit {
            order.retain(|(_, token)| half_open.contains_key(token));
        }
    }

    fn drop_half_open(&mut self, token: Token) -> bool {
        self.owners.remove(&token);
        self.acceptor.half_open.remove(&token).is_some()
    }

    /// Drops those whose time is up; deadlines come in the order of arrival.
    pub(super) fn expire_half_open(&mut self, now: Instant) {
        while let Some(&(deadline, token)) = self.acceptor.order.front() {
            if deadline > now && self.acceptor.half_open.contains_key(&token) {
                return self.set_timer(deadline, Timer::HalfOpen);
            }
            self.acceptor.order.pop_front();
            if self.drop_half_open(token) {
                Counters::bump(&self.shared.counters.half_open_expired);
            }
        }
    }

    pub(super) fn serve_half_open(&mut self, token: Token) {
        let Some(half) = self.acceptor.half_open.get_mut(&token) else { return };
        while half.got < PREAMBLE_LEN {
            match half.stream.read(&mut half.preamble[half.got..]) {
                Ok(None) => return,
                Ok(Some(got)) if got > 0 => half.got += got,
                Ok(Some(_)) | Err(_) => {
                    self.drop_half_open(token);
                    return Counters::bump(&self.shared.counters.garbage_preambles);
                }
            }
        }
        self.owners.remove(&token);
        let Some(half) = self.acceptor.half_open.remove(&token) else { return };
        match Preamble::decode(&half.preamble) {
            Ok(preamble) => self.hand_over(half, preamble),
            Err(error) => {
                tracing::debug!("dropping a connection of {}: {error}", half.peer);
                Counters::bump(&self.shared.counters.garbage_preambles);
            }
        }
    }

    /// Passes a connection that has said what it is to the thread that it belongs to.
    fn hand_over(&mut self, half: HalfOpen, preamble: Preamble) {
        let HalfOpen { stream: Stream { mut io, .. }, peer, .. } = half;
        if let Err(error) = self.poll.registry().deregister(&mut io) {
            return tracing::debug!("dropping a connection of {peer}: {error}");
        }
        match preamble {
            Preamble::Control => match self.shared.new_link(false) {
                Some(link) => {
                    let accept = Command::AcceptLink { link, stream: io, peer };
                    self.shared.to_link(link, accept);
                }
                None => {
                    Counters::bump(&self.shared.counters.links_refused);
                    // Only so that the other side can say why.
                    let _ = socket::send_reply(&io, Reply::Full);
                }
            },
            Preamble::Lane { link, lane, dialler, secret } => {
                let key = LaneKey { link, lane, role: opposite(dialler) };
                self.shared.to_lane(&key, Command::Attach { key, secret, stream: io });
            }
        }
    }
}
