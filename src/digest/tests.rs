use std::sync::Arc;

use proptest::prelude::*;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::*;
use crate::memory::{HostRegion, PlaneMemory, PoolMemory};
use crate::protocol::{BlockIndex, ComponentIndex, Extent, Incarnation, PageIndex, PlaneIndex};
use crate::transport::Placement;

const TRANSFER: TransferId =
    TransferId { receiver: Incarnation(0x0123_4567_89ab_cdef), counter: 1 };

fn key() -> BlockKey {
    let place = BlockPlace { component: ComponentIndex(0), extent: 0, plane: 0, page: 0, len: 0 };
    BlockKey { transfer: TRANSFER, place }
}

fn placed(change: impl FnOnce(&mut BlockKey)) -> BlockKey {
    let mut key = key();
    change(&mut key);
    key
}

/// The pattern of `docs/digest.md`.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (31 * i + i / 251 + 7) as u8).collect()
}

/// A pool of one page per plane, each plane of the bytes given.
fn pool(planes: &[&[u8]]) -> Arc<PoolMemory> {
    let plane = |bytes: &&[u8]| {
        let region = HostRegion::owned(bytes.len()).unwrap();
        region.write_at(0, bytes).unwrap();
        PlaneMemory { region, offset: 0, stride: bytes.len(), item_len: bytes.len() as u32 }
    };
    Arc::new(PoolMemory::new(planes.iter().map(plane).collect(), 1).unwrap())
}

/// The digest of the block that `extent` is of the page `bytes`, by way of the memory.
fn in_memory(bytes: &[u8], extent: Extent) -> u64 {
    let parts = vec![(pool(&[bytes]), vec![PageIndex(0)], vec![extent])];
    Placement::new(parts).unwrap().digest(TRANSFER, BlockIndex(0)).unwrap()
}

/// Leaves cut and summed in the plainest way, and hashed by another implementation.
fn plainly(key: &BlockKey, bytes: &[u8]) -> u64 {
    let mut sum = 0u64;
    for (number, leaf) in bytes.chunks(4096).enumerate() {
        let mut place = Vec::new();
        place.extend(key.transfer.receiver.0.to_le_bytes());
        place.extend(key.transfer.counter.to_le_bytes());
        let at = key.place;
        for field in [at.component.0.into(), at.page, at.plane.into(), at.extent.into()] {
            place.extend(u32::to_le_bytes(field));
        }
        place.extend((number as u32).to_le_bytes());
        assert_eq!(place.len(), 36);
        sum = sum.wrapping_add(xxh3_64_with_seed(leaf, xxh3_64(&place)));
    }
    sum
}

/// The rows of the table in `docs/digest.md` whose head is `head`.
fn table(head: &str) -> Vec<Vec<&'static str>> {
    let lines = include_str!("../../docs/digest.md").lines();
    let body = lines.skip_while(|line| *line != head).skip(2);
    let rows = body.map_while(|line| line.strip_prefix('|')?.strip_suffix('|'));
    rows.map(|row| row.split('|').map(str::trim).collect()).collect()
}

fn hex(text: &str) -> u64 {
    u64::from_str_radix(text, 16).unwrap()
}

#[test]
fn the_published_blocks_hold() {
    let rows =
        table("| bytes | incarnation | counter | component | page | plane | extent | digest |");
    for row in &rows {
        let &[bytes, incarnation, counter, component, page, plane, extent, digest] = &row[..]
        else {
            panic!("{row:?}");
        };
        let place = BlockPlace {
            component: ComponentIndex(component.parse().unwrap()),
            extent: extent.parse().unwrap(),
            plane: plane.parse().unwrap(),
            page: page.parse().unwrap(),
            len: bytes.parse().unwrap(),
        };
        let receiver = Incarnation(hex(incarnation));
        let transfer = TransferId { receiver, counter: counter.parse().unwrap() };
        let bytes = pattern(place.len as usize);
        let found = bytes_digest(&BlockKey { transfer, place }, &bytes);
        assert_eq!(found, hex(digest), "{row:?}: {found:016x}");
    }
    let lengths: Vec<_> = rows.iter().map(|row| row[0]).collect();
    for len in ["1", "16", "240", "4095", "4096", "4097", "32768"] {
        assert!(lengths.contains(&len), "the table has no row of {len} bytes");
    }
}

#[test]
fn the_published_strided_block_holds() {
    let rows = table("| offset | piece | pieces | stride | digest |");
    assert!(!rows.is_empty());
    for row in rows {
        let number = |column: usize| row[column].parse().unwrap();
        let extent = Extent {
            offset: number(0),
            piece_len: number(1),
            piece_count: number(2),
            piece_stride: number(3),
            ..Extent::whole(PlaneIndex(0), 1, 0)
        };
        let found = in_memory(&pattern(8192), extent);
        assert_eq!(found, hex(row[4]), "{row:?}: {found:016x}");
    }
}

#[test]
fn the_published_total_holds() {
    let bytes = pattern(20_000);
    let block = |page: usize, plane: usize| {
        let key = placed(|key| {
            (key.place.page, key.place.plane) = (page as u32, plane as u16);
        });
        bytes_digest(&key, &bytes[5000 * (2 * page + plane)..][..5000])
    };
    let page = |page| block(page, 0).wrapping_add(block(page, 1));
    let expected = [
        ("page 0, plane 0", block(0, 0)),
        ("page 0, plane 1", block(0, 1)),
        ("page 0", page(0)),
        ("page 1, plane 0", block(1, 0)),
        ("page 1, plane 1", block(1, 1)),
        ("page 1", page(1)),
        ("total", total(&[page(0), page(1)])),
    ];
    let rows = table("| of | digest |");
    assert_eq!(rows.len(), expected.len());
    for (row, (of, digest)) in rows.iter().zip(expected) {
        assert_eq!((row[0], hex(row[1])), (of, digest), "{digest:016x}");
    }
}

#[test]
fn the_published_seeds_hold() {
    let text = include_str!("../../docs/digest.md");
    let mut leaves = Leaves::new(&key());
    for leaf in 0..2 {
        let seed = format!("`{:016x}`", leaves.seed());
        assert!(text.contains(&seed), "leaf {leaf}: {seed}");
        leaves.add(b"");
    }
}

#[test]
fn every_part_of_the_place_counts() {
    let bytes = pattern(5000);
    let changes: [fn(&mut BlockKey); 6] = [
        |key| key.transfer.receiver.0 ^= 1,
        |key| key.transfer.counter += 1,
        |key| key.place.component.0 += 1,
        |key| key.place.page += 1,
        |key| key.place.plane += 1,
        |key| key.place.extent += 1,
    ];
    let mut seen = vec![bytes_digest(&key(), &bytes)];
    for change in changes {
        let digest = bytes_digest(&placed(change), &bytes);
        assert!(!seen.contains(&digest));
        seen.push(digest);
    }
}

#[test]
fn swapped_blocks_pages_and_leaves_fail() {
    let (a, b) = (pattern(4096), pattern(4196)[100..].to_vec());
    let two = |first: &[u8], second: &[u8], change: fn(&mut BlockKey)| {
        bytes_digest(&key(), first).wrapping_add(bytes_digest(&placed(change), second))
    };
    let changes: [fn(&mut BlockKey); 4] = [
        |key| key.place.page += 1,
        |key| key.place.plane += 1,
        |key| key.place.extent += 1,
        |key| key.place.component.0 += 1,
    ];
    for change in changes {
        assert_ne!(two(&a, &b, change), two(&b, &a, change));
    }
    let joined = |x: &[u8], y: &[u8]| bytes_digest(&key(), &[x, y].concat());
    assert_ne!(joined(&a, &b), joined(&b, &a));
}

#[test]
fn totals_wrap_and_an_empty_block_adds_nothing() {
    assert_eq!(total(&[u64::MAX, 2]), 1);
    assert_eq!(total(&[]), 0);
    assert_eq!(bytes_digest(&key(), b""), 0);
    assert_eq!(pieces_digest(&key(), std::iter::empty()), 0);
    assert_ne!(bytes_digest(&key(), &[0]), bytes_digest(&key(), &[0, 0]));
}

/// Lengths on both sides of every boundary, and any other.
fn any_len() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..600, 4090usize..4103, 8190usize..8195, 1usize..20_000]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_split_gives_the_plain_digest(
        len in any_len(),
        mut cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let bytes = pattern(len);
        let mut at: Vec<usize> = cuts.drain(..).map(|cut| cut.index(len + 1)).collect();
        at.extend([0, len]);
        at.sort_unstable();
        let pieces = at.windows(2).map(|cut| &bytes[cut[0]..cut[1]]);
        let expected = plainly(&key(), &bytes);
        prop_assert_eq!(bytes_digest(&key(), &bytes), expected);
        prop_assert_eq!(pieces_digest(&key(), pieces), expected);
    }

    #[test]
    fn strided_memory_equals_contiguous_bytes(
        offset in 0u32..70,
        piece_len in 1u32..700,
        gap in 0u32..90,
        piece_count in 1u32..40,
    ) {
        let piece_stride = piece_len + gap;
        let extent = Extent { first_plane: PlaneIndex(0), plane_count: 1, offset, piece_len,
            piece_count, piece_stride };
        let page = pattern(extent.end_byte() as usize + 5);
        let joined: Vec<u8> = extent
            .pieces()
            .flat_map(|(at, len)| page[at as usize..][..len as usize].to_vec())
            .collect();
        prop_assert_eq!(in_memory(&page, extent), bytes_digest(&key(), &joined));
    }

    #[test]
    fn any_flipped_bit_changes_it(len in any_len(), at in any::<prop::sample::Index>(), bit in 0..8) {
        let mut bytes = pattern(len);
        let before = bytes_digest(&key(), &bytes);
        bytes[at.index(len)] ^= 1u8 << bit;
        prop_assert_ne!(bytes_digest(&key(), &bytes), before);
    }
}
