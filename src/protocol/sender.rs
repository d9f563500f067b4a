//! The sending side: requests that are announced, refused or admitted; grants that find them; and
//! their writes.
//!
//! A grant and a send meet by label. What they are for, how many pages, and how pages are laid out
//! is compared before `Accept`; a difference is a refusal, never a shorter transfer. `[I1]` `[I17]`

mod matching;
mod talk;
mod tokens;
mod transfer;
mod types;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fixedbitset::FixedBitSet;

use super::cause::{Cause, TransferError};
use super::ids::{Incarnation, LaneId, Ticket, Time, TransferId};
use super::label::{Binding, Label};
use super::message::{Grant, Message};
use super::outbox::Outbox;
use super::{BlockMap, BlockRange};
pub use tokens::{Admitted, Announced, Completing, OfferId};
use transfer::Transfer;
pub use types::{SenderAction, SenderSettings, SourceComponent, WriteEnd};

/// What is in flight on one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
struct Load {
    bytes: u64,
    writes: u32,
}

impl Load {
    fn has_room(&self, settings: &SenderSettings) -> bool {
        self.writes < settings.lane_window_writes && self.bytes < settings.lane_window_bytes
    }

    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.writes += 1;
    }

    fn remove(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.writes = self.writes.saturating_sub(1);
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Admission {
    binding: Binding,
    components: Vec<SourceComponent>,
    map: BlockMap,
    written: FixedBitSet,
    written_bytes: u64,
    /// Ranges written before the grant came.
    early: Vec<BlockRange>,
    completing: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Offer {
    label: Label,
    peer: Option<Incarnation>,
    deadline: Time,
    admission: Option<Admission>,
    transfer: Option<Transfer>,
    /// Kept while the receiver may still decide otherwise.
    failed: Option<TransferError>,
    told: bool,
    source_free: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Pending {
    grant: Grant,
    expires: Time,
}

/// The last word on a transfer that is over here.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Tombstone {
    last: Option<Message>,
    outbox: Outbox,
}

/// All transfers that one engine sends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sender {
    settings: SenderSettings,
    offers: BTreeMap<OfferId, Offer>,
    transfers: BTreeMap<TransferId, OfferId>,
    pending: BTreeMap<TransferId, Pending>,
    tombstones: BTreeMap<TransferId, Tombstone>,
    low_water: BTreeMap<Incarnation, u64>,
    /// Refused labels, each for one receiver or for all.
    refused: BTreeMap<(Label, Option<Incarnation>), Cause>,
    refused_order: VecDeque<(Label, Option<Incarnation>)>,
    lanes: BTreeMap<Incarnation, BTreeSet<LaneId>>,
    opening: BTreeMap<Incarnation, BTreeSet<LaneId>>,
    loads: BTreeMap<(Incarnation, LaneId), Load>,
    last_ticket: u64,
    /// Whose turn it is to post.
    turn: OfferId,
}

type Actions = Vec<SenderAction>;

impl Sender {
    /// Nothing announced.
    pub fn new(settings: SenderSettings) -> Sender {
        Sender {
            settings,
            offers: BTreeMap::new(),
            transfers: BTreeMap::new(),
            pending: BTreeMap::new(),
            tombstones: BTreeMap::new(),
            low_water: BTreeMap::new(),
            refused: BTreeMap::new(),
            refused_order: VecDeque::new(),
            lanes: BTreeMap::new(),
            opening: BTreeMap::new(),
            loads: BTreeMap::new(),
            last_ticket: 0,
            turn: OfferId(0),
        }
    }

    /// These blocks are ready: each may be written once.
    pub fn write(&mut self, now: Time, id: OfferId, ranges: &[BlockRange], actions: &mut Actions) {
        let Some(offer) = self.offers.get_mut(&id).filter(|offer| !offer.told) else { return };
        let Some(admission) = offer.admission.as_mut() else { return };
        match admission.mark(ranges) {
            Ok(()) => match offer.transfer.as_mut() {
                Some(transfer) => transfer.write(ranges),
                None => admission.early.extend_from_slice(ranges),
            },
            Err(cause) => {
                self.fail(now, id, cause, actions);
                return;
            }
        }
        self.move_on(now, id, actions);
    }

    /// Everything was written. If not, the transfer fails here and now: fewer blocks than granted
    /// is never a completion. `[I1]`
    pub fn complete(&mut self, now: Time, completing: &Completing, actions: &mut Actions) {
        let id = completing.id();
        let Some(offer) = self.offers.get_mut(&id).filter(|offer| !offer.told) else { return };
        let Some(admission) = offer.admission.as_mut() else { return };
        let granted_bytes = admission.map.byte_count();
        let written_bytes = admission.written_bytes;
        if written_bytes < granted_bytes {
            self.fail(now, id, Cause::IncompleteWrite { granted_bytes, written_bytes }, actions);
            return;
        }
        admission.completing = true;
        if let Some(transfer) = offer.transfer.as_mut() {
            transfer.finish();
        }
        self.move_on(now, id, actions);
    }

    /// The application gives up, in any state. After `Complete` was sent, the receiver decides.
    pub fn abort(&mut self, now: Time, id: OfferId, cause: Cause, actions: &mut Actions) {
        match self.offers.get(&id) {
            Some(offer) if offer.transfer.is_some() => self.fail(now, id, cause, actions),
            Some(_) => self.abandon(now, id, cause, actions),
            None => {}
        }
    }

    /// A write or marker ended. Only success is success. `[I8]`
    pub fn on_write_done(
        &mut self,
        now: Time,
        id: TransferId,
        lane: LaneId,
        ticket: Ticket,
        end: WriteEnd,
        actions: &mut Actions,
    ) {
        let Some(&offer_id) = self.transfers.get(&id) else { return };
        let Some(transfer) = self.offers.get_mut(&offer_id).and_then(|o| o.transfer.as_mut())
        else {
            return;
        };
        let bytes = transfer.on_write_done(lane, ticket, end, actions);
        let peer = transfer.peer;
        if bytes > 0
            && let Some(load) = self.loads.get_mut(&(peer, lane))
        {
            load.remove(bytes);
        }
        self.move_on(now, offer_id, actions);
        self.pump(peer, actions);
    }

    /// The digests asked for by [`SenderAction::Digest`].
    pub fn on_digests(
        &mut self,
        now: Time,
        id: TransferId,
        digests: Option<Vec<Vec<u64>>>,
        actions: &mut Actions,
    ) {
        let Some(offer) = self.transfers.get(&id) else { return };
        if let Some(transfer) = self.offers.get_mut(offer).and_then(|o| o.transfer.as_mut()) {
            transfer.on_digests(now, digests, actions);
        }
    }

    /// A lane to `peer` is being opened: transfers that aren't accepted yet wait for it, so that
    /// the first one of a session gets all of the session's lanes.
    pub fn on_lane_opening(&mut self, peer: Incarnation, lane: LaneId) {
        self.opening.entry(peer).or_default().insert(lane);
    }

    /// A lane to `peer` can carry writes.
    pub fn on_lane_up(
        &mut self,
        now: Time,
        peer: Incarnation,
        lane: LaneId,
        actions: &mut Actions,
    ) {
        self.lanes.entry(peer).or_default().insert(lane);
        self.stop_waiting(peer, lane);
        for id in self.offers_with(peer) {
            if let Some(transfer) = self.offers.get_mut(&id).and_then(|o| o.transfer.as_mut()) {
                transfer.on_lane_up(lane);
            }
            self.move_on(now, id, actions);
        }
    }

    fn stop_waiting(&mut self, peer: Incarnation, lane: LaneId) {
        if let Some(opening) = self.opening.get_mut(&peer) {
            opening.remove(&lane);
            if opening.is_empty() {
                self.opening.remove(&peer);
            }
        }
    }

    /// A lane to `peer` broke, or didn't come up: nothing more is posted on it, and nothing that was is done.
    pub fn on_lane_down(
        &mut self,
        now: Time,
        peer: Incarnation,
        lane: LaneId,
        actions: &mut Actions,
    ) {
        if let Some(lanes) = self.lanes.get_mut(&peer) {
            lanes.remove(&lane);
        }
        self.loads.remove(&(peer, lane));
        self.stop_waiting(peer, lane);
        for id in self.offers_with(peer) {
            if let Some(transfer) = self.offers.get_mut(&id).and_then(|o| o.transfer.as_mut()) {
                transfer.on_lane_down(lane);
            }
            self.move_on(now, id, actions);
        }
    }

    /// The session with `peer` is over; the engine closes its lanes.
    pub fn on_peer_lost(
        &mut self,
        now: Time,
        peer: Incarnation,
        cause: &Cause,
        actions: &mut Actions,
    ) {
        self.pending.retain(|id, _| id.receiver != peer);
        self.tombstones.retain(|id, _| id.receiver != peer);
        self.low_water.remove(&peer);
        self.lanes.remove(&peer);
        self.opening.remove(&peer);
        let bound = |(_, offer): &(&OfferId, &Offer)| {
            offer.peer == Some(peer) || offer.transfer.as_ref().is_some_and(|t| t.peer == peer)
        };
        let ids: Vec<OfferId> = self.offers.iter().filter(bound).map(|(id, _)| *id).collect();
        for id in ids {
            if let Some(transfer) = self.offers.get_mut(&id).and_then(|o| o.transfer.as_mut()) {
                transfer.gone = true;
                transfer.lost = true;
                transfer.outbox.clear();
            }
            self.fail(now, id, cause.clone(), actions);
            if let Some(transfer) = self.offers.get_mut(&id).and_then(|o| o.transfer.as_mut()) {
                transfer.kill_stuck(now.after(self.settings.drain_grace), actions);
            }
            self.tell_failure(id, actions);
            self.move_on(now, id, actions);
        }
    }

    /// The session came back over a new link: everything unacknowledged is sent again.
    pub fn on_peer_back(&mut self, now: Time, peer: Incarnation) {
        for transfer in self.offers.values_mut().filter_map(|offer| offer.transfer.as_mut()) {
            if transfer.peer == peer {
                transfer.outbox.hurry(now);
            }
        }
        for (_, tombstone) in self.tombstones.iter_mut().filter(|(id, _)| id.receiver == peer) {
            tombstone.outbox.hurry(now);
        }
    }

    fn offers_with(&self, peer: Incarnation) -> Vec<OfferId> {
        let with = self.transfers.iter().filter(|(id, _)| id.receiver == peer);
        with.map(|(_, offer)| *offer).collect()
    }

    /// Does what can be done for one offer, and removes it when it is over.
    fn move_on(&mut self, now: Time, id: OfferId, actions: &mut Actions) {
        let Some(offer) = self.offers.get_mut(&id) else { return };
        let Some(transfer) = offer.transfer.as_mut() else { return };
        let peer = transfer.peer;
        let none = BTreeSet::new();
        let up = self.lanes.get(&peer).unwrap_or(&none);
        if !transfer.accepted && !self.opening.contains_key(&peer) {
            transfer.accept(now, &up.iter().copied().collect::<Vec<_>>(), actions);
        }
        transfer.advance(now, up, &mut self.last_ticket, actions);
        self.pump(peer, actions);
        self.retire(id, actions);
    }

    fn retire(&mut self, id: OfferId, actions: &mut Actions) {
        let Some(offer) = self.offers.get_mut(&id) else { return };
        let Some(transfer) = offer.transfer.as_mut() else { return };
        let over = offer.told || transfer.is_draining();
        if over && transfer.is_quiet() && !std::mem::replace(&mut offer.source_free, true) {
            actions.push(SenderAction::SourceFree { offer: id });
        }
        let last = transfer.last_word();
        let said = transfer.gone || (last.is_some() && transfer.outbox.is_empty());
        if !(offer.told && offer.source_free && said) {
            return;
        }
        let (transfer_id, lost) = (transfer.id, transfer.lost);
        self.offers.remove(&id);
        self.transfers.remove(&transfer_id);
        if !lost {
            let outbox = Outbox::new(self.settings.resend);
            self.tombstones.insert(transfer_id, Tombstone { last, outbox });
        }
    }

    /// Posts as long as lanes have room, one chunk per transfer in turn.
    fn pump(&mut self, peer: Incarnation, actions: &mut Actions) {
        let ids = self.offers_with(peer);
        let start = ids.iter().position(|id| *id > self.turn).unwrap_or(0);
        let Sender { offers, settings, loads, last_ticket, turn, .. } = self;
        let mut idle = 0;
        for &id in ids.iter().cycle().skip(start) {
            let transfer = offers.get_mut(&id).and_then(|offer| offer.transfer.as_mut());
            let posted =
                transfer.is_some_and(|t| t.pump_one(settings, loads, last_ticket, actions));
            idle = if posted { 0 } else { idle + 1 };
            if posted {
                *turn = id;
            }
            if idle >= ids.len() {
                break;
            }
        }
    }

    /// When [`Sender::on_timeout`] is due.
    pub fn next_timeout(&self) -> Time {
        let offers = self.offers.values().flat_map(|offer| {
            let deadline = if offer.told { Time::NEVER } else { offer.deadline };
            let transfer = offer.transfer.as_ref();
            let kill = transfer.map_or(Time::NEVER, |t| t.kill_at);
            [deadline, kill, transfer.map_or(Time::NEVER, |t| t.outbox.next_due())]
        });
        let pending = self.pending.values().map(|pending| pending.expires);
        let buried = self.tombstones.values().map(|tombstone| tombstone.outbox.next_due());
        offers.chain(pending).chain(buried).min().unwrap_or(Time::NEVER)
    }

    /// Deadlines and resends that are due.
    pub fn on_timeout(&mut self, now: Time, actions: &mut Actions) {
        self.pending.retain(|_, pending| pending.expires > now);
        for (id, tombstone) in &mut self.tombstones {
            for message in tombstone.outbox.due(now) {
                actions.push(SenderAction::Send { peer: id.receiver, message });
            }
        }
        for id in self.offers.keys().copied().collect::<Vec<_>>() {
            let Some(offer) = self.offers.get_mut(&id) else { continue };
            let late = !offer.told && offer.deadline <= now;
            if let Some(transfer) = offer.transfer.as_mut() {
                for message in transfer.outbox.due(now) {
                    actions.push(SenderAction::Send { peer: transfer.peer, message });
                }
                if transfer.kill_at <= now {
                    transfer.kill_stuck(now.after(self.settings.drain_grace), actions);
                }
            }
            if late {
                self.fail(now, id, Cause::DeadlineExceeded {}, actions);
                self.tell_failure(id, actions);
            }
            self.move_on(now, id, actions);
        }
    }

    /// Sends that aren't over, or whose source is still read.
    pub fn live_offers(&self) -> usize {
        self.offers.values().filter(|offer| !offer.told || !offer.source_free).count()
    }

    /// All sends that aren't over.
    pub fn offers(&self) -> Vec<OfferId> {
        self.offers.keys().copied().collect()
    }

    /// Bytes written so far for a send, of its total.
    pub fn progress(&self, id: OfferId) -> Option<(u64, u64)> {
        let offer = self.offers.get(&id)?;
        let total = offer.admission.as_ref()?.map.byte_count();
        Some((offer.transfer.as_ref().map_or(0, Transfer::done_bytes), total))
    }
}

impl Admission {
    /// Notes blocks as written; each may be once.
    fn mark(&mut self, ranges: &[BlockRange]) -> Result<(), Cause> {
        for &range in ranges {
            let block_count = self.map.block_count();
            let Ok(bytes) = self.map.range_len(range) else {
                return Err(Cause::OutsideGrant { first_block: range.first.0, block_count });
            };
            for block in range.blocks() {
                if self.written.put(block.0 as usize) {
                    return Err(Cause::DuplicateBlock { block: block.0 });
                }
            }
            self.written_bytes += bytes;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
