//! The core: owns the state machines, turns inputs into their events and carries their actions out.
//!
//! Single-threaded and without a clock of its own, so that a simulation can drive the very code
//! that is shipped.

mod lanes;
mod links;
mod transfers;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::DrainReport;
use super::command::{Command, Input, ReceiveKey, ReceiveResult, SendResult};
use super::shared::Shared;
use super::slot::Resolver;
use crate::protocol::receiver::{AssemblyId, LeaseComponent, Receiver, ReceiverAction};
use crate::protocol::sender::{OfferId, Sender, SenderAction, WriteEnd};
use crate::protocol::session::SessionAction;
use crate::protocol::{Cause, Incarnation, LaneId, Time, TransferError, TransferId};
use crate::transport::{
    CompletionStatus, DigestTable, Event, LandingError, LaneRole, LinkId, Placement, Transport,
};
use links::{Link, PeerEntry, Redial};

/// One receive of the API.
struct Receive {
    key: ReceiveKey,
    lease: Vec<LeaseComponent>,
    resolver: Option<Resolver<ReceiveResult>>,
}

/// Where one transfer's bytes land.
struct Landed {
    digests: Option<Arc<DigestTable>>,
    bytes: Arc<AtomicU64>,
}

/// One send of the API.
struct Send {
    placement: Option<Arc<Placement>>,
    digests: Option<Arc<DigestTable>>,
    transfer: Option<TransferId>,
    resolver: Option<Resolver<SendResult>>,
    source_free: Option<Resolver<()>>,
}

struct Draining {
    deadline: Time,
    last: Time,
    aborted: usize,
    resolvers: Vec<Resolver<Option<DrainReport>>>,
}

/// An action of some state machine, waiting to be carried out.
enum Todo {
    Receiver(ReceiverAction),
    Sender(SenderAction),
    Session(Incarnation, SessionAction),
}

/// See the module.
pub(crate) struct Core {
    shared: Arc<Shared>,
    transport: Arc<dyn Transport>,
    receiver: Receiver,
    sender: Sender,
    links: HashMap<LinkId, Link>,
    peers: BTreeMap<Incarnation, PeerEntry>,
    /// Where each lane that this side reads belongs; its epoch is unique in this engine.
    reader_lanes: HashMap<LaneId, (LinkId, Incarnation)>,
    writer_lanes: BTreeMap<(Incarnation, LaneId), LinkId>,
    redials: Vec<Redial>,
    last_epoch: u64,
    receives: HashMap<AssemblyId, Receive>,
    landed: HashMap<TransferId, Landed>,
    sends: HashMap<OfferId, Send>,
    sent: HashMap<TransferId, OfferId>,
    /// Announcements that failed before they were admitted; each is admitted or refused yet.
    early_failures: HashMap<OfferId, TransferError>,
    todo: VecDeque<Todo>,
    draining: Option<Draining>,
    /// Drained or shut down: nothing new begins any more.
    closing: bool,
    over: bool,
}

impl Core {
    pub(crate) fn new(shared: Arc<Shared>) -> Core {
        Core {
            transport: shared.transport.clone(),
            receiver: Receiver::new(shared.incarnation, shared.config.receiver),
            sender: Sender::new(shared.config.sender),
            links: HashMap::new(),
            peers: BTreeMap::new(),
            reader_lanes: HashMap::new(),
            writer_lanes: BTreeMap::new(),
            redials: Vec::new(),
            last_epoch: 0,
            receives: HashMap::new(),
            landed: HashMap::new(),
            sends: HashMap::new(),
            sent: HashMap::new(),
            early_failures: HashMap::new(),
            todo: VecDeque::new(),
            draining: None,
            closing: false,
            over: false,
            shared,
        }
    }

    /// Shut down: nothing more is to be done.
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }

    /// Stops the transport's threads. Whoever drives the core does so last.
    pub(crate) fn close_transport(&self) {
        self.transport.shutdown();
    }

    /// One input.
    pub(crate) fn on_input(&mut self, now: Time, input: Input) {
        match input {
            Input::Command(command) => self.on_command(now, *command),
            Input::Event(event) => self.on_event(now, event),
        }
        self.work(now);
    }

    /// When [`Core::on_timeout`] is due.
    pub(crate) fn next_timeout(&self) -> Time {
        let drain =
            self.draining.as_ref().map_or(Time::NEVER, |drain| drain.deadline.min(drain.last));
        self.receiver
            .next_timeout()
            .min(self.sender.next_timeout())
            .min(self.links_timeout())
            .min(drain)
    }

    /// Timers that are due.
    pub(crate) fn on_timeout(&mut self, now: Time) {
        if self.receiver.next_timeout() <= now {
            self.with_receiver(|receiver, ledgers, actions| {
                receiver.on_timeout(now, ledgers, actions);
            });
        }
        if self.sender.next_timeout() <= now {
            self.with_sender(|sender, actions| sender.on_timeout(now, actions));
        }
        self.on_links_timeout(now);
        self.work(now);
        self.check_drain(now);
    }

    fn with_receiver(
        &mut self,
        act: impl FnOnce(
            &mut Receiver,
            &mut crate::protocol::receiver::Ledgers,
            &mut Vec<ReceiverAction>,
        ),
    ) {
        let mut actions = Vec::new();
        act(&mut self.receiver, &mut self.shared.pools().ledgers, &mut actions);
        self.todo.extend(actions.into_iter().map(Todo::Receiver));
    }

    fn with_sender(&mut self, act: impl FnOnce(&mut Sender, &mut Vec<SenderAction>)) {
        let mut actions = Vec::new();
        act(&mut self.sender, &mut actions);
        self.todo.extend(actions.into_iter().map(Todo::Sender));
    }

    /// Carries out what the state machines asked for, until they ask for nothing.
    fn work(&mut self, now: Time) {
        while let Some(todo) = self.todo.pop_front() {
            match todo {
                Todo::Receiver(action) => self.do_receiver(now, action),
                Todo::Sender(action) => self.do_sender(now, action),
                Todo::Session(peer, action) => self.do_session(now, peer, action),
            }
        }
    }

    fn on_command(&mut self, now: Time, command: Command) {
        match command {
            Command::Connect { address, timeout, resolver } => {
                self.connect(now, address, timeout, resolver);
            }
            Command::Receive { key, lease, parts, deadline, integrity, resolver } => {
                let deadline = now.after(deadline);
                self.receive(now, key, lease, parts, deadline, integrity, resolver);
            }
            Command::AbortReceive { key, why } => {
                let found = self.receives.iter().find(|(_, receive)| receive.key == key);
                if let Some(assembly) = found.map(|(assembly, _)| *assembly) {
                    let cause = Cause::AbortedByReceiver { why: why.into() };
                    self.with_receiver(|receiver, ledgers, actions| {
                        receiver.abort(now, assembly, cause, ledgers, actions);
                    });
                }
            }
            Command::Announce { announced, label, peer, deadline } => {
                let deadline = now.after(deadline);
                self.with_sender(|sender, actions| {
                    sender.announce(&announced, label, peer, deadline, actions);
                });
                if self.closing {
                    self.abort_send(now, announced.id(), Cause::ShuttingDown {});
                }
            }
            Command::Refuse { offer, why } => {
                let cause = Cause::Refused { why: why.into() };
                self.abort_send(now, offer, cause);
                self.work(now);
                self.early_failures.remove(&offer);
            }
            Command::Admit { offer, binding, components, placement, resolver, source_free } => {
                let send = Send {
                    placement,
                    digests: None,
                    transfer: None,
                    resolver: Some(resolver),
                    source_free: Some(source_free),
                };
                self.admit(now, offer, binding, components, send);
            }
            Command::Write { offer, ranges } => {
                self.with_sender(|sender, actions| sender.write(now, offer, &ranges, actions));
            }
            Command::Complete { completing } => {
                self.with_sender(|sender, actions| sender.complete(now, &completing, actions));
            }
            Command::AbortSend { offer, why } => {
                self.abort_send(now, offer, Cause::AbortedBySender { why: why.into() });
            }
            Command::Drain { deadline, resolver } => {
                self.closing = true;
                let deadline = now.after(deadline);
                let (last, aborted, resolvers) = (Time::NEVER, 0, Vec::new());
                let fresh = Draining { deadline, last, aborted, resolvers };
                let drain = self.draining.get_or_insert(fresh);
                drain.deadline = drain.deadline.min(deadline);
                drain.resolvers.push(resolver);
                self.check_drain(now);
            }
            Command::Shutdown => self.shut_down(now),
        }
    }

    fn abort_send(&mut self, now: Time, offer: OfferId, cause: Cause) {
        self.with_sender(|sender, actions| sender.abort(now, offer, cause, actions));
    }

    /// Ends the drain if all is over; aborts what is left at its deadline; gives up a while later.
    fn check_drain(&mut self, now: Time) {
        let Some(drain) = self.draining.as_mut() else { return };
        let live = self.receiver.live_assemblies() + self.sender.live_offers();
        if live == 0 || drain.last <= now {
            if let Some(Draining { aborted, resolvers, .. }) = self.draining.take() {
                for resolver in resolvers {
                    resolver.resolve(Some(DrainReport { aborted, undrained: live }));
                }
            }
            return;
        }
        if drain.deadline > now {
            return;
        }
        let grace = self.shared.config.receiver.drain_grace + self.shared.config.session.liveness;
        drain.deadline = Time::NEVER;
        drain.last = now.after(grace);
        drain.aborted = live;
        self.abort_all(now);
    }

    fn abort_all(&mut self, now: Time) {
        for assembly in self.receives.keys().copied().collect::<Vec<_>>() {
            self.with_receiver(|receiver, ledgers, actions| {
                receiver.abort(now, assembly, Cause::ShuttingDown {}, ledgers, actions);
            });
        }
        for offer in self.sender.offers() {
            self.abort_send(now, offer, Cause::ShuttingDown {});
        }
        self.work(now);
    }

    fn on_event(&mut self, now: Time, event: Event) {
        match event {
            Event::LinkUp { link, dialled, .. } => self.on_link_up(now, link, dialled),
            Event::LinkDown { link, why } => self.on_link_down(now, link, &why),
            Event::Control { link, frame } => self.on_control(now, link, &frame),
            Event::LaneUp { link, lane, role } => self.on_lane_up(now, link, lane, role),
            Event::LaneDown { link, lane, role, why } => {
                self.on_lane_down(now, link, lane, role, &why)
            }
            Event::LaneFenced { lane, .. } => self.on_lane_fenced(lane),
            Event::WriteDone { lane, transfer, ticket, status } => {
                let end = match status {
                    CompletionStatus::Success => WriteEnd::Success,
                    CompletionStatus::Cancelled => WriteEnd::Cancelled,
                    _ => WriteEnd::Failed,
                };
                self.with_sender(|sender, actions| {
                    sender.on_write_done(now, transfer, lane, ticket, end, actions);
                });
            }
            Event::MarkerSeen { lane, transfer, round, .. } => {
                if let Some(&(_, peer)) = self.reader_lanes.get(&lane) {
                    self.with_receiver(|receiver, ledgers, actions| {
                        receiver.on_marker(now, peer, lane, transfer, round, ledgers, actions);
                    });
                }
            }
            Event::WriteRefused { lane, transfer, why, .. } => {
                tracing::warn!(%transfer, %lane, %why, "a write was refused");
                let Some(&(_, peer)) = self.reader_lanes.get(&lane) else { return };
                let cause = landing_cause(why);
                self.with_receiver(|receiver, ledgers, actions| {
                    receiver.on_write_refused(now, peer, transfer, cause, ledgers, actions);
                });
            }
            Event::LandingClosed { transfer, landed_bytes } => {
                let digests = self.landed.get(&transfer).and_then(|l| l.digests.clone());
                let digests = digests.map(|table| table.snapshot());
                self.with_receiver(|receiver, ledgers, actions| {
                    receiver.on_landing_closed(
                        now,
                        transfer,
                        landed_bytes,
                        digests,
                        ledgers,
                        actions,
                    );
                });
            }
            Event::WorkerDied { why } => {
                self.shared.fault(format!("a transport thread died: {why}"))
            }
        }
    }

    /// Everything live ends with its own error; then the peers hear that it is over.
    fn shut_down(&mut self, now: Time) {
        self.closing = true;
        self.abort_all(now);
        self.say_bye();
        self.over = true;
    }
}

fn landing_cause(why: LandingError) -> Cause {
    match why {
        LandingError::StaleGeneration { stated, granted } => {
            Cause::StaleGeneration { granted, stated }
        }
        LandingError::OutsideGrant { first, count, .. } => {
            Cause::OutsideGrant { first_block: first, block_count: count }
        }
        LandingError::DuplicateBlock { block } => Cause::DuplicateBlock { block: block.0 },
        LandingError::UnknownTransfer
        | LandingError::LengthMismatch { .. }
        | LandingError::Malformed => Cause::ProtocolViolation { why: why.to_string().into() },
    }
}

/// Which end of a lane an event is about, for the tables here.
fn is_reader(role: LaneRole) -> bool {
    role == LaneRole::Reader
}
