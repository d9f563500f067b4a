//! How an assembly ends: sealed, or failed and then released.

use super::part::Part;
use super::{Actions, AssemblyId, Ledgers, Receiver, ReceiverAction, Stage};
use crate::protocol::cause::{Cause, Phase, TransferError};
use crate::protocol::ids::{Time, TransferId};
use crate::protocol::message::Message;

impl Receiver {
    /// Ends the assembly of `id` with its first cause; later causes change nothing. `[I2]`
    pub(super) fn fail(
        &mut self,
        now: Time,
        id: TransferId,
        cause: Cause,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        let Some(assembly_id) = self.parts.get(&id).map(|part| part.assembly) else { return };
        // Both ends' clocks run out at once: whoever's is first, the part that is behind is to blame.
        let id = match cause {
            Cause::DeadlineExceeded {} => self.slowest_part(assembly_id),
            _ => id,
        };
        let Some(culprit) = self.parts.get(&id) else { return };
        let Some(assembly) = self.assemblies.get_mut(&assembly_id) else { return };
        if !matches!(assembly.stage, Stage::Filling | Stage::Verifying) {
            return;
        }
        let phase = match assembly.stage {
            Stage::Verifying => Phase::Verifying,
            _ => culprit.phase(),
        };
        let outcome = Err(TransferError {
            transfer: Some(id),
            label: culprit.label.clone(),
            peer: Some(culprit.peer),
            phase,
            bytes_done: culprit.landed_bytes(),
            bytes_total: culprit.map.byte_count(),
            cause: cause.clone(),
        });
        assembly.stage = Stage::Draining { fence_at: now.after(self.settings.drain_grace) };
        for component in &assembly.lease {
            let Some(ledger) = ledgers.get_mut(&component.pool) else { continue };
            let held = ledger.quarantine(&component.pages, component.generation);
            debug_assert!(held.is_ok(), "a live assembly holds its pages: {held:?}");
        }
        actions.push(ReceiverAction::Finished { assembly: assembly_id, outcome });
        let parts = assembly.parts.clone();
        for &part_id in &parts {
            let unfenced = self.lanes_of(part_id);
            let Some(part) = self.parts.get_mut(&part_id) else { continue };
            part.begin_drain(part_id, unfenced, actions);
            let cause = match part_id == id {
                true => cause.clone(),
                false => Cause::SiblingFailed { sibling: id },
            };
            part.send_abort(now, part_id, cause, actions);
        }
        if matches!(cause, Cause::DigestMismatch { .. }) {
            // What corrupted this transfer may corrupt the next one, and its markers are no better
            // than its bytes: its lanes go, and only that frees the pages. [I12]
            self.with_part(id, Part::distrust_markers);
            self.fence_all(id, actions);
        }
        self.advance(now, id, ledgers, actions);
    }

    /// Writing is over: compare-and-set of every page's state and generation, then the digests.
    pub(super) fn begin_verify(
        &mut self,
        now: Time,
        id: AssemblyId,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        let Some(assembly) = self.assemblies.get_mut(&id) else { return };
        for component in &assembly.lease {
            let Some(ledger) = ledgers.get_mut(&component.pool) else { continue };
            if let Err(why) = ledger.begin_verify(&component.pages, component.generation) {
                let first = assembly.parts[0];
                let page = component.pages[0];
                let cause = Cause::PageState { page, why: why.to_string().into() };
                self.fail(now, first, cause, ledgers, actions);
                return;
            }
        }
        assembly.stage = Stage::Verifying;
        for part_id in assembly.parts.clone() {
            if let Some(part) = self.parts.get_mut(&part_id) {
                part.close_landing(part_id, actions);
            }
        }
    }

    pub(super) fn verify(
        &mut self,
        now: Time,
        id: AssemblyId,
        ledgers: &mut Ledgers,
        actions: &mut Actions,
    ) {
        let Some(assembly) = self.assemblies.get(&id) else { return };
        let fault = assembly.parts.iter().find_map(|&part_id| {
            let part = self.parts.get(&part_id)?;
            Some((part_id, part.fault(&assembly.lease, assembly.integrity)?))
        });
        if let Some((part, cause)) = fault {
            self.fail(now, part, cause, ledgers, actions);
            return;
        }
        for component in &assembly.lease {
            let Some(ledger) = ledgers.get_mut(&component.pool) else { continue };
            let sealed = ledger.seal(&component.pages, component.generation);
            debug_assert!(sealed.is_ok(), "verifying pages can be sealed: {sealed:?}");
        }
        actions.push(ReceiverAction::Finished { assembly: id, outcome: Ok(()) });
        let parts = assembly.parts.clone();
        let until = now.after(self.settings.linger);
        if let Some(assembly) = self.assemblies.get_mut(&id) {
            assembly.stage = Stage::Sealed { until };
        }
        for part_id in parts {
            let Some(part) = self.parts.get_mut(&part_id) else { continue };
            part.outbox.clear();
            actions.push(ReceiverAction::ForgetLanding { id: part_id });
            part.send(now, Message::Verified { id: part_id }, actions);
            self.settle(part_id);
        }
    }

    /// Every write is proven to have ended: the pages are free again, exactly once. `[I3]` `[I9]`
    pub(super) fn release(&mut self, id: AssemblyId, ledgers: &mut Ledgers, actions: &mut Actions) {
        let Some(assembly) = self.assemblies.get_mut(&id) else { return };
        let mut scrub = Vec::new();
        for component in &assembly.lease {
            let Some(ledger) = ledgers.get_mut(&component.pool) else { continue };
            match ledger.release(&component.pages, component.generation) {
                Ok(pages) if pages.is_empty() => {}
                Ok(pages) => scrub.push((component.pool, pages)),
                Err(why) => debug_assert!(false, "quarantined pages can be released: {why}"),
            }
        }
        assembly.stage = Stage::Released;
        actions.push(ReceiverAction::Released { assembly: id, scrub });
        for part_id in assembly.parts.clone() {
            actions.push(ReceiverAction::ForgetLanding { id: part_id });
            self.settle(part_id);
        }
    }
}
