//! The writer's end of a write: posted, read from its source and sent off, completed.

use super::super::{CompletionStatus, LaneRole, LinkId};
use super::fault::{Fault, FaultKind};
use super::filter::Subject;
use super::flight::{Cargo, Flight, Posted, Shipment};
use super::lane::{HalfState, LaneKey, Outstanding};
use super::world::{EndpointId, Life, What, World};
use crate::protocol::{LaneId, TransferId};

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

    pub(super) fn flight_subject(&self, flight: &Flight) -> Subject {
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

    /// Sends the completion on its way back, in the lane's order.
    pub(super) fn acknowledge(&mut self, flight: &Flight) {
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
}
