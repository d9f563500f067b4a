//! The digest of blocks and pages (`docs/digest.md`), on the CPU.
//!
//! What may live here: hashing, and the seeds that tie a leaf to its place. What may not: deciding
//! what a mismatch means.

use std::hash::Hasher as _;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::memory::Span;
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
