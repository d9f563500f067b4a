//! The state of a simulated network: virtual time, the queue of what is to happen, the endpoints.
//!
//! Everything that happens is one entry of the queue, events for the engines included, so that the
//! order is that of (virtual time, sequence) and of nothing else.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::{Event, EventSink, LaneRole, LinkId, Placement, TransportError};
use super::config::SimConfig;
use super::fault::{CallKind, Fault, FaultKind};
use super::filter::{FaultBook, Subject};
use super::flight::Flight;
use super::landings::Landings;
use super::lane::{Lane, LaneKey};
use super::link::{Conn, Side};
use super::rng::Rng;
use crate::protocol::{LaneId, Time};

/// Position among the network's endpoints.
pub(super) type EndpointId = usize;

/// When an entry is due, and its sequence.
pub(super) type Due = (u64, u64);

/// What is to happen.
#[derive(Debug)]
pub(super) enum What {
    Tell(EndpointId, Event),
    Dialled(usize),
    Answered(usize),
    DialTimeout(usize),
    LinkLost { conn: usize, side: Side, why: &'static str },
    Frame { conn: usize, to: Side, frame: Vec<u8>, overtaken: bool },
    LaneUp(LaneKey, LaneRole),
    LaneTimeout(LaneKey, LaneRole),
    LaneDown { key: LaneKey, role: LaneRole, refused: Option<u64>, why: &'static str },
    Fence { reader: EndpointId, link: LinkId, lane: LaneId },
    Depart(LaneKey, u64),
    Arrive(Flight),
    Serve(LaneKey),
    Finish(LaneKey, u64),
    Appear(Flight, Arc<Placement>),
    Ack(LaneKey, u64),
}

/// Whether an endpoint runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Running,
    Paused,
    /// Shut down in good order.
    Stopped,
    Crashed,
}

pub(super) struct Endpoint {
    pub(super) name: Arc<str>,
    sink: EventSink,
    pub(super) life: Life,
    /// What would have happened while it is paused, as it was queued.
    waiting: Vec<(Due, What)>,
    pub(super) landings: Landings,
}

pub(super) struct World {
    pub(super) config: SimConfig,
    pub(super) rng: Rng,
    pub(super) now: u64,
    sequence: u64,
    queue: BTreeMap<Due, (Option<EndpointId>, What)>,
    pub(super) endpoints: Vec<Endpoint>,
    /// The endpoint that listens at each name.
    pub(super) names: BTreeMap<Arc<str>, EndpointId>,
    pub(super) conns: Vec<Conn>,
    pub(super) links: BTreeMap<LinkId, (usize, Side)>,
    pub(super) lanes: BTreeMap<LaneKey, Lane>,
    pub(super) faults: FaultBook,
    /// Events to hand out once the lock is released.
    pub(super) out: Vec<(EventSink, Event)>,
    pub(super) trace: VecDeque<String>,
    /// Real and virtual time at one moment, while a pump maps one to the other.
    pub(super) clock: Option<(Instant, u64)>,
    pub(super) pumps: usize,
}

impl World {
    pub(super) fn new(mut config: SimConfig) -> World {
        let mut faults = FaultBook::default();
        for (fault, filter) in std::mem::take(&mut config.faults) {
            faults.inject(fault, filter);
        }
        World {
            rng: Rng::new(config.seed),
            config,
            now: 0,
            sequence: 0,
            queue: BTreeMap::new(),
            endpoints: Vec::new(),
            names: BTreeMap::new(),
            conns: Vec::new(),
            links: BTreeMap::new(),
            lanes: BTreeMap::new(),
            faults,
            out: Vec::new(),
            trace: VecDeque::new(),
            clock: None,
            pumps: 0,
        }
    }

    pub(super) fn add_endpoint(&mut self, name: &str, sink: EventSink) -> EndpointId {
        let name: Arc<str> = name.into();
        let landings = Landings::new(self.config.confined);
        let life = Life::Running;
        let id = self.endpoints.len();
        self.names.insert(name.clone(), id);
        self.endpoints.push(Endpoint { name, sink, life, waiting: Vec::new(), landings });
        id
    }

    /// A number never used before: job, flight and link ids, and the order within one moment.
    pub(super) fn fresh(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// Queues `what` for `at`. If it needs `actor` to do anything, it waits while that is paused
    /// and is void once that has crashed.
    pub(super) fn schedule(&mut self, at: u64, actor: Option<EndpointId>, what: What) -> Due {
        let due = (at.max(self.now), self.fresh());
        self.queue.insert(due, (actor, what));
        due
    }

    pub(super) fn unschedule(&mut self, due: Option<Due>) {
        due.and_then(|due| self.queue.remove(&due));
    }

    /// Queues an event for an endpoint, for now.
    pub(super) fn tell(&mut self, endpoint: EndpointId, event: Event) {
        self.schedule(self.now, Some(endpoint), What::Tell(endpoint, event));
    }

    /// One seeded delay.
    fn delay(&mut self) -> u64 {
        self.rng.between(Time(0).after(self.config.min_delay).0, self.max_delay())
    }

    pub(super) fn max_delay(&self) -> u64 {
        Time(0).after(self.config.max_delay).0
    }

    /// A seeded time in the upper half of `span`.
    pub(super) fn most_of(&mut self, span: Duration) -> u64 {
        let span = Time(0).after(span).0;
        self.rng.between(span / 2, span)
    }

    /// When one seeded delay from now has passed.
    pub(super) fn soon(&mut self) -> u64 {
        let delay = self.delay();
        self.now.saturating_add(delay)
    }

    pub(super) fn next_due(&self) -> Option<u64> {
        self.queue.first_key_value().map(|(due, _)| due.0)
    }

    /// Brings virtual time up to real time, if a pump maps them.
    pub(super) fn tick(&mut self) {
        if let Some((real, base)) = self.clock {
            self.now = self.now.max(Time(base).after(real.elapsed()).0);
        }
    }

    /// Makes the next thing happen. `false` if nothing is queued.
    pub(super) fn step(&mut self) -> bool {
        let Some((due, (actor, what))) = self.queue.pop_first() else { return false };
        self.now = self.now.max(due.0);
        match actor.map(|actor| (actor, self.endpoints[actor].life)) {
            // A write at a crashed reader's door still has to fail its writer.
            Some((_, Life::Crashed)) if !matches!(what, What::Arrive(_) | What::Serve(_)) => {}
            Some((actor, Life::Paused)) => self.endpoints[actor].waiting.push((due, what)),
            _ => self.perform(what),
        }
        true
    }

    fn perform(&mut self, what: What) {
        self.record(&what);
        match what {
            What::Tell(endpoint, event) => {
                self.out.push((self.endpoints[endpoint].sink.clone(), event));
            }
            What::Dialled(conn) => self.dialled(conn),
            What::Answered(conn) => self.answered(conn),
            What::DialTimeout(conn) => self.hang_up(conn, Side::Dialler, "no answer in time"),
            What::LinkLost { conn, side, why } => self.end_down(conn, side, why),
            What::Frame { conn, to, frame, overtaken } => self.frame(conn, to, frame, overtaken),
            What::LaneUp(key, role) => self.lane_up(key, role),
            What::LaneTimeout(key, role) => self.lane_timeout(key, role),
            What::LaneDown { key, role, refused, why } => self.lane_down(key, role, refused, why),
            What::Fence { reader, link, lane } => self.fence(reader, link, lane),
            What::Depart(key, job) => self.depart(key, job),
            What::Arrive(flight) => self.arrive(flight),
            What::Serve(key) => self.serve(key),
            What::Finish(key, id) => self.finish(key, id),
            What::Appear(flight, placement) => self.appear(&flight, &placement),
            What::Ack(key, job) => self.complete(key, job),
        }
    }

    /// `Err` if this call is to fail.
    pub(super) fn check_call(
        &mut self,
        call: CallKind,
        subject: &Subject,
    ) -> Result<(), TransportError> {
        match self.hit(FaultKind::of_call(call), subject) {
            Some(Fault::FailCall(_, error)) => Err(error),
            _ => Ok(()),
        }
    }

    pub(super) fn hit(&mut self, kind: FaultKind, subject: &Subject) -> Option<Fault> {
        self.faults.hit(&mut self.rng, kind, subject)
    }

    pub(super) fn count(&mut self, kind: FaultKind) {
        self.faults.stats.add(kind);
    }

    pub(super) fn pause(&mut self, endpoint: EndpointId) {
        if self.endpoints[endpoint].life == Life::Running {
            self.endpoints[endpoint].life = Life::Paused;
            self.count(FaultKind::Pause);
        }
    }

    pub(super) fn resume(&mut self, endpoint: EndpointId) {
        let Endpoint { life, waiting, .. } = &mut self.endpoints[endpoint];
        if *life == Life::Paused {
            *life = Life::Running;
            // Under their old keys, so that nothing overtakes what waited.
            let waited = std::mem::take(waiting).into_iter();
            self.queue.extend(waited.map(|(due, what)| (due, (Some(endpoint), what))));
        }
    }

    /// Ends an endpoint as a power cut would: nobody is told, and what has left goes on.
    pub(super) fn crash(&mut self, endpoint: EndpointId) {
        let Endpoint { name, life, waiting, .. } = &mut self.endpoints[endpoint];
        if *life == Life::Crashed {
            return;
        }
        *life = Life::Crashed;
        waiting.clear();
        if self.names.get(name) == Some(&endpoint) {
            self.names.remove(&name.clone());
        }
        self.count(FaultKind::Crash);
    }

    fn record(&mut self, what: &What) {
        if self.config.trace_len == 0 {
            return;
        }
        let line = format!("{:>12} ns  {}", self.now, self.describe(what));
        if self.trace.len() == self.config.trace_len {
            self.trace.pop_front();
        }
        self.trace.push_back(line);
    }

    fn describe(&self, what: &What) -> String {
        match what {
            What::Tell(to, Event::Control { link, frame }) => {
                format!("{} <- control of {} bytes on {link:?}", self.name(*to), frame.len())
            }
            What::Tell(to, event) => format!("{} <- {event:?}", self.name(*to)),
            What::Frame { conn, to, frame, .. } => {
                format!("conn {conn} to {to:?}: frame of {} bytes", frame.len())
            }
            What::Arrive(flight) => format!("{:?}: arrives: {flight}", flight.key),
            What::Appear(flight, _) => format!("{:?}: appears: {flight}", flight.key),
            other => format!("{other:?}"),
        }
    }

    pub(super) fn name(&self, endpoint: EndpointId) -> &Arc<str> {
        &self.endpoints[endpoint].name
    }
}
