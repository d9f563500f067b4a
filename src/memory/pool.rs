//! The planes of one pool: page `p` of plane `k` is the `item_len` bytes at `base[k] + p * stride[k]`.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::layout::{Lattice, PlaneMemory, PoolMemoryError, check_disjoint};
use super::registry::{RegisterError, Registration, Registry};
use super::span::Span;
use crate::protocol::PageIndex;

/// A pool is in use, so it stays registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the pool is in use by {pins} pins and {handles} other handles")]
pub struct Busy {
    /// Pins: transfers that may read or write the memory, and reads of it.
    pub pins: usize,
    /// Other handles, each of which could take a pin.
    pub handles: usize,
}

/// The planes of one pool.
#[derive(Debug)]
pub struct PoolMemory {
    planes: Vec<PlaneMemory>,
    item_lens: Vec<u32>,
    page_count: u32,
    pins: AtomicUsize,
    registrations: Vec<Registration>,
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
        let lattices: Vec<_> = planes.iter().map(|p| Lattice::new(p, page_count)).collect();
        check_disjoint(&lattices)?;
        let item_lens = planes.iter().map(|plane| plane.item_len).collect();
        let pins = AtomicUsize::new(0);
        Ok(PoolMemory { planes, item_lens, page_count, pins, registrations: Vec::new() })
    }

    /// Registers the regions that the planes lie in, until the last handle and the last pin of the
    /// pool are dropped.
    pub fn registered(mut self, registry: &Registry) -> Result<PoolMemory, RegisterError> {
        let mut seen = HashSet::new();
        let regions = self.planes.iter().map(|plane| &plane.region);
        self.registrations = regions
            .filter(|region| seen.insert((region.base_addr(), region.len())))
            .map(|region| registry.register(region))
            .collect::<Result<_, _>>()?;
        Ok(self)
    }

    /// Ends the pool and its registrations, if `self` is the last use of it. Otherwise nothing
    /// changes, and the handle comes back with who else there is.
    ///
    /// There is no window between the check and the end: a pin can only be taken through a handle,
    /// so when no other handle is left, none can be taken. `[I18]`
    pub fn deregister(self: Arc<Self>) -> Result<(), (Arc<PoolMemory>, Busy)> {
        match Arc::try_unwrap(self) {
            Ok(_last) => Ok(()),
            Err(shared) => {
                let pins = shared.pins();
                let handles = (Arc::strong_count(&shared) - 1).saturating_sub(pins);
                Err((shared, Busy { pins, handles }))
            }
        }
    }

    /// Whether nothing is pinned now. Proves nothing about a moment later, unless the caller holds
    /// the lock under which it pins.
    pub fn check_idle(&self) -> Result<(), Busy> {
        match self.pins() {
            0 => Ok(()),
            pins => Err(Busy { pins, handles: 0 }),
        }
    }

    /// Whether a page of this pool and one of `other` share bytes: two pools that do can be given
    /// to two transfers that then write over each other. Exact where the strides are equal or the
    /// planes lie wholly apart, and `true` otherwise.
    pub fn shares_bytes(&self, other: &PoolMemory) -> bool {
        let theirs: Vec<_> = other.lattices().collect();
        self.lattices().any(|ours| theirs.iter().any(|theirs| ours.shares_bytes(theirs)))
    }

    fn lattices(&self) -> impl Iterator<Item = Lattice> + '_ {
        self.planes.iter().map(|plane| Lattice::new(plane, self.page_count))
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

    /// Sets every byte of `page` in `plane` to `byte`, and no other. `[I15]`
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

    /// Keeps the memory registered until the pin is dropped. `[I4]`
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

#[cfg(test)]
mod tests {
    use super::super::region::HostRegion;
    use super::*;

    fn plane(region: &HostRegion, offset: usize, stride: usize, item_len: u32) -> PlaneMemory {
        PlaneMemory { region: region.clone(), offset, stride, item_len }
    }

    fn interleaved() -> Arc<PoolMemory> {
        let region = HostRegion::owned(4 * 32).unwrap();
        let planes = vec![plane(&region, 0, 32, 16), plane(&region, 16, 32, 8)];
        Arc::new(PoolMemory::new(planes, 4).unwrap())
    }

    #[test]
    fn every_page_of_every_plane_is_its_own_bytes() {
        let pool = interleaved();
        assert_eq!(pool.item_lens(), [16, 8]);
        for (k, page) in (0..2).flat_map(|k| (0..4).map(move |page| (k, page))) {
            pool.fill_page(k, PageIndex(page), (10 * k) as u8 + page as u8 + 1);
        }
        let mut all = [0; 4 * 32];
        pool.planes()[0].region.read_at(0, &mut all).unwrap();
        for page in 0..4usize {
            let byte = page as u8 + 1;
            assert_eq!(all[page * 32..][..16], [byte; 16]);
            assert_eq!(all[page * 32 + 16..][..8], [10 + byte; 8]);
            assert_eq!(all[page * 32 + 24..][..8], [0; 8], "bytes of no page are untouched");
        }
        pool.write(1, PageIndex(3), 6, b"xy");
        let mut out = [0; 4];
        pool.read(1, PageIndex(3), 4, &mut out);
        assert_eq!(out, [14, 14, b'x', b'y']);
        let span = pool.span(1, PageIndex(3), 6, 2);
        // SAFETY: `pool` lives, and nothing writes meanwhile.
        assert_eq!(unsafe { span.as_slice() }, b"xy");
        assert_eq!((span.len(), span.iovec().iov_len), (2, 2));
        assert_eq!(span.iovec().iov_base.addr(), pool.planes()[0].region.base_addr() + 118);
    }

    #[test]
    fn what_the_pool_has_not_got_panics() {
        let pool = interleaved();
        let cases: [(u16, u32, u64, u64); 8] = [
            (2, 0, 0, 1),
            (u16::MAX, 0, 0, 0),
            (0, 4, 0, 1),
            (0, u32::MAX, 0, 0),
            (0, 0, 16, 1),
            (0, 3, 17, 0),
            (1, 3, u64::MAX, 2),
            (1, 3, 1, u64::MAX),
        ];
        for (plane, page, offset, len) in cases {
            let span = std::panic::AssertUnwindSafe(|| {
                pool.span(plane, PageIndex(page), offset, len);
            });
            assert!(std::panic::catch_unwind(span).is_err(), "{plane} {page} {offset} {len}");
        }
        assert_eq!(pool.span(0, PageIndex(3), 16, 0).len(), 0, "the end of a page is in it");
    }

    #[test]
    fn planes_that_make_no_pool_are_refused() {
        use PoolMemoryError::*;
        let region = HostRegion::owned(1024).unwrap();
        let plane = |offset, stride, item_len| plane(&region, offset, stride, item_len);
        let refusal = |planes, pages| PoolMemory::new(planes, pages).unwrap_err();
        assert_eq!(refusal(vec![], 1), Empty);
        assert_eq!(refusal(vec![plane(0, 64, 64)], 0), Empty);
        assert_eq!(refusal(vec![plane(0, 64, 0)], 1), Empty);
        assert_eq!(refusal(vec![plane(0, 0, 1); 1 << 16], 1), TooManyPlanes(1 << 16));
        let stride = Stride { plane: 1, stride: 63, item_len: 64 };
        assert_eq!(refusal(vec![plane(0, 64, 64), plane(512, 63, 64)], 1), stride);
        let past = |plane, need| PastRegion { plane, need, have: 1024 };
        assert_eq!(refusal(vec![plane(0, 64, 64)], 17), past(0, 17 * 64));
        assert_eq!(refusal(vec![plane(961, 64, 64)], 1), past(0, 1025));
        let huge = plane(usize::MAX, usize::MAX, u32::MAX);
        let need = (1 << 64) - 1 + u128::from(u32::MAX - 1) * ((1 << 64) - 1) + (1 << 32) - 1;
        assert_eq!(refusal(vec![huge], u32::MAX), past(0, need));
        assert!(PoolMemory::new(vec![plane(0, 64, 64)], 16).is_ok(), "the last byte is used");
        assert!(PoolMemory::new(vec![plane(0, 65, 49)], 16).is_ok(), "and no stride after it");
        let sharing = vec![plane(512, 64, 8), plane(0, 64, 32), plane(31, 64, 32)];
        assert_eq!(refusal(sharing, 2), PlanesOverlap(1, 2));
    }

    #[test]
    fn two_regions_over_the_same_memory_are_found_out() {
        let region = HostRegion::owned(256).unwrap();
        // SAFETY: `region` outlives the alias, and nothing accesses the bytes.
        let alias = unsafe { HostRegion::borrowed(region.ptr().as_ptr().add(64), 128) }.unwrap();
        let shared = vec![plane(&region, 0, 128, 65), plane(&alias, 0, 64, 64)];
        let error = PoolMemory::new(shared, 2).unwrap_err();
        assert_eq!(error, PoolMemoryError::PlanesOverlap(0, 1));

        let pool = |plane, pages| PoolMemory::new(vec![plane], pages).unwrap();
        let evens = pool(plane(&region, 0, 128, 64), 2);
        assert!(!evens.shares_bytes(&pool(plane(&alias, 0, 128, 64), 1)));
        assert!(evens.shares_bytes(&pool(plane(&alias, 0, 128, 65), 1)));
        assert!(evens.shares_bytes(&evens));
    }

    #[test]
    fn a_pool_in_use_stays_registered_until_the_last_pin() {
        let registry = Registry::default();
        let region = HostRegion::owned(256).unwrap();
        let planes = vec![plane(&region, 0, 64, 64), plane(&region, 128, 64, 64)];
        let pool = PoolMemory::new(planes, 2).unwrap().registered(&registry).unwrap();
        let pool = Arc::new(pool);
        assert_eq!(registry.live_count(), 1, "one region, however many planes");

        let (pin, other) = (pool.pin(), pool.clone());
        assert_eq!(pool.check_idle().unwrap_err().pins, 1);
        let (pool, busy) = pool.deregister().unwrap_err();
        assert_eq!(busy, Busy { pins: 1, handles: 1 });
        drop(pin);
        assert_eq!(pool.check_idle(), Ok(()));
        let (pool, busy) = pool.deregister().unwrap_err();
        assert_eq!(busy, Busy { pins: 0, handles: 1 });
        drop(other);
        assert!(pool.deregister().is_ok());
        assert_eq!(registry.live_count(), 0);
    }

    #[test]
    fn dropping_the_handle_under_a_pin_leaves_the_memory_registered() {
        let registry = Registry::default();
        let region = HostRegion::owned(64).unwrap();
        let pool = PoolMemory::new(vec![plane(&region, 0, 64, 64)], 1).unwrap();
        let pool = Arc::new(pool.registered(&registry).unwrap());
        drop(region);
        let pin = pool.pin();
        drop(pool);
        assert_eq!((registry.live_count(), pin.pins()), (1, 1));
        pin.write(0, PageIndex(0), 0, b"still there");
        drop(pin);
        assert_eq!(registry.live_count(), 0);
    }
}
