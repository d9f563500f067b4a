//! Carries out what the sender and the receiver ask for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Core, Landed, Receive, Send, Todo};
use crate::engine::command::{ReceiveKey, ReceiveResult};
use crate::engine::pages::Held;
use crate::engine::pool;
use crate::engine::slot::Resolver;
use crate::protocol::receiver::{AssemblyId, LeaseComponent, OpenPart, ReceiverAction};
use crate::protocol::sender::{Admitted, OfferId, SenderAction, SourceComponent};
use crate::protocol::{
    Binding, Cause, Generation, Incarnation, LaneId, Phase, Slice, Ticket, Time, TransferError,
    TransferId,
};
use crate::transport::{
    CompletionStatus, DigestTable, Event, Landing, Placement, PlacementError, WriteRequest,
};

impl Core {
    pub(super) fn receive(
        &mut self,
        now: Time,
        key: ReceiveKey,
        lease: Vec<LeaseComponent>,
        parts: Vec<OpenPart>,
        deadline: Time,
        integrity: bool,
        resolver: Resolver<ReceiveResult>,
    ) {
        let error = self.admission_fault(&lease, &parts).map(|(at, cause)| {
            let part = parts.get(at).or(parts.first());
            TransferError {
                transfer: None,
                label: part.map(|part| part.label.clone()).unwrap_or_default(),
                peer: part.map(|part| part.peer),
                phase: Phase::Admission,
                bytes_done: 0,
                bytes_total: lease
                    .iter()
                    .map(|c| c.layout.page_bytes() * c.pages.len() as u64)
                    .sum(),
                cause,
            }
        });
        let opened = match error {
            Some(error) => Err(error),
            None => {
                let mut actions = Vec::new();
                let copy = lease.clone();
                let opened =
                    self.receiver.open(now, copy, parts, deadline, integrity, &mut actions);
                self.todo.extend(actions.into_iter().map(Todo::Receiver));
                opened
            }
        };
        match opened {
            Ok(assembly) => {
                let resolver = Some(resolver);
                self.receives.insert(assembly, Receive { key, lease, resolver });
            }
            Err(error) => {
                pool::release(&self.shared, &lease);
                resolver.resolve(Err(error));
            }
        }
    }

    /// What is wrong with a receive before anything is sent: the part, and the cause.
    fn admission_fault(
        &self,
        lease: &[LeaseComponent],
        parts: &[OpenPart],
    ) -> Option<(usize, Cause)> {
        if self.closing {
            return Some((0, Cause::ShuttingDown {}));
        }
        parts.iter().enumerate().find_map(|(at, part)| {
            let Some(entry) = self.peers.get(&part.peer).filter(|peer| !peer.session.is_lost())
            else {
                let why = "there is no session with it".into();
                return Some((at, Cause::PeerLost { why }));
            };
            let slices = part.slices.iter().filter_map(|slice| {
                let component = lease.get(slice.component)?;
                let pages = slice.pages.end.saturating_sub(slice.pages.start);
                // The first component holds the whole prompt; a window or state pool need not.
                let tokens = if slice.component == 0 { part.binding.token_count } else { 0 };
                Some((component.layout.name.as_str(), u64::from(pages), tokens))
            });
            for (name, pages, tokens) in slices {
                if let Err(cause) = entry.hello.check_capacity(name, pages, tokens) {
                    return Some((at, cause));
                }
            }
            None
        })
    }

    pub(super) fn admit(
        &mut self,
        now: Time,
        offer: Admitted,
        binding: Binding,
        components: Vec<SourceComponent>,
        send: Send,
    ) {
        let id = offer.id();
        self.sends.insert(id, send);
        self.with_sender(|sender, actions| sender.admit(now, &offer, binding, components, actions));
        // One that met a waiting grant may be over already.
        self.work(now);
        // An offer that failed at its announcement was reported before there was a handle.
        if self.sender.progress(id).is_none() {
            self.settle_refused(id);
        }
    }

    fn settle_refused(&mut self, id: OfferId) {
        let early = self.early_failures.remove(&id);
        let Some(mut send) = self.sends.remove(&id) else { return };
        if let (Some(resolver), Some(mut error)) = (send.resolver.take(), early) {
            // What it would have sent wasn't known yet when it failed.
            error.bytes_total = send.placement.as_ref().map_or(0, |p| p.map().byte_count());
            resolver.resolve(Err(error));
        }
    }

    pub(super) fn do_receiver(&mut self, now: Time, action: ReceiverAction) {
        match action {
            ReceiverAction::Send { peer, message } => self.send(peer, &message),
            ReceiverAction::OpenLanding { assembly, id, peer, generation, slices, integrity } => {
                self.open_landing(now, assembly, id, peer, generation, &slices, integrity);
            }
            ReceiverAction::CloseLanding { id } => self.transport.close_landing(id),
            ReceiverAction::ForgetLanding { id } => {
                self.transport.forget_landing(id);
                self.landed.remove(&id);
            }
            ReceiverAction::Unland { id, lane } => self.transport.unland(id, lane),
            ReceiverAction::Fence { peer, lane } => self.fence(now, peer, lane),
            ReceiverAction::Finished { assembly, outcome } => {
                self.finish_receive(assembly, outcome)
            }
            ReceiverAction::Released { assembly, scrub } => {
                for (pool, pages) in scrub {
                    self.shared.scrub(pool, &pages);
                }
                self.receives.remove(&assembly);
            }
        }
    }

    fn open_landing(
        &mut self,
        now: Time,
        assembly: AssemblyId,
        id: TransferId,
        peer: Incarnation,
        generation: Generation,
        slices: &[Slice],
        integrity: bool,
    ) {
        let placed = self.place(assembly, slices);
        let placement = match placed {
            Ok(placement) => Arc::new(placement),
            Err(why) => {
                let cause = Cause::ProtocolViolation { why: why.to_string().into() };
                self.with_receiver(|receiver, ledgers, actions| {
                    receiver.abort(now, assembly, cause, ledgers, actions);
                });
                return;
            }
        };
        let digests = integrity.then(|| Arc::new(DigestTable::new(placement.map())));
        let bytes = Arc::new(AtomicU64::new(0));
        self.landed.insert(id, Landed { digests: digests.clone(), bytes: bytes.clone() });
        self.transport.open_landing(Landing {
            transfer: id,
            generation,
            placement,
            digests,
            landed_bytes: bytes,
            lanes: self.lane_set(peer),
        });
        self.want_lanes(now, peer);
    }

    fn place(&self, assembly: AssemblyId, slices: &[Slice]) -> Result<Placement, PlacementError> {
        let pools = self.shared.pools();
        let lease = self.receives.get(&assembly).map_or(&[][..], |receive| &receive.lease);
        let component = |slice: &Slice| {
            let part = lease.get(slice.component)?;
            let memory = pools.entries.get(&part.pool)?.memory.clone();
            let range = slice.pages.start as usize..slice.pages.end as usize;
            Some((memory, part.pages.get(range)?.to_vec(), slice.extents.clone()))
        };
        let placed: Option<Vec<_>> = slices.iter().map(component).collect();
        // A slice of a pool that is gone leaves nothing to place, which is an error there.
        Placement::new(placed.unwrap_or_default())
    }

    fn finish_receive(&mut self, assembly: AssemblyId, outcome: Result<(), TransferError>) {
        let Some(receive) = self.receives.get_mut(&assembly) else { return };
        let Some(resolver) = receive.resolver.take() else { return };
        match outcome {
            Ok(()) => {
                let transfers = self.receiver.transfers(assembly).to_vec();
                let lease = std::mem::take(&mut receive.lease);
                self.receives.remove(&assembly);
                resolver.resolve(Ok(Held::new(self.shared.clone(), lease, transfers)));
            }
            Err(mut error) => {
                let landed = error.transfer.and_then(|id| self.landed.get(&id));
                error.bytes_done = landed.map_or(0, |l| l.bytes.load(Ordering::Relaxed));
                tracing::warn!(%error, "a receive failed");
                resolver.resolve(Err(error));
            }
        }
    }

    pub(super) fn do_sender(&mut self, now: Time, action: SenderAction) {
        match action {
            SenderAction::Send { peer, message } => self.send(peer, &message),
            SenderAction::Matched { offer, id, integrity, .. } => {
                self.matched(offer, id, integrity)
            }
            SenderAction::Post { id, peer, lane, ticket, generation, blocks, digest } => {
                let Some(send) = self.sent.get(&id).and_then(|offer| self.sends.get(offer)) else {
                    return self.write_lost(now, id, lane, ticket);
                };
                let Some(source) = send.placement.clone() else {
                    return self.write_lost(now, id, lane, ticket);
                };
                let digests = send.digests.clone().filter(|_| digest);
                let write =
                    WriteRequest { transfer: id, generation, ticket, blocks, source, digests };
                match self.writer_lanes.get(&(peer, lane)) {
                    Some(&link) => self.transport.post_write(link, lane, write),
                    None => self.write_lost(now, id, lane, ticket),
                }
            }
            SenderAction::Marker { id, peer, lane, round, ticket } => {
                match self.writer_lanes.get(&(peer, lane)) {
                    Some(&link) => self.transport.post_marker(link, lane, id, round, ticket),
                    None => self.write_lost(now, id, lane, ticket),
                }
            }
            SenderAction::Cancel { id } => self.transport.cancel(id),
            SenderAction::KillLane { peer, lane } => {
                if let Some(&link) = self.writer_lanes.get(&(peer, lane)) {
                    self.transport.kill_lane(link, lane);
                }
            }
            SenderAction::Digest { id } => {
                let send = self.sent.get(&id).and_then(|offer| self.sends.get(offer));
                let digests = send.and_then(|send| send.digests.as_ref()).map(|t| t.snapshot());
                self.with_sender(|sender, actions| sender.on_digests(now, id, digests, actions));
            }
            SenderAction::Finished { offer, outcome } => self.finish_send(offer, outcome),
            SenderAction::SourceFree { offer } => self.free_source(offer),
        }
    }

    fn matched(&mut self, offer: OfferId, id: TransferId, integrity: bool) {
        self.sent.insert(id, offer);
        if let Some(send) = self.sends.get_mut(&offer) {
            send.transfer = Some(id);
            let table = send.placement.as_ref().map(|p| Arc::new(DigestTable::of_source(p.map())));
            send.digests = table.filter(|_| integrity);
        }
    }

    /// The lane went between the decision and the post: the write ended as flushed.
    fn write_lost(&mut self, now: Time, transfer: TransferId, lane: LaneId, ticket: Ticket) {
        let status = CompletionStatus::Flushed;
        self.on_event(now, Event::WriteDone { lane, transfer, ticket, status });
    }

    fn finish_send(&mut self, offer: OfferId, outcome: Result<(), TransferError>) {
        if let Err(error) = &outcome {
            tracing::warn!(%error, "a send failed");
        }
        match self.sends.get_mut(&offer) {
            Some(send) => {
                if let Some(resolver) = send.resolver.take() {
                    resolver.resolve(outcome);
                }
                self.forget_send(offer);
            }
            None => {
                if let Err(error) = outcome {
                    self.early_failures.insert(offer, error);
                }
            }
        }
    }

    fn free_source(&mut self, offer: OfferId) {
        if let Some(send) = self.sends.get_mut(&offer) {
            // The pin ends before the caller is told.
            send.placement = None;
            if let Some(free) = send.source_free.take() {
                free.resolve(());
            }
            self.forget_send(offer);
        }
    }

    fn forget_send(&mut self, offer: OfferId) {
        let Some(send) = self.sends.get(&offer) else { return };
        if send.resolver.is_none() && send.source_free.is_none() {
            if let Some(id) = send.transfer {
                self.sent.remove(&id);
            }
            self.sends.remove(&offer);
        }
    }
}
