//! A write's way: posted, read from its source and sent off, arrived, landed, acknowledged.

use std::fmt;
use std::sync::Arc;

use super::super::{
    CompletionStatus, Event, LandingError, LaneRole, LinkId, Placement, WriteRequest,
};
use super::bytes::{gather, scatter};
use super::fault::{Fault, FaultKind};
use super::filter::Subject;
use super::lane::{HalfState, LaneKey, Outstanding};
use super::world::{EndpointId, Life, What, World};
use crate::protocol::{
    BlockIndex, BlockRange, Generation, LaneId, Round, Ticket, Time, TransferId,
};

/// What a writer posts.
#[derive(Debug)]
pub(super) enum Posted {
    Write(WriteRequest),
    Marker { transfer: TransferId, round: Round, ticket: Ticket },
}

/// The bytes of a write on their way.
#[derive(Clone, Debug)]
pub(super) struct Shipment {
    pub(super) transfer: TransferId,
    pub(super) generation: Generation,
    pub(super) ranges: Vec<BlockRange>,
    blocks: Vec<(BlockIndex, Vec<u8>)>,
}

#[derive(Clone, Debug)]
pub(super) enum Cargo {
    Write(Shipment),
    Marker { transfer: TransferId, round: Round },
}

/// Something that has left its writer. It goes on by itself, whatever becomes of the request.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    id: u64,
    /// The request it came from; later requests have higher numbers.
    job: u64,
    pub(super) key: LaneKey,
    pub(super) cargo: Cargo,
    /// The second of a pair: nobody waits for its completion.
    copy: bool,
    /// Not in the lane's order.
    loose: bool,
    pub(super) held: bool,
    /// How long its bytes stay out of memory once they are said to be there.
    reveal: Option<u64>,
}

impl fmt::Display for Flight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cargo {
            Cargo::Write(ship) => write!(f, "write of {:?} {:?}", ship.transfer, ship.ranges)?,
            Cargo::Marker { transfer, round } => write!(f, "marker of {transfer:?} {round:?}")?,
        }
        if self.copy { f.write_str(" again") } else { Ok(()) }
    }
}

impl Shipment {
    /// Reads the blocks from their source as it is now.
    fn read(write: &WriteRequest) -> Shipment {
        let blocks = write.blocks.iter().flat_map(BlockRange::blocks);
        let blocks = blocks.filter_map(|block| Some((block, gather(&write.source, block)?)));
        Shipment {
            transfer: write.transfer,
            generation: write.generation,
            ranges: write.blocks.clone(),
            blocks: blocks.collect(),
        }
    }

    pub(super) fn byte_count(&self) -> u64 {
        self.blocks.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// Lands the first half of every block.
    fn land_first_half(&self, placement: &Placement) {
        for (block, bytes) in &self.blocks {
            scatter(placement, *block, bytes, 0..bytes.len() / 2);
        }
    }

    /// Lands the rest.
    fn land_second_half(&self, placement: &Placement) {
        for (block, bytes) in &self.blocks {
            scatter(placement, *block, bytes, bytes.len() / 2..bytes.len());
        }
    }

    /// Two blocks whose contents can be exchanged so that it shows.
    fn exchangeable(&self) -> Option<(usize, usize)> {
        let differ = |a: &[u8], b: &[u8]| a.len() == b.len() && a != b;
        let count = self.blocks.len();
        let mut pairs = (1..count).flat_map(|b| (0..b).map(move |a| (a, b)));
        pairs.find(|&(a, b)| differ(&self.blocks[a].1, &self.blocks[b].1))
    }
}

impl Flight {
    fn transfer(&self) -> TransferId {
        match &self.cargo {
            Cargo::Write(ship) => ship.transfer,
            Cargo::Marker { transfer, .. } => *transfer,
        }
    }
}

impl World {
    pub(super) fn post(&mut self, writer: EndpointId, link: LinkId, lane: LaneId, posted: Posted) {
        let (transfer, ticket) = match &posted {
            Posted::Write(write) => (write.transfer, write.ticket),
            Posted::Marker { transfer, ticket, .. } => (*transfer, *ticket),
        };
        let source = match &posted {
            Posted::Write(write) => Some(write.source.clone()),
            Posted::Marker { .. } => None,
        };
        let posted = Some(posted);
        let open = Outstanding { transfer, ticket, posted, _source: source, status: None };
        let job = self.fresh();
        let leaves_in = self.rng.below(self.max_delay());
        let key = self.lane_key(writer, link, lane, LaneRole::Writer);
        let found = key.and_then(|key| Some((key, self.lanes.get_mut(&key)?)));
        let Some((key, lane)) = found.filter(|(_, lane)| lane.writer.state == HalfState::Up) else {
            return self.tell(writer, open.event(lane, CompletionStatus::Flushed));
        };
        lane.outstanding.insert(job, open);
        lane.depart_at = lane.depart_at.max(self.now.saturating_add(leaves_in));
        let at = lane.depart_at;
        // A NIC sends what was posted to it even if its process is stopped.
        self.schedule(at, self.config.confined.then_some(writer), What::Depart(key, job));
    }

    /// Completes what of the transfer is posted and not begun.
    pub(super) fn cancel(&mut self, writer: EndpointId, transfer: TransferId) {
        let keys: Vec<_> = self.lanes.keys().copied().collect();
        for key in keys {
            if self.lane_end(key, LaneRole::Writer).0 != writer {
                continue;
            }
            let Some(lane) = self.lanes.get_mut(&key) else { continue };
            let queued = |open: &Outstanding| {
                open.transfer == transfer && matches!(open.posted, Some(Posted::Write(_)))
            };
            let all = std::mem::take(&mut lane.outstanding).into_iter();
            let (cancelled, kept): (Vec<_>, Vec<_>) = all.partition(|(_, open)| queued(open));
            lane.outstanding.extend(kept);
            for (_, open) in cancelled {
                self.tell(writer, open.event(key.id, CompletionStatus::Cancelled));
            }
        }
    }

    /// The request is begun: its source is read, and it leaves.
    pub(super) fn depart(&mut self, key: LaneKey, job: u64) {
        let (writer, _) = self.lane_end(key, LaneRole::Writer);
        let cut = self.conns[key.conn].severed || self.endpoints[writer].life == Life::Crashed;
        let Some(lane) = self.lanes.get_mut(&key) else { return };
        let cut = cut || lane.severed;
        let posted = lane.outstanding.get_mut(&job).and_then(|open| open.posted.take());
        // With no way through, its completion comes when the writer notices.
        let Some(posted) = posted.filter(|_| !cut) else { return };
        let cargo = match posted {
            Posted::Write(write) => Cargo::Write(Shipment::read(&write)),
            Posted::Marker { transfer, round, .. } => Cargo::Marker { transfer, round },
        };
        let id = self.fresh();
        let mut flight =
            Flight { id, job, key, cargo, copy: false, loose: false, held: false, reveal: None };
        let subject = self.flight_subject(&flight);
        if self.hit(FaultKind::DropWrite, &subject).is_some() {
            return;
        }
        self.spoil(&mut flight, &subject);
        if let Some(Fault::CompleteWith(status)) = self.hit(FaultKind::CompleteWith, &subject)
            && let Some(open) = self.outstanding_mut(key, job)
        {
            open.status = Some(status);
        }
        if self.hit(FaultKind::AckEarly, &subject).is_some() {
            self.acknowledge(&flight);
        }
        self.launch(flight, &subject);
    }

    fn outstanding_mut(&mut self, key: LaneKey, job: u64) -> Option<&mut Outstanding> {
        self.lanes.get_mut(&key)?.outstanding.get_mut(&job)
    }

    fn flight_subject(&self, flight: &Flight) -> Subject {
        let mut subject = self.subject(flight.key.conn, flight.key.reader.other());
        subject.lane = Some(flight.key.id);
        subject.transfer = Some(flight.transfer());
        subject.marker = Some(matches!(flight.cargo, Cargo::Marker { .. }));
        subject
    }

    /// The faults that touch the bytes.
    fn spoil(&mut self, flight: &mut Flight, subject: &Subject) {
        let Cargo::Write(ship) = &mut flight.cargo else { return };
        if let Some((a, b)) = ship.exchangeable()
            && self.hit(FaultKind::SwapBlocks, subject).is_some()
        {
            let (left, right) = ship.blocks.split_at_mut(b);
            std::mem::swap(&mut left[a].1, &mut right[0].1);
        }
        if ship.byte_count() > 0 && self.hit(FaultKind::CorruptBlock, subject).is_some() {
            let block = self.rng.below(ship.blocks.len() as u64) as usize;
            let bytes = &mut ship.blocks[block].1;
            let byte = self.rng.below(bytes.len() as u64) as usize;
            bytes[byte] ^= 1 << self.rng.below(8);
        }
        if let Some(Fault::DelayVisibility(span)) = self.hit(FaultKind::DelayVisibility, subject) {
            flight.reveal = Some(self.most_of(span));
        }
    }

    /// Puts a flight on its way, once or twice.
    fn launch(&mut self, mut flight: Flight, subject: &Subject) {
        let mut at = self.soon();
        if let Some(Fault::DelayWrite(span)) = self.hit(FaultKind::DelayWrite, subject) {
            at = at.saturating_add(self.most_of(span));
        }
        let reorder = self.hit(FaultKind::ReorderWithinLane, subject);
        if let Some(Fault::ReorderWithinLane(span)) = reorder {
            flight.loose = true;
            at = at.saturating_add(self.most_of(span));
        }
        let copy = self.hit(FaultKind::DuplicateWrite, subject).map(|_| {
            let id = self.fresh();
            Flight { id, copy: true, ..flight.clone() }
        });
        for flight in std::iter::once(flight).chain(copy) {
            let lane = self.lanes.entry(flight.key).or_default();
            if !flight.loose {
                at = at.max(lane.arrive_at);
                lane.arrive_at = at;
            }
            self.schedule(at, self.landing_actor(flight.key), What::Arrive(flight));
            at = self.soon().max(at);
        }
    }

    /// Who has to run for a write to land: the reader if it asks, else nobody.
    fn landing_actor(&self, key: LaneKey) -> Option<EndpointId> {
        self.config.confined.then(|| self.lane_end(key, LaneRole::Reader).0)
    }

    /// A flight is at the reader's door.
    pub(super) fn arrive(&mut self, mut flight: Flight) {
        let subject = self.flight_subject(&flight);
        flight.held = self.hit(FaultKind::HoldWrite, &subject).is_some();
        if flight.loose && !flight.held {
            return self.begin(flight);
        }
        let key = flight.key;
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.inbox.push_back(flight);
            self.serve(key);
        }
    }

    /// Lets in what waits at the door, in order, as far as it may.
    pub(super) fn serve(&mut self, key: LaneKey) {
        while let Some(lane) = self.lanes.get_mut(&key) {
            if lane.busy.is_some() || lane.inbox.front().is_none_or(|flight| flight.held) {
                return;
            }
            let Some(flight) = lane.inbox.pop_front() else { return };
            self.begin(flight);
        }
    }

    pub(super) fn release_writes(&mut self) {
        self.faults.withdraw_certain(FaultKind::HoldWrite);
        let keys: Vec<_> = self.lanes.keys().copied().collect();
        for key in keys {
            if let Some(lane) = self.lanes.get_mut(&key) {
                lane.inbox.iter_mut().for_each(|flight| flight.held = false);
                self.serve(key);
            }
        }
    }

    fn begin(&mut self, flight: Flight) {
        if !self.may_land(flight.key) {
            return;
        }
        match &flight.cargo {
            Cargo::Marker { transfer, round } => {
                self.marker_seen(flight.key, *transfer, *round);
                self.acknowledge(&flight);
            }
            Cargo::Write(ship) => {
                let (reader, _) = self.lane_end(flight.key, LaneRole::Reader);
                match self.endpoints[reader].landings.admit(ship) {
                    Err(why) => self.refuse(&flight, why),
                    Ok(None) => self.acknowledge(&flight),
                    Ok(Some(placement)) => self.begin_landing(flight, placement),
                }
            }
        }
    }

    /// Whether what is at the door still comes in.
    fn may_land(&mut self, key: LaneKey) -> bool {
        let (reader, _) = self.lane_end(key, LaneRole::Reader);
        let crashed = self.endpoints[reader].life == Life::Crashed;
        let cut = self.conns[key.conn].severed;
        let Some(lane) = self.lanes.get_mut(&key) else { return false };
        if lane.fenced {
            self.count(FaultKind::FencedInFlight);
            return false;
        }
        if lane.dead {
            return false;
        }
        if crashed {
            lane.dead = true;
            let (writer, _) = self.lane_end(key, LaneRole::Writer);
            let at = Time(self.now).after(self.config.retry_timeout).0;
            let (role, why) = (LaneRole::Writer, "the reader doesn't answer");
            self.schedule(at, Some(writer), What::LaneDown { key, role, refused: None, why });
            return false;
        }
        if cut || lane.severed {
            if !self.rng.chance(self.config.late_landing) {
                // What is behind it is lost too: a lane keeps order to its end.
                lane.dead = true;
                return false;
            }
            self.count(FaultKind::LateLanding);
        }
        true
    }

    fn marker_seen(&mut self, key: LaneKey, transfer: TransferId, round: Round) {
        let (reader, link) = self.lane_end(key, LaneRole::Reader);
        // After `LaneDown` the reader hears no more of the lane, even if bytes still come.
        if self.lanes.get(&key).is_some_and(|lane| lane.reader.state == HalfState::Up) {
            self.tell(reader, Event::MarkerSeen { link, lane: key.id, transfer, round });
        }
    }

    /// The reader takes the lane down; nothing behind the offender is read.
    fn refuse(&mut self, flight: &Flight, why: LandingError) {
        let key = flight.key;
        let (reader, link) = self.lane_end(key, LaneRole::Reader);
        self.count(FaultKind::RefusedWrite);
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.dead = true;
        }
        if self.config.confined {
            let (lane, transfer) = (key.id, flight.transfer());
            self.tell(reader, Event::WriteRefused { link, lane, transfer, why });
        }
        self.lane_down(key, LaneRole::Reader, None, "a write was refused");
        let refused = (!flight.copy).then_some(flight.job);
        self.lane_down_soon(key, LaneRole::Writer, refused, "the reader refused a write");
    }

    /// Half of the bytes come in now and half a moment later, so that a fence or a close can come
    /// in between.
    fn begin_landing(&mut self, flight: Flight, placement: Arc<Placement>) {
        let (key, id) = (flight.key, flight.id);
        if let (Cargo::Write(ship), None) = (&flight.cargo, flight.reveal) {
            ship.land_first_half(&placement);
        }
        let takes = self.rng.below(self.max_delay() / 4);
        let at = self.now.saturating_add(takes);
        self.schedule(at, self.landing_actor(key), What::Finish(key, id));
        if let Some(lane) = self.lanes.get_mut(&key) {
            if !flight.loose {
                lane.busy = Some(id);
            }
            lane.landing.insert(id, (flight, placement));
        }
    }

    /// The last byte of a write comes in, unless a fence came first.
    pub(super) fn finish(&mut self, key: LaneKey, id: u64) {
        let Some(lane) = self.lanes.get_mut(&key) else { return };
        let Some((flight, placement)) = lane.landing.remove(&id) else { return };
        if lane.busy == Some(id) {
            lane.busy = None;
        }
        let (reader, _) = self.lane_end(key, LaneRole::Reader);
        let Cargo::Write(ship) = &flight.cargo else { return };
        match flight.reveal {
            None => ship.land_second_half(&placement),
            Some(span) => {
                let at = self.now.saturating_add(span);
                self.schedule(at, None, What::Appear(flight.clone(), placement));
            }
        }
        self.note_order(&flight);
        if self.endpoints[reader].landings.landed(ship, key.id) {
            self.report_closed(reader, ship.transfer);
        }
        self.acknowledge(&flight);
        self.serve(key);
    }

    fn note_order(&mut self, flight: &Flight) {
        let newest = &mut self.conns[flight.key.conn].newest_landed[flight.key.reader as usize];
        let overtaken = flight.job < *newest;
        *newest = flight.job.max(*newest);
        if overtaken && !flight.loose && !flight.copy {
            self.count(FaultKind::LanesReordered);
        }
    }

    /// Bytes that were said to be in memory come to be there. A fence stops them.
    pub(super) fn appear(&mut self, flight: &Flight, placement: &Placement) {
        let fenced = self.lanes.get(&flight.key).is_none_or(|lane| lane.fenced);
        let (reader, _) = self.lane_end(flight.key, LaneRole::Reader);
        if fenced {
            return self.count(FaultKind::FencedInFlight);
        }
        if let Cargo::Write(ship) = &flight.cargo
            && self.endpoints[reader].life != Life::Crashed
        {
            ship.land_first_half(placement);
            ship.land_second_half(placement);
        }
    }

    /// Sends the completion on its way back, in the lane's order.
    fn acknowledge(&mut self, flight: &Flight) {
        let (writer, _) = self.lane_end(flight.key, LaneRole::Writer);
        let soon = self.soon();
        let cut = self.conns[flight.key.conn].severed;
        let Some(lane) = self.lanes.get_mut(&flight.key) else { return };
        if flight.copy || cut || lane.severed {
            return;
        }
        lane.ack_at = lane.ack_at.max(soon);
        let at = lane.ack_at;
        self.schedule(at, Some(writer), What::Ack(flight.key, flight.job));
    }

    /// The completion has come to the writer, unless another ended the request before.
    pub(super) fn complete(&mut self, key: LaneKey, job: u64) {
        let (writer, _) = self.lane_end(key, LaneRole::Writer);
        let lane = self.lanes.get_mut(&key);
        if let Some(open) = lane.and_then(|lane| lane.outstanding.remove(&job)) {
            self.tell(writer, open.event(key.id, CompletionStatus::Success));
        }
    }

    /// Says that a landing is closed, once.
    pub(super) fn report_closed(&mut self, reader: EndpointId, transfer: TransferId) {
        if let Some(landed_bytes) = self.endpoints[reader].landings.report(transfer) {
            self.tell(reader, Event::LandingClosed { transfer, landed_bytes });
        }
    }
}
