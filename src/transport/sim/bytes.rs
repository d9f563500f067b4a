//! Copies between the blocks of a placement and the simulated wire.

use std::ops::Range;

use super::super::Placement;
use crate::protocol::BlockIndex;

/// The bytes of `block` as they are in memory now; `None` past the last block.
pub(super) fn gather(placement: &Placement, block: BlockIndex) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for span in placement.spans(block)? {
        let start = bytes.len();
        bytes.resize(start + span.len, 0);
        // SAFETY: the placement pins the memory that the span lies in, and `bytes` was just made
        // long enough. Like a NIC, this reads while others may write: the bytes are then any mix
        // of old and new, which is what a digest has to find.
        unsafe { std::ptr::copy(span.ptr.as_ptr(), bytes[start..].as_mut_ptr(), span.len) };
    }
    Some(bytes)
}

/// Writes the part `range` of `bytes`, the whole content of `block`, to its place.
pub(super) fn scatter(placement: &Placement, block: BlockIndex, bytes: &[u8], range: Range<usize>) {
    let mut start = 0;
    for span in placement.spans(block).into_iter().flatten() {
        let from = range.start.max(start);
        let to = range.end.min(start + span.len).min(bytes.len());
        if from < to {
            let part = &bytes[from..to];
            // SAFETY: the placement pins the memory that the span lies in; `from - start` and the
            // part's end lie inside the span by the bounds above. Like a NIC, this writes whoever
            // else looks.
            unsafe {
                let place = span.ptr.as_ptr().add(from - start);
                std::ptr::copy(part.as_ptr(), place, part.len());
            }
        }
        start += span.len;
    }
}
