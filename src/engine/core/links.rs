//! Links, handshakes and sessions.

use std::sync::Arc;
use std::time::Duration;

use super::{Core, Todo};
use crate::engine::command::ConnectResult;
use crate::engine::slot::Resolver;
use crate::protocol::parts::{Joiner, MAX_MESSAGE_LEN, MAX_PART_LEN, split};
use crate::protocol::session::{Session, SessionAction};
use crate::protocol::wire::Text;
use crate::protocol::{
    Cause, Hello, Incarnation, MAGIC, MIN_VERSION, Message, PoolCapacity, Time, VERSION,
};
use crate::transport::{LaneRole, LaneSet, LinkId};

/// A control connection.
pub(super) struct Link {
    joiner: Joiner,
    last_number: u32,
    state: LinkState,
}

enum LinkState {
    /// Dialling, or waiting for the Welcome.
    Dialling {
        until: Time,
        address: String,
        for_peer: Option<Incarnation>,
        resolver: Option<Resolver<ConnectResult>>,
    },
    /// Dialled by a peer that hasn't said who it is.
    Waiting { until: Time },
    /// Carries a session.
    Bound(Incarnation),
    /// Answered with a session that another link carries; the peer closes it.
    Spare { until: Time },
}

/// A peer that a session stands with, or whose lanes aren't all fenced yet.
pub(super) struct PeerEntry {
    pub(super) session: Session,
    pub(super) hello: Arc<Hello>,
    session_id: u64,
    pub(super) link: LinkId,
    /// What it may write through here.
    pub(super) lanes: Arc<LaneSet>,
    /// What to dial again, if this side dialled.
    address: Option<String>,
}

/// A dial that is to be tried again.
pub(super) struct Redial {
    at: Time,
    address: String,
    until: Time,
    resolver: Option<Resolver<ConnectResult>>,
}

const REDIAL_PAUSE: Duration = Duration::from_millis(20);

impl Core {
    pub(super) fn connect(
        &mut self,
        now: Time,
        address: String,
        timeout: Duration,
        resolver: Resolver<ConnectResult>,
    ) {
        if self.closing {
            resolver.resolve(Err(Cause::ShuttingDown {}));
            return;
        }
        self.dial(now, address, timeout, None, Some(resolver));
    }

    fn dial(
        &mut self,
        now: Time,
        address: String,
        timeout: Duration,
        for_peer: Option<Incarnation>,
        resolver: Option<Resolver<ConnectResult>>,
    ) {
        match self.transport.connect(&address, timeout) {
            Ok(link) => {
                let until = now.after(timeout);
                let state = LinkState::Dialling { until, address, for_peer, resolver };
                self.links.insert(link, Link::new(state));
            }
            Err(why) => {
                if let Some(resolver) = resolver {
                    resolver.resolve(Err(Cause::PeerLost { why: why.to_string().into() }));
                }
            }
        }
    }

    /// What this side says of itself.
    fn hello(&self, session: Option<u64>) -> Hello {
        let config = &self.shared.config;
        let pools = self.shared.pools();
        let capacity = |entry: &crate::engine::shared::PoolEntry| PoolCapacity {
            name: Text::new(&entry.layout.name),
            page_count: entry.layout.page_count,
            tokens_per_page: entry.layout.tokens_per_page,
        };
        Hello {
            magic: MAGIC,
            min_version: MIN_VERSION,
            max_version: VERSION,
            incarnation: self.shared.incarnation,
            name: Text::new(&config.name),
            session,
            capabilities: self.transport.capabilities().bits(),
            transport: Text::new(self.transport.name()),
            max_grant_pages: config.max_grant_pages,
            window_bytes: config.sender.lane_window_bytes,
            liveness_ms: u32::try_from(config.session.liveness.as_millis()).unwrap_or(u32::MAX),
            pools: pools.entries.values().map(capacity).collect(),
            auth: Vec::new(),
        }
    }

    pub(super) fn on_link_up(&mut self, now: Time, link: LinkId, dialled: bool) {
        if !dialled {
            let until = now.after(self.shared.config.handshake);
            self.links.insert(link, Link::new(LinkState::Waiting { until }));
            return;
        }
        let Some(LinkState::Dialling { for_peer, .. }) = self.links.get(&link).map(|l| &l.state)
        else {
            self.transport.close_link(link);
            return;
        };
        let session = for_peer.and_then(|peer| self.peers.get(&peer)).map(|p| p.session_id);
        let hello = self.hello(session);
        self.send_on(link, &Message::Hello { hello });
    }

    pub(super) fn on_link_down(&mut self, now: Time, link: LinkId, why: &str) {
        let Some(gone) = self.links.remove(&link) else { return };
        match gone.state {
            LinkState::Dialling { resolver: Some(resolver), .. } => {
                resolver.resolve(Err(Cause::PeerLost { why: why.into() }));
            }
            LinkState::Bound(peer) => {
                let bound = self.peers.get_mut(&peer).filter(|entry| entry.link == link);
                if let Some(entry) = bound {
                    tracing::info!(%peer, %why, "the control link broke");
                    let mut actions = Vec::new();
                    entry.session.on_link_down(now, &mut actions);
                    self.queue(peer, actions);
                }
            }
            _ => {}
        }
    }

    pub(super) fn queue(&mut self, peer: Incarnation, actions: Vec<SessionAction>) {
        self.todo.extend(actions.into_iter().map(|action| Todo::Session(peer, action)));
    }

    pub(super) fn on_control(&mut self, now: Time, link: LinkId, frame: &[u8]) {
        let Some(entry) = self.links.get_mut(&link) else { return };
        if let LinkState::Bound(peer) = entry.state
            && let Some(peer) = self.peers.get_mut(&peer)
        {
            peer.session.heard(now);
        }
        let whole = matches!(entry.state, LinkState::Bound(_));
        let limit = if whole { MAX_MESSAGE_LEN } else { MAX_PART_LEN };
        match entry.joiner.push(frame, limit) {
            Ok(None) => {}
            Ok(Some(message)) => self.on_message(now, link, message),
            Err(why) => {
                let why = format!("a malformed control message: {why}").into();
                self.break_off(now, link, Cause::ProtocolViolation { why });
            }
        }
    }

    /// The peer of this link is broken: it is told, and whatever stands with it fails.
    fn break_off(&mut self, now: Time, link: LinkId, cause: Cause) {
        tracing::warn!(?link, %cause, "session broken off");
        self.send_on(link, &Message::Bye { cause: cause.clone() });
        let Some(entry) = self.links.get(&link) else { return };
        if let LinkState::Bound(peer) = entry.state {
            self.lose(now, peer, cause);
        } else {
            self.fail_dial(link, cause);
        }
    }

    fn fail_dial(&mut self, link: LinkId, cause: Cause) {
        self.transport.close_link(link);
        if let Some(Link { state: LinkState::Dialling { resolver: Some(resolver), .. }, .. }) =
            self.links.remove(&link)
        {
            resolver.resolve(Err(cause));
        }
    }

    fn lose(&mut self, now: Time, peer: Incarnation, cause: Cause) {
        if let Some(entry) = self.peers.get_mut(&peer) {
            let mut actions = Vec::new();
            entry.session.lose(now, cause, &mut actions);
            self.queue(peer, actions);
        }
    }

    fn on_message(&mut self, now: Time, link: LinkId, message: Message) {
        let Some(entry) = self.links.get(&link) else { return };
        match (&entry.state, message) {
            (LinkState::Bound(peer), message) => {
                let peer = *peer;
                self.on_peer_message(now, peer, message);
            }
            (LinkState::Waiting { .. }, Message::Hello { hello }) => {
                self.on_hello(now, link, hello)
            }
            (LinkState::Dialling { .. }, Message::Welcome { hello, resumed }) => {
                self.on_welcome(now, link, hello, resumed);
            }
            (LinkState::Dialling { .. }, Message::Bye { cause }) => self.fail_dial(link, cause),
            (LinkState::Spare { .. }, _) => {}
            (_, message) => {
                let why = format!("{} before the handshake", message.name()).into();
                self.break_off(now, link, Cause::ProtocolViolation { why });
            }
        }
    }

    /// A dialler says who it is.
    fn on_hello(&mut self, now: Time, link: LinkId, theirs: Hello) {
        let refused = self.hello(None).agree(&theirs).err();
        let refused = refused.or(self.closing.then_some(Cause::ShuttingDown {}));
        if let Some(cause) = refused {
            self.break_off(now, link, cause);
            self.transport.close_link(link);
            self.links.remove(&link);
            return;
        }
        let peer = theirs.incarnation;
        let standing = self.peers.get(&peer).filter(|entry| !entry.session.is_lost());
        let known = standing.map(|entry| (entry.session_id, entry.session.is_up()));
        match known {
            Some((id, _)) if theirs.session == Some(id) => self.resume(now, link, peer),
            // The session that stands goes on over its own link. It dialled a second time; or it
            // meant an engine that had this address before, and names its session with that one.
            Some((id, true)) => {
                let until = now.after(self.shared.config.handshake);
                self.set_state(link, LinkState::Spare { until });
                let hello = self.hello(Some(id));
                self.send_on(link, &Message::Welcome { hello, resumed: true });
            }
            _ => {
                let why = "it began a new session".into();
                self.lose(now, peer, Cause::PeerLost { why });
                self.work(now);
                let id = getrandom::u64().unwrap_or(self.last_epoch) | 1;
                let hello = self.hello(Some(id));
                self.send_on(link, &Message::Welcome { hello, resumed: false });
                self.begin(now, link, theirs, id, None);
            }
        }
    }

    /// The same peer carries its session on over a new link.
    fn resume(&mut self, now: Time, link: LinkId, peer: Incarnation) {
        let Some(entry) = self.peers.get_mut(&peer) else { return };
        let (old, id, was_up) = (entry.link, entry.session_id, entry.session.is_up());
        if was_up {
            let mut actions = Vec::new();
            entry.session.on_link_down(now, &mut actions);
            self.queue(peer, actions);
        }
        self.links.remove(&old);
        self.transport.close_link(old);
        let hello = self.hello(Some(id));
        self.send_on(link, &Message::Welcome { hello, resumed: true });
        self.rebind(now, link, peer);
    }

    fn rebind(&mut self, now: Time, link: LinkId, peer: Incarnation) {
        self.set_state(link, LinkState::Bound(peer));
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.link = link;
            entry.session.on_link_back(now);
        }
        self.with_receiver(|receiver, _, actions| receiver.on_peer_back(now, peer, actions));
        self.with_sender(|sender, _| sender.on_peer_back(now, peer));
        self.want_lanes(now, peer);
    }

    fn set_state(&mut self, link: LinkId, state: LinkState) {
        if let Some(entry) = self.links.get_mut(&link) {
            entry.state = state;
        }
    }

    /// The listener answers.
    fn on_welcome(&mut self, now: Time, link: LinkId, theirs: Hello, resumed: bool) {
        if let Err(cause) = self.hello(None).agree(&theirs) {
            self.break_off(now, link, cause);
            return;
        }
        let peer = theirs.incarnation;
        let Some(LinkState::Dialling { address, for_peer, resolver, until }) = self
            .links
            .get_mut(&link)
            .map(|l| std::mem::replace(&mut l.state, LinkState::Bound(peer)))
        else {
            return;
        };
        let id = theirs.session.unwrap_or_default();
        let standing = self.peers.get(&peer).filter(|entry| !entry.session.is_lost());
        let known = standing.map(|entry| (entry.session_id, entry.session.is_up()));
        let shared_hello = Arc::new(theirs.clone());
        if let Some(lost) = for_peer.filter(|lost| *lost != peer) {
            let why = format!("another engine, {peer}, answers at its address").into();
            self.lose(now, lost, Cause::PeerLost { why });
        }
        match known {
            Some((ours, false)) if ours == id && resumed => self.rebind(now, link, peer),
            // Another link carries a session with this peer: of two dials that cross, the one of
            // the lower incarnation stands, on both sides.
            Some((ours, true)) if ours == id || self.shared.incarnation > peer => {
                self.links.remove(&link);
                self.transport.close_link(link);
            }
            // It takes us for a session that is over here, whose old link it hasn't missed yet.
            standing if resumed && standing.map(|(ours, _)| ours) != Some(id) => {
                self.transport.close_link(link);
                self.links.remove(&link);
                self.redial_later(now, address, until, resolver);
                return;
            }
            _ => {
                let why = "it does not know the session any more".into();
                self.lose(now, peer, Cause::PeerLost { why });
                self.work(now);
                self.begin(now, link, theirs, id, Some(address));
            }
        }
        if let Some(resolver) = resolver {
            resolver.resolve(Ok((peer, shared_hello)));
        }
    }

    fn redial_later(
        &mut self,
        now: Time,
        address: String,
        until: Time,
        resolver: Option<Resolver<ConnectResult>>,
    ) {
        let at = now.after(REDIAL_PAUSE);
        self.redials.push(Redial { at, address, until, resolver });
    }

    /// Dials again what met a session that was over here; until its own time is up.
    fn redial_due(&mut self, now: Time) {
        let (due, later) =
            std::mem::take(&mut self.redials).into_iter().partition(|redial| redial.at <= now);
        self.redials = later;
        for Redial { address, until, resolver, .. } in due {
            let left = now.until(until);
            match resolver {
                Some(resolver) if left.is_zero() => {
                    let why = "it holds on to a session that is over here".into();
                    resolver.resolve(Err(Cause::PeerLost { why }));
                }
                resolver if !left.is_zero() => self.dial(now, address, left, None, resolver),
                _ => {}
            }
        }
    }

    fn begin(&mut self, now: Time, link: LinkId, theirs: Hello, id: u64, address: Option<String>) {
        let peer = theirs.incarnation;
        self.set_state(link, LinkState::Bound(peer));
        let session = Session::new(now, address.is_some(), self.shared.config.session);
        let hello = Arc::new(theirs);
        self.shared.add_peer(hello.clone());
        let entry =
            PeerEntry { session, hello, session_id: id, link, lanes: Arc::default(), address };
        if let Some(old) = self.peers.insert(peer, entry) {
            self.links.remove(&old.link);
            self.transport.close_link(old.link);
        }
        self.want_lanes(now, peer);
    }

    fn on_peer_message(&mut self, now: Time, peer: Incarnation, message: Message) {
        match message {
            Message::Ping {}
            | Message::Pong {}
            | Message::Bye { .. }
            | Message::LaneOffer { .. }
            | Message::LaneAnswer { .. }
            | Message::LaneGone { .. } => {
                if let Some(entry) = self.peers.get_mut(&peer) {
                    let mut actions = Vec::new();
                    entry.session.on_message(now, message, &mut actions);
                    self.queue(peer, actions);
                }
            }
            Message::Hello { .. } | Message::Welcome { .. } => {
                if let Some(link) = self.peers.get(&peer).map(|entry| entry.link) {
                    let why = "a second handshake on one link".into();
                    self.break_off(now, link, Cause::ProtocolViolation { why });
                }
            }
            message => {
                let ours = |id: crate::protocol::TransferId| id.receiver == self.shared.incarnation;
                if message.transfer().is_some_and(ours) {
                    self.with_receiver(|receiver, ledgers, actions| {
                        receiver.on_message(now, peer, message, ledgers, actions);
                    });
                    self.want_lanes(now, peer);
                } else {
                    self.with_sender(|sender, actions| {
                        sender.on_message(now, peer, message, actions)
                    });
                }
            }
        }
    }

    pub(super) fn do_session(&mut self, now: Time, peer: Incarnation, action: SessionAction) {
        match action {
            SessionAction::Send(message) => self.send(peer, &message),
            SessionAction::PrepareReader(lane) => self.prepare_reader(now, peer, lane),
            SessionAction::StartReader { lane, params } => {
                let Some(&(link, _)) = self.reader_lanes.get(&lane) else { return };
                let timeout = self.shared.config.session.lane_timeout;
                let started =
                    self.transport.start_lane(link, lane, LaneRole::Reader, &params, timeout);
                if let Err(why) = started {
                    tracing::warn!(%peer, %lane, %why, "a lane could not be started");
                    self.with_session(peer, |session, actions| {
                        session.on_reader_failed(now, lane, actions);
                    });
                }
            }
            SessionAction::JoinWriter { lane, params } => {
                self.join_writer(now, peer, lane, &params)
            }
            SessionAction::Fence(lane) => match self.reader_lanes.get(&lane) {
                Some(&(link, owner)) if owner == peer => self.transport.fence_lane(link, lane),
                // Fenced before, or another peer's: this one writes nothing through it.
                _ => self.queue(peer, vec![SessionAction::ReaderFenced(lane)]),
            },
            SessionAction::ReaderUp(lane) => self.with_receiver(|receiver, ledgers, actions| {
                receiver.on_lane_up(now, peer, lane, ledgers, actions);
            }),
            SessionAction::ReaderDown(lane) => self.receiver.on_lane_down(peer, lane),
            SessionAction::ReaderFenced(lane) => {
                self.with_receiver(|receiver, ledgers, actions| {
                    receiver.on_lane_fenced(now, peer, lane, ledgers, actions);
                });
                self.want_lanes(now, peer);
            }
            SessionAction::Lost(cause) => self.on_lost(now, peer, &cause),
            SessionAction::Redial => {
                let address = self.peers.get(&peer).and_then(|entry| entry.address.clone());
                let busy = self.links.values().any(|link| {
                    matches!(&link.state, LinkState::Dialling { for_peer, .. } if *for_peer == Some(peer))
                });
                if let Some(address) = address.filter(|_| !busy) {
                    let timeout = self.shared.config.session.reconnect_grace;
                    self.dial(now, address, timeout, Some(peer), None);
                }
            }
        }
    }

    pub(super) fn with_session(
        &mut self,
        peer: Incarnation,
        act: impl FnOnce(&mut Session, &mut Vec<SessionAction>),
    ) {
        if let Some(entry) = self.peers.get_mut(&peer) {
            let mut actions = Vec::new();
            act(&mut entry.session, &mut actions);
            self.queue(peer, actions);
        }
    }

    fn on_lost(&mut self, now: Time, peer: Incarnation, cause: &Cause) {
        tracing::warn!(%peer, %cause, "a session is over");
        self.shared.remove_peer(peer);
        if let Some(link) = self.peers.get(&peer).map(|entry| entry.link) {
            self.send_on(link, &Message::Bye { cause: cause.clone() });
            self.links.remove(&link);
            self.transport.close_link(link);
        }
        self.with_receiver(|receiver, ledgers, actions| {
            receiver.on_peer_lost(now, peer, cause, ledgers, actions);
        });
        self.with_sender(|sender, actions| sender.on_peer_lost(now, peer, cause, actions));
    }

    pub(super) fn peer_of(&self, link: LinkId) -> Option<Incarnation> {
        match self.links.get(&link)?.state {
            LinkState::Bound(peer) => Some(peer),
            _ => None,
        }
    }

    pub(super) fn send(&mut self, peer: Incarnation, message: &Message) {
        let up = self.peers.get(&peer).filter(|entry| entry.session.is_up());
        if let Some(link) = up.map(|entry| entry.link) {
            self.send_on(link, message);
        }
    }

    pub(super) fn send_on(&mut self, link: LinkId, message: &Message) {
        let Some(entry) = self.links.get_mut(&link) else { return };
        entry.last_number = entry.last_number.wrapping_add(1);
        let frames = match split(entry.last_number, message) {
            Ok(frames) => frames,
            Err(why) => {
                tracing::error!(%why, message = message.name(), "a message can't be encoded");
                return;
            }
        };
        for frame in frames {
            // A stream with holes is no stream: the link goes, and the session carries on over
            // the next one, where all that matters is sent again.
            if let Err(why) = self.transport.send_control(link, &frame) {
                tracing::warn!(?link, %why, message = message.name(), "a message was not sent");
                self.transport.close_link(link);
                return;
            }
        }
    }

    pub(super) fn say_bye(&mut self) {
        let bound: Vec<LinkId> = self.peers.values().map(|entry| entry.link).collect();
        for link in bound {
            self.send_on(link, &Message::Bye { cause: Cause::ShuttingDown {} });
        }
    }

    pub(super) fn links_timeout(&self) -> Time {
        let sessions = self.peers.iter().map(|(peer, entry)| {
            let wants = self.receiver.wants_lanes(*peer) && self.receiver.may_open_lanes(*peer);
            entry.session.next_timeout(wants)
        });
        let links = self.links.values().map(|link| match &link.state {
            LinkState::Dialling { until, .. }
            | LinkState::Waiting { until }
            | LinkState::Spare { until } => *until,
            LinkState::Bound(_) => Time::NEVER,
        });
        let redials = self.redials.iter().map(|redial| redial.at);
        sessions.chain(links).chain(redials).min().unwrap_or(Time::NEVER)
    }

    pub(super) fn on_links_timeout(&mut self, now: Time) {
        self.redial_due(now);
        for peer in self.peers.keys().copied().collect::<Vec<_>>() {
            self.with_session(peer, |session, actions| session.on_timeout(now, actions));
            self.want_lanes(now, peer);
            self.forget_lost(peer);
        }
        let late = |(link, entry): (&LinkId, &Link)| match &entry.state {
            LinkState::Dialling { until, .. }
            | LinkState::Waiting { until }
            | LinkState::Spare { until } => (*until <= now).then_some(*link),
            LinkState::Bound(_) => None,
        };
        for link in self.links.iter().filter_map(late).collect::<Vec<_>>() {
            self.fail_dial(link, Cause::DeadlineExceeded {});
        }
    }
}

impl Link {
    fn new(state: LinkState) -> Link {
        Link { joiner: Joiner::default(), last_number: 0, state }
    }
}
