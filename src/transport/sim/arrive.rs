//! The reader's end of a write: let in or not, landed, said to be there.

use std::sync::Arc;

use super::super::{Event, LandingError, LaneRole, Placement};
use super::fault::FaultKind;
use super::flight::{Cargo, Flight};
use super::lane::{HalfState, LaneKey};
use super::world::{EndpointId, Life, What, World};
use crate::protocol::{Round, Time, TransferId};

impl World {
    /// Who has to run for a write to land: the reader if it asks, else nobody.
    pub(super) fn landing_actor(&self, key: LaneKey) -> Option<EndpointId> {
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
                self.schedule(self.now, self.landing_actor(key), What::Serve(key));
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
                match self.endpoints[reader].landings.admit(flight.key.id, ship) {
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

    /// Says that a landing is closed, once.
    pub(super) fn report_closed(&mut self, reader: EndpointId, transfer: TransferId) {
        if let Some(landed_bytes) = self.endpoints[reader].landings.report(transfer) {
            self.tell(reader, Event::LandingClosed { transfer, landed_bytes });
        }
    }
}
