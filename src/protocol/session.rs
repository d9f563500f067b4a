//! One session with one peer: is it alive, and which lanes join the two.
//!
//! The reader of a lane opens it, fences it and rebuilds it; the writer follows. Lanes die with
//! the link that carries the session's control messages; the session itself outlives a link that
//! comes back soon enough.

use std::collections::BTreeMap;
use std::time::Duration;

use super::cause::Cause;
use super::ids::{LaneId, Time};
use super::message::{Hello, MAGIC, Message};

/// Limits in time and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionSettings {
    /// Silence after which the peer is given up.
    pub liveness: Duration,
    /// How long a broken link may take to come back.
    pub reconnect_grace: Duration,
    /// Lanes that this side opens to be written through.
    pub lane_count: u16,
    /// How long opening a lane may take.
    pub lane_timeout: Duration,
    /// First pause before a broken lane is rebuilt; doubles up to 16 times.
    pub lane_backoff: Duration,
}

impl Default for SessionSettings {
    fn default() -> Self {
        SessionSettings {
            liveness: Duration::from_secs(2),
            reconnect_grace: Duration::from_secs(1),
            lane_count: 2,
            lane_timeout: Duration::from_secs(5),
            lane_backoff: Duration::from_millis(20),
        }
    }
}

impl Hello {
    /// The version to speak with `theirs`, or why there is none.
    pub fn agree(&self, theirs: &Hello) -> Result<u16, Cause> {
        if theirs.magic != MAGIC {
            return Err(Cause::ProtocolViolation { why: "the Hello is not sealift's".into() });
        }
        let version = self.max_version.min(theirs.max_version);
        if version < self.min_version.max(theirs.min_version) {
            let what = format!(
                "protocol {}..={} (this side speaks {}..={})",
                theirs.min_version, theirs.max_version, self.min_version, self.max_version
            );
            return Err(Cause::Unsupported { what: what.into() });
        }
        if self.transport != theirs.transport {
            let what = format!("transport {} (the peer has {})", self.transport, theirs.transport);
            return Err(Cause::Unsupported { what: what.into() });
        }
        if self.incarnation == theirs.incarnation {
            return Err(Cause::ProtocolViolation { why: "the peer is this engine".into() });
        }
        let missing = self.capabilities & !theirs.capabilities;
        if missing != 0 {
            let what = format!("capability bits {missing:#x}");
            return Err(Cause::Unsupported { what: what.into() });
        }
        Ok(version)
    }

    /// Is a request of `pages` pages and `tokens` tokens larger than what this side announced for
    /// its pool `name`? `[I16]`
    pub fn check_capacity(&self, name: &str, pages: u64, tokens: u64) -> Result<(), Cause> {
        let exceeded = |what: String, asked: u64, limit: u64| {
            Err(Cause::CapacityExceeded { what: what.into(), asked, limit })
        };
        if pages > u64::from(self.max_grant_pages) {
            return exceeded("pages of one grant".into(), pages, self.max_grant_pages.into());
        }
        let Some(pool) = self.pools.iter().find(|pool| pool.name.as_str() == name) else {
            return Ok(());
        };
        if pages > u64::from(pool.page_count) {
            return exceeded(
                format!("pages of the peer's pool {name}"),
                pages,
                pool.page_count.into(),
            );
        }
        let token_limit = u64::from(pool.page_count) * u64::from(pool.tokens_per_page);
        if pool.tokens_per_page > 0 && tokens > token_limit {
            return exceeded(format!("tokens of the peer's pool {name}"), tokens, token_limit);
        }
        Ok(())
    }
}

/// What to do next. In order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SessionAction {
    /// Send a message to the peer.
    Send(Message),
    /// Prepare this end of a lane to be written through; [`Session::on_reader_prepared`] or
    /// [`Session::on_reader_failed`] must follow.
    PrepareReader(LaneId),
    /// The peer's parameters came: join.
    StartReader {
        /// The lane.
        lane: LaneId,
        /// The peer's.
        params: Vec<u8>,
    },
    /// Prepare and start this end of a lane to write through; answer with
    /// [`Message::LaneAnswer`] or [`Message::LaneGone`].
    JoinWriter {
        /// The lane.
        lane: LaneId,
        /// The peer's parameters.
        params: Vec<u8>,
    },
    /// Take this (reading) end out of service; [`Session::on_fenced`] must follow.
    Fence(LaneId),
    /// A lane to read from is up.
    ReaderUp(LaneId),
    /// A lane to read from broke; its fence is under way.
    ReaderDown(LaneId),
    /// A lane to read from is fenced.
    ReaderFenced(LaneId),
    /// The peer is given up: everything with it fails.
    Lost(Cause),
    /// Dial the peer again.
    Redial,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ReaderState {
    Opening { until: Time },
    Up,
    Fencing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum LinkState {
    Up,
    Broken { since: Time, redial_at: Time },
    Lost,
}

/// One session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Session {
    settings: SessionSettings,
    dialler: bool,
    link: LinkState,
    last_heard: Time,
    last_ping: Time,
    readers: BTreeMap<LaneId, ReaderState>,
    retry_at: Time,
    failures: u32,
}

type Actions = Vec<SessionAction>;

impl Session {
    /// A session whose handshake has just ended. `dialler`: this side dials again if it breaks.
    pub fn new(now: Time, dialler: bool, settings: SessionSettings) -> Session {
        Session {
            settings,
            dialler,
            link: LinkState::Up,
            last_heard: now,
            last_ping: now,
            readers: BTreeMap::new(),
            retry_at: now,
            failures: 0,
        }
    }

    /// The link stands and the peer isn't given up.
    pub fn is_up(&self) -> bool {
        self.link == LinkState::Up
    }

    /// The peer is given up.
    pub fn is_lost(&self) -> bool {
        self.link == LinkState::Lost
    }

    /// Opens missing lanes, if it is time. `next_epoch` counts every lane of this engine.
    pub fn want_lanes(&mut self, now: Time, next_epoch: &mut u64, actions: &mut Actions) {
        if self.link != LinkState::Up || now < self.retry_at {
            return;
        }
        for index in 0..self.settings.lane_count {
            if self.readers.keys().any(|lane| lane.index == index) {
                continue;
            }
            *next_epoch += 1;
            let lane = LaneId { index, epoch: *next_epoch };
            let until = now.after(self.settings.lane_timeout);
            self.readers.insert(lane, ReaderState::Opening { until });
            actions.push(SessionAction::PrepareReader(lane));
        }
    }

    /// Whether a lane is missing.
    pub fn lacks_lanes(&self) -> bool {
        self.readers.len() < usize::from(self.settings.lane_count)
    }

    /// This end of a lane is prepared.
    pub fn on_reader_prepared(&mut self, lane: LaneId, params: Vec<u8>, actions: &mut Actions) {
        if self.readers.contains_key(&lane) {
            actions.push(SessionAction::Send(Message::LaneOffer { lane, params }));
        }
    }

    /// This end of a lane couldn't be prepared or started.
    pub fn on_reader_failed(&mut self, now: Time, lane: LaneId, actions: &mut Actions) {
        self.fence(now, lane, actions);
    }

    /// A lane to read from is up.
    pub fn on_reader_up(&mut self, lane: LaneId, actions: &mut Actions) {
        match self.readers.get_mut(&lane) {
            Some(state @ ReaderState::Opening { .. }) => {
                *state = ReaderState::Up;
                self.failures = 0;
                actions.push(SessionAction::ReaderUp(lane));
            }
            Some(_) => {}
            None => actions.push(SessionAction::Fence(lane)),
        }
    }

    /// A lane to read from broke: bytes may be on the way, so fence it.
    pub fn on_reader_down(&mut self, now: Time, lane: LaneId, actions: &mut Actions) {
        if self.readers.contains_key(&lane) {
            self.fence(now, lane, actions);
        }
    }

    /// Takes a lane out of service; the transfers that use it hear of it.
    pub fn fence(&mut self, now: Time, lane: LaneId, actions: &mut Actions) {
        match self.readers.get_mut(&lane) {
            Some(ReaderState::Fencing) => return,
            Some(state) => {
                let was_up = std::mem::replace(state, ReaderState::Fencing) == ReaderState::Up;
                if was_up {
                    actions.push(SessionAction::ReaderDown(lane));
                }
                self.failures = (self.failures + 1).min(5);
                let pause = self.settings.lane_backoff * (1 << (self.failures - 1));
                self.retry_at = now.after(pause);
            }
            // Fenced before, or never ours: the transport says so at once.
            None => {}
        }
        actions.push(SessionAction::Fence(lane));
    }

    /// A lane to read from is out of service.
    pub fn on_fenced(&mut self, lane: LaneId, actions: &mut Actions) {
        self.readers.remove(&lane);
        actions.push(SessionAction::ReaderFenced(lane));
    }

    /// A lane to write through is closed.
    pub fn on_writer_down(&self, lane: LaneId, actions: &mut Actions) {
        if self.link == LinkState::Up {
            actions.push(SessionAction::Send(Message::LaneGone { lane }));
        }
    }

    /// Anything came from the peer.
    pub fn heard(&mut self, now: Time) {
        self.last_heard = now;
    }

    /// A message of the session itself.
    pub fn on_message(&mut self, now: Time, message: Message, actions: &mut Actions) {
        match message {
            Message::Ping {} => actions.push(SessionAction::Send(Message::Pong {})),
            Message::LaneOffer { lane, params } => {
                actions.push(SessionAction::JoinWriter { lane, params });
            }
            Message::LaneAnswer { lane, params } => {
                let opening = matches!(self.readers.get(&lane), Some(ReaderState::Opening { .. }));
                actions.extend(opening.then_some(SessionAction::StartReader { lane, params }));
            }
            Message::LaneGone { lane } if self.readers.contains_key(&lane) => {
                self.fence(now, lane, actions);
            }
            Message::Bye { cause } => self.lose(now, cause, actions),
            _ => {}
        }
    }

    /// The link broke; its lanes are down with it.
    pub fn on_link_down(&mut self, now: Time, actions: &mut Actions) {
        if self.link == LinkState::Up {
            self.link = LinkState::Broken { since: now, redial_at: now };
            self.drop_lanes(now, actions);
        }
    }

    /// Another link carries the session on.
    pub fn on_link_back(&mut self, now: Time) {
        self.link = LinkState::Up;
        self.last_heard = now;
        self.retry_at = now;
    }

    /// Gives the peer up.
    pub fn lose(&mut self, now: Time, cause: Cause, actions: &mut Actions) {
        if self.link != LinkState::Lost {
            self.link = LinkState::Lost;
            self.drop_lanes(now, actions);
            actions.push(SessionAction::Lost(cause));
        }
    }

    fn drop_lanes(&mut self, now: Time, actions: &mut Actions) {
        for lane in self.readers.keys().copied().collect::<Vec<_>>() {
            self.fence(now, lane, actions);
        }
    }

    /// When [`Session::on_timeout`] is due.
    pub fn next_timeout(&self, wants_lanes: bool) -> Time {
        let link = match self.link {
            LinkState::Up => self.last_heard.after(self.settings.liveness).min(self.ping_at()),
            LinkState::Broken { since, redial_at } => {
                since.after(self.settings.reconnect_grace).min(redial_at)
            }
            LinkState::Lost => return Time::NEVER,
        };
        let opening = self.readers.values().map(|state| match state {
            ReaderState::Opening { until } => *until,
            _ => Time::NEVER,
        });
        let lanes = if wants_lanes && self.is_up() && self.lacks_lanes() {
            self.retry_at
        } else {
            Time::NEVER
        };
        opening.min().unwrap_or(Time::NEVER).min(link).min(lanes)
    }

    fn ping_at(&self) -> Time {
        self.last_ping.max(self.last_heard).after(self.settings.liveness / 4)
    }

    /// Liveness, redialling, lanes that don't come up.
    pub fn on_timeout(&mut self, now: Time, actions: &mut Actions) {
        match &mut self.link {
            LinkState::Up => {
                let limit = self.settings.liveness;
                if self.last_heard.after(limit) <= now {
                    let why = format!("silent for {} ms", limit.as_millis()).into();
                    self.lose(now, Cause::PeerLost { why }, actions);
                } else if self.ping_at() <= now {
                    self.last_ping = now;
                    actions.push(SessionAction::Send(Message::Ping {}));
                }
            }
            LinkState::Broken { since, redial_at } => {
                let limit = self.settings.reconnect_grace;
                if since.after(limit) <= now {
                    let why = format!("disconnected for {} ms", limit.as_millis()).into();
                    self.lose(now, Cause::PeerLost { why }, actions);
                } else if *redial_at <= now {
                    *redial_at = now.after(limit / 8);
                    actions.extend(self.dialler.then_some(SessionAction::Redial));
                }
            }
            LinkState::Lost => {}
        }
        let late = |(lane, state): (&LaneId, &ReaderState)| {
            matches!(state, ReaderState::Opening { until } if *until <= now).then_some(*lane)
        };
        for lane in self.readers.iter().filter_map(late).collect::<Vec<_>>() {
            self.fence(now, lane, actions);
        }
    }
}
