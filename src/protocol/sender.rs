//! The sending side: requests that are announced, refused or admitted; grants that find them; and
//! their writes.
//!
//! A grant and a send meet by label. What they are for, how many pages, and how pages are laid out
//! is compared before `Accept`; a difference is a refusal, never a shorter transfer. [I1] [I17]

mod tokens;
mod transfer;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use fixedbitset::FixedBitSet;

use super::cause::{Cause, Phase, TransferError};
use super::ids::{
    ComponentIndex, Generation, Incarnation, LaneId, Round, Ticket, Time, TransferId,
};
use super::label::{Binding, Label};
use super::layout::Fingerprint;
use super::message::{Grant, GrantComponent, Message};
use super::outbox::Outbox;
use super::{BlockMap, BlockRange, ComponentShape, Extent};
pub use tokens::{Admitted, Announced, Completing, OfferId};
use transfer::Transfer;

/// Limits in time and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SenderSettings {
    /// First resend of an unacknowledged message.
    pub resend: Duration,
    /// How long a failed transfer's writes may take to end before their lanes are given up.
    pub drain_grace: Duration,
    /// Most bytes of one posted write, unless one block is longer.
    pub chunk_bytes: u64,
    /// Most blocks of one posted write.
    pub chunk_blocks: u32,
    /// Most bytes in flight on one lane, over all transfers.
    pub lane_window_bytes: u64,
    /// Most writes in flight on one lane, over all transfers.
    pub lane_window_writes: u32,
    /// Most bytes in flight of one transfer, over all lanes.
    pub transfer_window_bytes: u64,
    /// Most grants that wait for their send.
    pub max_pending_grants: usize,
    /// Most refused labels that are remembered; the oldest goes first.
    pub max_refused_labels: usize,
}

impl Default for SenderSettings {
    fn default() -> Self {
        SenderSettings {
            resend: Duration::from_millis(500),
            drain_grace: Duration::from_millis(500),
            chunk_bytes: 1 << 20,
            chunk_blocks: 1024,
            lane_window_bytes: 4 << 20,
            lane_window_writes: 64,
            transfer_window_bytes: 16 << 20,
            max_pending_grants: 4096,
            max_refused_labels: 65_536,
        }
    }
}

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

/// One component of what is sent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceComponent {
    /// The sender's pool.
    pub layout: Fingerprint,
    /// Pages.
    pub page_count: u32,
    /// What of each page; as many as the grant has, each as long.
    pub extents: Vec<Extent>,
    /// The extents are the whole page.
    pub whole_pages: bool,
}

/// What to do next. In order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SenderAction {
    /// Send a message to a peer.
    Send {
        /// To.
        peer: Incarnation,
        /// What.
        message: Message,
    },
    /// A grant met its send: from now on the transfer has this id.
    Matched {
        /// Which send.
        offer: OfferId,
        /// The transfer.
        id: TransferId,
        /// The receiver.
        peer: Incarnation,
        /// Digest what is written.
        integrity: bool,
    },
    /// Post a write; [`Sender::on_write_done`] must follow.
    Post {
        /// The transfer.
        id: TransferId,
        /// The receiver.
        peer: Incarnation,
        /// Over this lane.
        lane: LaneId,
        /// Names the write.
        ticket: Ticket,
        /// The grant's.
        generation: Generation,
        /// What.
        blocks: Vec<BlockRange>,
        /// Add the blocks' digests before the first byte leaves.
        digest: bool,
    },
    /// Post the in-band marker; [`Sender::on_write_done`] must follow.
    Marker {
        /// The transfer.
        id: TransferId,
        /// The receiver.
        peer: Incarnation,
        /// Over this lane.
        lane: LaneId,
        /// Of this round.
        round: Round,
        /// Names the marker.
        ticket: Ticket,
    },
    /// Take back what is queued and not begun.
    Cancel {
        /// The transfer.
        id: TransferId,
    },
    /// Close this end of a lane.
    KillLane {
        /// The receiver.
        peer: Incarnation,
        /// The lane.
        lane: LaneId,
    },
    /// Report the digests of what was written to [`Sender::on_digests`].
    Digest {
        /// The transfer.
        id: TransferId,
    },
    /// The one terminal event of a send. [I9]
    Finished {
        /// Which.
        offer: OfferId,
        /// Verified by the receiver, or why not.
        outcome: Result<(), TransferError>,
    },
    /// Nothing reads the source any more: it may be reused. Once per admitted send. [I4]
    SourceFree {
        /// Which.
        offer: OfferId,
    },
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
    refused: BTreeMap<Label, Cause>,
    refused_order: VecDeque<Label>,
    lanes: BTreeMap<Incarnation, BTreeSet<LaneId>>,
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
            loads: BTreeMap::new(),
            last_ticket: 0,
            turn: OfferId(0),
        }
    }

    /// A request is known by `label`; grants for it wait. A failure is a terminal event.
    pub fn announce(
        &mut self,
        announced: &Announced,
        label: Label,
        peer: Option<Incarnation>,
        deadline: Time,
        actions: &mut Actions,
    ) {
        let taken = self.offers.values().any(|offer| {
            let same_peer = offer.peer.is_none() || peer.is_none() || offer.peer == peer;
            offer.label == label && same_peer && !offer.told
        });
        self.refused.remove(&label);
        let offer = Offer {
            label,
            peer,
            deadline,
            admission: None,
            transfer: None,
            failed: None,
            told: false,
            source_free: true,
        };
        self.offers.insert(announced.id(), offer);
        if taken {
            self.finish_unmatched(
                announced.id(),
                Phase::Admission,
                Cause::DuplicateLabel {},
                actions,
            );
        }
    }

    /// The request won't be served: a grant for its label, now or later, is refused. There is no
    /// way from here to `complete`. [I2]
    pub fn refuse(&mut self, now: Time, announced: Announced, why: &str, actions: &mut Actions) {
        self.abandon(now, announced.id(), Cause::Refused { why: why.into() }, actions);
    }

    /// The request is served from these pages.
    pub fn admit(
        &mut self,
        now: Time,
        admitted: &Admitted,
        binding: Binding,
        components: Vec<SourceComponent>,
        actions: &mut Actions,
    ) {
        let id = admitted.id();
        let Some(offer) = self.offers.get_mut(&id) else { return };
        if offer.told {
            return;
        }
        let shape = |c: &SourceComponent| ComponentShape {
            page_count: c.page_count,
            extents: c.extents.clone(),
        };
        let Ok(map) = BlockMap::new(&components.iter().map(shape).collect::<Vec<_>>()) else {
            self.abandon(now, id, Cause::EmptyTransfer {}, actions);
            return;
        };
        let written = FixedBitSet::with_capacity(map.block_count() as usize);
        offer.source_free = false;
        offer.admission = Some(Admission {
            binding,
            components,
            map,
            written,
            written_bytes: 0,
            early: Vec::new(),
            completing: false,
        });
        self.match_pending(now, id, actions);
    }

    fn match_pending(&mut self, now: Time, id: OfferId, actions: &mut Actions) {
        let Some(offer) = self.offers.get(&id) else { return };
        let meets = |(transfer, pending): &(&TransferId, &Pending)| {
            let theirs = offer.peer.is_none_or(|peer| peer == transfer.receiver);
            pending.grant.label == offer.label && theirs
        };
        let found: Vec<TransferId> = self.pending.iter().filter(meets).map(|(t, _)| *t).collect();
        for transfer in found {
            if self.offers.get(&id).is_none_or(|offer| offer.told || offer.transfer.is_some()) {
                return;
            }
            if let Some(pending) = self.pending.remove(&transfer) {
                self.meet(now, id, pending.grant, actions);
            }
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
    /// is never a completion. [I1]
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

    /// Ends an offer that met no grant, and refuses the grants that come.
    fn abandon(&mut self, now: Time, id: OfferId, cause: Cause, actions: &mut Actions) {
        let Some(offer) = self.offers.get(&id).filter(|offer| !offer.told) else { return };
        let (label, peer) = (offer.label.clone(), offer.peer);
        let mine = |(transfer, pending): &(&TransferId, &Pending)| {
            pending.grant.label == label && peer.is_none_or(|peer| peer == transfer.receiver)
        };
        let waiting: Vec<TransferId> = self.pending.iter().filter(mine).map(|(t, _)| *t).collect();
        for transfer in waiting {
            self.pending.remove(&transfer);
            self.refuse_grant(now, transfer, cause.clone(), actions);
        }
        self.remember_refusal(label, cause.clone());
        self.finish_unmatched(id, Phase::Matching, cause, actions);
    }

    fn remember_refusal(&mut self, label: Label, cause: Cause) {
        if self.refused.insert(label.clone(), cause).is_none() {
            self.refused_order.push_back(label);
        }
        while self.refused_order.len() > self.settings.max_refused_labels {
            if let Some(oldest) = self.refused_order.pop_front() {
                self.refused.remove(&oldest);
            }
        }
    }

    fn finish_unmatched(&mut self, id: OfferId, phase: Phase, cause: Cause, actions: &mut Actions) {
        let Some(offer) = self.offers.remove(&id) else { return };
        let error = TransferError {
            transfer: None,
            label: offer.label,
            peer: offer.peer,
            phase,
            bytes_done: 0,
            bytes_total: offer.admission.as_ref().map_or(0, |a| a.map.byte_count()),
            cause,
        };
        if !offer.told {
            actions.push(SenderAction::Finished { offer: id, outcome: Err(error) });
        }
        if !offer.source_free {
            actions.push(SenderAction::SourceFree { offer: id });
        }
    }

    /// A message from `peer` about a transfer that this side sends.
    pub fn on_message(
        &mut self,
        now: Time,
        peer: Incarnation,
        message: Message,
        actions: &mut Actions,
    ) {
        if let Message::Live { ids } = &message {
            let unknown = |id: &&TransferId| !self.knows(**id);
            let stale = ids.iter().filter(unknown).map(|&id| Message::Stale { id });
            actions.extend(stale.map(|message| SenderAction::Send { peer, message }));
            return;
        }
        let Some(id) = message.transfer().filter(|id| id.receiver == peer) else { return };
        actions.extend(message.ack().map(|message| SenderAction::Send { peer, message }));
        if let Message::Grant { grant } = message {
            self.on_grant(now, peer, grant, actions);
        } else if let Some(&offer) = self.transfers.get(&id) {
            self.on_transfer_message(now, offer, message, actions);
            self.move_on(now, offer, actions);
        } else if let Some(tombstone) = self.tombstones.get_mut(&id) {
            match message {
                Message::Ack { of, round, .. } => tombstone.outbox.ack(of, round),
                Message::Stale { .. } => tombstone.outbox.clear(),
                Message::Abort { .. } => {
                    let last = tombstone.last.clone();
                    actions.extend(last.map(|message| SenderAction::Send { peer, message }));
                }
                _ => {}
            }
        } else if let Message::Abort { cause, .. } = message {
            // Its grant never came here: if it still does, it must find the transfer over.
            self.pending.remove(&id);
            let last = Message::Drained { id, round: Round(0), cause, lanes: Vec::new() };
            self.bury(now, id, Some(last), actions);
        }
    }

    fn knows(&self, id: TransferId) -> bool {
        self.transfers.contains_key(&id)
            || self.pending.contains_key(&id)
            || self.tombstones.contains_key(&id)
    }

    fn on_grant(&mut self, now: Time, peer: Incarnation, grant: Grant, actions: &mut Actions) {
        let id = grant.id;
        self.raise_low_water(peer, grant.oldest_live);
        if self.transfers.contains_key(&id) || self.pending.contains_key(&id) {
            return;
        }
        if let Some(tombstone) = self.tombstones.get(&id) {
            let last = tombstone.last.clone();
            actions.extend(last.map(|message| SenderAction::Send { peer, message }));
            return;
        }
        if id.counter < self.low_water.get(&peer).copied().unwrap_or(0) {
            actions.push(SenderAction::Send { peer, message: Message::Stale { id } });
            return;
        }
        if let Some(cause) = self.refused.get(&grant.label) {
            self.refuse_grant(now, id, cause.clone(), actions);
            return;
        }
        let same =
            |other: TransferId, label: &Label| other.receiver == peer && *label == grant.label;
        let busy = self.pending.iter().any(|(&other, pending)| same(other, &pending.grant.label))
            || self.transfers.iter().any(|(&other, offer)| {
                self.offers.get(offer).is_some_and(|o| !o.told && same(other, &o.label))
            });
        if busy {
            self.refuse_grant(now, id, Cause::DuplicateLabel {}, actions);
            return;
        }
        let waiting = |(_, offer): &(&OfferId, &Offer)| {
            let theirs = offer.peer.is_none_or(|wanted| wanted == peer);
            offer.label == grant.label && theirs && offer.transfer.is_none() && !offer.told
        };
        let found =
            self.offers.iter().find(waiting).map(|(id, offer)| (*id, offer.admission.is_some()));
        match found {
            Some((offer, true)) => self.meet(now, offer, grant, actions),
            _ => self.keep_pending(now, grant, actions),
        }
    }

    fn raise_low_water(&mut self, peer: Incarnation, oldest_live: u64) {
        let mark = self.low_water.entry(peer).or_default();
        *mark = (*mark).max(oldest_live);
        let mark = *mark;
        self.tombstones.retain(|id, _| id.receiver != peer || id.counter >= mark);
    }

    fn keep_pending(&mut self, now: Time, grant: Grant, actions: &mut Actions) {
        let limit = self.settings.max_pending_grants;
        if self.pending.len() >= limit {
            let asked = limit as u64 + 1;
            let what = "grants waiting for their send".into();
            let cause = Cause::CapacityExceeded { what, asked, limit: limit as u64 };
            self.refuse_grant(now, grant.id, cause, actions);
            return;
        }
        let expires = now.after(Duration::from_millis(grant.deadline_ms.into()));
        self.pending.insert(grant.id, Pending { grant, expires });
    }

    fn refuse_grant(&mut self, now: Time, id: TransferId, cause: Cause, actions: &mut Actions) {
        self.bury(now, id, Some(Message::Refuse { id, cause }), actions);
    }

    /// The transfer is over here; `last` is said until acknowledged, and to whoever asks.
    fn bury(&mut self, now: Time, id: TransferId, last: Option<Message>, actions: &mut Actions) {
        let mut outbox = Outbox::new(self.settings.resend);
        if let Some(message) = last.clone() {
            outbox.push(now, message.clone());
            actions.push(SenderAction::Send { peer: id.receiver, message });
        }
        self.tombstones.insert(id, Tombstone { last, outbox });
    }

    /// A grant and an admitted send have the same label: are they the same request?
    fn meet(&mut self, now: Time, offer_id: OfferId, grant: Grant, actions: &mut Actions) {
        let Some(offer) = self.offers.get_mut(&offer_id) else { return };
        let Some(admission) = offer.admission.as_mut() else { return };
        let (id, peer) = (grant.id, grant.id.receiver);
        if let Some((field, granted, offered)) = grant.binding.difference(&admission.binding) {
            // Another request under the same label: this send still waits for its own grant.
            self.refuse_grant(now, id, Cause::BindingMismatch { field, granted, offered }, actions);
            return;
        }
        if let Some(cause) = shape_difference(&grant.components, &admission.components) {
            self.refuse_grant(now, id, cause.clone(), actions);
            self.finish_unmatched(offer_id, Phase::Matching, cause, actions);
            return;
        }
        let deadline = now.after(Duration::from_millis(grant.deadline_ms.into()));
        offer.deadline = offer.deadline.min(deadline);
        let map = admission.map.clone();
        let mut transfer =
            Transfer::new(id, peer, grant.generation, grant.integrity, map, &self.settings);
        transfer.write(&std::mem::take(&mut admission.early));
        if admission.completing {
            transfer.finish();
        }
        offer.transfer = Some(transfer);
        self.transfers.insert(id, offer_id);
        let integrity = grant.integrity;
        actions.push(SenderAction::Matched { offer: offer_id, id, peer, integrity });
        self.move_on(now, offer_id, actions);
    }

    fn on_transfer_message(
        &mut self,
        now: Time,
        offer_id: OfferId,
        message: Message,
        actions: &mut Actions,
    ) {
        let Some(offer) = self.offers.get_mut(&offer_id) else { return };
        let Some(transfer) = offer.transfer.as_mut() else { return };
        match message {
            Message::Verified { .. } | Message::TooLate { .. } => {
                transfer.gone = true;
                transfer.outbox.clear();
                self.succeed(offer_id, actions);
            }
            Message::Abort { cause, .. } => {
                transfer.outbox.settle(Message::ABORT);
                let last = transfer.last_word();
                let peer = transfer.peer;
                actions.extend(last.map(|message| SenderAction::Send { peer, message }));
                self.drain(now, offer_id, cause, false, actions);
                self.tell_failure(offer_id, actions);
            }
            Message::Stale { .. } => {
                transfer.gone = true;
                transfer.outbox.clear();
                self.drain(now, offer_id, Cause::StaleTransfer {}, false, actions);
                self.tell_failure(offer_id, actions);
            }
            Message::Resume { round, dead, lanes, .. } => {
                transfer.on_resume(round, dead, lanes, actions);
            }
            Message::Ack { of, round, .. } => {
                transfer.outbox.ack(of, round);
                if transfer.is_draining()
                    && transfer.outbox.is_empty()
                    && transfer.last_word().is_some()
                {
                    self.tell_failure(offer_id, actions);
                }
            }
            _ => {}
        }
    }

    fn succeed(&mut self, id: OfferId, actions: &mut Actions) {
        let Some(offer) = self.offers.get_mut(&id) else { return };
        offer.failed = None;
        if !std::mem::replace(&mut offer.told, true) {
            actions.push(SenderAction::Finished { offer: id, outcome: Ok(()) });
        }
    }

    /// A local failure of a matched transfer (or of one that isn't matched yet).
    fn fail(&mut self, now: Time, id: OfferId, cause: Cause, actions: &mut Actions) {
        let Some(offer) = self.offers.get(&id) else { return };
        let Some(transfer) = offer.transfer.as_ref() else {
            self.abandon(now, id, cause, actions);
            return;
        };
        // Once `Complete` is out the receiver may have sealed: it decides, up to the deadline.
        let decided = !transfer.complete_sent || matches!(cause, Cause::DeadlineExceeded {});
        self.drain(now, id, cause, true, actions);
        if decided {
            self.tell_failure(id, actions);
        }
        self.move_on(now, id, actions);
    }

    fn drain(&mut self, now: Time, id: OfferId, cause: Cause, say: bool, actions: &mut Actions) {
        let kill_at = now.after(self.settings.drain_grace);
        let Some(offer) = self.offers.get_mut(&id) else { return };
        let Some(transfer) = offer.transfer.as_mut() else { return };
        if offer.told || transfer.is_draining() {
            return;
        }
        let phase = match () {
            () if transfer.complete_sent => Phase::Completing,
            () if transfer.accepted => Phase::Writing,
            () => Phase::Matching,
        };
        offer.failed = Some(TransferError {
            transfer: Some(transfer.id),
            label: offer.label.clone(),
            peer: Some(transfer.peer),
            phase,
            bytes_done: transfer.done_bytes,
            bytes_total: offer.admission.as_ref().map_or(0, |a| a.map.byte_count()),
            cause: cause.clone(),
        });
        transfer.begin_drain(cause.clone(), kill_at, actions);
        if say && !transfer.gone {
            let id = transfer.id;
            transfer.send(now, Message::Abort { id, cause }, actions);
        }
    }

    fn tell_failure(&mut self, id: OfferId, actions: &mut Actions) {
        let Some(offer) = self.offers.get_mut(&id).filter(|offer| !offer.told) else { return };
        if let Some(error) = offer.failed.take() {
            offer.told = true;
            actions.push(SenderAction::Finished { offer: id, outcome: Err(error) });
        }
    }

    /// A write or marker ended. Only success is success. [I8]
    pub fn on_write_done(
        &mut self,
        now: Time,
        id: TransferId,
        lane: LaneId,
        ticket: Ticket,
        success: bool,
        cancelled: bool,
        actions: &mut Actions,
    ) {
        let Some(&offer_id) = self.transfers.get(&id) else { return };
        let Some(transfer) = self.offers.get_mut(&offer_id).and_then(|o| o.transfer.as_mut())
        else {
            return;
        };
        let bytes = transfer.on_write_done(lane, ticket, success, cancelled);
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

    /// A lane to `peer` can carry writes.
    pub fn on_lane_up(
        &mut self,
        now: Time,
        peer: Incarnation,
        lane: LaneId,
        actions: &mut Actions,
    ) {
        self.lanes.entry(peer).or_default().insert(lane);
        for id in self.offers_with(peer) {
            self.move_on(now, id, actions);
        }
    }

    /// A lane to `peer` broke: nothing more is posted on it, and nothing that was is done.
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
        let bound = |(_, offer): &(&OfferId, &Offer)| {
            offer.peer == Some(peer) || offer.transfer.as_ref().is_some_and(|t| t.peer == peer)
        };
        let ids: Vec<OfferId> = self.offers.iter().filter(bound).map(|(id, _)| *id).collect();
        for id in ids {
            if let Some(transfer) = self.offers.get_mut(&id).and_then(|o| o.transfer.as_mut()) {
                transfer.gone = true;
                transfer.outbox.clear();
            }
            self.fail(now, id, cause.clone(), actions);
            if let Some(transfer) = self.offers.get_mut(&id).and_then(|o| o.transfer.as_mut()) {
                transfer.kill_stuck(actions);
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
        if let Some(lanes) = self.lanes.get(&peer)
            && !transfer.accepted
        {
            let lanes: Vec<LaneId> = lanes.iter().copied().collect();
            transfer.accept(now, &lanes, actions);
        }
        transfer.advance(now, &mut self.last_ticket, actions);
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
        let transfer_id = transfer.id;
        self.offers.remove(&id);
        self.transfers.remove(&transfer_id);
        let outbox = Outbox::new(self.settings.resend);
        self.tombstones.insert(transfer_id, Tombstone { last, outbox });
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
                    transfer.kill_stuck(actions);
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

    /// Bytes written so far for a send, of its total.
    pub fn progress(&self, id: OfferId) -> Option<(u64, u64)> {
        let offer = self.offers.get(&id)?;
        let total = offer.admission.as_ref()?.map.byte_count();
        Some((offer.transfer.as_ref().map_or(0, |t| t.done_bytes), total))
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

/// The first difference in shape between a grant and a send.
fn shape_difference(granted: &[GrantComponent], offered: &[SourceComponent]) -> Option<Cause> {
    if granted.len() != offered.len() {
        return Some(Cause::LayoutMismatch {
            component: ComponentIndex(granted.len().min(offered.len()) as u16),
            field: "components".into(),
            granted: granted.len().to_string().into(),
            offered: offered.len().to_string().into(),
        });
    }
    granted.iter().zip(offered).enumerate().find_map(|(index, (grant, offer))| {
        let component = ComponentIndex(index as u16);
        let whole = grant.whole_pages && offer.whole_pages;
        if let Some((field, granted, offered)) = grant.layout.difference(&offer.layout, whole) {
            return Some(Cause::LayoutMismatch { component, field, granted, offered });
        }
        if grant.pages.len() as u64 != u64::from(offer.page_count) {
            let granted = grant.pages.len() as u32;
            return Some(Cause::PageCountMismatch {
                component,
                granted,
                offered: offer.page_count,
            });
        }
        let shape = |extents: &[Extent]| {
            let text = extents.iter().map(|e| format!("{}x{}", e.plane_count, e.block_len()));
            text.collect::<Vec<_>>().join("+")
        };
        let (granted, offered) = (shape(&grant.extents), shape(&offer.extents));
        (granted != offered).then(|| Cause::LayoutMismatch {
            component,
            field: "extents".into(),
            granted: granted.into(),
            offered: offered.into(),
        })
    })
}
