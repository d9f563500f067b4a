//! The receiving side: leases filled by one or more grants, from the grant to sealed pages or to
//! pages that are free again.
//!
//! An **assembly** is one lease; each of its **parts** is one grant to one sender and has its own
//! transfer id. The assembly is sealed when every part is complete, quiescent and verified; the
//! first failure of any part ends all of them.

mod ends;
mod part;
mod talk;
mod types;

use std::collections::BTreeMap;

use super::cause::{Cause, Phase, TransferError};
use super::coverage::{Slice, check_exact};
use super::ids::{Incarnation, LaneId, PoolId, Round, Time, TransferId};
use super::ledger::Ledger;
use super::message::{GrantComponent, Message};
use super::{BlockMap, ComponentShape};
use part::{Landed, Part};
pub use types::{AssemblyId, LeaseComponent, OpenPart, ReceiverAction, ReceiverSettings};

/// The ledgers that the receiver acts on, by pool.
pub type Ledgers = BTreeMap<PoolId, Ledger>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Stage {
    /// Grants are out; senders write.
    Filling,
    /// All parts are complete and quiescent; digests are on their way.
    Verifying,
    /// Readable; `Verified` is being told until the time given.
    Sealed { until: Time },
    /// Failed and pages quarantined; lanes are fenced at the time given.
    Draining { fence_at: Time },
    /// Failed, pages released; some senders don't know yet.
    Released,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Assembly {
    lease: Vec<LeaseComponent>,
    deadline: Time,
    integrity: bool,
    stage: Stage,
    parts: Vec<TransferId>,
}

/// All transfers that one engine receives.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver {
    me: Incarnation,
    settings: ReceiverSettings,
    last_counter: u64,
    last_assembly: u64,
    assemblies: BTreeMap<AssemblyId, Assembly>,
    parts: BTreeMap<TransferId, Part>,
    /// Lanes that peers may be writing through, as far as they aren't fenced.
    lanes: BTreeMap<(Incarnation, LaneId), LaneHealth>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum LaneHealth {
    /// Offered: the writer's end may be up before this one.
    Opening,
    Up,
    Down,
}

type Actions = Vec<ReceiverAction>;

impl Receiver {
    /// Nothing open.
    pub fn new(me: Incarnation, settings: ReceiverSettings) -> Receiver {
        Receiver {
            me,
            settings,
            last_counter: 0,
            last_assembly: 0,
            assemblies: BTreeMap::new(),
            parts: BTreeMap::new(),
            lanes: BTreeMap::new(),
        }
    }

    /// Opens an assembly over leased (granted) pages. On an error nothing was sent and the pages
    /// are still leased.
    pub fn open(
        &mut self,
        now: Time,
        lease: Vec<LeaseComponent>,
        parts: Vec<OpenPart>,
        deadline: Time,
        integrity: bool,
        actions: &mut Actions,
    ) -> Result<AssemblyId, TransferError> {
        let maps = self.check_open(&lease, &parts)?;
        self.last_assembly += 1;
        let assembly = AssemblyId(self.last_assembly);
        let first = self.last_counter + 1;
        self.last_counter += parts.len() as u64;
        let ids =
            (first..=self.last_counter).map(|counter| TransferId { receiver: self.me, counter });
        let ids: Vec<TransferId> = ids.collect();
        let generation = lease[0].generation;
        for ((open, map), &id) in parts.into_iter().zip(maps).zip(&ids) {
            let slices = open.slices.clone();
            let mut part = Part::new(assembly, open, map, self.settings.resend);
            let oldest_live = self.oldest_live(part.peer, id);
            let grant =
                part.grant(id, &lease, generation, now.until(deadline), integrity, oldest_live);
            actions.push(ReceiverAction::OpenLanding {
                assembly,
                id,
                peer: part.peer,
                generation,
                slices,
                integrity,
            });
            part.send(now, Message::Grant { grant }, actions);
            self.parts.insert(id, part);
        }
        let stage = Stage::Filling;
        let entry = Assembly { lease, deadline, integrity, stage, parts: ids };
        self.assemblies.insert(assembly, entry);
        Ok(assembly)
    }

    fn check_open(
        &self,
        lease: &[LeaseComponent],
        parts: &[OpenPart],
    ) -> Result<Vec<BlockMap>, TransferError> {
        let refuse = |part: Option<&OpenPart>, cause: Cause| TransferError {
            transfer: None,
            label: part.map(|p| p.label.clone()).unwrap_or_default(),
            peer: part.map(|p| p.peer),
            phase: Phase::Admission,
            bytes_done: 0,
            bytes_total: lease.iter().map(|c| c.layout.page_bytes() * c.pages.len() as u64).sum(),
            cause,
        };
        if lease.is_empty() || lease.iter().any(|c| c.pages.is_empty()) || parts.is_empty() {
            return Err(refuse(parts.first(), Cause::EmptyTransfer {}));
        }
        let components: Vec<(u32, &[u32])> =
            lease.iter().map(|c| (c.pages.len() as u32, &c.layout.item_lens[..])).collect();
        let slices: Vec<&Slice> = parts.iter().flat_map(|part| &part.slices).collect();
        let misfit = slices.iter().find_map(|slice| {
            let (_, item_lens) = components.get(slice.component)?;
            slice.extents.iter().find_map(|extent| extent.check(item_lens).err())
        });
        if let Some(why) = misfit {
            let why = why.to_string().into();
            return Err(refuse(parts.first(), Cause::ProtocolViolation { why }));
        }
        check_exact(&components, &slices).map_err(|why| {
            refuse(parts.first(), Cause::ProtocolViolation { why: why.to_string().into() })
        })?;
        let mut maps = Vec::with_capacity(parts.len());
        for (index, part) in parts.iter().enumerate() {
            let same = |other: &OpenPart| (&other.label, other.peer) == (&part.label, part.peer);
            // Sealed is over for the caller, also while the sender hasn't acknowledged it.
            let in_use = self.parts.iter().any(|(&id, p)| {
                (&p.label, p.peer) == (&part.label, part.peer)
                    && matches!(self.stage_of(id), Some(Stage::Filling | Stage::Verifying))
            });
            if in_use || parts[..index].iter().any(same) {
                return Err(refuse(Some(part), Cause::DuplicateLabel {}));
            }
            let shape = |slice: &Slice| ComponentShape {
                page_count: slice.pages.end - slice.pages.start,
                extents: slice.extents.clone(),
            };
            let shapes: Vec<ComponentShape> = part.slices.iter().map(shape).collect();
            maps.push(BlockMap::new(&shapes).map_err(|why| {
                refuse(Some(part), Cause::ProtocolViolation { why: why.to_string().into() })
            })?);
        }
        Ok(maps)
    }

    /// Transfers below this counter have ended, as far as `peer` can know of them.
    fn oldest_live(&self, peer: Incarnation, newest: TransferId) -> u64 {
        let own = self.parts.iter().filter(|(_, part)| part.peer == peer);
        own.map(|(id, _)| id.counter).min().unwrap_or(newest.counter)
    }

    /// The application gives up: cancels, drops its handle, shuts down, or found a fault.
    pub fn abort(
        &mut self,
        now: Time,
        assembly: AssemblyId,
        cause: Cause,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        let first = self.assemblies.get(&assembly).and_then(|a| a.parts.first().copied());
        if let Some(id) = first {
            self.fail(now, id, cause, ledgers, actions);
        }
    }

    /// The transport refused a write of `peer` that named `id`: nothing of it landed, and the
    /// sender is broken or hostile. A transfer of another peer isn't touched by it.
    pub fn on_write_refused(
        &mut self,
        now: Time,
        peer: Incarnation,
        id: TransferId,
        cause: Cause,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        if self.parts.get(&id).is_some_and(|part| part.peer == peer) {
            self.fail(now, id, cause, ledgers, actions);
        }
    }

    /// A lane from `peer` is being opened: from here to its fence, writes may come through it.
    pub fn on_lane_opening(&mut self, peer: Incarnation, lane: LaneId) {
        self.lanes.insert((peer, lane), LaneHealth::Opening);
    }

    /// A lane from `peer` can carry writes.
    pub fn on_lane_up(
        &mut self,
        now: Time,
        peer: Incarnation,
        lane: LaneId,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        if let Some(health @ LaneHealth::Opening) = self.lanes.get_mut(&(peer, lane)) {
            *health = LaneHealth::Up;
        }
        for id in self.parts_of(peer) {
            self.try_resume(now, id, ledgers, actions);
        }
    }

    /// A lane from `peer` broke; the engine is fencing it.
    pub fn on_lane_down(&mut self, peer: Incarnation, lane: LaneId) {
        if let Some(health) = self.lanes.get_mut(&(peer, lane)) {
            *health = LaneHealth::Down;
        }
    }

    /// A lane from `peer` is out of service: nothing lands through it any more.
    pub fn on_lane_fenced(
        &mut self,
        now: Time,
        peer: Incarnation,
        lane: LaneId,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        self.lanes.remove(&(peer, lane));
        for id in self.parts_of(peer) {
            if let Some(part) = self.parts.get_mut(&id) {
                part.on_fenced(id, lane, actions);
            }
            self.try_resume(now, id, ledgers, actions);
            self.advance(now, id, ledgers, actions);
        }
    }

    /// The in-band marker of `id` came through `lane`.
    pub fn on_marker(
        &mut self,
        now: Time,
        peer: Incarnation,
        lane: LaneId,
        id: TransferId,
        round: Round,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        if let Some(part) = self.parts.get_mut(&id).filter(|part| part.peer == peer) {
            part.on_marker(lane, round);
            self.advance(now, id, ledgers, actions);
        }
    }

    /// Nothing of `id` lands any more; `digests` are those of what did.
    pub fn on_landing_closed(
        &mut self,
        now: Time,
        id: TransferId,
        landed_bytes: u64,
        digests: Option<Vec<Vec<u64>>>,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        if let Some(part) = self.parts.get_mut(&id) {
            part.landed = Landed::Closed { bytes: landed_bytes, digests };
            self.advance(now, id, ledgers, actions);
        }
    }

    /// The session with `peer` is over. The engine fences its lanes.
    pub fn on_peer_lost(
        &mut self,
        now: Time,
        peer: Incarnation,
        cause: &Cause,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        for id in self.parts_of(peer) {
            if let Some(part) = self.parts.get_mut(&id) {
                part.on_peer_lost();
            }
            self.fail(now, id, cause.clone(), ledgers, actions);
            self.fence_all(id, actions);
            self.advance(now, id, ledgers, actions);
        }
    }

    /// The session came back over a new link: everything unacknowledged is sent again.
    pub fn on_peer_back(&mut self, now: Time, peer: Incarnation, actions: &mut Actions) {
        let mut ids = Vec::new();
        for (id, part) in self.parts.iter_mut().filter(|(_, part)| part.peer == peer) {
            part.outbox.hurry(now);
            // One whose grant may be on its way isn't known there yet.
            if part.is_live() && !part.outbox.holds(Message::GRANT) {
                ids.push(*id);
            }
        }
        for ids in ids.chunks(Message::MAX_LIVE) {
            let message = Message::Live { ids: ids.to_vec() };
            actions.push(ReceiverAction::Send { peer, message });
        }
    }

    /// Whether new lanes from `peer` may be opened: not while it may not know yet that a transfer,
    /// whose pages went back by a fence alone, is over. Else it could go on writing through them.
    pub fn may_open_lanes(&self, peer: Incarnation) -> bool {
        !self.parts.values().any(|part| part.peer == peer && part.awaits_peer())
    }

    /// Assemblies that aren't over: filling, verifying or draining.
    pub fn live_assemblies(&self) -> usize {
        let over = |stage: &Stage| matches!(stage, Stage::Sealed { .. } | Stage::Released);
        self.assemblies.values().filter(|assembly| !over(&assembly.stage)).count()
    }

    /// Transfers that want a lane from `peer`.
    pub fn wants_lanes(&self, peer: Incarnation) -> bool {
        self.parts.values().any(|part| part.peer == peer && part.is_live())
    }

    /// When [`Receiver::on_timeout`] is due.
    pub fn next_timeout(&self) -> Time {
        let stages = self.assemblies.values().map(|assembly| match assembly.stage {
            Stage::Filling | Stage::Verifying => assembly.deadline,
            Stage::Sealed { until } => until,
            Stage::Draining { fence_at } => fence_at,
            Stage::Released => Time::NEVER,
        });
        let resends = self.parts.values().map(|part| part.outbox.next_due());
        stages.chain(resends).min().unwrap_or(Time::NEVER)
    }

    /// Deadlines and resends that are due.
    pub fn on_timeout(&mut self, now: Time, ledgers: &mut Ledgers, actions: &mut Actions) {
        for part in self.parts.values_mut() {
            for message in part.outbox.due(now) {
                actions.push(ReceiverAction::Send { peer: part.peer, message });
            }
        }
        let ids: Vec<AssemblyId> = self.assemblies.keys().copied().collect();
        for id in ids {
            let Some(assembly) = self.assemblies.get_mut(&id) else { continue };
            match assembly.stage {
                Stage::Filling | Stage::Verifying if assembly.deadline <= now => {
                    let first = assembly.parts[0];
                    self.fail(now, first, Cause::DeadlineExceeded {}, ledgers, actions);
                }
                Stage::Sealed { until } if until <= now => self.remove(id),
                Stage::Draining { fence_at } if fence_at <= now => {
                    assembly.stage = Stage::Draining { fence_at: Time::NEVER };
                    for part in assembly.parts.clone() {
                        self.fence_all(part, actions);
                        self.advance(now, part, ledgers, actions);
                    }
                }
                _ => {}
            }
        }
    }

    fn slowest_part(&self, assembly: AssemblyId) -> TransferId {
        let parts = self.assemblies.get(&assembly).map_or(&[][..], |a| &a.parts);
        let behind = |id: &&TransferId| self.parts.get(id).is_some_and(|part| !part.is_complete());
        parts.iter().find(behind).or(parts.first()).copied().unwrap_or_default()
    }

    fn with_part(&mut self, id: TransferId, change: impl FnOnce(&mut Part)) {
        if let Some(part) = self.parts.get_mut(&id) {
            change(part);
        }
    }

    fn parts_of(&self, peer: Incarnation) -> Vec<TransferId> {
        self.parts.iter().filter(|(_, part)| part.peer == peer).map(|(id, _)| *id).collect()
    }

    fn stage_of(&self, id: TransferId) -> Option<&Stage> {
        self.parts.get(&id).and_then(|part| self.assemblies.get(&part.assembly)).map(|a| &a.stage)
    }

    /// Unfenced lanes from the part's peer.
    fn lanes_of(&self, id: TransferId) -> Vec<LaneId> {
        let Some(part) = self.parts.get(&id) else { return Vec::new() };
        let from = (part.peer, LaneId { index: 0, epoch: 0 });
        let own = self.lanes.range(from..).take_while(|((peer, _), _)| *peer == part.peer);
        own.map(|((_, lane), _)| *lane).collect()
    }

    /// Fences every lane that the part may have used and that isn't fenced.
    fn fence_all(&mut self, id: TransferId, actions: &mut Actions) {
        let Some(part) = self.parts.get_mut(&id) else { return };
        for lane in part.unfenced() {
            self.fence_lane(id, lane, actions);
        }
    }

    fn fence_lane(&mut self, id: TransferId, lane: LaneId, actions: &mut Actions) {
        let Some(part) = self.parts.get_mut(&id) else { return };
        let peer = part.peer;
        match self.lanes.get_mut(&(peer, lane)) {
            Some(health) => {
                *health = LaneHealth::Down;
                actions.push(ReceiverAction::Fence { peer, lane });
            }
            // Fenced before, or never this peer's: nothing of it comes through there.
            None => part.on_fenced(id, lane, actions),
        }
    }

    /// After a fence: the sender may go on over the lanes that are up now.
    fn try_resume(
        &mut self,
        now: Time,
        id: TransferId,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        if !matches!(self.stage_of(id), Some(Stage::Filling)) {
            return;
        }
        let Some(part) = self.parts.get(&id).filter(|part| part.wants_resume()) else { return };
        let is_up = |lane: &LaneId| self.lanes.get(&(part.peer, *lane)) == Some(&LaneHealth::Up);
        let up: Vec<LaneId> = self.lanes_of(id).into_iter().filter(is_up).collect();
        let rounds = part.round();
        if rounds.0 >= self.settings.max_rounds {
            let lane = up.first().copied().unwrap_or_default();
            let why = format!("lanes broke {} times", rounds.0).into();
            self.fail(now, id, Cause::LaneFailed { lane, why }, ledgers, actions);
        } else if !up.is_empty() {
            self.with_part(id, |part| part.resume(now, id, up, actions));
        }
    }

    /// Moves the assembly of `id` on, as far as what is known allows.
    fn advance(&mut self, now: Time, id: TransferId, ledgers: &mut Ledgers, actions: &mut Actions) {
        let Some(assembly_id) = self.parts.get(&id).map(|part| part.assembly) else { return };
        let Some(assembly) = self.assemblies.get(&assembly_id) else { return };
        let parts = || assembly.parts.iter().filter_map(|id| self.parts.get(id));
        match assembly.stage {
            Stage::Filling if parts().all(Part::is_ready_to_verify) => {
                self.begin_verify(now, assembly_id, ledgers, actions);
            }
            Stage::Verifying if parts().all(Part::is_landed) => {
                self.verify(now, assembly_id, ledgers, actions);
            }
            Stage::Draining { .. } if parts().all(|p| p.is_quiescent() && p.is_landed()) => {
                self.release(assembly_id, ledgers, actions);
            }
            Stage::Released => self.settle(id),
            _ => {}
        }
    }

    /// Removes the assembly of `id` once it is over and every sender knows.
    fn settle(&mut self, id: TransferId) {
        let Some(assembly_id) = self.parts.get(&id).map(|part| part.assembly) else { return };
        let Some(assembly) = self.assemblies.get(&assembly_id) else { return };
        if !matches!(assembly.stage, Stage::Sealed { .. } | Stage::Released) {
            return;
        }
        let mut parts = assembly.parts.iter().filter_map(|id| self.parts.get(id));
        if parts.all(|part| part.outbox.is_empty() && !part.awaits_peer()) {
            self.remove(assembly_id);
        }
    }

    fn remove(&mut self, id: AssemblyId) {
        let Some(assembly) = self.assemblies.remove(&id) else { return };
        assembly.parts.iter().for_each(|part| {
            self.parts.remove(part);
        });
    }

    /// The transfers of one assembly.
    pub fn transfers(&self, assembly: AssemblyId) -> &[TransferId] {
        self.assemblies.get(&assembly).map_or(&[], |a| &a.parts)
    }
}

pub(super) fn grant_components(lease: &[LeaseComponent], slices: &[Slice]) -> Vec<GrantComponent> {
    let component = |slice: &Slice| {
        let LeaseComponent { layout, pages, .. } = &lease[slice.component];
        let range = slice.pages.start as usize..slice.pages.end as usize;
        GrantComponent {
            layout: layout.fingerprint(),
            pages: pages[range].to_vec(),
            extents: slice.extents.clone(),
            whole_pages: slice.extents == layout.whole_page(),
        }
    };
    slices.iter().map(component).collect()
}
