//! XXH3-64 over 4 KiB leaves of 32 KiB blocks: the crates that offer it, and the digest of blocks.
//!
//! `docs/digest.md` says what came out and what was decided. `hot` blocks stay in the L2 cache;
//! `cold` ones come from memory, in an order that no prefetcher follows.

use std::hint::black_box;
use std::sync::Arc;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use sealift::digest::LEAF_LEN;
use sealift::memory::{HostRegion, PlaneMemory, PoolMemory};
use sealift::protocol::{BlockIndex, Extent, Incarnation, PageIndex, PlaneIndex, TransferId};
use sealift::transport::Placement;

const BLOCK_LEN: usize = 32 * 1024;
const HOT_BLOCKS: usize = 8;
const COLD_BLOCKS: usize = 320 * 1024 * 1024 / BLOCK_LEN;
/// Coprime with both counts, so that it visits every block.
const STEP: usize = 7919;

/// Runs `hash` on a block per iteration.
fn over_blocks(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    blocks: usize,
    mut hash: impl FnMut(usize) -> u64,
) {
    let mut block = 0;
    group.bench_function(name, |bencher| {
        bencher.iter(|| {
            block = (block + STEP) % blocks;
            black_box(hash(black_box(block)))
        });
    });
}

/// Sums a leaf hash over the leaves of a block.
fn leaf_wise(bytes: &[u8], block: usize, hash: impl Fn(&[u8], u64) -> u64) -> u64 {
    bytes[block * BLOCK_LEN..][..BLOCK_LEN]
        .chunks_exact(LEAF_LEN)
        .enumerate()
        .fold(0, |sum, (leaf, bytes)| sum.wrapping_add(hash(bytes, (block + leaf) as u64)))
}

/// One plane of `blocks` pages of a block each, in pieces of `piece_len` bytes with as many
/// between them.
fn placement(blocks: usize, bytes: &[u8], piece_len: usize) -> Placement {
    let spread = if piece_len == BLOCK_LEN { 1 } else { 2 };
    let page_len = BLOCK_LEN * spread;
    let region = HostRegion::owned(blocks * page_len).unwrap();
    (0..spread).for_each(|part| region.write_at(part * bytes.len(), bytes).unwrap());
    let plane = PlaneMemory { region, offset: 0, stride: page_len, item_len: page_len as u32 };
    let memory = PoolMemory::new(vec![plane], blocks as u32).unwrap();
    let extent = Extent {
        piece_len: piece_len as u32,
        piece_count: (BLOCK_LEN / piece_len) as u32,
        piece_stride: (piece_len * spread) as u32,
        ..Extent::whole(PlaneIndex(0), 1, page_len as u32)
    };
    let pages = (0..blocks as u32).map(PageIndex).collect();
    Placement::new(vec![(Arc::new(memory), pages, vec![extent])]).unwrap()
}

fn digests(c: &mut Criterion) {
    let transfer = TransferId { receiver: Incarnation(0x5ea1), counter: 1 };
    for (name, blocks) in [("hot", HOT_BLOCKS), ("cold", COLD_BLOCKS)] {
        let bytes: Vec<u8> = (0..blocks * BLOCK_LEN).map(|i| (i * 31 + i / 251) as u8).collect();
        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Bytes(BLOCK_LEN as u64));
        over_blocks(&mut group, "xxhash-rust", blocks, |block| {
            leaf_wise(&bytes, block, xxhash_rust::xxh3::xxh3_64_with_seed)
        });
        over_blocks(&mut group, "twox-hash", blocks, |block| {
            leaf_wise(&bytes, block, |leaf, seed| {
                twox_hash::XxHash3_64::oneshot_with_seed(seed, leaf)
            })
        });
        for (name, piece_len) in [("block_digest", BLOCK_LEN), ("block_digest, strided", 128)] {
            let placed = placement(blocks, &bytes, piece_len);
            over_blocks(&mut group, name, blocks, |block| {
                placed.digest(transfer, BlockIndex(block as u32)).unwrap()
            });
        }
    }
}

criterion_group!(benches, digests);
criterion_main!(benches);
