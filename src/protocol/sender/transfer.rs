//! The writes of one matched transfer: windows, lanes, markers, and the way to quiet.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Health {
    /// Named by the receiver, not up at this end yet.
    Opening,
    Up,
    /// Nothing is posted on it any more. What was posted is owed, until a resume names the lane or
    /// its marker of this round was through before.
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct LaneUse {
    health: Health,
    /// What went over it, as ranges; written again if the lane is given up.
    posted: Vec<BlockRange>,
    /// Bytes of that which succeeded.
    done_bytes: u64,
    marker: Marker,
}

impl LaneUse {
    fn new(health: Health) -> LaneUse {
        LaneUse { health, posted: Vec::new(), done_bytes: 0, marker: Marker::None }
    }

    fn is_marked(&self, round: Round) -> bool {
        self.marker == Marker::Done(round)
    }

    fn is_dead(&self) -> bool {
        self.health == Health::Dead
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
    /// The session is over: nobody can ask for the last word any more.
    pub(super) lost: bool,
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
            lost: false,
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
        self.lanes = lanes.iter().map(|&lane| (lane, LaneUse::new(Health::Up))).collect();
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
        let up = self.lanes.iter().filter(|(_, lane)| lane.health == Health::Up);
        let load = |lane: LaneId| loads.get(&(self.peer, lane)).copied().unwrap_or_default();
        let roomy = up.map(|(lane, _)| *lane).filter(|&lane| load(lane).has_room(settings));
        let Some(lane) = roomy.min_by_key(|&lane| load(lane).bytes) else { return false };
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
        let write = self.in_flight.remove(&ticket);
        let bytes = write.map_or(0, |write| write.bytes);
        let Some(used) = self.lanes.get_mut(&lane) else { return bytes };
        if let Marker::Posted(posted, round) = used.marker
            && posted == ticket
        {
            used.marker = match end {
                WriteEnd::Success => Marker::Done(round),
                _ => Marker::None,
            };
        }
        match end {
            WriteEnd::Success => used.done_bytes += bytes,
            // It never touched the lane.
            WriteEnd::Cancelled => {}
            // Whatever isn't success makes the lane unusable for good, for everyone.
            WriteEnd::Failed if used.is_dead() => {}
            WriteEnd::Failed => {
                used.health = Health::Dead;
                actions.push(SenderAction::KillLane { peer: self.peer, lane });
            }
        }
        bytes
    }

    pub(super) fn on_lane_up(&mut self, lane: LaneId) {
        if let Some(used) = self.lanes.get_mut(&lane)
            && used.health == Health::Opening
        {
            used.health = Health::Up;
        }
    }

    pub(super) fn on_lane_down(&mut self, lane: LaneId) {
        if let Some(used) = self.lanes.get_mut(&lane) {
            used.health = Health::Dead;
        }
    }

    /// Bytes written, each block counted once.
    pub(super) fn done_bytes(&self) -> u64 {
        self.lanes.values().map(|used| used.done_bytes).sum()
    }

    /// The receiver fenced lanes and lets the transfer go on.
    pub(super) fn on_resume(
        &mut self,
        round: Round,
        dead: Vec<LaneId>,
        lanes: Vec<LaneId>,
        actions: &mut Actions,
    ) {
        if self.draining.is_some() || round <= self.round {
            return;
        }
        if self.resume.as_ref().is_some_and(|pending| pending.round >= round) {
            return;
        }
        for &lane in &dead {
            if let Some(used) = self.lanes.get_mut(&lane)
                && !used.is_dead()
            {
                used.health = Health::Dead;
                actions.push(SenderAction::KillLane { peer: self.peer, lane });
            }
        }
        // A later resume names all that earlier ones did.
        self.resume = Some(PendingResume { round, dead, lanes });
    }

    /// Acts on a resume once every write of the given-up lanes is reaped.
    fn try_resume(&mut self, up: &BTreeSet<LaneId>) {
        let Some(resume) = self.resume.take() else { return };
        let unreaped = self.in_flight.values().any(|write| resume.dead.contains(&write.lane));
        if unreaped {
            self.resume = Some(resume);
            return;
        }
        for lane in &resume.dead {
            let Some(used) = self.lanes.remove(lane) else { continue };
            used.posted.into_iter().for_each(|range| self.again.push(range));
        }
        for lane in resume.lanes {
            let health = if up.contains(&lane) { Health::Up } else { Health::Opening };
            self.lanes.entry(lane).or_insert_with(|| LaneUse::new(health));
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
    pub(super) fn kill_stuck(&mut self, again_at: Time, actions: &mut Actions) {
        // Markers may be posted after this, and get stuck in turn.
        self.kill_at = if self.drained_sent { Time::NEVER } else { again_at };
        let busy = |lane: &LaneId| self.in_flight.values().any(|write| write.lane == *lane);
        let stuck = |(lane, used): (&LaneId, &LaneUse)| {
            let waits = busy(lane) || matches!(used.marker, Marker::Posted(..));
            (waits && !used.is_dead()).then_some(*lane)
        };
        for lane in self.lanes.iter().filter_map(stuck).collect::<Vec<_>>() {
            actions.push(SenderAction::KillLane { peer: self.peer, lane });
        }
    }

    /// Posts what markers are due, then says `Complete` or `Drained`.
    pub(super) fn advance(
        &mut self,
        now: Time,
        up: &BTreeSet<LaneId>,
        next_ticket: &mut u64,
        actions: &mut Actions,
    ) {
        if self.resume.is_some() {
            self.try_resume(up);
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
                let posted = self.post_markers(next_ticket, actions);
                if posted && self.is_marked() {
                    self.complete_sent = true;
                    actions.push(SenderAction::Digest { id: self.id });
                }
            }
            None => {}
        }
    }

    /// `true` once no marker is under way: each lane that is up has its marker of this round
    /// through the local end.
    fn post_markers(&mut self, next_ticket: &mut u64, actions: &mut Actions) -> bool {
        let round = self.round;
        let up = self.lanes.iter_mut().filter(|(_, used)| used.health == Health::Up);
        for (&lane, used) in up {
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
        self.lanes.values().all(|used| used.health != Health::Up || used.is_marked(round))
    }

    /// Every lane has its marker through; of those that broke without it, a resume must come.
    fn is_marked(&self) -> bool {
        self.lanes.values().all(|used| used.is_marked(self.round))
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
            bytes: self.done_bytes(),
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
