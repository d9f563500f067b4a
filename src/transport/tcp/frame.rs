//! What travels on a lane: write frames (a header, block ranges, payload) and markers.
//!
//! All integers are little-endian. The fixed part is the same 32 bytes for both kinds:
//!
//! | bytes | write                      | marker   |
//! |-------|----------------------------|----------|
//! | 0     | kind 1                     | kind 2   |
//! | 1     | 0                          | 0        |
//! | 2..4  | number of ranges           | round    |
//! | 4..8  | payload bytes              | 0        |
//! | 8..24 | transfer (receiver, count) | transfer |
//! | 24..32| generation                 | 0        |
//!
//! A write goes on with its ranges, `first: u32, count: u32` each, and then the byte strings of
//! the blocks in that order. Parsing is a pure function; whether a write is *allowed* is for
//! [`crate::transport::landing`] to say.

use crate::protocol::{BlockIndex, BlockRange, Generation, Incarnation, Round, TransferId};

/// Bytes of the fixed part.
pub const FIXED_LEN: usize = 32;
/// Bytes of one range.
pub const RANGE_LEN: usize = 8;
/// The most ranges in a frame.
pub const MAX_RANGES: usize = 512;
/// The most blocks in a frame.
pub const MAX_BLOCKS: u32 = 4096;
/// The longest header.
pub const MAX_HEADER_LEN: usize = FIXED_LEN + MAX_RANGES * RANGE_LEN;

const KIND_WRITE: u8 = 1;
const KIND_MARKER: u8 = 2;

/// A parsed header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Header {
    /// `payload` bytes follow, which are the blocks of `ranges` in order.
    Write {
        /// The transfer.
        transfer: TransferId,
        /// The generation that the writer was granted.
        generation: Generation,
        /// 1 to [`MAX_RANGES`] ranges, none empty, of at most [`MAX_BLOCKS`] blocks.
        ranges: Vec<BlockRange>,
        /// Bytes that follow; at least 1.
        payload: u32,
    },
    /// Every write of the transfer's round that used this lane came before this.
    Marker {
        /// The transfer.
        transfer: TransferId,
        /// Which of its rounds.
        round: Round,
    },
}

/// Bytes that are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{fault} (in a frame that names {transfer})")]
pub struct FrameError {
    /// The transfer that the bytes would name: a claim, good for a log line only.
    pub transfer: TransferId,
    /// What is wrong.
    pub fault: FrameFault,
}

/// What is wrong with a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameFault {
    /// Neither a write nor a marker.
    #[error("frame kind {0} is unknown")]
    Kind(u8),
    /// A field that must be zero isn't.
    #[error("a reserved field is set")]
    Reserved,
    /// No ranges, or too many.
    #[error("{0} ranges in one frame")]
    RangeCount(u16),
    /// A range has no blocks, or ends past the last number that a block can have.
    #[error("a range is empty or runs past the last block number")]
    Range,
    /// Too many blocks.
    #[error("more than {MAX_BLOCKS} blocks in one frame")]
    BlockCount,
    /// A write that carries nothing.
    #[error("a write without payload")]
    NoPayload,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// Parses the header at the start of `bytes`: `None` if there are too few of them yet, else the
/// header and its length. Fails as early as the bytes allow, so garbage is never waited for.
pub fn parse_header(bytes: &[u8]) -> Result<Option<(Header, usize)>, FrameError> {
    if bytes.len() < FIXED_LEN {
        return Ok(None);
    }
    let transfer =
        TransferId { receiver: Incarnation(u64_at(bytes, 8)), counter: u64_at(bytes, 16) };
    let fail = |fault| Err(FrameError { transfer, fault });
    if bytes[1] != 0 {
        return fail(FrameFault::Reserved);
    }
    let (short, payload, generation) = (u16_at(bytes, 2), u32_at(bytes, 4), u64_at(bytes, 24));
    match bytes[0] {
        KIND_MARKER if payload != 0 || generation != 0 => fail(FrameFault::Reserved),
        KIND_MARKER => Ok(Some((Header::Marker { transfer, round: Round(short) }, FIXED_LEN))),
        KIND_WRITE if payload == 0 => fail(FrameFault::NoPayload),
        KIND_WRITE => match parse_ranges(&bytes[FIXED_LEN..], short) {
            Ok(None) => Ok(None),
            Ok(Some(ranges)) => {
                let len = FIXED_LEN + ranges.len() * RANGE_LEN;
                let generation = Generation(generation);
                Ok(Some((Header::Write { transfer, generation, ranges, payload }, len)))
            }
            Err(fault) => fail(fault),
        },
        kind => fail(FrameFault::Kind(kind)),
    }
}

fn parse_ranges(bytes: &[u8], count: u16) -> Result<Option<Vec<BlockRange>>, FrameFault> {
    let len = usize::from(count);
    if len == 0 || len > MAX_RANGES {
        return Err(FrameFault::RangeCount(count));
    }
    let Some(bytes) = bytes.get(..len * RANGE_LEN) else { return Ok(None) };
    let mut ranges = Vec::with_capacity(len);
    let mut blocks = 0u32;
    for at in (0..bytes.len()).step_by(RANGE_LEN) {
        let range =
            BlockRange { first: BlockIndex(u32_at(bytes, at)), count: u32_at(bytes, at + 4) };
        // A block number of u32::MAX can't exist: there are at most u32::MAX blocks.
        if range.count == 0 || range.end() > u64::from(u32::MAX) {
            return Err(FrameFault::Range);
        }
        blocks = blocks.saturating_add(range.count);
        if blocks > MAX_BLOCKS {
            return Err(FrameFault::BlockCount);
        }
        ranges.push(range);
    }
    Ok(Some(ranges))
}

/// Appends a write's header to `out`. The caller keeps to the limits of this module.
pub fn encode_write(
    out: &mut Vec<u8>,
    transfer: TransferId,
    generation: Generation,
    ranges: &[BlockRange],
    payload: u32,
) {
    debug_assert!((1..=MAX_RANGES).contains(&ranges.len()));
    encode_fixed(out, KIND_WRITE, ranges.len() as u16, payload, transfer, generation);
    for range in ranges {
        out.extend_from_slice(&range.first.0.to_le_bytes());
        out.extend_from_slice(&range.count.to_le_bytes());
    }
}

/// Appends a marker to `out`.
pub fn encode_marker(out: &mut Vec<u8>, transfer: TransferId, round: Round) {
    encode_fixed(out, KIND_MARKER, round.0, 0, transfer, Generation(0));
}

fn encode_fixed(
    out: &mut Vec<u8>,
    kind: u8,
    short: u16,
    payload: u32,
    transfer: TransferId,
    generation: Generation,
) {
    let mut fixed = [0; FIXED_LEN];
    fixed[0] = kind;
    fixed[2..4].copy_from_slice(&short.to_le_bytes());
    fixed[4..8].copy_from_slice(&payload.to_le_bytes());
    fixed[8..16].copy_from_slice(&transfer.receiver.0.to_le_bytes());
    fixed[16..24].copy_from_slice(&transfer.counter.to_le_bytes());
    fixed[24..32].copy_from_slice(&generation.0.to_le_bytes());
    out.extend_from_slice(&fixed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TRANSFER: TransferId = TransferId { receiver: Incarnation(7), counter: 9 };

    fn range(first: u32, count: u32) -> BlockRange {
        BlockRange { first: BlockIndex(first), count }
    }

    fn write(ranges: &[BlockRange], payload: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode_write(&mut bytes, TRANSFER, Generation(3), ranges, payload);
        bytes
    }

    fn fault(bytes: &[u8]) -> FrameFault {
        parse_header(bytes).unwrap_err().fault
    }

    #[test]
    fn headers_come_back_as_they_went() {
        let ranges = vec![range(5, 2), range(0, 1)];
        let bytes = write(&ranges, 77);
        let header =
            Header::Write { transfer: TRANSFER, generation: Generation(3), ranges, payload: 77 };
        assert_eq!(parse_header(&bytes), Ok(Some((header, bytes.len()))));
        for cut in 0..bytes.len() {
            assert_eq!(parse_header(&bytes[..cut]), Ok(None), "a part is no header");
        }
        let mut bytes = Vec::new();
        encode_marker(&mut bytes, TRANSFER, Round(4));
        let header = Header::Marker { transfer: TRANSFER, round: Round(4) };
        assert_eq!(parse_header(&bytes), Ok(Some((header, FIXED_LEN))));
    }

    #[test]
    fn every_bound_is_kept() {
        assert_eq!(fault(&write(&[range(0, 1)], 0)), FrameFault::NoPayload);
        assert_eq!(fault(&write(&[range(0, 0)], 1)), FrameFault::Range);
        assert_eq!(fault(&write(&[range(u32::MAX, 1)], 1)), FrameFault::Range);
        assert_eq!(fault(&write(&[range(0, MAX_BLOCKS + 1)], 1)), FrameFault::BlockCount);
        assert_eq!(fault(&write(&[range(0, 4000), range(0, 97)], 1)), FrameFault::BlockCount);
        let mut bytes = write(&[range(0, 1)], 1);
        bytes[2..4].copy_from_slice(&0u16.to_le_bytes());
        assert_eq!(fault(&bytes), FrameFault::RangeCount(0));
        bytes[2..4].copy_from_slice(&513u16.to_le_bytes());
        assert_eq!(fault(&bytes), FrameFault::RangeCount(513));
        bytes[1] = 1;
        assert_eq!(fault(&bytes), FrameFault::Reserved);
        assert_eq!(fault(&[0; FIXED_LEN]), FrameFault::Kind(0));
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_what_parses_is_bounded(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..MAX_HEADER_LEN + 64),
            kind in 0u8..4, ranges in 0u16..600, tame in any::<bool>(),
        ) {
            if tame && bytes.len() >= 4 {
                (bytes[0], bytes[1]) = (kind, 0);
                bytes[2..4].copy_from_slice(&ranges.to_le_bytes());
                bytes.iter_mut().skip(FIXED_LEN).skip(1).step_by(2).for_each(|b| *b = 0);
            }
            if let Ok(Some((header, len))) = parse_header(&bytes) {
                prop_assert!(len <= bytes.len() && len <= MAX_HEADER_LEN);
                let mut again = Vec::new();
                match header {
                    Header::Write { transfer, generation, ranges, payload } => {
                        let blocks: u64 = ranges.iter().map(|r| u64::from(r.count)).sum();
                        prop_assert!(ranges.len() <= MAX_RANGES && blocks <= MAX_BLOCKS.into());
                        encode_write(&mut again, transfer, generation, &ranges, payload);
                    }
                    Header::Marker { transfer, round } => encode_marker(&mut again, transfer, round),
                }
                prop_assert_eq!(&again[..], &bytes[..len], "one encoding for one header");
            }
        }
    }
}
