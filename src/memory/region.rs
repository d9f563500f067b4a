//! Host memory: mapped by us, or borrowed from whoever maps it (an inference engine's tensors).

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock};

/// Why memory can't be had, or an access to it was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// No bytes.
    #[error("a region needs at least one byte")]
    Empty,
    /// A null pointer.
    #[error("a region can't start at the null address")]
    Null,
    /// More bytes than one object may have, or a range that runs past the end of the address space.
    #[error("{len} bytes from {base:#x} don't fit the address space")]
    AddressOverflow {
        /// Address of the first byte.
        base: usize,
        /// Bytes asked for.
        len: usize,
    },
    /// The system gave no memory.
    #[error("mapping {len} bytes: {why}")]
    Map {
        /// Bytes asked for.
        len: usize,
        /// What the system said.
        why: String,
    },
    /// An access past the end.
    #[error("{len} bytes at offset {offset} lie outside a region of {region_len}")]
    OutOfBounds {
        /// Bytes from the region's start.
        offset: usize,
        /// Bytes asked for.
        len: usize,
        /// Bytes in the region.
        region_len: usize,
    },
}

/// A range of host memory. Clones share it; memory of ours is unmapped with the last of them.
///
/// The copying accessors exclude each other, over all clones, so they never race among themselves.
/// They don't exclude a transfer: what they write under a live one may be sent, hashed or
/// overwritten in part, as with memory shared between processes, and the digest then fails. The
/// page ledger is what keeps the two apart.
#[derive(Clone)]
pub struct HostRegion(Arc<Inner>);

struct Inner {
    base: NonNull<u8>,
    len: usize,
    /// Bytes that we mapped, whole system pages; `None` for borrowed memory.
    mapped: Option<usize>,
    /// Held by the copying accessors.
    access: RwLock<()>,
}

// SAFETY: `Inner` is an address and a length. Its accessors copy under `access`, and everything
// else that reads or writes the memory is unsafe and has its own contract.
unsafe impl Send for Inner {}
// SAFETY: as for `Send`; `&Inner` gives no access that isn't under the lock.
unsafe impl Sync for Inner {}

impl HostRegion {
    /// Maps `len` zeroed bytes, every system page of them in place before this returns, so that no
    /// transfer waits for a page fault.
    pub fn owned(len: usize) -> Result<HostRegion, MemoryError> {
        if len == 0 {
            return Err(MemoryError::Empty);
        }
        let mapped = len
            .checked_next_multiple_of(system_page_len())
            .filter(|&mapped| isize::try_from(mapped).is_ok())
            .ok_or(MemoryError::AddressOverflow { base: 0, len })?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: a new anonymous mapping at an address of the system's choice touches no memory
        // that exists.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        let failed = || MemoryError::Map { len, why: io::Error::last_os_error().to_string() };
        if address == libc::MAP_FAILED {
            return Err(failed());
        }
        let base = NonNull::new(address.cast::<u8>()).ok_or(MemoryError::Null)?;
        Ok(HostRegion::from_parts(base, len, Some(mapped)))
    }

    /// Takes memory that somebody else owns.
    ///
    /// # Safety
    ///
    /// - `len` bytes from `ptr` are valid for reads and writes, through this pointer and from any
    ///   thread, until the last clone of the region is dropped.
    /// - Nobody else writes to bytes that a live transfer covers, nor reads those that it receives
    ///   into, from the call that names their pages until the transfer's end is reported.
    /// - Nobody else accesses bytes while one of the copying accessors accesses them.
    pub unsafe fn borrowed(ptr: *mut u8, len: usize) -> Result<HostRegion, MemoryError> {
        let base = NonNull::new(ptr).ok_or(MemoryError::Null)?;
        if len == 0 {
            return Err(MemoryError::Empty);
        }
        let fits = isize::try_from(len).is_ok() && ptr.addr().checked_add(len).is_some();
        if !fits {
            return Err(MemoryError::AddressOverflow { base: ptr.addr(), len });
        }
        Ok(HostRegion::from_parts(base, len, None))
    }

    fn from_parts(base: NonNull<u8>, len: usize, mapped: Option<usize>) -> HostRegion {
        HostRegion(Arc::new(Inner { base, len, mapped, access: RwLock::new(()) }))
    }

    /// Bytes in the region; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Address of the first byte.
    pub fn base_addr(&self) -> usize {
        self.0.base.as_ptr().addr()
    }

    /// The first byte. Valid while a clone of the region lives.
    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.0.base
    }

    /// Copies `data` to `offset` bytes from the start.
    pub fn write_at(&self, offset: usize, data: &[u8]) -> Result<(), MemoryError> {
        let to = self.at(offset, data.len())?;
        let _alone = self.0.access.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `at` checked that the bytes lie in the region, which `self` keeps alive. `copy`
        // allows for a `data` that itself lies in borrowed memory.
        unsafe { std::ptr::copy(data.as_ptr(), to.as_ptr(), data.len()) };
        Ok(())
    }

    /// Copies the bytes that start at `offset` into `out`, all of it.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), MemoryError> {
        let from = self.at(offset, out.len())?;
        let _shared = self.0.access.read().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `at` checked that the bytes lie in the region, which `self` keeps alive. `copy`
        // allows for an `out` that itself lies in borrowed memory.
        unsafe { std::ptr::copy(from.as_ptr(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Sets `len` bytes that start at `offset` to `byte`.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) -> Result<(), MemoryError> {
        let to = self.at(offset, len)?;
        let _alone = self.0.access.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `at` checked that the bytes lie in the region, which `self` keeps alive.
        unsafe { std::ptr::write_bytes(to.as_ptr(), byte, len) };
        Ok(())
    }

    /// The address of `len` bytes at `offset`, if the region has them.
    fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>, MemoryError> {
        match offset.checked_add(len) {
            // SAFETY: `offset` is at most the region's length, which is at most `isize::MAX`, so
            // the sum stays in the region or one past its end.
            Some(end) if end <= self.0.len => Ok(unsafe { self.0.base.add(offset) }),
            _ => Err(MemoryError::OutOfBounds { offset, len, region_len: self.0.len }),
        }
    }
}

impl fmt::Debug for HostRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = if self.0.mapped.is_some() { "owned" } else { "borrowed" };
        write!(f, "HostRegion({owner}, {} bytes at {:#x})", self.len(), self.base_addr())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(mapped) = self.mapped else { return };
        // SAFETY: the mapping is ours, of exactly this address and length, and the last handle to
        // it is being dropped.
        let result = unsafe { libc::munmap(self.base.as_ptr().cast::<c_void>(), mapped) };
        debug_assert_eq!(result, 0, "munmap: {}", io::Error::last_os_error());
    }
}

/// Bytes in a page of the system's memory.
pub(super) fn system_page_len() -> usize {
    // SAFETY: reads a constant of the system.
    let len = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(len).ok().filter(|len| len.is_power_of_two()).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owned_region_is_zeroed_and_as_long_as_asked() {
        for len in [1, 4095, 4096, 4097, 1 << 20] {
            let region = HostRegion::owned(len).unwrap();
            assert_eq!(region.len(), len);
            let mut bytes = vec![1; len];
            region.read_at(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn a_length_that_no_memory_has_is_an_error() {
        assert_eq!(HostRegion::owned(0).unwrap_err(), MemoryError::Empty);
        for len in [usize::MAX, usize::MAX - 8192, isize::MAX as usize] {
            let error = HostRegion::owned(len).unwrap_err();
            assert_eq!(error, MemoryError::AddressOverflow { base: 0, len });
        }
        assert!(matches!(HostRegion::owned(1 << 60), Err(MemoryError::Map { .. })));
    }

    #[test]
    fn borrowing_what_can_not_be_memory_is_an_error() {
        let borrow = |base: usize, len| {
            // SAFETY: every case is refused, and an address that is refused is never touched.
            unsafe { HostRegion::borrowed(std::ptr::without_provenance_mut(base), len) }
                .unwrap_err()
        };
        assert_eq!(borrow(0, 8), MemoryError::Null);
        assert_eq!(borrow(4096, 0), MemoryError::Empty);
        for (base, len) in [(usize::MAX, 1), (4096, usize::MAX), (4096, 1 << 63)] {
            assert_eq!(borrow(base, len), MemoryError::AddressOverflow { base, len });
        }
    }

    #[test]
    fn clones_and_borrowers_see_the_same_bytes_and_no_access_leaves_the_region() {
        let mut bytes = *b"0123456789";
        // SAFETY: the array outlives the region and isn't used otherwise before its last use.
        let region = unsafe { HostRegion::borrowed(bytes.as_mut_ptr(), 8) }.unwrap();
        region.clone().write_at(2, b"ab").unwrap();
        region.fill(7, 1, b'z').unwrap();
        region.write_at(8, b"").unwrap();
        let mut out = [0; 3];
        region.read_at(2, &mut out).unwrap();
        assert_eq!(&out, b"ab4");

        let outside = |offset, len| MemoryError::OutOfBounds { offset, len, region_len: 8 };
        assert_eq!(region.write_at(7, b"xx").unwrap_err(), outside(7, 2));
        assert_eq!(region.read_at(9, &mut []).unwrap_err(), outside(9, 0));
        assert_eq!(region.fill(usize::MAX, 2, 0).unwrap_err(), outside(usize::MAX, 2));
        assert_eq!(region.fill(1, usize::MAX, 0).unwrap_err(), outside(1, usize::MAX));
        drop(region);
        assert_eq!(&bytes, b"01ab456z89");
    }

    #[test]
    fn accessors_of_clones_do_not_tear_each_other() {
        let region = HostRegion::owned(1 << 16).unwrap();
        std::thread::scope(|scope| {
            for byte in [3, 7] {
                let region = region.clone();
                scope.spawn(move || (0..50).for_each(|_| region.fill(0, 1 << 16, byte).unwrap()));
            }
            let mut out = vec![0; 1 << 16];
            for _ in 0..50 {
                region.read_at(0, &mut out).unwrap();
                assert!(out.iter().all(|&byte| byte == out[0]));
            }
        });
    }
}
