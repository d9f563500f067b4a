//! What the sender says.

use super::{Actions, Ledgers, Receiver, ReceiverAction, Stage};
use crate::protocol::cause::Cause;
use crate::protocol::ids::{Incarnation, LaneId, Round, Time, TransferId};
use crate::protocol::message::{Manifest, Message};

impl Receiver {
    /// A message from `peer` about a transfer that this side receives.
    pub fn on_message(
        &mut self,
        now: Time,
        peer: Incarnation,
        message: Message,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        let Some(id) = message.transfer() else { return };
        if self.parts.get(&id).is_none_or(|part| part.peer != peer) {
            Self::answer_stale(peer, id, &message, actions);
            return;
        }
        if let Some(ack) = message.ack() {
            actions.push(ReceiverAction::Send { peer, message: ack });
        }
        if matches!(self.stage_of(id), Some(Stage::Sealed { .. })) {
            self.on_message_sealed(peer, id, &message, actions);
            return;
        }
        match message {
            Message::Accept { bytes, lanes, .. } => {
                self.on_accept(now, id, bytes, lanes, ledgers, actions);
            }
            Message::Refuse { cause, .. } => {
                self.with_part(id, |part| part.on_refused());
                self.fail(now, id, cause, ledgers, actions);
                self.advance(now, id, ledgers, actions);
            }
            Message::Complete { round, manifest, .. } => {
                self.on_complete(now, id, round, manifest, ledgers, actions);
            }
            Message::Abort { cause, .. } => self.fail(now, id, cause, ledgers, actions),
            Message::Drained { round, cause, lanes, .. } => {
                let open = self.lanes_of(id);
                self.with_part(id, |part| part.on_drained(id, round, &lanes, &open, actions));
                self.fail(now, id, cause, ledgers, actions);
                for drain in lanes.iter().filter(|drain| drain.needs_fence) {
                    self.fence_lane(id, drain.lane, actions);
                }
                self.advance(now, id, ledgers, actions);
            }
            Message::Stale { .. } => {
                self.with_part(id, |part| part.on_forgotten());
                self.fail(now, id, Cause::StaleTransfer {}, ledgers, actions);
                self.fence_all(id, actions);
                self.advance(now, id, ledgers, actions);
            }
            Message::Ack { of, round, .. } => {
                self.with_part(id, |part| part.outbox.ack(of, round));
                self.settle(id);
            }
            _ => {}
        }
    }

    /// The seal decided: what comes later changes nothing. `[I9]`
    pub(super) fn on_message_sealed(
        &mut self,
        peer: Incarnation,
        id: TransferId,
        message: &Message,
        actions: &mut Actions,
    ) {
        match message {
            Message::Abort { .. } | Message::Drained { .. } => {
                actions.push(ReceiverAction::Send { peer, message: Message::TooLate { id } });
            }
            Message::Ack { of, round, .. } => {
                self.with_part(id, |part| part.outbox.ack(*of, *round));
            }
            Message::Stale { .. } => self.with_part(id, |part| part.outbox.clear()),
            _ => {}
        }
        self.settle(id);
    }

    /// An id that isn't live: what it asks for has been done, or never will be. `[I10]`
    pub(super) fn answer_stale(
        peer: Incarnation,
        id: TransferId,
        message: &Message,
        actions: &mut Actions,
    ) {
        let answer = match message {
            Message::Drained { .. } | Message::Refuse { .. } | Message::Abort { .. } => {
                message.ack()
            }
            Message::Accept { .. } | Message::Complete { .. } => Some(Message::Stale { id }),
            _ => None,
        };
        actions.extend(answer.map(|message| ReceiverAction::Send { peer, message }));
    }

    pub(super) fn on_accept(
        &mut self,
        now: Time,
        id: TransferId,
        bytes: u64,
        lanes: Vec<LaneId>,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        let open = self.lanes_of(id);
        let Some(part) = self.parts.get_mut(&id) else { return };
        part.outbox.settle(Message::GRANT);
        let granted_bytes = part.map.byte_count();
        part.accept(id, lanes.into_iter(), &open, actions);
        if bytes != granted_bytes {
            let cause = match bytes < granted_bytes {
                true => Cause::IncompleteCoverage { granted_bytes, covered_bytes: bytes },
                false => Cause::ManifestMismatch {
                    field: "bytes".into(),
                    granted: granted_bytes,
                    stated: bytes,
                },
            };
            self.fail(now, id, cause, ledgers, actions);
        }
        if matches!(self.stage_of(id), Some(Stage::Draining { fence_at: Time::NEVER })) {
            self.fence_all(id, actions);
        }
        self.try_resume(now, id, ledgers, actions);
        self.advance(now, id, ledgers, actions);
    }

    pub(super) fn on_complete(
        &mut self,
        now: Time,
        id: TransferId,
        round: Round,
        manifest: Manifest,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        let open = self.lanes_of(id);
        let Some(part) = self.parts.get_mut(&id) else { return };
        let generation = self.assemblies[&part.assembly].lease[0].generation;
        if let Some(cause) = part.on_complete(id, round, manifest, &open, generation, actions) {
            self.fail(now, id, cause, ledgers, actions);
        }
        self.try_resume(now, id, ledgers, actions);
        self.advance(now, id, ledgers, actions);
    }
}
