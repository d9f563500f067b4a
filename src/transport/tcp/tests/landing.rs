//! What the reader refuses, discards and waits for. The writer is played by hand.

use std::io::Write as _;
use std::net::TcpStream;
use std::sync::Arc;

use super::rig::*;
use crate::memory::PoolMemory;
use crate::protocol::{
    BlockIndex, Extent, Generation, Incarnation, LaneId, PageIndex, PlaneIndex, Round, TransferId,
};
use crate::transport::tcp::frame;
use crate::transport::{DigestTable, Event, LandingError, LaneRole, Placement, Transport};

const PAGE: u32 = 1000;

struct Scene {
    side: Side,
    peer: ByHand,
    lane: TcpStream,
    pool: Arc<PoolMemory>,
    placement: Arc<Placement>,
    digests: Arc<DigestTable>,
}

/// Four granted pages of six, and a lane.
fn scene() -> Scene {
    let side = side(listening());
    let peer = ByHand::link(&side);
    let lane = peer.lane(&side, LANE, LaneRole::Reader);
    let pool = pool(&[PAGE], 6, CANARY);
    let placement = place(&pool, &[4, 1, 0, 3], vec![Extent::whole(PlaneIndex(0), 1, PAGE)]);
    let digests = Arc::new(DigestTable::new(placement.map()));
    side.transport.open_landing(landing(&placement, Some(&digests)));
    Scene { side, peer, lane, pool, placement, digests }
}

impl Scene {
    fn send(&mut self, bytes: &[u8]) {
        self.lane.write_all(bytes).unwrap();
    }

    fn refused(&self) -> (TransferId, LandingError) {
        let refused = self.side.expect(|event| match event {
            Event::WriteRefused { transfer, why, .. } => Some((*transfer, *why)),
            _ => None,
        });
        self.side.lane_down();
        refused
    }

    fn page(&self, page: u32) -> Vec<u8> {
        let mut bytes = vec![0; PAGE as usize];
        self.pool.read(0, PageIndex(page), 0, &mut bytes);
        bytes
    }
}

#[test]
fn every_write_outside_the_grant_is_refused_and_not_a_byte_lands() {
    let stranger = TransferId { receiver: Incarnation(0xabc), counter: 2 };
    let encode = |transfer, generation, ranges: &[_], payload| {
        let mut bytes = Vec::new();
        frame::encode_write(&mut bytes, transfer, generation, ranges, payload);
        bytes
    };
    let outside = LandingError::OutsideGrant { first: 3, end: 5, count: 4 };
    let stale = LandingError::StaleGeneration { stated: Generation(4), granted: GENERATION };
    let mismatch = LandingError::LengthMismatch { payload: 2001, blocks: 2000 };
    let twice = LandingError::DuplicateBlock { block: BlockIndex(2) };
    let mut garbage = header(&[range(0, 1)], PAGE);
    garbage[0] = 77;
    let cases = [
        (encode(stranger, GENERATION, &[range(0, 1)], PAGE), LandingError::UnknownTransfer),
        (encode(TRANSFER, Generation(4), &[range(0, 1)], PAGE), stale),
        (header(&[range(0, 1), range(3, 2)], 3 * PAGE), outside),
        (header(&[range(0, 2)], 2001), mismatch),
        (header(&[range(2, 1), range(1, 2)], 3 * PAGE), twice),
        (header(&[range(0, 0)], PAGE), LandingError::Malformed),
        (garbage, LandingError::Malformed),
    ];
    for (head, expected) in cases {
        let mut scene = scene();
        let before = bytes_of(&scene.pool);
        let mut bytes = head.clone();
        bytes.resize(head.len() + 3 * PAGE as usize, 0x11);
        scene.send(&bytes);
        let (transfer, why) = scene.refused();
        assert_eq!(why, expected);
        assert_eq!(
            transfer,
            if why == LandingError::UnknownTransfer { stranger } else { TRANSFER }
        );
        assert!(is_closed(&mut scene.lane));
        assert_eq!(bytes_of(&scene.pool), before, "{expected}");
        scene.side.transport.close_landing(TRANSFER);
        assert_eq!(scene.side.closed(), 0);
        assert!(scene.digests.snapshot()[0].iter().all(|&sum| sum == 0));
        let counters = scene.side.transport.counters();
        assert_eq!(counters.frames_malformed + counters.writes_refused, 1);
    }
}

#[test]
fn a_block_lands_once_whichever_lane_brings_it() {
    let mut scene = scene();
    let other = LaneId { index: 1, epoch: 2 };
    let mut second = scene.peer.lane(&scene.side, other, LaneRole::Reader);
    scene.send(&[header(&[range(1, 1)], PAGE), vec![0x22; PAGE as usize], marker(0)].concat());
    scene.side.marker();
    second.write_all(&[header(&[range(1, 1)], PAGE), vec![0x33; PAGE as usize]].concat()).unwrap();
    let twice = LandingError::DuplicateBlock { block: BlockIndex(1) };
    assert_eq!(scene.refused(), (TRANSFER, twice));
    assert_eq!(scene.page(1), vec![0x22; PAGE as usize], "the first one stands");
    // Once the lane that brought it is fenced, it may be taken back and written again.
    scene.side.transport.fence_lane(scene.peer.link, LANE);
    scene.side.fenced();
    scene.side.transport.unland(TRANSFER, LANE);
    assert!(scene.digests.snapshot()[0].iter().all(|&sum| sum == 0));
    let third = LaneId { index: 0, epoch: 3 };
    let mut third = scene.peer.lane(&scene.side, third, LaneRole::Reader);
    third
        .write_all(&[header(&[range(1, 1)], PAGE), vec![0x44; PAGE as usize], marker(1)].concat())
        .unwrap();
    assert_eq!(scene.side.marker(), Round(1));
    assert_eq!(scene.page(1), vec![0x44; PAGE as usize]);
    let digest = scene.placement.digest(TRANSFER, BlockIndex(1)).unwrap();
    assert_eq!(scene.digests.snapshot()[0], [0, digest, 0, 0]);
}

#[test]
fn frames_land_however_the_network_cuts_them() {
    let mut scene = scene();
    let mut bytes = header(&[range(2, 2), range(0, 1)], 3 * PAGE);
    bytes.extend((0..3 * PAGE).map(|at| (at / 7) as u8));
    bytes.extend(marker(6));
    bytes.extend(header(&[range(1, 1)], PAGE));
    bytes.extend(vec![0x55; PAGE as usize]);
    bytes.extend(marker(7));
    for part in bytes.chunks(13) {
        scene.send(part);
    }
    assert_eq!((scene.side.marker(), scene.side.marker()), (Round(6), Round(7)));
    let sent: Vec<u8> = (0..3 * PAGE).map(|at| (at / 7) as u8).collect();
    assert_eq!([scene.page(0), scene.page(3), scene.page(4)].concat(), sent);
    assert_eq!(scene.page(1), vec![0x55; PAGE as usize]);
    assert_eq!([scene.page(2), scene.page(5)].concat(), vec![CANARY; 2 * PAGE as usize]);
    scene.side.transport.close_landing(TRANSFER);
    assert_eq!(scene.side.closed(), 4 * u64::from(PAGE));
    scene.side.transport.close_landing(TRANSFER);
    assert_eq!(scene.side.closed(), 4 * u64::from(PAGE), "each call is answered");
}

#[test]
fn a_close_waits_for_the_frame_that_is_being_read_and_what_follows_is_thrown_away() {
    let mut scene = scene();
    let head = header(&[range(0, 2)], 2 * PAGE);
    scene.send(&[head, vec![0x66; PAGE as usize + 1]].concat());
    eventually(|| scene.page(4) == vec![0x66; PAGE as usize]);
    scene.side.transport.close_landing(TRANSFER);
    scene.side.transport.close_landing(TRANSFER);
    // A round trip through the thread that reads: it had its chance to report too early.
    scene.side.transport.fence_lane(scene.peer.link, LaneId { index: 0, epoch: 77 });
    scene.side.fenced();
    scene.side.nothing_waits();
    scene.send(&vec![0x66; PAGE as usize - 1]);
    assert_eq!(scene.side.closed(), 2 * u64::from(PAGE));
    scene.send(&[header(&[range(2, 2)], 2 * PAGE), vec![0x77; 2 * PAGE as usize]].concat());
    // Even what was written before: nothing of it lands.
    scene.send(&[header(&[range(0, 2)], 2 * PAGE), vec![0x77; 2 * PAGE as usize]].concat());
    scene.send(&marker(2));
    assert_eq!(scene.side.marker(), Round(2));
    assert_eq!([scene.page(4), scene.page(1)].concat(), vec![0x66; 2 * PAGE as usize]);
    assert_eq!([scene.page(0), scene.page(3)].concat(), vec![CANARY; 2 * PAGE as usize]);
    scene.side.transport.forget_landing(TRANSFER);
    scene.send(&header(&[range(2, 2)], 2 * PAGE));
    assert_eq!(scene.refused(), (TRANSFER, LandingError::UnknownTransfer));
}

#[test]
fn a_writer_that_dies_in_a_frame_leaves_nothing_in_the_books() {
    let mut scene = scene();
    scene.side.transport.close_link(scene.peer.link);
    let _ = (scene.side.next(), scene.side.next());
    scene = self::scene();
    let head = header(&[range(0, 2)], 2 * PAGE);
    scene.send(&[head, vec![0x66; PAGE as usize + 1]].concat());
    eventually(|| scene.page(4) == vec![0x66; PAGE as usize]);
    drop(scene.lane);
    scene.side.lane_down();
    assert!(scene.digests.snapshot()[0].iter().all(|&sum| sum == 0));
    scene.side.transport.close_landing(TRANSFER);
    assert_eq!(scene.side.closed(), 0);
}

#[test]
fn forgetting_in_the_middle_of_a_frame_admits_nothing_more() {
    let mut scene = scene();
    scene.send(&[header(&[range(0, 2)], 2 * PAGE), vec![0x66; PAGE as usize]].concat());
    eventually(|| scene.page(4) == vec![0x66; PAGE as usize]);
    scene.side.transport.forget_landing(TRANSFER);
    scene.side.transport.close_landing(TRANSFER);
    scene.send(&[vec![0x66; PAGE as usize], header(&[range(2, 1)], PAGE)].concat());
    scene.side.closed();
    assert_eq!(scene.refused(), (TRANSFER, LandingError::UnknownTransfer));
}
