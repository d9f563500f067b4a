//! Control links: dialled or accepted, up, down.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::control::{Control, ControlEnd};
use super::dial::Dial;
use super::preamble::{Preamble, Reply};
use super::shared::{Counters, LinkShared};
use super::socket::{self, Stream};
use super::worker::{Owner, Timer, Worker};
use crate::transport::{Event, LinkId};

/// A link's own state.
pub(super) struct Link {
    shared: Arc<LinkShared>,
    phase: Phase,
}

enum Phase {
    /// The name is being looked up.
    Resolving {
        deadline: Instant,
    },
    /// `rest` are the addresses to try after this one.
    Dialling {
        dial: Dial,
        address: SocketAddr,
        rest: VecDeque<SocketAddr>,
        attempt: Instant,
        deadline: Instant,
    },
    Up {
        stream: Stream,
        control: Control,
    },
}

impl Link {
    pub(super) fn stream(&mut self) -> Option<&mut Stream> {
        match &mut self.phase {
            Phase::Resolving { .. } => None,
            Phase::Dialling { dial, .. } => Some(&mut dial.stream),
            Phase::Up { stream, .. } => Some(stream),
        }
    }
}

impl Worker {
    fn link_shared(&self, link: LinkId) -> Option<Arc<LinkShared>> {
        self.shared.links().get(&link).cloned()
    }

    pub(super) fn await_addresses(&mut self, link: LinkId, deadline: Instant) {
        let Some(shared) = self.link_shared(link) else { return };
        self.links.insert(link, Link { shared, phase: Phase::Resolving { deadline } });
        self.set_timer(deadline, Timer::Link(link));
    }

    pub(super) fn resolved(&mut self, link: LinkId, addresses: Result<Vec<SocketAddr>, String>) {
        let Some(Link { phase: Phase::Resolving { deadline }, .. }) = self.links.get(&link) else {
            return;
        };
        match (*deadline, addresses) {
            (deadline, Ok(addresses)) => self.dial(link, addresses, deadline),
            (_, Err(why)) => self.link_down(link, &why),
        }
    }

    /// Dials the first address that a connection can be begun to. Each gets its share of the time.
    pub(super) fn dial(&mut self, link: LinkId, addresses: Vec<SocketAddr>, deadline: Instant) {
        self.dial_next(link, addresses.into(), deadline, "the name has no address");
    }

    fn dial_next(
        &mut self,
        link: LinkId,
        mut rest: VecDeque<SocketAddr>,
        deadline: Instant,
        why: &str,
    ) {
        let Some(shared) = self.link_shared(link) else { return };
        if self.crippled {
            return self.link_down(link, "the I/O thread died");
        }
        let mut why = why.to_owned();
        while let Some(address) = rest.pop_front() {
            let now = Instant::now();
            let share = deadline.saturating_duration_since(now) / (rest.len() as u32 + 1);
            let token = self.new_token(Owner::Link(link));
            let (config, registry) = (&self.shared.config, self.poll.registry());
            match Dial::start(address, &Preamble::Control, config, registry, token) {
                Ok(dial) => {
                    let attempt = now + share;
                    let phase = Phase::Dialling { dial, address, rest, attempt, deadline };
                    self.links.insert(link, Link { shared, phase });
                    return self.set_timer(attempt, Timer::Link(link));
                }
                Err(error) => {
                    self.owners.remove(&token);
                    why = format!("dialling {address}: {error}");
                }
            }
        }
        self.link_down(link, &why);
    }

    pub(super) fn accept_link(&mut self, link: LinkId, io: mio::net::TcpStream, peer: SocketAddr) {
        let Some(shared) = self.link_shared(link) else { return };
        if self.crippled {
            return self.shared.drop_link(link);
        }
        let welcomed = socket::send_reply(&io, Reply::LINK);
        match welcomed.and_then(|()| self.watch(io, Owner::Link(link))) {
            Ok(stream) => self.link_up(link, shared, stream, peer),
            Err(error) => {
                tracing::debug!("dropping a link of {peer}: {error}");
                self.shared.drop_link(link);
            }
        }
    }

    fn link_up(&mut self, link: LinkId, shared: Arc<LinkShared>, stream: Stream, peer: SocketAddr) {
        let (token, dialled) = (stream.token, shared.dialled);
        if dialled {
            let _ = shared.address.set(peer);
        }
        shared.up.store(true, Ordering::Release);
        let phase = Phase::Up { stream, control: Control::new() };
        self.links.insert(link, Link { shared, phase });
        self.emit(Event::LinkUp { link, peer: peer.to_string(), dialled });
        self.make_ready(token);
    }

    /// Moves a link on as far as its socket lets it; `true` if it could go on at once.
    pub(super) fn serve_link(&mut self, link: LinkId) -> bool {
        match self.links.get_mut(&link).map(|link| &mut link.phase) {
            Some(Phase::Up { .. }) => self.serve_control(link),
            Some(Phase::Dialling { .. }) => {
                self.serve_dial(link);
                false
            }
            _ => false,
        }
    }

    fn serve_dial(&mut self, link: LinkId) {
        let Some(Link { phase: Phase::Dialling { dial, address, .. }, .. }) =
            self.links.get_mut(&link)
        else {
            return;
        };
        let why = match dial.drive() {
            Ok(None) => return,
            Ok(Some(Reply::Welcome(_))) => {
                if let Some(Link { shared, phase: Phase::Dialling { dial, address, .. } }) =
                    self.links.remove(&link)
                {
                    self.link_up(link, shared, dial.stream, address);
                }
                return;
            }
            Ok(Some(Reply::Full)) => "it takes no more links".to_owned(),
            Ok(Some(Reply::Refused)) => "it refused the link".to_owned(),
            Err(why) => why,
        };
        let why = format!("dialling {address}: {why}");
        self.redial(link, &why);
    }

    /// Gives up the present address for the next.
    fn redial(&mut self, link: LinkId, why: &str) {
        if let Some(Link { phase: Phase::Dialling { dial, rest, deadline, .. }, .. }) =
            self.links.remove(&link)
        {
            self.owners.remove(&dial.stream.token);
            self.dial_next(link, rest, deadline, why);
        }
    }

    fn serve_control(&mut self, id: LinkId) -> bool {
        let sink = Arc::clone(&self.shared.sink);
        let Some(link) = self.links.get_mut(&id) else { return false };
        let Phase::Up { stream, control } = &mut link.phase else { return false };
        let mut result = Ok(false);
        if stream.writable {
            result = control.flush(stream, &link.shared.queued).map(|()| false).map_err(Into::into);
        }
        if result.is_ok() && stream.readable {
            let deliver = |frame| sink(Event::Control { link: id, frame });
            result = control.read(stream, &mut self.scratch, deliver);
        }
        result.unwrap_or_else(|end| {
            if matches!(end, ControlEnd::TooLong(_)) {
                Counters::bump(&self.shared.counters.control_malformed);
            }
            self.link_down(id, &end.to_string());
            false
        })
    }

    pub(super) fn queue_control(&mut self, link: LinkId, bytes: Vec<u8>) {
        if let Some(Link { phase: Phase::Up { stream, control }, .. }) = self.links.get_mut(&link) {
            control.push(bytes);
            if stream.writable {
                let token = stream.token;
                self.make_ready(token);
            }
        }
    }

    pub(super) fn close_link(&mut self, id: LinkId) {
        if let Some(Link { shared, phase: Phase::Up { stream, control } }) = self.links.get_mut(&id)
        {
            // What was said before the close should still go out, if the socket takes it.
            let _ = control.flush(stream, &shared.queued);
        }
        self.link_down(id, "closed by this side");
    }

    pub(super) fn expire_link(&mut self, link: LinkId, now: Instant) {
        match self.links.get(&link).map(|link| &link.phase) {
            Some(Phase::Resolving { deadline }) if *deadline <= now => {
                self.link_down(link, "looking the name up took too long");
            }
            Some(Phase::Dialling { attempt, address, .. }) if *attempt <= now => {
                let why = format!("dialling {address}: timed out");
                self.redial(link, &why);
            }
            _ => {}
        }
    }

    /// Ends a link, once: whoever drops it from the shared table reports it.
    pub(super) fn link_down(&mut self, link: LinkId, why: &str) {
        if let Some(stream) = self.links.get_mut(&link).and_then(Link::stream) {
            let token = stream.token;
            self.owners.remove(&token);
        }
        self.links.remove(&link);
        if self.link_shared(link).is_some() {
            self.shared.drop_link(link);
            self.emit(Event::LinkDown { link, why: why.to_owned() });
        }
    }

    pub(super) fn lanes_of_gone_link(&mut self, link: LinkId) {
        let lanes: Vec<_> = self.lanes.keys().copied().filter(|key| key.link == link).collect();
        lanes.iter().for_each(|key| self.lane_down(key, "its link is down"));
    }
}
