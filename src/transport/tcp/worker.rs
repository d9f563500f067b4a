//! An I/O thread: waits for sockets, commands and deadlines, and serves each for a bounded turn.
//!
//! A thread owns its links and lanes; nobody else touches their sockets. So a fence that it
//! executes finds it outside every receive call, and what it answers is so.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use mio::{Events, Poll, Token};

use super::accept::Acceptor;
use super::lane::Lane;
use super::link::Link;
use super::shared::{Command, LaneKey, Shared};
use super::socket::Stream;
use crate::transport::{Event, LinkId};

/// The token of the thread's waker.
pub(super) const WAKER: Token = Token(0);
/// The token of the listener.
pub(super) const LISTENER: Token = Token(1);
const FIRST_TOKEN: usize = 2;

/// Commands taken in one turn, before sockets are served again.
const TURN_COMMANDS: usize = 1024;
/// How often a thread whose poll fails looks for commands.
const CRIPPLED_PAUSE: Duration = Duration::from_millis(10);
/// Bytes of the buffer that all links of a thread read through.
const SCRATCH_BYTES: usize = 64 * 1024;

/// Who a connection belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Owner {
    HalfOpen,
    Link(LinkId),
    Lane(LaneKey),
}

/// What a deadline is for. Those that were overtaken fire in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    Accept,
    HalfOpen,
    Link(LinkId),
    Lane(LaneKey),
}

/// Whether the thread goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    On,
    Stop,
}

/// The state of one I/O thread.
pub(super) struct Worker {
    index: usize,
    pub(super) shared: Arc<Shared>,
    pub(super) poll: Poll,
    commands: Receiver<Command>,
    more_commands: bool,
    next_token: usize,
    pub(super) owners: HashMap<Token, Owner>,
    pub(super) links: HashMap<LinkId, Link>,
    pub(super) lanes: HashMap<LaneKey, Lane>,
    pub(super) acceptor: Acceptor,
    ready: VecDeque<Token>,
    timers: BTreeSet<(Instant, Timer)>,
    pub(super) scratch: Box<[u8]>,
    /// It panicked: it takes nothing new, and answers for what it had.
    pub(super) crippled: bool,
}

impl Worker {
    pub(super) fn new(
        index: usize,
        shared: Arc<Shared>,
        poll: Poll,
        commands: Receiver<Command>,
        listener: Option<mio::net::TcpListener>,
    ) -> Worker {
        Worker {
            index,
            shared,
            poll,
            commands,
            more_commands: false,
            next_token: FIRST_TOKEN,
            owners: HashMap::new(),
            links: HashMap::new(),
            lanes: HashMap::new(),
            acceptor: Acceptor::new(listener),
            ready: VecDeque::new(),
            timers: BTreeSet::new(),
            scratch: vec![0; SCRATCH_BYTES].into(),
            crippled: false,
        }
    }

    /// Runs until shutdown. A panic is reported, and costs everything that this thread owned; the
    /// thread stays to answer for it, since a fence must be answered even then. `[I14]`
    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        loop {
            match catch_unwind(AssertUnwindSafe(|| self.turn(&mut events))) {
                Ok(Ok(Flow::On)) => {}
                Ok(Ok(Flow::Stop)) => break,
                Ok(Err(error)) => self.die(&format!("waiting for sockets: {error}")),
                Err(panic) => self.die(&panic_text(panic.as_ref())),
            }
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.stop())) {
            self.die(&panic_text(panic.as_ref()));
        }
    }

    fn die(&mut self, why: &str) {
        self.crippled = true;
        let why = format!("tcp I/O thread {}: {why}", self.index);
        tracing::error!("{why}");
        let report = AssertUnwindSafe(|| self.emit(Event::WorkerDied { why: why.clone() }));
        // A sink that panics can't be told anything.
        let _ = catch_unwind(report);
        // Each try takes at least one away, even if the sink panics at every report.
        for _ in 0..=self.lanes.len() + self.links.len() {
            let close = AssertUnwindSafe(|| self.close_everything(&why));
            if catch_unwind(close).is_ok() {
                break;
            }
        }
    }

    /// Closes everything, and answers what was asked in the meantime.
    fn stop(&mut self) {
        self.crippled = true;
        self.close_everything("the transport shut down");
        while let Ok(command) = self.commands.try_recv() {
            self.execute(command);
        }
    }

    fn turn(&mut self, events: &mut Events) -> io::Result<Flow> {
        let busy = self.more_commands || !self.ready.is_empty();
        let timeout = if busy { Some(Duration::ZERO) } else { self.next_timeout() };
        match self.poll.poll(events, timeout) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // It was reported, and commands must still be answered.
            Err(_) if self.crippled => std::thread::sleep(CRIPPLED_PAUSE),
            other => other?,
        }
        for event in events.iter() {
            match event.token() {
                WAKER => {}
                LISTENER => self.accept_all(),
                token => {
                    // An error or an end is met by the read or write that it wakes.
                    let ended = event.is_error() || event.is_read_closed();
                    self.note(token, event.is_readable() || ended, event.is_writable() || ended);
                }
            }
        }
        if self.take_commands() == Flow::Stop {
            return Ok(Flow::Stop);
        }
        self.fire_timers();
        for _ in 0..self.ready.len() {
            if let Some(token) = self.ready.pop_front() {
                self.serve(token);
            }
        }
        Ok(Flow::On)
    }

    fn next_timeout(&self) -> Option<Duration> {
        let (at, _) = self.timers.first()?;
        // Rounded up to what the poll can count, so that it doesn't wake just too early and spin.
        Some(at.saturating_duration_since(Instant::now()) + Duration::from_millis(1))
    }

    pub(super) fn set_timer(&mut self, at: Instant, timer: Timer) {
        self.timers.insert((at, timer));
    }

    fn fire_timers(&mut self) {
        if self.timers.is_empty() {
            return;
        }
        let now = Instant::now();
        while let Some(&(at, timer)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            match timer {
                Timer::Accept => self.accept_all(),
                Timer::HalfOpen => self.expire_half_open(now),
                Timer::Link(link) => self.expire_link(link, now),
                Timer::Lane(key) => self.expire_lane(&key, now),
            }
        }
    }

    pub(super) fn emit(&self, event: Event) {
        (self.shared.sink)(event);
    }

    /// A token that no connection of this thread ever had.
    pub(super) fn new_token(&mut self, owner: Owner) -> Token {
        let token = Token(self.next_token);
        self.next_token += 1;
        self.owners.insert(token, owner);
        token
    }

    /// Watches a connection for `owner`.
    pub(super) fn watch(&mut self, io: mio::net::TcpStream, owner: Owner) -> io::Result<Stream> {
        let token = self.new_token(owner);
        let watched = Stream::watch(io, self.poll.registry(), token);
        if watched.is_err() {
            self.owners.remove(&token);
        }
        watched
    }

    fn stream(&mut self, token: Token) -> Option<&mut Stream> {
        match *self.owners.get(&token)? {
            Owner::HalfOpen => self.acceptor.stream(token),
            Owner::Link(link) => self.links.get_mut(&link)?.stream(),
            Owner::Lane(key) => self.lanes.get_mut(&key)?.stream(),
        }
        .filter(|stream| stream.token == token)
    }

    fn note(&mut self, token: Token, readable: bool, writable: bool) {
        if let Some(stream) = self.stream(token) {
            stream.readable |= readable;
            stream.writable |= writable;
            self.make_ready(token);
        }
    }

    /// Has a connection served in this turn or the next.
    pub(super) fn make_ready(&mut self, token: Token) {
        if let Some(stream) = self.stream(token)
            && !std::mem::replace(&mut stream.queued, true)
        {
            self.ready.push_back(token);
        }
    }

    fn serve(&mut self, token: Token) {
        let Some(stream) = self.stream(token) else { return };
        stream.queued = false;
        let again = match self.owners.get(&token).copied() {
            Some(Owner::HalfOpen) => {
                self.serve_half_open(token);
                false
            }
            Some(Owner::Link(link)) => self.serve_link(link),
            Some(Owner::Lane(key)) => self.serve_lane(&key),
            None => false,
        };
        if again {
            self.make_ready(token);
        }
    }

    fn take_commands(&mut self) -> Flow {
        // Cleared before the queue is read: what comes later wakes the thread again.
        self.shared.mailbox(self.index).woken.swap(false, Ordering::AcqRel);
        self.more_commands = true;
        for _ in 0..TURN_COMMANDS {
            let Ok(command) = self.commands.try_recv() else {
                self.more_commands = false;
                break;
            };
            if matches!(command, Command::Shutdown) {
                return Flow::Stop;
            }
            self.execute(command);
        }
        Flow::On
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::AcceptLink { link, stream, peer } => self.accept_link(link, stream, peer),
            Command::Dial { link, addresses, deadline } => self.dial(link, addresses, deadline),
            Command::Resolving { link, deadline } => self.await_addresses(link, deadline),
            Command::Resolved { link, addresses } => self.resolved(link, addresses),
            Command::Control { link, bytes } => self.queue_control(link, bytes),
            Command::CloseLink(link) => self.close_link(link),
            Command::LinkGone(link) => self.lanes_of_gone_link(link),
            Command::PrepareLane { key, secret, dials } => self.prepare_lane(key, secret, dials),
            Command::StartLane { key, peer, dial, deadline } => {
                self.start_lane(key, peer, dial, deadline);
            }
            Command::Attach { key, secret, stream } => self.attach(&key, &secret, stream),
            Command::Fence(key) => self.fence(&key),
            Command::Kill(key) => self.kill(&key),
            Command::Post { key, job } => self.post(&key, job),
            Command::Cancel(transfer) => self.cancel(transfer),
            Command::Report(event) => self.emit(event),
            Command::Shutdown => {}
        }
    }

    /// Ends all links and lanes, and says so.
    fn close_everything(&mut self, why: &str) {
        self.acceptor.close();
        self.ready.clear();
        self.timers.clear();
        let lanes: Vec<LaneKey> = self.lanes.keys().copied().collect();
        lanes.iter().for_each(|key| self.lane_down(key, why));
        let links: Vec<LinkId> = self.links.keys().copied().collect();
        links.iter().for_each(|&link| self.link_down(link, why));
        self.owners.clear();
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("without a message"))
}
