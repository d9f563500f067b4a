//! The planes of one pool: page `p` of plane `k` is the `item_len` bytes at `base[k] + p * stride[k]`.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::region::HostRegion;
use crate::protocol::PageIndex;

/// One plane: pages of `item_len` bytes, `stride` bytes apart, from byte `offset` of `region`.
#[derive(Clone, Debug)]
pub struct PlaneMemory {
    /// The memory.
    pub region: HostRegion,
    /// Bytes from the region's start to page 0.
    pub offset: usize,
    /// Bytes from page to page; at least `item_len`.
    pub stride: usize,
    /// Bytes of a page in this plane.
    pub item_len: u32,
}

/// Why planes don't make a pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolMemoryError {
    /// No planes, no pages or no bytes.
    #[error("a pool needs at least one plane, one page and one byte a page")]
    Empty,
    /// More planes than a `u16` counts.
    #[error("{0} planes exceed 65,535")]
    TooManyPlanes(usize),
    /// Pages of a plane overlap each other.
    #[error("plane {plane}: stride {stride} is less than the page length {item_len}")]
    Stride {
        /// Which plane.
        plane: usize,
        /// Its stride.
        stride: usize,
        /// Its page length.
        item_len: u32,
    },
    /// A plane runs past its region.
    #[error("plane {plane} needs {need} bytes of a region of {have}")]
    PastRegion {
        /// Which plane.
        plane: usize,
        /// Bytes from the region's start to the plane's end.
        need: u128,
        /// Bytes in the region.
        have: usize,
    },
    /// Pages of two planes share bytes.
    #[error("planes {0} and {1} share bytes")]
    PlanesOverlap(usize, usize),
}

/// A piece of memory inside a registered region. The [`Pin`] it came from keeps it valid.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub(crate) ptr: NonNull<u8>,
    pub(crate) len: usize,
}

/// The planes of one pool.
#[derive(Debug)]
pub struct PoolMemory {
    planes: Vec<PlaneMemory>,
    item_lens: Vec<u32>,
    page_count: u32,
    pins: AtomicUsize,
}

impl PoolMemory {
    /// Pages in the pool.
    pub fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Bytes of a page in each plane.
    pub fn item_lens(&self) -> &[u32] {
        &self.item_lens
    }

    /// Pins that live now. A pool can be deregistered only at 0.
    pub fn pins(&self) -> usize {
        self.pins.load(Ordering::Acquire)
    }

    /// Keeps the memory registered until the pin is dropped. [I4]
    pub fn pin(self: &Arc<Self>) -> Pin {
        self.pins.fetch_add(1, Ordering::AcqRel);
        Pin(Arc::clone(self))
    }
}

/// A use of a pool's memory: while one lives, the pool can't be deregistered.
#[derive(Debug)]
pub struct Pin(Arc<PoolMemory>);

impl Deref for Pin {
    type Target = PoolMemory;
    fn deref(&self) -> &PoolMemory {
        &self.0
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.pins.fetch_sub(1, Ordering::AcqRel);
    }
}
