//! What the receiver says, and how a transfer ends: one cause, one terminal event.

use super::{Actions, OfferId, Sender, SenderAction};
use crate::protocol::cause::{Cause, Phase, TransferError};
use crate::protocol::ids::{Incarnation, Round, Time, TransferId};
use crate::protocol::message::Message;

impl Sender {
    /// A message from `peer` about a transfer that this side sends.
    pub fn on_message(
        &mut self,
        now: Time,
        peer: Incarnation,
        message: Message,
        actions: &mut Actions,
    ) {
        if let Message::Live { ids } = message {
            for id in ids.into_iter().take(Message::MAX_LIVE).filter(|id| id.receiver == peer) {
                if !self.knows(id) {
                    // If its grant is still under way, it must find the transfer over.
                    self.bury(now, id, Some(Message::Stale { id }), actions);
                }
            }
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

    pub(super) fn knows(&self, id: TransferId) -> bool {
        self.transfers.contains_key(&id)
            || self.pending.contains_key(&id)
            || self.tombstones.contains_key(&id)
    }

    pub(super) fn on_transfer_message(
        &mut self,
        now: Time,
        offer_id: OfferId,
        message: Message,
        actions: &mut Actions,
    ) {
        let Some(offer) = self.offers.get_mut(&offer_id) else { return };
        let Some(transfer) = offer.transfer.as_mut() else { return };
        match message {
            Message::Verified { .. } | Message::TooLate { .. } if !transfer.complete_sent => {
                let why = format!("{} before Complete", message.name()).into();
                self.fail(now, offer_id, Cause::ProtocolViolation { why }, actions);
            }
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

    pub(super) fn succeed(&mut self, id: OfferId, actions: &mut Actions) {
        let Some(offer) = self.offers.get_mut(&id) else { return };
        offer.failed = None;
        if !std::mem::replace(&mut offer.told, true) {
            actions.push(SenderAction::Finished { offer: id, outcome: Ok(()) });
        }
    }

    /// A local failure of a matched transfer (or of one that isn't matched yet).
    pub(super) fn fail(&mut self, now: Time, id: OfferId, cause: Cause, actions: &mut Actions) {
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

    pub(super) fn drain(
        &mut self,
        now: Time,
        id: OfferId,
        cause: Cause,
        say: bool,
        actions: &mut Actions,
    ) {
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
            bytes_done: transfer.done_bytes(),
            bytes_total: offer.admission.as_ref().map_or(0, |a| a.map.byte_count()),
            cause: cause.clone(),
        });
        transfer.begin_drain(cause.clone(), kill_at, actions);
        if say && !transfer.gone {
            let id = transfer.id;
            transfer.send(now, Message::Abort { id, cause }, actions);
        }
    }

    pub(super) fn tell_failure(&mut self, id: OfferId, actions: &mut Actions) {
        let Some(offer) = self.offers.get_mut(&id).filter(|offer| !offer.told) else { return };
        if let Some(error) = offer.failed.take() {
            offer.told = true;
            actions.push(SenderAction::Finished { offer: id, outcome: Err(error) });
        }
    }
}
