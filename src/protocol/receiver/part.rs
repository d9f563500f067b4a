//! One grant to one sender: what of it is proven.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{AssemblyId, LeaseComponent, OpenPart, ReceiverAction, grant_components};
use crate::protocol::cause::{Cause, Phase};
use crate::protocol::coverage::Slice;
use crate::protocol::ids::{
    ComponentIndex, Generation, Incarnation, LaneId, Round, Time, TransferId,
};
use crate::protocol::label::{Binding, Label};
use crate::protocol::message::{Grant, LaneDrain, Manifest, Message};
use crate::protocol::outbox::Outbox;
use crate::protocol::{BlockMap, wrapping_total};

/// What is known of one lane that the transfer may have used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
struct LaneProof {
    /// The latest marker that came through.
    marker: Option<Round>,
    /// Nothing lands through it any more.
    fenced: bool,
    /// Fenced before its writes were known to be complete: what went over it must come again.
    owed: bool,
    /// The sender was told so by a resume.
    given_up: bool,
}

/// Whether bytes may still land.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Landed {
    /// They may.
    Open,
    /// The transport was asked to close.
    Closing,
    /// They can't: this is what did.
    Closed { bytes: u64, digests: Option<Vec<Vec<u64>>> },
}

/// What the sender has said of its end.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Sender {
    /// Nothing yet.
    Silent,
    /// It writes over the lanes of `lanes`.
    Accepted,
    /// It wrote everything, in this round.
    Complete { round: Round, manifest: Manifest },
    /// It writes no more, and posted the markers of this round.
    Drained { round: Round },
    /// It wrote nothing and won't.
    Refused,
    /// It is gone, or doesn't know the transfer: only fences prove anything.
    Gone,
}

/// One part of an assembly.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Part {
    pub(super) assembly: AssemblyId,
    pub(super) peer: Incarnation,
    pub(super) label: Label,
    pub(super) map: BlockMap,
    pub(super) outbox: Outbox,
    pub(super) landed: Landed,
    binding: Binding,
    slices: Vec<Slice>,
    sender: Sender,
    lanes: BTreeMap<LaneId, LaneProof>,
    round: Round,
    /// `lanes` are all that the sender uses, by its own word.
    bounded: bool,
    draining: bool,
}

type Actions = Vec<ReceiverAction>;

impl Part {
    pub(super) fn new(
        assembly: AssemblyId,
        open: OpenPart,
        map: BlockMap,
        resend: Duration,
    ) -> Part {
        let OpenPart { peer, label, binding, slices } = open;
        Part {
            assembly,
            peer,
            label,
            map,
            outbox: Outbox::new(resend),
            landed: Landed::Open,
            binding,
            slices,
            sender: Sender::Silent,
            lanes: BTreeMap::new(),
            round: Round(0),
            bounded: false,
            draining: false,
        }
    }

    pub(super) fn grant(
        &self,
        id: TransferId,
        lease: &[LeaseComponent],
        generation: Generation,
        deadline: Duration,
        integrity: bool,
        oldest_live: u64,
    ) -> Grant {
        Grant {
            id,
            label: self.label.clone(),
            binding: self.binding,
            generation,
            deadline_ms: u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX),
            integrity,
            oldest_live,
            components: grant_components(lease, &self.slices),
        }
    }

    /// Sends now, and again until acknowledged.
    pub(super) fn send(&mut self, now: Time, message: Message, actions: &mut Actions) {
        self.outbox.push(now, message.clone());
        actions.push(ReceiverAction::Send { peer: self.peer, message });
    }

    /// It hasn't failed.
    pub(super) fn is_live(&self) -> bool {
        !self.draining
    }

    /// The peer hasn't acknowledged the abort: it may still begin to write.
    pub(super) fn awaits_peer(&self) -> bool {
        self.draining && self.outbox.holds(Message::ABORT)
    }

    pub(super) fn is_complete(&self) -> bool {
        matches!(self.sender, Sender::Complete { .. })
    }

    pub(super) fn is_landed(&self) -> bool {
        matches!(self.landed, Landed::Closed { .. })
    }

    pub(super) fn landed_bytes(&self) -> u64 {
        match self.landed {
            Landed::Closed { bytes, .. } => bytes,
            _ => 0,
        }
    }

    pub(super) fn phase(&self) -> Phase {
        match self.sender {
            Sender::Silent | Sender::Refused => Phase::Matching,
            Sender::Complete { .. } => Phase::Completing,
            Sender::Accepted | Sender::Drained { .. } | Sender::Gone => Phase::Writing,
        }
    }

    /// The sender uses `lanes` and no others; those that aren't in `open` are fenced already.
    pub(super) fn accept(
        &mut self,
        id: TransferId,
        lanes: impl Iterator<Item = LaneId>,
        open: &[LaneId],
        actions: &mut Actions,
    ) {
        if std::mem::replace(&mut self.bounded, true) {
            return;
        }
        if self.sender == Sender::Silent {
            self.sender = Sender::Accepted;
        }
        let known = std::mem::take(&mut self.lanes);
        for lane in lanes {
            self.lanes.insert(lane, known.get(&lane).copied().unwrap_or_default());
            if !open.contains(&lane) {
                self.on_fenced(id, lane, actions);
            }
        }
    }

    /// The sender may be using `lane`, for all that is known.
    pub(super) fn suspect(&mut self, lane: LaneId) {
        self.lanes.entry(lane).or_default();
    }

    pub(super) fn on_refused(&mut self) {
        if !std::mem::replace(&mut self.bounded, true) {
            self.sender = Sender::Refused;
            self.lanes.clear();
            self.outbox.clear();
        }
    }

    pub(super) fn on_forgotten(&mut self) {
        self.sender = Sender::Gone;
        self.outbox.clear();
    }

    pub(super) fn on_peer_lost(&mut self) {
        if !matches!(self.sender, Sender::Refused | Sender::Drained { .. }) {
            self.sender = Sender::Gone;
        }
        self.outbox.clear();
    }

    pub(super) fn on_marker(&mut self, lane: LaneId, round: Round) {
        let proof = self.lanes.entry(lane).or_default();
        proof.marker = proof.marker.max(Some(round));
    }

    pub(super) fn on_fenced(&mut self, id: TransferId, lane: LaneId, actions: &mut Actions) {
        let Some(proof) = self.lanes.get_mut(&lane) else { return };
        if std::mem::replace(&mut proof.fenced, true) || self.draining {
            return;
        }
        // Complete, and its marker through: all of it is placed. Else what landed is in doubt, or
        // the sender can't know that it isn't.
        let complete = matches!(self.sender, Sender::Complete { .. });
        if !complete || proof.marker < Some(self.round) {
            proof.owed = true;
            actions.push(ReceiverAction::Unland { id, lane });
        }
    }

    /// Markers of this transfer prove nothing any more: its lanes corrupt data. Only fences do.
    pub(super) fn distrust_markers(&mut self) {
        self.lanes.values_mut().for_each(|proof| proof.marker = None);
    }

    /// `Some` if the manifest isn't the grant.
    pub(super) fn on_complete(
        &mut self,
        id: TransferId,
        round: Round,
        manifest: Manifest,
        open: &[LaneId],
        generation: Generation,
        actions: &mut Actions,
    ) -> Option<Cause> {
        if self.draining || round != self.round || self.is_complete() {
            return None;
        }
        let fault = self.manifest_fault(&manifest, generation);
        self.accept(id, manifest.lanes.iter().copied(), open, actions);
        self.sender = Sender::Complete { round, manifest };
        self.outbox.settle(Message::GRANT);
        fault
    }

    fn manifest_fault(&self, manifest: &Manifest, generation: Generation) -> Option<Cause> {
        let granted_bytes = self.map.byte_count();
        if manifest.bytes < granted_bytes {
            let covered_bytes = manifest.bytes;
            return Some(Cause::IncompleteCoverage { granted_bytes, covered_bytes });
        }
        let mismatch = |field: &str, granted: u64, stated: u64| {
            (granted != stated).then(|| Cause::ManifestMismatch {
                field: field.into(),
                granted,
                stated,
            })
        };
        let pages = self.map.page_counts();
        let counts = || {
            let stated = manifest.components.iter().map(|c| c.page_count);
            pages.iter().zip(stated).find_map(|(&granted, stated)| {
                mismatch("page_count", granted.into(), stated.into())
            })
        };
        mismatch("generation", generation.0, manifest.generation.0)
            .or_else(|| mismatch("bytes", granted_bytes, manifest.bytes))
            .or_else(|| {
                mismatch("block_count", self.map.block_count().into(), manifest.block_count.into())
            })
            .or_else(|| {
                mismatch("components", pages.len() as u64, manifest.components.len() as u64)
            })
            .or_else(counts)
    }

    pub(super) fn on_drained(
        &mut self,
        id: TransferId,
        round: Round,
        lanes: &[LaneDrain],
        open: &[LaneId],
        actions: &mut Actions,
    ) {
        if matches!(self.sender, Sender::Refused | Sender::Drained { .. }) {
            return;
        }
        self.accept(id, lanes.iter().map(|drain| drain.lane), open, actions);
        self.sender = Sender::Drained { round };
        self.outbox.clear();
    }

    /// Every lane that the sender may have used is proven quiet: by the marker of the round that
    /// the sender ended with, or by a fence. Nothing else is a proof.
    pub(super) fn is_quiescent(&self) -> bool {
        let ended = match &self.sender {
            Sender::Refused => return true,
            Sender::Complete { round, .. } | Sender::Drained { round } => Some(*round),
            Sender::Silent | Sender::Accepted | Sender::Gone => None,
        };
        let quiet = |proof: &LaneProof| {
            proof.fenced || ended.is_some_and(|round| proof.marker >= Some(round))
        };
        // Of a sender that never said which lanes it uses, a drain suspects every one.
        (self.bounded || self.draining) && self.lanes.values().all(quiet)
    }

    /// Every byte is placed: each lane's marker of the round that ended came through, or what went
    /// over the lane was written again over others. A fence alone says that nothing more comes, not
    /// that everything came.
    pub(super) fn is_ready_to_verify(&self) -> bool {
        let Sender::Complete { round, .. } = &self.sender else { return false };
        let placed = |proof: &LaneProof| proof.marker >= Some(*round) || proof.given_up;
        self.lanes.values().all(|proof| placed(proof) && !proof.owed)
    }

    pub(super) fn unfenced(&self) -> Vec<LaneId> {
        self.lanes.iter().filter(|(_, proof)| !proof.fenced).map(|(lane, _)| *lane).collect()
    }

    pub(super) fn close_landing(&mut self, id: TransferId, actions: &mut Actions) {
        if self.landed == Landed::Open {
            self.landed = Landed::Closing;
            actions.push(ReceiverAction::CloseLanding { id });
        }
    }

    /// The assembly failed. `unfenced`: every lane of the peer that isn't fenced, any of which a
    /// sender that hasn't said which ones it uses may be writing through.
    pub(super) fn begin_drain(
        &mut self,
        id: TransferId,
        unfenced: Vec<LaneId>,
        actions: &mut Actions,
    ) {
        self.draining = true;
        if !self.bounded {
            unfenced.into_iter().for_each(|lane| self.suspect(lane));
        }
        self.close_landing(id, actions);
    }

    pub(super) fn send_abort(
        &mut self,
        now: Time,
        id: TransferId,
        cause: Cause,
        actions: &mut Actions,
    ) {
        self.outbox.clear();
        if !matches!(self.sender, Sender::Refused | Sender::Drained { .. } | Sender::Gone) {
            self.send(now, Message::Abort { id, cause }, actions);
        }
    }

    /// What went over some lane must come again, and can: there is another lane.
    pub(super) fn wants_resume(&self) -> bool {
        self.bounded && self.lanes.values().any(|proof| proof.owed)
    }

    /// Tells the sender to go on over the lanes that are up.
    pub(super) fn resume(
        &mut self,
        now: Time,
        id: TransferId,
        up: Vec<LaneId>,
        actions: &mut Actions,
    ) {
        self.round = Round(self.round.0 + 1);
        self.sender = Sender::Accepted;
        for proof in self.lanes.values_mut().filter(|proof| proof.owed) {
            proof.owed = false;
            proof.given_up = true;
        }
        // All that were ever given up: an earlier resume may never have been seen.
        let given_up = self.lanes.iter().filter(|(_, proof)| proof.given_up);
        let dead = given_up.map(|(lane, _)| *lane).collect();
        up.iter().for_each(|&lane| self.suspect(lane));
        let round = self.round;
        self.send(now, Message::Resume { id, round, dead, lanes: up }, actions);
    }

    pub(super) fn round(&self) -> Round {
        self.round
    }

    /// What is wrong with the landed bytes, if anything.
    pub(super) fn fault(&self, lease: &[LeaseComponent], integrity: bool) -> Option<Cause> {
        let (Sender::Complete { manifest, .. }, Landed::Closed { bytes, digests }) =
            (&self.sender, &self.landed)
        else {
            return Some(Cause::ProtocolViolation { why: "verified before complete".into() });
        };
        let granted_bytes = self.map.byte_count();
        if *bytes != granted_bytes {
            return Some(Cause::IncompleteCoverage { granted_bytes, covered_bytes: *bytes });
        }
        if !integrity {
            return None;
        }
        let Some(digests) = digests else {
            return Some(Cause::Unsupported { what: "digests".into() });
        };
        self.digest_fault(manifest, digests, lease)
    }

    fn digest_fault(
        &self,
        manifest: &Manifest,
        landed: &[Vec<u64>],
        lease: &[LeaseComponent],
    ) -> Option<Cause> {
        for (index, (stated, landed)) in manifest.components.iter().zip(landed).enumerate() {
            if stated.digests.len() != landed.len() {
                let (granted, stated) = (landed.len() as u64, stated.digests.len() as u64);
                return Some(Cause::ManifestMismatch { field: "digests".into(), granted, stated });
            }
            let wrong = |page: &usize| stated.digests[*page] != landed[*page];
            let wrong_pages = (0..landed.len()).filter(wrong).count() as u32;
            let slice = &self.slices[index];
            let component = ComponentIndex(index as u16);
            if let Some(first) = (0..landed.len()).find(wrong) {
                let page = lease[slice.component].pages[slice.pages.start as usize + first];
                return Some(Cause::DigestMismatch { component, page, wrong_pages });
            }
            let total = wrapping_total(landed);
            if stated.total != total {
                let field = "total".into();
                return Some(Cause::ManifestMismatch {
                    field,
                    granted: total,
                    stated: stated.total,
                });
            }
        }
        None
    }
}
