//! The life of a lane: its two halves, how they join, and how it ends.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::super::{CompletionStatus, Event, LaneRole, LinkId, Placement, TransportError};
use super::fault::{CallKind, FaultKind};
use super::flight::{Cargo, Flight, Posted};
use super::link::Side;
use super::world::{Due, EndpointId, What, World};
use crate::protocol::{LaneId, Ticket, Time, TransferId};

/// Names a lane for ever. The two directions of a connection may use the same [`LaneId`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LaneKey {
    pub(super) conn: usize,
    /// The side that reads from it.
    pub(super) reader: Side,
    pub(super) id: LaneId,
}

impl fmt::Debug for LaneKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "conn {} {:?} to {:?}", self.conn, self.id, self.reader)
    }
}

impl LaneKey {
    /// What one half tells the other, so that a mix-up of lanes, roles or links is found.
    fn params(&self, role: LaneRole) -> Vec<u8> {
        let mut params = b"sim".to_vec();
        params.push(role as u8);
        params.extend_from_slice(&(self.conn as u64).to_le_bytes());
        params.push(self.reader as u8);
        params.extend_from_slice(&self.id.index.to_le_bytes());
        params.extend_from_slice(&self.id.epoch.to_le_bytes());
        params
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum HalfState {
    #[default]
    Absent,
    Prepared,
    Started,
    Up,
    Down,
}

#[derive(Debug, Default)]
pub(super) struct Half {
    pub(super) state: HalfState,
    timer: Option<Due>,
}

/// Something posted that has no completion yet.
#[derive(Debug)]
pub(super) struct Outstanding {
    pub(super) transfer: TransferId,
    pub(super) ticket: Ticket,
    /// Until it is begun.
    pub(super) posted: Option<Posted>,
    /// Pins the memory until the completion, as a NIC that may still read it wants. `[I4]`
    pub(super) _source: Option<Arc<Placement>>,
    /// What its completion is to state, if not the truth.
    pub(super) status: Option<CompletionStatus>,
}

#[derive(Debug, Default)]
pub(super) struct Lane {
    pub(super) reader: Half,
    pub(super) writer: Half,
    /// The path is no longer whole: what is in flight may or may not land.
    pub(super) severed: bool,
    /// Something in flight was lost, so nothing behind it lands.
    pub(super) dead: bool,
    pub(super) fenced: bool,
    pub(super) outstanding: BTreeMap<u64, Outstanding>,
    /// When the latest post leaves, arrives and is acknowledged: a lane keeps order.
    pub(super) depart_at: u64,
    pub(super) arrive_at: u64,
    pub(super) ack_at: u64,
    /// Arrived, and waiting: for the one before, or for a release.
    pub(super) inbox: VecDeque<Flight>,
    /// Landing now.
    pub(super) landing: BTreeMap<u64, (Flight, Arc<Placement>)>,
    /// Which of `landing` the inbox waits for.
    pub(super) busy: Option<u64>,
}

impl Lane {
    fn half_mut(&mut self, role: LaneRole) -> &mut Half {
        match role {
            LaneRole::Reader => &mut self.reader,
            LaneRole::Writer => &mut self.writer,
        }
    }
}

impl World {
    /// The lane that `endpoint` means, whether or not it exists.
    pub(super) fn lane_key(
        &self,
        endpoint: EndpointId,
        link: LinkId,
        id: LaneId,
        role: LaneRole,
    ) -> Option<LaneKey> {
        let (conn, side) = self.find_link(endpoint, link)?;
        let reader = if role == LaneRole::Reader { side } else { side.other() };
        Some(LaneKey { conn, reader, id })
    }

    /// The endpoint at one end of a lane.
    pub(super) fn lane_end(&self, key: LaneKey, role: LaneRole) -> (EndpointId, LinkId) {
        let side = if role == LaneRole::Reader { key.reader } else { key.reader.other() };
        let end = self.conns[key.conn].end(side);
        (end.endpoint, end.link)
    }

    fn check_lane_call(
        &mut self,
        call: CallKind,
        endpoint: EndpointId,
        link: LinkId,
        lane: LaneId,
        role: LaneRole,
    ) -> Result<LaneKey, TransportError> {
        let (conn, side) = self.find_up(endpoint, link)?;
        let mut subject = self.subject(conn, side);
        subject.lane = Some(lane);
        self.check_call(call, &subject)?;
        let reader = if role == LaneRole::Reader { side } else { side.other() };
        Ok(LaneKey { conn, reader, id: lane })
    }

    pub(super) fn prepare_lane(
        &mut self,
        endpoint: EndpointId,
        link: LinkId,
        lane: LaneId,
        role: LaneRole,
    ) -> Result<Vec<u8>, TransportError> {
        let key = self.check_lane_call(CallKind::PrepareLane, endpoint, link, lane, role)?;
        let lane = self.lanes.entry(key).or_default();
        // An epoch is never used twice, so a half that was there before isn't made again.
        if lane.half_mut(role).state != HalfState::Absent {
            return Err(TransportError::NoLane(key.id));
        }
        lane.half_mut(role).state = HalfState::Prepared;
        Ok(key.params(role))
    }

    pub(super) fn start_lane(
        &mut self,
        endpoint: EndpointId,
        link: LinkId,
        lane: LaneId,
        role: LaneRole,
        peer_params: &[u8],
        timeout: Duration,
    ) -> Result<(), TransportError> {
        let key = self.check_lane_call(CallKind::StartLane, endpoint, link, lane, role)?;
        let half = self.lanes.get_mut(&key).map(|lane| lane.half_mut(role));
        let half = half.filter(|half| half.state == HalfState::Prepared);
        half.ok_or(TransportError::NoLane(lane))?;
        let peer = if role == LaneRole::Reader { LaneRole::Writer } else { LaneRole::Reader };
        if peer_params != key.params(peer) {
            let why = format!("they aren't those of the {peer:?} of {key:?}");
            return Err(TransportError::LaneParams(why));
        }
        let deadline = Time(self.now).after(timeout).0;
        let timer = self.schedule(deadline, Some(endpoint), What::LaneTimeout(key, role));
        let lane = self.lanes.entry(key).or_default();
        *lane.half_mut(role) = Half { state: HalfState::Started, timer: Some(timer) };
        if lane.reader.state == HalfState::Started && lane.writer.state == HalfState::Started {
            // The reader first: it has to be there when the writer's first write comes.
            let (reader, _) = self.lane_end(key, LaneRole::Reader);
            let at = self.soon();
            self.schedule(at, Some(reader), What::LaneUp(key, LaneRole::Reader));
        }
        Ok(())
    }

    /// One half learns that both are there.
    pub(super) fn lane_up(&mut self, key: LaneKey, role: LaneRole) {
        let cut = self.conns[key.conn].severed;
        let (endpoint, link) = self.lane_end(key, role);
        let Some(lane) = self.lanes.get_mut(&key) else { return };
        let gone = cut || lane.severed || lane.fenced;
        let half = lane.half_mut(role);
        if gone || half.state != HalfState::Started {
            return;
        }
        half.state = HalfState::Up;
        let timer = half.timer.take();
        self.unschedule(timer);
        self.tell(endpoint, Event::LaneUp { link, lane: key.id, role });
        if role == LaneRole::Reader {
            let (writer, _) = self.lane_end(key, LaneRole::Writer);
            let at = self.soon();
            self.schedule(at, Some(writer), What::LaneUp(key, LaneRole::Writer));
        }
    }

    pub(super) fn lane_timeout(&mut self, key: LaneKey, role: LaneRole) {
        match role {
            LaneRole::Reader => self.lane_down(key, role, None, "no writer in time"),
            LaneRole::Writer => self.retire_writer(key, "no reader in time"),
        }
    }

    /// One half learns that the lane is no more. A writer's outstanding requests end here.
    pub(super) fn lane_down(
        &mut self,
        key: LaneKey,
        role: LaneRole,
        refused: Option<u64>,
        why: &str,
    ) {
        let (endpoint, link) = self.lane_end(key, role);
        let Some(lane) = self.lanes.get_mut(&key) else { return };
        let half = lane.half_mut(role);
        let before = half.state;
        if matches!(before, HalfState::Absent | HalfState::Down) {
            return;
        }
        half.state = HalfState::Down;
        let timer = half.timer.take();
        self.unschedule(timer);
        if role == LaneRole::Writer {
            self.flush(key, refused);
        }
        if before != HalfState::Prepared {
            let why = why.to_owned();
            self.tell(endpoint, Event::LaneDown { link, lane: key.id, role, why });
        }
    }

    fn flush(&mut self, key: LaneKey, refused: Option<u64>) {
        let (writer, _) = self.lane_end(key, LaneRole::Writer);
        let Some(lane) = self.lanes.get_mut(&key) else { return };
        for (job, ended) in std::mem::take(&mut lane.outstanding) {
            let truth = match Some(job) == refused {
                true => CompletionStatus::Refused,
                false => CompletionStatus::Flushed,
            };
            self.tell(writer, ended.event(key.id, truth));
        }
    }

    pub(super) fn sever_lane(&mut self, key: LaneKey) {
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.severed = true;
        }
    }

    pub(super) fn kill_lane(&mut self, endpoint: EndpointId, link: LinkId, lane: LaneId) {
        if let Some(key) = self.lane_key(endpoint, link, lane, LaneRole::Writer) {
            self.retire_writer(key, "killed here");
        }
    }

    /// The writer goes. What has left may land all the same. A reader with a socket sees the end
    /// of its stream; a NIC's queue pair sees nothing.
    fn retire_writer(&mut self, key: LaneKey, why: &str) {
        let live = |lane: &&Lane| !matches!(lane.writer.state, HalfState::Absent | HalfState::Down);
        if self.lanes.get(&key).filter(live).is_none() {
            return;
        }
        self.sever_lane(key);
        self.lane_down(key, LaneRole::Writer, None, why);
        if self.config.confined {
            self.lane_down_soon(key, LaneRole::Reader, None, "ended by the writer");
        }
    }

    pub(super) fn lane_down_soon(
        &mut self,
        key: LaneKey,
        role: LaneRole,
        refused: Option<u64>,
        why: &'static str,
    ) {
        let (endpoint, _) = self.lane_end(key, role);
        let at = self.soon();
        self.schedule(at, Some(endpoint), What::LaneDown { key, role, refused, why });
    }

    /// The reader's fence takes hold, and is reported in the same moment.
    pub(super) fn fence(&mut self, reader: EndpointId, link: LinkId, lane: LaneId) {
        if let Some(key) = self.lane_key(reader, link, lane, LaneRole::Reader) {
            self.fence_now(key);
        }
        self.tell(reader, Event::LaneFenced { link, lane });
    }

    pub(super) fn fence_now(&mut self, key: LaneKey) {
        let (reader, _) = self.lane_end(key, LaneRole::Reader);
        // Also if the lane never was: it can't come to be after this.
        let lane = self.lanes.entry(key).or_default();
        if lane.fenced {
            return;
        }
        lane.fenced = true;
        lane.busy = None;
        lane.reader.state = HalfState::Down;
        let timer = lane.reader.timer.take();
        let waiting = std::mem::take(&mut lane.inbox);
        let landing = std::mem::take(&mut lane.landing);
        self.unschedule(timer);
        waiting.iter().for_each(|_| self.count(FaultKind::FencedInFlight));
        for (flight, _) in landing.into_values() {
            self.count(FaultKind::FencedInFlight);
            if let Cargo::Write(ship) = &flight.cargo
                && self.endpoints[reader].landings.abandon(ship)
            {
                self.report_closed(reader, ship.transfer);
            }
        }
        self.lane_down_soon(key, LaneRole::Writer, None, "fenced by the reader");
        self.forget_unreachable(reader);
    }

    /// Lets a reader's forgotten landings go once every lane that could write them is fenced.
    pub(super) fn forget_unreachable(&mut self, reader: EndpointId) {
        let open = |(key, lane): (&LaneKey, &Lane)| {
            let used = !matches!(lane.reader.state, HalfState::Absent | HalfState::Prepared);
            used && !lane.fenced && self.lane_end(*key, LaneRole::Reader).0 == reader
        };
        if !self.lanes.iter().any(open) {
            self.endpoints[reader].landings.forget_unreachable();
        }
    }
}

impl Outstanding {
    /// Its one completion: consumes it.
    pub(super) fn event(self, lane: LaneId, truth: CompletionStatus) -> Event {
        let Outstanding { transfer, ticket, status, .. } = self;
        Event::WriteDone { lane, transfer, ticket, status: status.unwrap_or(truth) }
    }
}
