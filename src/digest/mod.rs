//! The digest of blocks and pages (`docs/digest.md`), on the CPU.
//!
//! What may live here: hashing, and the seeds that tie a leaf to its place. What may not: deciding
//! what a mismatch means.

use twox_hash::XxHash3_64;

use crate::memory::Span;
pub use crate::protocol::wrapping_total as total;
use crate::protocol::{BlockPlace, TransferId};

/// The longest leaf, in bytes, counted from the start of each block.
pub const LEAF_LEN: usize = 4096;

/// Which block a digest is for. Physical placement isn't part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockKey {
    /// The transfer.
    pub transfer: TransferId,
    /// The block's place in it.
    pub place: BlockPlace,
}

/// The digest of the block whose bytes are those of `spans`, one after the other, as they are in
/// memory now. How they are split makes no difference.
///
/// The caller holds the pin that the spans came from, and has seen to it that nothing writes to
/// them: a source is hashed before it is released to be written again, and a landed block after
/// its last byte was placed. A writer that breaks that makes the digest worthless, so it fails.
pub(crate) fn block_digest(key: &BlockKey, spans: impl Iterator<Item = Span>) -> u64 {
    // SAFETY: the pin keeps the memory valid and the caller keeps writers away, as stated above.
    pieces_digest(key, spans.map(|span| unsafe { span.as_slice() }))
}

/// The digest of a block that is `bytes`.
pub fn bytes_digest(key: &BlockKey, bytes: &[u8]) -> u64 {
    pieces_digest(key, std::iter::once(bytes))
}

/// Hashes in place while leaves lie in one piece each.
fn pieces_digest<'a>(key: &BlockKey, mut pieces: impl Iterator<Item = &'a [u8]>) -> u64 {
    let mut leaves = Leaves::new(key);
    while let Some(piece) = pieces.next() {
        let tail = leaves.add_whole(piece);
        if tail.is_empty() {
            continue;
        }
        if let Some(next) = pieces.next() {
            return gather(leaves, tail, std::iter::once(next).chain(pieces));
        }
        leaves.add(tail);
    }
    leaves.sum
}

/// The rest of a block, from the first leaf on that lies in several pieces: `head`, then `pieces`.
fn gather<'a>(mut leaves: Leaves, head: &[u8], pieces: impl Iterator<Item = &'a [u8]>) -> u64 {
    let mut leaf = [0u8; LEAF_LEN];
    leaf[..head.len()].copy_from_slice(head);
    let mut filled = head.len();
    for mut piece in pieces {
        if filled > 0 {
            let (taken, rest) = piece.split_at(piece.len().min(LEAF_LEN - filled));
            leaf[filled..filled + taken.len()].copy_from_slice(taken);
            filled += taken.len();
            if filled < LEAF_LEN {
                continue;
            }
            leaves.add(&leaf);
            piece = rest;
        }
        let tail = leaves.add_whole(piece);
        leaf[..tail.len()].copy_from_slice(tail);
        filled = tail.len();
    }
    if filled > 0 {
        leaves.add(&leaf[..filled]);
    }
    leaves.sum
}

/// The leaves of one block so far.
struct Leaves {
    /// What a leaf's seed is the hash of; the leaf's number is the last field.
    place: [u8; 36],
    number: u32,
    sum: u64,
}

impl Leaves {
    fn new(key: &BlockKey) -> Leaves {
        let BlockKey { transfer, place: at } = key;
        let mut place = [0u8; 36];
        place[0..8].copy_from_slice(&transfer.receiver.0.to_le_bytes());
        place[8..16].copy_from_slice(&transfer.counter.to_le_bytes());
        place[16..20].copy_from_slice(&u32::from(at.component.0).to_le_bytes());
        place[20..24].copy_from_slice(&at.page.to_le_bytes());
        place[24..28].copy_from_slice(&u32::from(at.plane).to_le_bytes());
        place[28..32].copy_from_slice(&u32::from(at.extent).to_le_bytes());
        Leaves { place, number: 0, sum: 0 }
    }

    /// The seed of the next leaf.
    #[inline]
    fn seed(&mut self) -> u64 {
        self.place[32..36].copy_from_slice(&self.number.to_le_bytes());
        XxHash3_64::oneshot(&self.place)
    }

    /// Adds the next leaf.
    #[inline]
    fn add(&mut self, leaf: &[u8]) {
        self.sum = self.sum.wrapping_add(XxHash3_64::oneshot_with_seed(self.seed(), leaf));
        self.number = self.number.wrapping_add(1);
    }

    /// Adds the full leaves that `piece` starts with; returns what is left, less than a leaf.
    #[inline]
    fn add_whole<'a>(&mut self, piece: &'a [u8]) -> &'a [u8] {
        let leaves = piece.chunks_exact(LEAF_LEN);
        let tail = leaves.remainder();
        leaves.for_each(|leaf| self.add(leaf));
        tail
    }
}

#[cfg(test)]
mod tests;
