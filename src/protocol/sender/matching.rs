//! How a grant and a send find each other: labels, refusals, waiting grants, and the comparison.

use std::time::Duration;

use fixedbitset::FixedBitSet;

use super::transfer::Transfer;
use super::{
    Actions, Admission, Admitted, Announced, Offer, OfferId, Pending, Sender, SenderAction,
    SourceComponent, Tombstone,
};
use crate::protocol::cause::{Cause, Phase, TransferError};
use crate::protocol::ids::{ComponentIndex, Incarnation, Time, TransferId};
use crate::protocol::label::{Binding, Label};
use crate::protocol::message::{Grant, GrantComponent, Message};
use crate::protocol::outbox::Outbox;
use crate::protocol::{BlockMap, ComponentShape, Extent};

impl Sender {
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
        let key = (label.clone(), peer);
        if self.refused.remove(&key).is_some() {
            self.refused_order.retain(|other| *other != key);
        }
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
                None,
                Phase::Admission,
                Cause::DuplicateLabel {},
                actions,
            );
        }
    }

    /// The request won't be served: a grant for its label, now or later, is refused. There is no
    /// way from here to `complete`. `[I2]`
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

    pub(super) fn match_pending(&mut self, now: Time, id: OfferId, actions: &mut Actions) {
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

    /// Ends an offer that met no grant, and refuses the grants that come.
    pub(super) fn abandon(&mut self, now: Time, id: OfferId, cause: Cause, actions: &mut Actions) {
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
        self.remember_refusal(label, peer, cause.clone());
        self.finish_unmatched(id, None, Phase::Matching, cause, actions);
    }

    pub(super) fn remember_refusal(
        &mut self,
        label: Label,
        peer: Option<Incarnation>,
        cause: Cause,
    ) {
        let key = (label, peer);
        if self.refused.insert(key.clone(), cause).is_none() {
            self.refused_order.push_back(key);
        }
        while self.refused_order.len() > self.settings.max_refused_labels {
            if let Some(oldest) = self.refused_order.pop_front() {
                self.refused.remove(&oldest);
            }
        }
    }

    /// Ends an offer that never had a transfer of its own; `transfer`: the grant it failed to meet.
    pub(super) fn finish_unmatched(
        &mut self,
        id: OfferId,
        transfer: Option<TransferId>,
        phase: Phase,
        cause: Cause,
        actions: &mut Actions,
    ) {
        let Some(offer) = self.offers.remove(&id) else { return };
        let error = TransferError {
            transfer,
            label: offer.label,
            peer: offer.peer.or(transfer.map(|id| id.receiver)),
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

    pub(super) fn on_grant(
        &mut self,
        now: Time,
        peer: Incarnation,
        grant: Grant,
        actions: &mut Actions,
    ) {
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
        let refused = [Some(peer), None]
            .into_iter()
            .find_map(|peer| self.refused.get(&(grant.label.clone(), peer)));
        if let Some(cause) = refused {
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

    pub(super) fn raise_low_water(&mut self, peer: Incarnation, oldest_live: u64) {
        let mark = self.low_water.entry(peer).or_default();
        *mark = (*mark).max(oldest_live);
        let mark = *mark;
        self.tombstones.retain(|id, _| id.receiver != peer || id.counter >= mark);
    }

    pub(super) fn keep_pending(&mut self, now: Time, grant: Grant, actions: &mut Actions) {
        let exceeded = |what: &str, asked: u64, limit: u64| {
            (asked > limit).then(|| Cause::CapacityExceeded { what: what.into(), asked, limit })
        };
        let pages = |grant: &Grant| grant.components.iter().map(|c| c.pages.len() as u64).sum();
        let waiting: u64 = self.pending.values().map(|pending| pages(&pending.grant)).sum();
        let limit = self.settings.max_pending_grants as u64;
        let own: u64 = pages(&grant);
        let full = exceeded("grants waiting for their send", self.pending.len() as u64 + 1, limit)
            .or_else(|| {
                let limit = self.settings.max_grant_pages;
                exceeded("pages of grants waiting for their send", waiting + own, limit)
            });
        if let Some(cause) = full {
            self.refuse_grant(now, grant.id, cause, actions);
            return;
        }
        let expires = now.after(Duration::from_millis(grant.deadline_ms.into()));
        self.pending.insert(grant.id, Pending { grant, expires });
    }

    pub(super) fn refuse_grant(
        &mut self,
        now: Time,
        id: TransferId,
        cause: Cause,
        actions: &mut Actions,
    ) {
        self.bury(now, id, Some(Message::Refuse { id, cause }), actions);
    }

    /// The transfer is over here; `last` is said until acknowledged, and to whoever asks.
    pub(super) fn bury(
        &mut self,
        now: Time,
        id: TransferId,
        last: Option<Message>,
        actions: &mut Actions,
    ) {
        if self.tombstones.len() >= self.settings.max_tombstones {
            self.raise_low_water(id.receiver, id.counter.saturating_add(1));
            actions.extend(last.map(|message| SenderAction::Send { peer: id.receiver, message }));
            return;
        }
        let mut outbox = Outbox::new(self.settings.resend);
        if let Some(message) = last.clone() {
            outbox.push(now, message.clone());
            actions.push(SenderAction::Send { peer: id.receiver, message });
        }
        self.tombstones.insert(id, Tombstone { last, outbox });
    }

    /// A grant and an admitted send have the same label: are they the same request?
    pub(super) fn meet(
        &mut self,
        now: Time,
        offer_id: OfferId,
        grant: Grant,
        actions: &mut Actions,
    ) {
        let Some(offer) = self.offers.get_mut(&offer_id) else { return };
        let Some(admission) = offer.admission.as_mut() else { return };
        let (id, peer) = (grant.id, grant.id.receiver);
        if let Some((field, granted, offered)) = grant.binding.difference(&admission.binding) {
            // Another request under the same label: this send still waits for its own grant.
            self.refuse_grant(now, id, Cause::BindingMismatch { field, granted, offered }, actions);
            return;
        }
        if let Some(cause) = shape_difference(&grant.components, &admission.components) {
            let (label, peer) = (offer.label.clone(), offer.peer);
            self.refuse_grant(now, id, cause.clone(), actions);
            self.remember_refusal(label, peer, cause.clone());
            self.finish_unmatched(offer_id, Some(id), Phase::Matching, cause, actions);
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
