//! The writes of one matched transfer: windows, lanes, markers, and the way to quiet.

use std::collections::{BTreeMap, VecDeque};

use super::{Load, SenderAction, SenderSettings, WriteEnd};
use crate::protocol::cause::Cause;
use crate::protocol::ids::{
    BlockIndex, Generation, Incarnation, LaneId, Round, Ticket, Time, TransferId,
};
use crate::protocol::message::{LaneDrain, Manifest, ManifestComponent, Message};
use crate::protocol::outbox::Outbox;
use crate::protocol::{BlockMap, BlockRange, wrapping_total};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Marker {
    None,
    Posted(Ticket, Round),
    Done(Round),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct LaneUse {
    /// What went over it, as ranges; written again if the lane is fenced.
    posted: Vec<BlockRange>,
    marker: Marker,
    dead: bool,
}

impl LaneUse {
    fn new() -> LaneUse {
        LaneUse { posted: Vec::new(), marker: Marker::None, dead: false }
    }

    fn is_marked(&self, round: Round) -> bool {
        self.marker == Marker::Done(round)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct InFlight {
    lane: LaneId,
    bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PendingResume {
    round: Round,
    dead: Vec<LaneId>,
    lanes: Vec<LaneId>,
}

/// Blocks waiting to be posted.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub(super) struct Queue(VecDeque<BlockRange>);

impl Queue {
    pub(super) fn push(&mut self, range: BlockRange) {
        match self.0.back_mut() {
            Some(last) if last.end() == u64::from(range.first.0) => last.count += range.count,
            _ => self.0.push_back(range),
        }
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes up to `max_bytes` and `max_blocks`, at least one block.
    fn take(&mut self, map: &BlockMap, max_bytes: u64, max_blocks: u32) -> (Vec<BlockRange>, u64) {
        let (mut ranges, mut bytes, mut blocks) = (Vec::new(), 0u64, 0u32);
        while let Some(range) = self.0.front_mut() {
            let len = map.locate(range.first).map_or(0, |place| place.len).max(1);
            let room = (max_bytes.saturating_sub(bytes) / len).min(u64::from(max_blocks - blocks));
            let room = if blocks == 0 { room.max(1) } else { room };
            // Blocks of one range may differ in length at a section's end: take the first kind.
            let run = same_len_run(map, *range, len);
            let count = run.min(u32::try_from(room).unwrap_or(u32::MAX));
            if count == 0 {
                break;
            }
            ranges.push(BlockRange { first: range.first, count });
            bytes += len * u64::from(count);
            blocks += count;
            range.first = BlockIndex(range.first.0 + count);
            range.count -= count;
            if range.count == 0 {
                self.0.pop_front();
            }
        }
        (ranges, bytes)
    }
}

fn same_len_run(map: &BlockMap, range: BlockRange, len: u64) -> u32 {
    let all = map.range_len(range).unwrap_or(0);
    if all == len * u64::from(range.count) {
        return range.count;
    }
    let differs = |block: &BlockIndex| map.locate(*block).is_none_or(|place| place.len != len);
    range.blocks().position(|block| differs(&block)).map_or(range.count, |at| at as u32)
}

/// A transfer that has an id: a grant met its send.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Transfer {
    pub(super) id: TransferId,
    pub(super) peer: Incarnation,
    pub(super) outbox: Outbox,
    pub(super) accepted: bool,
    pub(super) complete_sent: bool,
    /// The peer is gone or has forgotten the transfer: nothing more is said to it.
    pub(super) gone: bool,
    pub(super) done_bytes: u64,
    pub(super) kill_at: Time,
    generation: Generation,
    integrity: bool,
    map: BlockMap,
    queue: Queue,
    again: Queue,
    finishing: bool,
    round: Round,
    lanes: BTreeMap<LaneId, LaneUse>,
    in_flight: BTreeMap<Ticket, InFlight>,
    resume: Option<PendingResume>,
    draining: Option<Cause>,
    drained_sent: bool,
}

type Actions = Vec<SenderAction>;

impl Transfer {
    pub(super) fn new(
        id: TransferId,
        peer: Incarnation,
        generation: Generation,
        integrity: bool,
        map: BlockMap,
        settings: &SenderSettings,
    ) -> Transfer {
        Transfer {
            id,
            peer,
            outbox: Outbox::new(settings.resend),
            accepted: false,
            complete_sent: false,
            gone: false,
            done_bytes: 0,
            kill_at: Time::NEVER,
            generation,
            integrity,
            map,
            queue: Queue::default(),
            again: Queue::default(),
            finishing: false,
            round: Round(0),
            lanes: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            resume: None,
            draining: None,
            drained_sent: false,
        }
    }

    pub(super) fn write(&mut self, ranges: &[BlockRange]) {
        ranges.iter().for_each(|&range| self.queue.push(range));
    }

    /// No more writes will come.
    pub(super) fn finish(&mut self) {
        self.finishing = true;
    }

    pub(super) fn send(&mut self, now: Time, message: Message, actions: &mut Actions) {
        self.outbox.push(now, message.clone());
        actions.push(SenderAction::Send { peer: self.peer, message });
    }

    /// Names the lanes that may be used.
    pub(super) fn accept(&mut self, now: Time, lanes: &[LaneId], actions: &mut Actions) {
        if self.accepted || lanes.is_empty() || self.draining.is_some() {
            return;
        }
        self.accepted = true;
        self.lanes = lanes.iter().map(|&lane| (lane, LaneUse::new())).collect();
        let (id, bytes) = (self.id, self.map.byte_count());
        self.send(now, Message::Accept { id, bytes, lanes: lanes.to_vec() }, actions);
    }

    /// Nothing local reads the source any more. `[I4]`
    pub(super) fn is_quiet(&self) -> bool {
        self.in_flight.is_empty()
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.is_some()
    }

    pub(super) fn in_flight_bytes(&self) -> u64 {
        self.in_flight.values().map(|write| write.bytes).sum()
    }

    /// Posts one chunk over the least loaded lane that has room. `false` if there was nothing to
    /// post or no room. `[I6]`
    pub(super) fn pump_one(
        &mut self,
        settings: &SenderSettings,
        loads: &mut BTreeMap<(Incarnation, LaneId), Load>,
        next_ticket: &mut u64,
        actions: &mut Actions,
    ) -> bool {
        let fresh = self.again.is_empty();
        let idle = self.queue.is_empty() && fresh;
        if idle || !self.accepted || self.draining.is_some() || self.resume.is_some() {
            return false;
        }
        if self.in_flight_bytes() >= settings.transfer_window_bytes {
            return false;
        }
        let alive = self.lanes.iter().filter(|(_, lane)| !lane.dead).map(|(lane, _)| *lane);
        let load = |lane: LaneId| loads.get(&(self.peer, lane)).copied().unwrap_or_default();
        let Some(lane) = alive.min_by_key(|&lane| load(lane).bytes) else { return false };
        if !load(lane).has_room(settings) {
            return false;
        }
        let queue = if fresh { &mut self.queue } else { &mut self.again };
        let (blocks, bytes) = queue.take(&self.map, settings.chunk_bytes, settings.chunk_blocks);
        *next_ticket += 1;
        let ticket = Ticket(*next_ticket);
        self.in_flight.insert(ticket, InFlight { lane, bytes });
        loads.entry((self.peer, lane)).or_default().add(bytes);
        if let Some(used) = self.lanes.get_mut(&lane) {
            blocks.iter().for_each(|&range| push_merged(&mut used.posted, range));
        }
        let digest = self.integrity;
        let (id, generation) = (self.id, self.generation);
        actions.push(SenderAction::Post {
            id,
            peer: self.peer,
            lane,
            ticket,
            generation,
            blocks,
            digest,
        });
        true
    }

    /// A write or marker ended. Returns the bytes that left its lane's load.
    pub(super) fn on_write_done(
        &mut self,
        lane: LaneId,
        ticket: Ticket,
        end: WriteEnd,
        actions: &mut Actions,
    ) -> u64 {
        if let Some(used) = self.lanes.get_mut(&lane) {
            if let Marker::Posted(posted, round) = used.marker
                && posted == ticket
            {
                used.marker = match end {
                    WriteEnd::Success => Marker::Done(round),
                    _ => Marker::None,
                };
            }
            // Whatever isn't success makes the lane unusable for good; a cancelled write never
            // touched it. It is closed, so that the receiver hears of it and fences: the transport
            // may think it well.
            if end == WriteEnd::Failed && !std::mem::replace(&mut used.dead, true) {
                actions.push(SenderAction::KillLane { peer: self.peer, lane });
            }
        }
        let Some(write) = self.in_flight.remove(&ticket) else { return 0 };
        if end == WriteEnd::Success && !self.is_draining() {
            self.done_bytes = (self.done_bytes + write.bytes).min(self.map.byte_count());
        }
        write.bytes
    }

    pub(super) fn on_lane_down(&mut self, lane: LaneId) {
        if let Some(used) = self.lanes.get_mut(&lane) {
            used.dead = true;
        }
    }

    /// The receiver fenced lanes and lets the transfer go on.
    pub(super) fn on_resume(
        &mut self,
        round: Round,
        dead: Vec<LaneId>,
        lanes: Vec<LaneId>,
        actions: &mut Actions,
    ) {
        if self.draining.is_some() || round.0 != self.round.0 + 1 {
            return;
        }
        for &lane in &dead {
            if let Some(used) = self.lanes.get_mut(&lane)
                && !std::mem::replace(&mut used.dead, true)
            {
                actions.push(SenderAction::KillLane { peer: self.peer, lane });
            }
        }
        self.resume = Some(PendingResume { round, dead, lanes });
    }

    /// Acts on a resume once every write of the fenced lanes is reaped.
    fn try_resume(&mut self) {
        let Some(resume) = self.resume.take() else { return };
        let unreaped = self.in_flight.values().any(|write| resume.dead.contains(&write.lane));
        if unreaped {
            self.resume = Some(resume);
            return;
        }
        for lane in &resume.dead {
            let Some(used) = self.lanes.remove(lane) else { continue };
            for range in used.posted {
                let bytes = self.map.range_len(range).unwrap_or(0);
                self.done_bytes = self.done_bytes.saturating_sub(bytes);
                self.again.push(range);
            }
        }
        // Dead lanes that the receiver doesn't name had their marker through: nothing is owed.
        self.lanes.retain(|_, used| !used.dead);
        for lane in resume.lanes {
            self.lanes.entry(lane).or_insert_with(LaneUse::new);
        }
        self.round = resume.round;
        self.complete_sent = false;
        self.outbox.settle(Message::COMPLETE);
    }

    /// Stops posting. `[I2]`
    pub(super) fn begin_drain(&mut self, cause: Cause, kill_at: Time, actions: &mut Actions) {
        if self.draining.is_some() {
            return;
        }
        self.draining = Some(cause);
        self.kill_at = kill_at;
        self.resume = None;
        self.queue = Queue::default();
        self.again = Queue::default();
        self.outbox.settle(Message::ACCEPT);
        self.outbox.settle(Message::COMPLETE);
        actions.push(SenderAction::Cancel { id: self.id });
    }

    /// Gives up the lanes that don't let a draining transfer end.
    pub(super) fn kill_stuck(&mut self, actions: &mut Actions) {
        self.kill_at = Time::NEVER;
        let busy = |lane: &LaneId| self.in_flight.values().any(|write| write.lane == *lane);
        let stuck = |(lane, used): (&LaneId, &LaneUse)| {
            let waits = busy(lane) || matches!(used.marker, Marker::Posted(..));
            (waits && !used.dead).then_some(*lane)
        };
        for lane in self.lanes.iter().filter_map(stuck).collect::<Vec<_>>() {
            actions.push(SenderAction::KillLane { peer: self.peer, lane });
        }
    }

    /// Posts what markers are due, then says `Complete` or `Drained`.
    pub(super) fn advance(&mut self, now: Time, next_ticket: &mut u64, actions: &mut Actions) {
        if self.resume.is_some() {
            self.try_resume();
        }
        let written = self.queue.is_empty() && self.again.is_empty() && self.in_flight.is_empty();
        if !written || self.resume.is_some() {
            return;
        }
        match &self.draining {
            Some(cause) => {
                let cause = cause.clone();
                if !self.gone && self.post_markers(next_ticket, actions) {
                    self.send_drained(now, cause, actions);
                }
            }
            None if self.finishing && self.accepted && !self.complete_sent => {
                let owed = |used: &LaneUse| used.dead && !used.is_marked(self.round);
                let owing = self.lanes.values().any(owed);
                if self.post_markers(next_ticket, actions) && !owing {
                    self.complete_sent = true;
                    actions.push(SenderAction::Digest { id: self.id });
                }
            }
            None => {}
        }
    }

    /// `true` once every lane that lives has its marker of this round through the local end.
    fn post_markers(&mut self, next_ticket: &mut u64, actions: &mut Actions) -> bool {
        let round = self.round;
        for (&lane, used) in self.lanes.iter_mut().filter(|(_, used)| !used.dead) {
            if matches!(used.marker, Marker::Posted(_, r) | Marker::Done(r) if r == round) {
                continue;
            }
            *next_ticket += 1;
            let ticket = Ticket(*next_ticket);
            used.marker = Marker::Posted(ticket, round);
            actions.push(SenderAction::Marker {
                id: self.id,
                peer: self.peer,
                lane,
                round,
                ticket,
            });
        }
        self.lanes.values().all(|used| used.dead || used.is_marked(round))
    }

    fn send_drained(&mut self, now: Time, cause: Cause, actions: &mut Actions) {
        if std::mem::replace(&mut self.drained_sent, true) {
            return;
        }
        let drained = self.drained(cause);
        self.send(now, drained, actions);
    }

    fn drained(&self, cause: Cause) -> Message {
        let drain = |(&lane, used): (&LaneId, &LaneUse)| LaneDrain {
            lane,
            needs_fence: !used.is_marked(self.round),
        };
        let lanes = self.lanes.iter().map(drain).collect();
        Message::Drained { id: self.id, round: self.round, cause, lanes }
    }

    /// What a receiver that asks again is answered with, once the drain was said.
    pub(super) fn last_word(&self) -> Option<Message> {
        let cause = self.draining.clone().filter(|_| self.drained_sent)?;
        Some(self.drained(cause))
    }

    /// Says `Complete`, with the digests of what was written.
    pub(super) fn on_digests(
        &mut self,
        now: Time,
        digests: Option<Vec<Vec<u64>>>,
        actions: &mut Actions,
    ) {
        if self.draining.is_some() || !self.complete_sent {
            return;
        }
        let digests = digests.unwrap_or_else(|| vec![Vec::new(); self.map.page_counts().len()]);
        let component = |(&page_count, digests): (&u32, Vec<u64>)| {
            let total = wrapping_total(&digests);
            ManifestComponent { page_count, digests, total }
        };
        let components = self.map.page_counts().iter().zip(digests).map(component).collect();
        let manifest = Manifest {
            generation: self.generation,
            block_count: self.map.block_count(),
            bytes: self.done_bytes,
            components,
            lanes: self.lanes.keys().copied().collect(),
        };
        let (id, round) = (self.id, self.round);
        self.send(now, Message::Complete { id, round, manifest }, actions);
    }
}

fn push_merged(ranges: &mut Vec<BlockRange>, range: BlockRange) {
    match ranges.last_mut() {
        Some(last) if last.end() == u64::from(range.first.0) => last.count += range.count,
        _ => ranges.push(range),
    }
}
