//! A piece of memory by address.

use std::ptr::NonNull;

/// A piece of memory inside a page of a pool. The [`super::Pin`] it came from keeps it valid.
///
/// Only [`super::PoolMemory`] makes spans, for this crate's own use and for
/// [`crate::transport::Placement`], which holds the pin. Safe code outside can hold one for too
/// long and learn a length from it, but not a byte. It stays on the thread that asked for it,
/// where the pin can be seen: what crosses threads is the placement.
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
