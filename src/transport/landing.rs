//! The receiver's own check of every write against the live grants, before a byte lands.
//!
//! Shared by every provider whose reader is in control of the landing. A block lands at most once
//! per round; what landed over a lane can be taken back after the lane was fenced.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fixedbitset::FixedBitSet;

use super::placement::{DigestTable, Placement};
use crate::protocol::{BlockIndex, BlockRange, Generation, LaneId, TransferId};

/// The lanes that one peer may write through. Shared by that peer's landings, so that a lane that
/// another peer opened can't bring anything into them, whatever its frames say.
#[derive(Debug, Default)]
pub struct LaneSet(Mutex<BTreeSet<LaneId>>);

impl LaneSet {
    /// The set of these lanes.
    pub fn of(lanes: impl IntoIterator<Item = LaneId>) -> LaneSet {
        LaneSet(Mutex::new(lanes.into_iter().collect()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<LaneId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the peer write through `lane`.
    pub fn insert(&self, lane: LaneId) {
        self.lock().insert(lane);
    }

    /// The lane is out of service.
    pub fn remove(&self, lane: LaneId) {
        self.lock().remove(&lane);
    }

    /// Whether the peer may write through `lane`.
    pub fn contains(&self, lane: LaneId) -> bool {
        self.lock().contains(&lane)
    }
}

/// What may land for one transfer, and where.
#[derive(Clone, Debug)]
pub struct Landing {
    /// The transfer.
    pub transfer: TransferId,
    /// The generation of its grant.
    pub generation: Generation,
    /// Where its blocks lie here.
    pub placement: Arc<Placement>,
    /// Where the digest of every landed block is added; `None` with integrity off.
    pub digests: Option<Arc<DigestTable>>,
    /// Bytes landed so far, for progress and error messages.
    pub landed_bytes: Arc<AtomicU64>,
    /// The lanes of the one peer that the grant is for.
    pub lanes: Arc<LaneSet>,
}

/// Why a write was refused. Not a byte of it landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum LandingError {
    /// No such transfer is open here.
    #[error("no such transfer is open")]
    UnknownTransfer,
    /// The frame states another generation than the grant.
    #[error("the write states {stated}, the grant is {granted}")]
    StaleGeneration {
        /// In the frame.
        stated: Generation,
        /// In the grant.
        granted: Generation,
    },
    /// The frame names blocks that the grant hasn't.
    #[error("blocks {first}..{end} lie outside the grant's {count}")]
    OutsideGrant {
        /// First block of the range.
        first: u32,
        /// One past its last.
        end: u64,
        /// Blocks in the grant.
        count: u32,
    },
    /// The block was written before.
    #[error("{block} was written before")]
    DuplicateBlock {
        /// The block.
        block: BlockIndex,
    },
    /// The frame's payload isn't as long as its blocks.
    #[error("the frame carries {payload} bytes for blocks of {blocks}")]
    LengthMismatch {
        /// Bytes stated.
        payload: u64,
        /// Bytes of the blocks.
        blocks: u64,
    },
    /// The frame breaks the format.
    #[error("the frame is malformed")]
    Malformed,
}

/// What to do with a frame that passed.
#[derive(Debug)]
pub enum Admission {
    /// Land its blocks, then [`LandingTable::commit`] each.
    Land(Arc<Placement>),
    /// The landing is closed: read the payload and throw it away.
    Discard,
}

#[derive(Debug)]
struct Open {
    landing: Landing,
    /// Blocks admitted: landed, or being read at this moment.
    admitted: FixedBitSet,
    /// Blocks that landed wholly, by the lane that brought them.
    landed: HashMap<LaneId, FixedBitSet>,
    /// Blocks admitted and not yet committed.
    pending: usize,
    closing: bool,
    closed: bool,
    /// Forgotten while a frame was being read: kept until that ends, and admits nothing.
    forgotten: bool,
}

/// All landings of one transport. Any thread may use it; a lock is held per frame, not per byte.
#[derive(Debug, Default)]
pub struct LandingTable {
    open: Mutex<HashMap<TransferId, Open>>,
}

impl LandingTable {
    fn lock(&self) -> MutexGuard<'_, HashMap<TransferId, Open>> {
        // A panic while the lock is held leaves counters that are wrong on the safe side only.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a transfer land.
    pub fn open(&self, landing: Landing) {
        let blocks = landing.placement.map().block_count() as usize;
        let open = Open {
            landing,
            admitted: FixedBitSet::with_capacity(blocks),
            landed: HashMap::new(),
            pending: 0,
            closing: false,
            closed: false,
            forgotten: false,
        };
        self.lock().insert(open.landing.transfer, open);
    }

    /// Checks a frame from `lane`: transfer, peer, generation, blocks in range and not seen before, payload length.
    /// Marks the blocks, so that no other lane can write them meanwhile.
    pub fn admit(
        &self,
        lane: LaneId,
        transfer: TransferId,
        generation: Generation,
        ranges: &[BlockRange],
        payload: u64,
    ) -> Result<Admission, LandingError> {
        let mut table = self.lock();
        // Another peer's transfer is no different from none: it learns nothing of it.
        let open = table.get_mut(&transfer).filter(|open| !open.forgotten);
        let open = open.filter(|open| open.landing.lanes.contains(lane));
        let open = open.ok_or(LandingError::UnknownTransfer)?;
        let granted = open.landing.generation;
        if generation != granted {
            return Err(LandingError::StaleGeneration { stated: generation, granted });
        }
        let map = open.landing.placement.map();
        let mut bytes = 0u64;
        for &range in ranges {
            let outside = LandingError::OutsideGrant {
                first: range.first.0,
                end: range.end(),
                count: map.block_count(),
            };
            bytes = bytes.saturating_add(map.range_len(range).map_err(|_| outside)?);
        }
        if bytes != payload {
            return Err(LandingError::LengthMismatch { payload, blocks: bytes });
        }
        if open.closing {
            return Ok(Admission::Discard);
        }
        let blocks = || ranges.iter().flat_map(BlockRange::blocks);
        let mut marked = 0;
        for block in blocks() {
            if open.admitted.put(block.0 as usize) {
                blocks().take(marked).for_each(|b| open.admitted.set(b.0 as usize, false));
                return Err(LandingError::DuplicateBlock { block });
            }
            marked += 1;
        }
        open.pending += marked;
        Ok(Admission::Land(open.landing.placement.clone()))
    }

    /// Counts blocks whose bytes all landed, and adds their digests as they are in memory now.
    /// `true` if this ended a landing that waits to close: report it closed.
    pub fn commit(&self, transfer: TransferId, lane: LaneId, ranges: &[BlockRange]) -> bool {
        let Some((placement, digests)) = self.sinks(transfer) else { return false };
        let mut bytes = 0;
        for block in ranges.iter().flat_map(BlockRange::blocks) {
            bytes += Self::sum(&placement, digests.as_deref(), transfer, block);
        }
        self.record(transfer, lane, ranges, bytes)
    }

    /// The placement and digest table of a transfer, for a provider that digests block by block
    /// while the bytes are in cache ([`LandingTable::sum`]) and then [`LandingTable::record`]s.
    pub fn sinks(
        &self,
        transfer: TransferId,
    ) -> Option<(Arc<Placement>, Option<Arc<DigestTable>>)> {
        let table = self.lock();
        let landing = &table.get(&transfer)?.landing;
        Some((landing.placement.clone(), landing.digests.clone()))
    }

    /// Adds the digest of one landed block to `digests`; returns the block's bytes.
    pub fn sum(
        placement: &Placement,
        digests: Option<&DigestTable>,
        transfer: TransferId,
        block: BlockIndex,
    ) -> u64 {
        let Some(place) = placement.map().locate(block) else { return 0 };
        if let (Some(table), Some(digest)) =
            (digests, digests.and_then(|_| placement.digest(transfer, block)))
        {
            table.add(place.component, place.page, digest);
        }
        place.len
    }

    /// Counts `ranges` (of `bytes` bytes, digested already) as landed over `lane`.
    /// `true` if this ended a landing that waits to close: report it closed.
    pub fn record(
        &self,
        transfer: TransferId,
        lane: LaneId,
        ranges: &[BlockRange],
        bytes: u64,
    ) -> bool {
        let mut table = self.lock();
        let Some(open) = table.get_mut(&transfer) else { return false };
        let blocks = open.admitted.len();
        let landed = open.landed.entry(lane).or_insert_with(|| FixedBitSet::with_capacity(blocks));
        let mut count = 0;
        for range in ranges {
            landed.insert_range(range.first.0 as usize..range.end() as usize);
            count += range.count as usize;
        }
        open.pending = open.pending.saturating_sub(count);
        open.landing.landed_bytes.fetch_add(bytes, Ordering::Relaxed);
        Self::settle(&mut table, transfer)
    }

    /// Gives back blocks that were admitted and will not be read to their end (the lane died).
    /// `true` if this ended a landing that waits to close: report it closed.
    pub fn abandon(&self, transfer: TransferId, ranges: &[BlockRange]) -> bool {
        let mut table = self.lock();
        let Some(open) = table.get_mut(&transfer) else { return false };
        for block in ranges.iter().flat_map(BlockRange::blocks) {
            open.admitted.set(block.0 as usize, false);
            open.pending = open.pending.saturating_sub(1);
        }
        Self::settle(&mut table, transfer)
    }

    /// Closes a landing that only waited for its last frame: `true` if so.
    fn settle(table: &mut HashMap<TransferId, Open>, transfer: TransferId) -> bool {
        let Some(open) = table.get_mut(&transfer) else { return false };
        let ends = open.closing && !open.closed && open.pending == 0;
        open.closed |= ends;
        if open.forgotten && open.pending == 0 {
            table.remove(&transfer);
        }
        ends
    }

    /// Stops admitting. `true` if nothing is being read for it now: report it closed. If `false`,
    /// the [`LandingTable::record`] or [`LandingTable::abandon`] that ends it says so.
    /// An unknown transfer is closed.
    pub fn close(&self, transfer: TransferId) -> bool {
        let mut table = self.lock();
        let Some(open) = table.get_mut(&transfer) else { return true };
        open.closing = true;
        open.closed |= open.pending == 0;
        open.closed
    }

    /// Bytes that landed for a transfer; 0 if unknown.
    pub fn landed_bytes(&self, transfer: TransferId) -> u64 {
        let table = self.lock();
        table.get(&transfer).map_or(0, |open| open.landing.landed_bytes.load(Ordering::Relaxed))
    }

    /// Forgets a landing. One that a frame is being read for goes with that frame: until then it
    /// admits nothing, and its memory stays pinned.
    pub fn forget(&self, transfer: TransferId) {
        let mut table = self.lock();
        match table.get_mut(&transfer) {
            Some(open) if open.pending > 0 => (open.closing, open.forgotten) = (true, true),
            _ => drop(table.remove(&transfer)),
        }
    }

    /// Takes back what landed over `lane`, digests included, so that it may be written again.
    /// Only right once the lane is fenced.
    pub fn unland(&self, transfer: TransferId, lane: LaneId) {
        let Some((Landing { placement, digests, landed_bytes, .. }, landed)) =
            self.take_landed(transfer, lane)
        else {
            return;
        };
        // Hashing takes its time, so not under the lock. The blocks are still marked as written:
        // until they are let go below, nobody writes them.
        for index in landed.ones() {
            let block = BlockIndex(index as u32);
            let Some(place) = placement.map().locate(block) else { continue };
            landed_bytes.fetch_sub(place.len, Ordering::Relaxed);
            if let Some(table) = &digests
                && let Some(digest) = placement.digest(transfer, block)
            {
                table.sub(place.component, place.page, digest);
            }
        }
        if let Some(open) = self.lock().get_mut(&transfer) {
            open.admitted.difference_with(&landed);
        }
    }

    fn take_landed(&self, transfer: TransferId, lane: LaneId) -> Option<(Landing, FixedBitSet)> {
        let mut table = self.lock();
        let open = table.get_mut(&transfer)?;
        let landed = open.landed.remove(&lane)?;
        Some((open.landing.clone(), landed))
    }
}
