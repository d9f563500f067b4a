//! A byte range inside a page: whole, or a strided slice such as some heads of every token.

use super::PlaneIndex;

/// The bytes that one grant covers in each page, for `plane_count` planes from `first_plane`:
/// `piece_count` pieces of `piece_len` bytes, `piece_stride` bytes apart, from `offset` in the page.
///
/// Both ends describe their own memory; what must agree is the byte string that the pieces make,
/// so a contiguous source can fill a strided destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// First plane that the extent covers.
    pub first_plane: PlaneIndex,
    /// How many planes, at least 1.
    pub plane_count: u16,
    /// Bytes from the start of the page to the first piece.
    pub offset: u32,
    /// Bytes in each piece, at least 1.
    pub piece_len: u32,
    /// How many pieces, at least 1.
    pub piece_count: u32,
    /// Bytes from the start of one piece to the start of the next; at least `piece_len`.
    pub piece_stride: u32,
}

/// Why an extent can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum ExtentError {
    /// No planes, no pieces or no bytes.
    #[error("the extent is empty")]
    Empty,
    /// Pieces overlap each other.
    #[error("piece stride {stride} is less than piece length {len}")]
    Overlap {
        /// Bytes from piece to piece.
        stride: u32,
        /// Bytes in a piece.
        len: u32,
    },
    /// The extent runs past the end of the page.
    #[error("the extent ends at byte {end} of a page of {page_len} bytes")]
    PastPage {
        /// One past the extent's last byte.
        end: u64,
        /// Bytes of the page.
        page_len: u64,
    },
    /// The extent names a plane that isn't there.
    #[error("the extent ends at plane {end} of {plane_count}")]
    PastPlanes {
        /// One past the extent's last plane.
        end: u32,
        /// Planes in the pool.
        plane_count: u32,
    },
}

impl Extent {
    /// The whole page of `item_len` bytes, in `plane_count` planes from `first_plane`.
    pub fn whole(first_plane: PlaneIndex, plane_count: u16, item_len: u32) -> Extent {
        Extent {
            first_plane,
            plane_count,
            offset: 0,
            piece_len: item_len,
            piece_count: 1,
            piece_stride: item_len,
        }
    }

    /// Bytes that the extent covers in one page of one plane.
    pub fn block_len(&self) -> u64 {
        u64::from(self.piece_len) * u64::from(self.piece_count)
    }

    /// One past the last plane.
    pub fn end_plane(&self) -> u32 {
        u32::from(self.first_plane.0) + u32::from(self.plane_count)
    }

    /// One past the last byte in the page.
    pub fn end_byte(&self) -> u64 {
        u64::from(self.offset)
            + u64::from(self.piece_stride) * u64::from(self.piece_count.saturating_sub(1))
            + u64::from(self.piece_len)
    }

    /// The byte ranges in the page, in order.
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = (u64, u64)> + use<> {
        let Extent { offset, piece_len, piece_count, piece_stride, .. } = *self;
        (0..piece_count).map(move |piece| {
            (u64::from(offset) + u64::from(piece) * u64::from(piece_stride), u64::from(piece_len))
        })
    }

    /// Checks the extent against planes whose pages have `item_len(plane)` bytes.
    pub fn check(&self, item_lens: &[u32]) -> Result<(), ExtentError> {
        if self.plane_count == 0 || self.piece_count == 0 || self.piece_len == 0 {
            return Err(ExtentError::Empty);
        }
        if self.piece_count > 1 && self.piece_stride < self.piece_len {
            return Err(ExtentError::Overlap { stride: self.piece_stride, len: self.piece_len });
        }
        let plane_count = u32::try_from(item_lens.len()).unwrap_or(u32::MAX);
        if self.end_plane() > plane_count {
            return Err(ExtentError::PastPlanes { end: self.end_plane(), plane_count });
        }
        let planes = usize::from(self.first_plane.0)..self.end_plane() as usize;
        match item_lens[planes].iter().find(|&&len| self.end_byte() > u64::from(len)) {
            Some(&len) => {
                Err(ExtentError::PastPage { end: self.end_byte(), page_len: u64::from(len) })
            }
            None => Ok(()),
        }
    }
}
