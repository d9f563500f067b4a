//! What travels over a lane.

use std::collections::BTreeMap;
use std::fmt;

use super::super::{Placement, WriteRequest};
use super::bytes::{gather, scatter};
use super::lane::LaneKey;
use crate::protocol::{BlockIndex, BlockRange, Generation, Round, Ticket, TransferId};

/// What a writer posts.
#[derive(Debug)]
pub(super) enum Posted {
    Write(WriteRequest),
    Marker { transfer: TransferId, round: Round, ticket: Ticket },
}

/// The bytes of a write on their way.
#[derive(Clone, Debug)]
pub(super) struct Shipment {
    pub(super) transfer: TransferId,
    pub(super) generation: Generation,
    pub(super) ranges: Vec<BlockRange>,
    pub(super) blocks: Vec<(BlockIndex, Vec<u8>)>,
}

#[derive(Clone, Debug)]
pub(super) enum Cargo {
    Write(Shipment),
    Marker { transfer: TransferId, round: Round },
}

/// Something that has left its writer. It goes on by itself, whatever becomes of the request.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) id: u64,
    /// The request it came from; later requests have higher numbers.
    pub(super) job: u64,
    pub(super) key: LaneKey,
    pub(super) cargo: Cargo,
    /// The second of a pair: nobody waits for its completion.
    pub(super) copy: bool,
    /// Not in the lane's order.
    pub(super) loose: bool,
    pub(super) held: bool,
    /// How long its bytes stay out of memory once they are said to be there.
    pub(super) reveal: Option<u64>,
}

impl fmt::Display for Flight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cargo {
            Cargo::Write(ship) => write!(f, "write of {:?} {:?}", ship.transfer, ship.ranges)?,
            Cargo::Marker { transfer, round } => write!(f, "marker of {transfer:?} {round:?}")?,
        }
        if self.copy { f.write_str(" again") } else { Ok(()) }
    }
}

impl Shipment {
    /// Reads the blocks from their source as it is now.
    pub(super) fn read(write: &WriteRequest) -> Shipment {
        let blocks = write.blocks.iter().flat_map(BlockRange::blocks);
        let blocks = blocks.filter_map(|block| Some((block, gather(&write.source, block)?)));
        Shipment {
            transfer: write.transfer,
            generation: write.generation,
            ranges: write.blocks.clone(),
            blocks: blocks.collect(),
        }
    }

    pub(super) fn byte_count(&self) -> u64 {
        self.blocks.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// Lands the first half of every block.
    pub(super) fn land_first_half(&self, placement: &Placement) {
        for (block, bytes) in &self.blocks {
            scatter(placement, *block, bytes, 0..bytes.len() / 2);
        }
    }

    /// Lands the rest.
    pub(super) fn land_second_half(&self, placement: &Placement) {
        for (block, bytes) in &self.blocks {
            scatter(placement, *block, bytes, bytes.len() / 2..bytes.len());
        }
    }

    /// Two blocks whose contents can be exchanged so that it shows. If any two of one length
    /// differ, one of them differs from the first of that length.
    pub(super) fn exchangeable(&self) -> Option<(usize, usize)> {
        let mut first_of = BTreeMap::new();
        let blocks = self.blocks.iter().map(|(_, bytes)| bytes).enumerate();
        blocks.into_iter().find_map(|(b, bytes)| {
            let &mut a = first_of.entry(bytes.len()).or_insert(b);
            (self.blocks[a].1 != *bytes).then_some((a, b))
        })
    }
}

impl Flight {
    pub(super) fn transfer(&self) -> TransferId {
        match &self.cargo {
            Cargo::Write(ship) => ship.transfer,
            Cargo::Marker { transfer, .. } => *transfer,
        }
    }
}
