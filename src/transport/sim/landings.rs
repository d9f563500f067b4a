//! What one simulated reader lets land: asked first (confined), or not at all (verbs-like).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::Placement;
use super::super::landing::{Admission, Landing, LandingError, LandingTable};
use super::flight::Shipment;
use crate::protocol::{BlockIndex, BlockRange, LaneId, TransferId};

#[derive(Debug)]
struct Opened {
    landing: Landing,
    /// What landed over each lane; kept here only if not confined.
    landed: BTreeMap<LaneId, BTreeSet<u32>>,
    closed: bool,
    /// `LandingClosed` was said.
    reported: bool,
    forgotten: bool,
}

/// The landings of one endpoint.
#[derive(Debug)]
pub(super) struct Landings {
    confined: bool,
    table: LandingTable,
    opened: BTreeMap<TransferId, Opened>,
}

impl Landings {
    pub(super) fn new(confined: bool) -> Landings {
        Landings { confined, table: LandingTable::default(), opened: BTreeMap::new() }
    }

    pub(super) fn open(&mut self, landing: Landing) {
        if self.confined {
            self.table.open(landing.clone());
        }
        let opened = Opened {
            landing,
            landed: BTreeMap::new(),
            closed: false,
            reported: false,
            forgotten: false,
        };
        self.opened.insert(opened.landing.transfer, opened);
    }

    /// Where the shipment is to land; `None` if it is to be thrown away.
    pub(super) fn admit(
        &self,
        lane: LaneId,
        ship: &Shipment,
    ) -> Result<Option<Arc<Placement>>, LandingError> {
        if self.confined {
            let payload = ship.byte_count();
            return match self.table.admit(
                lane,
                ship.transfer,
                ship.generation,
                &ship.ranges,
                payload,
            )? {
                Admission::Land(placement) => Ok(Some(placement)),
                Admission::Discard => Ok(None),
            };
        }
        // What a NIC checks: that the addresses are ones it was once told of.
        let opened = self.opened.get(&ship.transfer).ok_or(LandingError::UnknownTransfer)?;
        let placement = &opened.landing.placement;
        let count = placement.map().block_count();
        match ship.ranges.iter().find(|range| range.end() > u64::from(count)) {
            Some(range) => {
                Err(LandingError::OutsideGrant { first: range.first.0, end: range.end(), count })
            }
            None => Ok(Some(placement.clone())),
        }
    }

    /// Counts what landed wholly. `true` if this ended a landing that waits to close.
    pub(super) fn landed(&mut self, ship: &Shipment, lane: LaneId) -> bool {
        if self.confined {
            return self.table.commit(ship.transfer, lane, &ship.ranges);
        }
        let Some(opened) = self.opened.get_mut(&ship.transfer) else { return false };
        for block in ship.ranges.iter().flat_map(BlockRange::blocks) {
            let is_new = !opened.landed.values().any(|blocks| blocks.contains(&block.0));
            opened.landed.entry(lane).or_default().insert(block.0);
            if is_new {
                let len = opened.len_of(block);
                opened.landing.landed_bytes.fetch_add(len, Ordering::Relaxed);
            }
        }
        false
    }

    /// Gives back what was admitted and will not land. `true` as above.
    pub(super) fn abandon(&mut self, ship: &Shipment) -> bool {
        self.confined && self.table.abandon(ship.transfer, &ship.ranges)
    }

    /// Stops the landing. `true` if nothing is landing for it now.
    pub(super) fn close(&mut self, transfer: TransferId) -> bool {
        if self.confined {
            return self.table.close(transfer);
        }
        if let Some(opened) = self.opened.get_mut(&transfer)
            && !opened.closed
        {
            opened.closed = true;
            opened.digest_all();
        }
        true
    }

    /// Bytes landed, if `LandingClosed` hasn't been said yet. An unknown transfer is closed, as
    /// often as anybody asks.
    pub(super) fn report(&mut self, transfer: TransferId) -> Option<u64> {
        match self.opened.get_mut(&transfer) {
            Some(opened) if opened.reported => None,
            Some(opened) => {
                opened.reported = true;
                Some(opened.landing.landed_bytes.load(Ordering::Relaxed))
            }
            None => Some(0),
        }
    }

    pub(super) fn forget(&mut self, transfer: TransferId) {
        self.table.forget(transfer);
        if self.confined {
            self.opened.remove(&transfer);
        } else if let Some(opened) = self.opened.get_mut(&transfer) {
            // The NIC forgets nothing: see `forget_unreachable`.
            opened.forgotten = true;
        }
    }

    /// Lets go of forgotten landings, and so of the memory: no lane is left to write them.
    pub(super) fn forget_unreachable(&mut self) {
        self.opened.retain(|_, opened| !opened.forgotten);
    }

    pub(super) fn unland(&mut self, transfer: TransferId, lane: LaneId) {
        if self.confined {
            return self.table.unland(transfer, lane);
        }
        let Some(opened) = self.opened.get_mut(&transfer) else { return };
        for block in opened.landed.remove(&lane).into_iter().flatten() {
            if !opened.landed.values().any(|blocks| blocks.contains(&block)) {
                let len = opened.len_of(BlockIndex(block));
                opened.landing.landed_bytes.fetch_sub(len, Ordering::Relaxed);
            }
        }
    }
}

impl Opened {
    fn len_of(&self, block: BlockIndex) -> u64 {
        self.landing.placement.map().locate(block).map_or(0, |place| place.len)
    }

    /// Adds the digest of every block as it is in memory now: the NIC doesn't say which of them it
    /// wrote.
    fn digest_all(&self) {
        let Landing { transfer, placement, digests, .. } = &self.landing;
        for block in placement.map().all().blocks() {
            LandingTable::sum(placement, digests.as_deref(), *transfer, block);
        }
    }
}
