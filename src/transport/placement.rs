//! Joins the numbering of a transfer's blocks with the memory that they lie in.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::digest::{BlockKey, block_digest};
use crate::memory::{Pin, PoolMemory, Span};
use crate::protocol::{BlockError, BlockIndex, BlockMap, ComponentShape, Extent, PageIndex};
use crate::protocol::{ComponentIndex, ExtentError, TransferId};

/// One component of a [`Placement`]: these pages of this memory, these extents of each page.
#[derive(Debug)]
struct Placed {
    memory: Pin,
    pages: Vec<PageIndex>,
    extents: Vec<Extent>,
}

/// Where each block of one transfer lies on this side. Pins the memory while it lives.
#[derive(Debug)]
pub struct Placement {
    map: BlockMap,
    components: Vec<Placed>,
}

/// Why a placement can't be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The blocks can't be numbered.
    #[error(transparent)]
    Blocks(#[from] BlockError),
    /// An extent doesn't fit the pool.
    #[error("{component}: {why}")]
    Extent {
        /// Which component.
        component: ComponentIndex,
        /// What is wrong.
        why: ExtentError,
    },
    /// A page that the pool doesn't have.
    #[error("{component}: {page} of a pool of {page_count} pages")]
    Page {
        /// Which component.
        component: ComponentIndex,
        /// The page.
        page: PageIndex,
        /// Pages in the pool.
        page_count: u32,
    },
}

impl Placement {
    /// Checks every page and extent against the memory, once, so that no block lookup can leave it.
    pub fn new(
        components: Vec<(Arc<PoolMemory>, Vec<PageIndex>, Vec<Extent>)>,
    ) -> Result<Placement, PlacementError> {
        let mut placed = Vec::with_capacity(components.len());
        let mut shapes = Vec::with_capacity(components.len());
        for (index, (memory, pages, extents)) in components.into_iter().enumerate() {
            let component = ComponentIndex(index as u16);
            for extent in &extents {
                extent
                    .check(memory.item_lens())
                    .map_err(|why| PlacementError::Extent { component, why })?;
            }
            let page_count = memory.page_count();
            if let Some(&page) = pages.iter().find(|page| page.0 >= page_count) {
                return Err(PlacementError::Page { component, page, page_count });
            }
            let page_count = u32::try_from(pages.len()).map_err(|_| BlockError::TooMany)?;
            shapes.push(ComponentShape { page_count, extents: extents.clone() });
            placed.push(Placed { memory: memory.pin(), pages, extents });
        }
        Ok(Placement { map: BlockMap::new(&shapes)?, components: placed })
    }

    /// The numbering.
    pub fn map(&self) -> &BlockMap {
        &self.map
    }

    /// The pieces of memory that `block` is made of, in order; `None` past the last block.
    pub fn spans(&self, block: BlockIndex) -> Option<impl ExactSizeIterator<Item = Span> + '_> {
        let place = self.map.locate(block)?;
        let placed = &self.components[usize::from(place.component.0)];
        let extent = &placed.extents[usize::from(place.extent)];
        let plane = extent.first_plane.0 + place.plane;
        let page = placed.pages[place.page as usize];
        let memory = &placed.memory;
        Some(extent.pieces().map(move |(offset, len)| memory.span(plane, page, offset, len)))
    }

    /// The digest of `block` as it is in memory now; `None` past the last block.
    pub fn digest(&self, transfer: TransferId, block: BlockIndex) -> Option<u64> {
        let place = self.map.locate(block)?;
        let key = BlockKey { transfer, place };
        Some(block_digest(&key, self.spans(block)?))
    }
}

/// The digests of one transfer's pages as they come together: one sum per logical page, added to
/// from any thread in any order.
#[derive(Debug)]
pub struct DigestTable {
    components: Vec<Vec<AtomicU64>>,
    /// A bit per block that was digested; empty on the landing side, which may take blocks back.
    done: Vec<AtomicU64>,
}

impl DigestTable {
    /// All zero, for the pages of `map`, on the landing side.
    pub fn new(map: &BlockMap) -> DigestTable {
        let column = |&count: &u32| (0..count).map(|_| AtomicU64::new(0)).collect();
        let components = map.page_counts().iter().map(column).collect();
        DigestTable { components, done: Vec::new() }
    }

    /// All zero, on the writing side: remembers which blocks it has.
    pub fn of_source(map: &BlockMap) -> DigestTable {
        let words = (map.block_count() as usize).div_ceil(64);
        let done = (0..words).map(|_| AtomicU64::new(0)).collect();
        DigestTable { done, ..DigestTable::new(map) }
    }

    /// Digests a source block, unless that was done when it was posted before: a source is hashed
    /// once, before its first byte leaves, so a change after that shows as a mismatch.
    pub fn add_source(&self, source: &Placement, transfer: TransferId, block: BlockIndex) {
        let bit = 1 << (block.0 % 64);
        let word = self.done.get((block.0 / 64) as usize);
        if word.is_some_and(|word| word.fetch_or(bit, Ordering::Relaxed) & bit != 0) {
            return;
        }
        if let (Some(place), Some(digest)) =
            (source.map().locate(block), source.digest(transfer, block))
        {
            self.add(place.component, place.page, digest);
        }
    }

    /// Adds a block's digest to its page.
    pub fn add(&self, component: ComponentIndex, page: u32, digest: u64) {
        self.components[usize::from(component.0)][page as usize]
            .fetch_add(digest, Ordering::Relaxed);
    }

    /// Takes a block's digest back out of its page.
    pub fn sub(&self, component: ComponentIndex, page: u32, digest: u64) {
        self.components[usize::from(component.0)][page as usize]
            .fetch_sub(digest, Ordering::Relaxed);
    }

    /// The sums so far, per component and page. Whole only once nobody adds any more.
    pub fn snapshot(&self) -> Vec<Vec<u64>> {
        let column =
            |pages: &Vec<AtomicU64>| pages.iter().map(|p| p.load(Ordering::Relaxed)).collect();
        self.components.iter().map(column).collect()
    }
}
