//! Lanes between two transports: bytes, digests, markers, ends.

use std::sync::Arc;
use std::time::Duration;

use super::rig::*;
use crate::memory::{PoolMemory, Span};
use crate::protocol::{Extent, LaneId, PageIndex, PlaneIndex, Round, Ticket};
use crate::transport::tcp::TcpConfig;
use crate::transport::{
    CompletionStatus, DigestTable, Event, LaneRole, LinkId, Placement, Transport, TransportError,
};

/// Fills each page of each plane with bytes of its own.
fn paint(pool: &PoolMemory) {
    for (plane, &len) in pool.item_lens().iter().enumerate() {
        for page in 0..pool.page_count() {
            let seed = plane * 7919 + page as usize * 104_729;
            let bytes: Vec<u8> =
                (0..len as usize).map(|at| ((at * 31 + seed) >> 3) as u8 ^ at as u8).collect();
            pool.write(plane as u16, PageIndex(page), 0, &bytes);
        }
    }
}

/// The byte strings of every block, in order.
fn content(placement: &Placement) -> Vec<Vec<u8>> {
    let bytes = |span: Span| {
        // SAFETY: the placement pins the memory, and no transfer is under way.
        unsafe { span.as_slice() }.to_vec()
    };
    let block = |index| placement.spans(index).unwrap().flat_map(bytes).collect();
    placement.map().all().blocks().map(block).collect()
}

struct Shape {
    source: Arc<Placement>,
    destination: Arc<Placement>,
    landed: Arc<PoolMemory>,
}

/// Two components' worth of trouble: whole pages, and a contiguous source for strided pieces.
fn shape() -> Shape {
    let source = pool(&[4096, 4096, 40, 700_000], 7, 1);
    let landed = pool(&[128, 8192, 8192, 700_000], 9, CANARY);
    paint(&source);
    let whole = |plane, count, len| Extent::whole(PlaneIndex(plane), count, len);
    let strided = Extent {
        first_plane: PlaneIndex(1),
        plane_count: 2,
        offset: 16,
        piece_len: 32,
        piece_count: 128,
        piece_stride: 64,
    };
    let small = Extent { first_plane: PlaneIndex(0), plane_count: 1, ..whole(0, 1, 40) };
    Shape {
        source: place(
            &source,
            &[6, 0, 3, 1],
            vec![whole(0, 2, 4096), whole(2, 1, 40), whole(3, 1, 700_000)],
        ),
        destination: place(&landed, &[2, 8, 0, 5], vec![strided, small, whole(3, 1, 700_000)]),
        landed,
    }
}

/// Moves a whole transfer over `lanes`, one range after the other, and checks everything.
fn move_all(writer: (&Side, LinkId), reader: (&Side, LinkId), lanes: &[LaneId]) {
    let Shape { source, destination, landed } = shape();
    let sent = Arc::new(DigestTable::new(source.map()));
    let got = Arc::new(DigestTable::new(destination.map()));
    let expected = content(&source);
    reader.0.transport.open_landing(landing(&destination, Some(&got)));
    let count = source.map().block_count();
    // Out of order, and split so that every lane gets some.
    for block in (0..count).rev() {
        let lane = lanes[block as usize % lanes.len()];
        let request = write(&source, Some(&sent), u64::from(block), &[range(block, 1)]);
        writer.0.transport.post_write(writer.1, lane, request);
    }
    for (index, &lane) in lanes.iter().enumerate() {
        let ticket = Ticket(1000 + index as u64);
        writer.0.transport.post_marker(writer.1, lane, TRANSFER, Round(3), ticket);
    }
    for _ in lanes {
        assert_eq!(reader.0.marker(), Round(3));
    }
    let mut tickets: Vec<u64> = (0..count as usize + lanes.len())
        .map(|_| {
            let (ticket, status) = writer.0.done();
            assert_eq!(status, CompletionStatus::Success);
            ticket.0
        })
        .collect();
    tickets.sort_unstable();
    let marks = 1000..1000 + lanes.len() as u64;
    assert_eq!(tickets, (0..u64::from(count)).chain(marks).collect::<Vec<_>>());
    reader.0.transport.close_landing(TRANSFER);
    assert_eq!(reader.0.closed(), source.map().byte_count());
    assert_eq!(content(&destination), expected, "every byte is where it belongs");
    assert_eq!(sent.snapshot(), got.snapshot());
    assert_eq!(sent.snapshot(), digests_of(&source), "each block was digested once");
    let outside = bytes_of(&landed).iter().filter(|&&byte| byte == CANARY).count();
    let total: u64 = landed.item_lens().iter().map(|&len| u64::from(len) * 9).sum();
    assert!(outside as u64 >= total - source.map().byte_count(), "and nowhere else");
    reader.0.transport.forget_landing(TRANSFER);
}

fn digests_of(placement: &Placement) -> Vec<Vec<u64>> {
    let table = DigestTable::new(placement.map());
    for block in placement.map().all().blocks() {
        let place = placement.map().locate(block).unwrap();
        table.add(place.component, place.page, placement.digest(TRANSFER, block).unwrap());
    }
    table.snapshot()
}

#[test]
fn lanes_carry_writes_both_ways_over_any_number_of_threads_and_frame_sizes() {
    for (io_threads, frame_bytes) in [(1, 1), (1, 8192), (3, 512 * 1024), (2, 4 << 20)] {
        let config = |base| TcpConfig { io_threads, frame_bytes, ..base };
        let (a, b, at_a, at_b) = linked(config(TcpConfig::default()), config(listening()));
        let lanes: Vec<LaneId> = (0..3).map(|index| LaneId { index, epoch: 10 }).collect();
        for &lane in &lanes {
            join((&a, at_a), (&b, at_b), lane, lane.index == 1);
            // The same id the other way is another lane: its reader counts its own epochs.
            join((&b, at_b), (&a, at_a), lane, lane.index == 1);
        }
        move_all((&a, at_a), (&b, at_b), &lanes);
        move_all((&b, at_b), (&a, at_a), &lanes);
        move_all((&a, at_a), (&b, at_b), &lanes[..1]);
    }
}

#[test]
fn one_request_of_many_scattered_blocks_is_cut_within_the_frame_limits() {
    let (a, b, at_a, at_b) = linked(TcpConfig::default(), listening());
    join((&a, at_a), (&b, at_b), LANE, true);
    let pages = 12_000u32;
    let (source, landed) = (pool(&[24], pages, 1), pool(&[24], pages, CANARY));
    paint(&source);
    let order: Vec<u32> = (0..pages).map(|page| page * 7919 % pages).collect();
    let whole = vec![Extent::whole(PlaneIndex(0), 1, 24)];
    let source = place(&source, &order, whole.clone());
    let destination = place(&landed, &(0..pages).collect::<Vec<_>>(), whole);
    b.transport.open_landing(landing(&destination, None));
    // Every second block alone, then the others as one range: too many ranges and too many blocks.
    let evens: Vec<_> = (0..pages).step_by(2).map(|block| range(block, 1)).collect();
    let odds: Vec<_> = (1..pages).step_by(2).map(|block| range(block, 1)).collect();
    a.transport.post_write(at_a, LANE, write(&source, None, 1, &evens));
    a.transport.post_write(at_a, LANE, write(&source, None, 2, &odds));
    a.transport.post_write(at_a, LANE, write(&source, None, 3, &[]));
    a.transport.post_marker(at_a, LANE, TRANSFER, Round(0), Ticket(4));
    for ticket in 1..=4 {
        assert_eq!(a.done(), (Ticket(ticket), CompletionStatus::Success), "in order");
    }
    b.marker();
    assert_eq!(content(&destination), content(&source));
}

#[test]
fn a_request_for_blocks_that_are_not_there_fails_and_harms_nobody() {
    let (a, b, at_a, at_b) = linked(TcpConfig::default(), listening());
    join((&a, at_a), (&b, at_b), LANE, true);
    let source = place(&pool(&[64], 4, 1), &[0, 1], vec![Extent::whole(PlaneIndex(0), 1, 64)]);
    a.transport.post_write(at_a, LANE, write(&source, None, 1, &[range(0, 1), range(1, 2)]));
    assert!(matches!(a.done(), (Ticket(1), CompletionStatus::Unknown(_))));
    a.transport.post_marker(at_a, LANE, TRANSFER, Round(0), Ticket(2));
    assert_eq!(a.done(), (Ticket(2), CompletionStatus::Success));
    b.marker();
}

#[test]
fn lanes_die_with_their_link_and_say_so() {
    let (a, b, at_a, at_b) = linked(TcpConfig::default(), listening());
    join((&a, at_a), (&b, at_b), LANE, true);
    join((&b, at_b), (&a, at_a), LANE, false);
    b.transport.close_link(at_b);
    for side in [&a, &b] {
        let (mut links, mut roles) = (0, Vec::new());
        while links < 1 || roles.len() < 2 {
            match side.next() {
                Event::LinkDown { .. } => links += 1,
                Event::LaneDown { role, .. } => roles.push(role),
                other => panic!("unexpected: {other:?}"),
            }
        }
        roles.sort_unstable();
        assert_eq!(roles, [LaneRole::Reader, LaneRole::Writer]);
    }
    let source = place(&pool(&[64], 1, 1), &[0], vec![Extent::whole(PlaneIndex(0), 1, 64)]);
    a.transport.post_write(at_a, LANE, write(&source, None, 9, &[range(0, 1)]));
    assert_eq!(a.done(), (Ticket(9), CompletionStatus::Flushed), "never dropped in silence");
    b.transport.fence_lane(at_b, LANE);
    b.fenced();
    let late = a.transport.prepare_lane(at_a, LANE, LaneRole::Reader);
    assert_eq!(late, Err(TransportError::NoLink(at_a)));
    a.nothing_waits();
    b.nothing_waits();
}

#[test]
fn a_lane_whose_other_half_never_comes_goes_down_in_time() {
    let (a, b, at_a, at_b) = linked(TcpConfig::default(), listening());
    let short = Duration::from_millis(50);
    let of_reader = b.transport.prepare_lane(at_b, LANE, LaneRole::Reader).unwrap();
    let of_writer = a.transport.prepare_lane(at_a, LANE, LaneRole::Writer).unwrap();
    b.transport.start_lane(at_b, LANE, LaneRole::Reader, &of_writer, short).unwrap();
    assert!(b.lane_down().contains("in time"));
    // The writer dials too late, is refused, and hears why.
    a.transport.start_lane(at_a, LANE, LaneRole::Writer, &of_reader, GUARD).unwrap();
    assert!(a.lane_down().contains("refused"));
    assert_eq!(b.transport.counters().lanes_refused, 1);
    // Not prepared, malformed, or of another lane.
    a.transport.start_lane(at_a, LANE, LaneRole::Writer, &of_reader, GUARD).unwrap();
    assert!(a.lane_down().contains("not prepared"));
    let other = LaneId { index: 1, epoch: 1 };
    for (lane, role, params) in [
        (other, LaneRole::Writer, &of_reader[..]),
        (LANE, LaneRole::Reader, &of_reader[..]),
        (LANE, LaneRole::Writer, &of_reader[1..]),
    ] {
        let refused = a.transport.start_lane(at_a, lane, role, params, GUARD);
        assert!(matches!(refused, Err(TransportError::LaneParams(_))), "{refused:?}");
    }
}
