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

impl Span {
    /// Bytes in the piece; may be 0.
    #[allow(clippy::len_without_is_empty)]
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The bytes, in place.
    ///
    /// # Safety
    ///
    /// For as long as the slice lives: the pin that the span came from lives, and nothing writes
    /// to these bytes, a peer's transfer included.
    #[inline]
    pub unsafe fn as_slice<'a>(&self) -> &'a [u8] {
        // SAFETY: `PoolMemory::span` took the bytes from inside a region; the caller vouches for
        // its life and for the absence of writers.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// For a system call that gathers from or scatters to the piece.
    #[inline]
    pub(crate) fn iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.ptr.as_ptr().cast(), iov_len: self.len }
    }
}

impl PlaneMemory {
    /// Address of page 0.
    fn base(&self) -> u128 {
        self.region.base_addr() as u128 + self.offset as u128
    }

    /// Bytes from the start of page 0 to the end of the last page.
    fn extent(&self, page_count: u32) -> u128 {
        u128::from(page_count - 1) * self.stride as u128 + u128::from(self.item_len)
    }

    fn check(&self, plane: usize, page_count: u32) -> Result<(), PoolMemoryError> {
        let PlaneMemory { stride, item_len, .. } = *self;
        if item_len == 0 {
            return Err(PoolMemoryError::Empty);
        }
        if (stride as u128) < u128::from(item_len) {
            return Err(PoolMemoryError::Stride { plane, stride, item_len });
        }
        let need = self.offset as u128 + self.extent(page_count);
        let have = self.region.len();
        if need > have as u128 {
            return Err(PoolMemoryError::PastRegion { plane, need, have });
        }
        Ok(())
    }
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
    /// Checks that every page of every plane lies in its region and shares no byte with another.
    ///
    /// Planes may be interleaved (K and V page by page in one region) if they have one stride;
    /// planes of different strides must lie wholly apart.
    pub fn new(planes: Vec<PlaneMemory>, page_count: u32) -> Result<PoolMemory, PoolMemoryError> {
        if planes.is_empty() || page_count == 0 {
            return Err(PoolMemoryError::Empty);
        }
        if planes.len() > usize::from(u16::MAX) {
            return Err(PoolMemoryError::TooManyPlanes(planes.len()));
        }
        for (index, plane) in planes.iter().enumerate() {
            plane.check(index, page_count)?;
        }
        layout::check_disjoint(&planes, page_count)?;
        let item_lens = planes.iter().map(|plane| plane.item_len).collect();
        Ok(PoolMemory { planes, item_lens, page_count, pins: AtomicUsize::new(0) })
    }

    /// The planes, in order.
    pub fn planes(&self) -> &[PlaneMemory] {
        &self.planes
    }

    /// Pages in the pool.
    pub fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Bytes of a page in each plane.
    pub fn item_lens(&self) -> &[u32] {
        &self.item_lens
    }

    /// The `len` bytes at `offset` of `page` in `plane`.
    ///
    /// # Panics
    ///
    /// If the pool has no such bytes: a wild pointer would be worse.
    #[inline]
    pub(crate) fn span(&self, plane: u16, page: PageIndex, offset: u64, len: u64) -> Span {
        let (plane, start) = self.locate(plane, page, offset, len);
        // SAFETY: `locate` asserted that `len` bytes from `start` lie in the page, and `new` that
        // every page lies in the region, so the sum neither overflows nor leaves it.
        let ptr = unsafe { plane.region.ptr().add(start) };
        Span { ptr, len: len as usize }
    }

    /// Copies the bytes at `offset` of `page` in `plane` into `out`, all of it.
    ///
    /// # Panics
    ///
    /// If the pool has no such bytes.
    pub fn read(&self, plane: u16, page: PageIndex, offset: u64, out: &mut [u8]) {
        let (plane, start) = self.locate(plane, page, offset, out.len() as u64);
        plane.region.read_at(start, out).expect("every page lies in its region");
    }

    /// Copies `data` to `offset` of `page` in `plane`.
    ///
    /// # Panics
    ///
    /// If the pool has no such bytes.
    pub fn write(&self, plane: u16, page: PageIndex, offset: u64, data: &[u8]) {
        let (plane, start) = self.locate(plane, page, offset, data.len() as u64);
        plane.region.write_at(start, data).expect("every page lies in its region");
    }

    /// Sets every byte of `page` in `plane` to `byte`, and no other. [I15]
    ///
    /// # Panics
    ///
    /// If the pool has no such page.
    pub fn fill_page(&self, plane: u16, page: PageIndex, byte: u8) {
        let (plane, start) = self.locate(plane, page, 0, 0);
        let len = plane.item_len as usize;
        plane.region.fill(start, len, byte).expect("every page lies in its region");
    }

    /// The plane, and bytes from its region's start to `offset` of `page`.
    #[inline]
    fn locate(&self, plane: u16, page: PageIndex, offset: u64, len: u64) -> (&PlaneMemory, usize) {
        let plane = &self.planes[usize::from(plane)];
        assert!(page.0 < self.page_count, "{page} of a pool of {} pages", self.page_count);
        let item_len = u64::from(plane.item_len);
        assert!(
            offset <= item_len && len <= item_len - offset,
            "{len} bytes at offset {offset} of a page of {item_len}"
        );
        // Neither step overflows: the page's end lies in the region, and `new` checked it.
        (plane, plane.offset + page.0 as usize * plane.stride + offset as usize)
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

/// Whether planes share bytes.
mod layout {
    use super::{PlaneMemory, PoolMemoryError};

    /// Compares the planes whose address ranges meet, in the order of their addresses, so that
    /// planes that lie apart cost a sort and no more.
    pub(super) fn check_disjoint(
        planes: &[PlaneMemory],
        page_count: u32,
    ) -> Result<(), PoolMemoryError> {
        let mut order: Vec<usize> = (0..planes.len()).collect();
        order.sort_by_key(|&plane| planes[plane].base());
        for (position, &a) in order.iter().enumerate() {
            let end = planes[a].base() + planes[a].extent(page_count);
            for &b in order[position + 1..].iter().take_while(|&&b| planes[b].base() < end) {
                if share_bytes(&planes[a], &planes[b], page_count) {
                    return Err(PoolMemoryError::PlanesOverlap(a.min(b), a.max(b)));
                }
            }
        }
        Ok(())
    }

    /// Whether a page of `a` and one of `b` share a byte, for planes whose ranges meet and
    /// `a.base() <= b.base()`. Exact for equal strides; `true` for others.
    fn share_bytes(a: &PlaneMemory, b: &PlaneMemory, page_count: u32) -> bool {
        if a.stride != b.stride {
            return true;
        }
        // Page q of `b` starts `distance - k * stride` after page q + k of `a`. They share bytes if
        // that is less than a's page length and more than minus b's. `a` starts first, so only
        // the last page of `a` that starts at or before page 0 of `b`, and the next, can do so.
        let distance = b.base() - a.base();
        let stride = a.stride as u128;
        let last = u128::from(page_count) - 1;
        let (pages, rest) = (distance / stride, distance % stride);
        let shares_before = pages <= last && rest < u128::from(a.item_len);
        let shares_after = pages < last && stride - rest < u128::from(b.item_len);
        shares_before || shares_after
    }
}
