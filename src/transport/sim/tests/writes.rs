//! Writes on a confined network, and each fault that can befall one.

use super::*;

fn ready() -> Bed {
    Bed::ready(SimConfig::seeded(4))
}

fn close(bed: &Bed) -> u64 {
    bed.b.transport.close_landing(T);
    drain(&bed.net);
    match bed.b.take().pop() {
        Some(Event::LandingClosed { transfer: T, landed_bytes }) => landed_bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_byte_lands_at_its_place_and_the_digests_agree() {
    for seed in 0..50 {
        let bed = Bed::ready(SimConfig::seeded(seed));
        bed.write(L0, 1, 0..3);
        bed.write(L1, 2, 3..8);
        bed.marker(L0, 3);
        bed.marker(L1, 4);
        drain(&bed.net);
        let mut done = bed.completions();
        done.sort_by_key(|done| done.0);
        assert_eq!(done, [(1, OK), (2, OK), (3, OK), (4, OK)]);
        assert_eq!(bed.landed(), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(bed.digests_agree());
        let untouched = [0, 2, 4, 6].map(|index| page(&bed.b.memory, 0, index));
        let old = [0, 2, 4, 6].map(|index| vec![101 + index; PAGE_LEN as usize]);
        assert_eq!(untouched, old);
        assert_eq!(bed.b.take().len(), 2, "two markers");
        assert_eq!(close(&bed), 8 * u64::from(PAGE_LEN));
        bed.b.transport.close_landing(T);
        drain(&bed.net);
        assert!(bed.b.take().is_empty(), "closed once");
    }
}

#[test]
fn a_lane_keeps_order_and_its_marker_comes_last() {
    for seed in 0..100 {
        let slow = (Fault::DelayWrite(MILLI), Filter::any().chance(0.5));
        let bed = Bed::ready(SimConfig { faults: vec![slow], ..SimConfig::seeded(seed) });
        for block in 0..8 {
            bed.write(L0, u64::from(block), block..block + 1);
        }
        bed.marker(L0, 8);
        bed.step_until(|bed| !bed.b.log.lock().unwrap().is_empty());
        assert!(matches!(bed.b.take()[..], [Event::MarkerSeen { lane: L0, transfer: T, .. }]));
        assert_eq!(bed.landed().len(), 8, "everything before the marker is placed");
        drain(&bed.net);
        assert_eq!(bed.completions(), (0..9).map(|n| (n, OK)).collect::<Vec<_>>());
    }
}

#[test]
fn lanes_run_apart() {
    let apart = (0..50).filter(|&seed| {
        let bed = Bed::ready(SimConfig::seeded(seed));
        bed.write(L0, 1, 0..1);
        bed.write(L1, 2, 1..2);
        drain(&bed.net);
        bed.count(FaultKind::LanesReordered) > 0
    });
    assert!((10..40).contains(&apart.count()));

    let bed = ready();
    bed.net.inject(Fault::DelayWrite(MILLI), Filter::any().lane(L0));
    bed.write(L0, 1, 0..1);
    bed.write(L1, 2, 1..2);
    drain(&bed.net);
    assert_eq!(bed.completions(), [(2, OK), (1, OK)]);
    assert_eq!(bed.count(FaultKind::DelayWrite), 1);
    assert_eq!(bed.count(FaultKind::LanesReordered), 1);
}

#[test]
fn a_source_that_changes_before_its_completion_can_show() {
    let caught = (0..50).filter(|&seed| {
        let bed = Bed::ready(SimConfig::seeded(seed));
        bed.write(L0, 1, 0..8);
        bed.net.advance(Duration::from_micros(20));
        assert!(bed.a.take().is_empty(), "no completion yet, so it isn't ours to change");
        bed.a.memory.fill_page(0, PageIndex(0), 250);
        drain(&bed.net);
        !bed.digests_agree()
    });
    assert!((10..45).contains(&caught.count()), "read before or after, by the seed");

    for seed in 0..50 {
        let bed = Bed::ready(SimConfig::seeded(seed));
        bed.write(L0, 1, 0..8);
        bed.step_until(|bed| !bed.a.log.lock().unwrap().is_empty());
        bed.a.memory.fill_page(0, PageIndex(0), 250);
        drain(&bed.net);
        assert!(bed.digests_agree(), "after the completion nothing reads it");
    }
}

#[test]
fn the_source_is_pinned_until_the_completion() {
    let mut bed = ready();
    bed.source = placement(&bed.a.memory, &[0]);
    let pins = bed.a.memory.pins();
    bed.net.inject(Fault::DropWrite, Filter::any());
    bed.write(L0, 1, 0..1);
    bed.source = placement(&bed.a.memory, &[0, 1, 2, 3]);
    drain(&bed.net);
    assert_eq!(bed.a.memory.pins(), pins + 1);
    bed.a.transport.kill_lane(bed.la, L0);
    drain(&bed.net);
    assert_eq!(bed.a.memory.pins(), pins);
}

#[test]
fn held_writes_stay_in_flight_with_all_behind_them() {
    let bed = ready();
    bed.write(L0, 1, 0..1);
    bed.net.hold_writes(Filter::any().lane(L0).skip(1).times(1));
    bed.write(L0, 2, 1..2);
    bed.write(L0, 3, 2..3);
    bed.marker(L0, 4);
    bed.write(L1, 5, 3..4);
    drain(&bed.net);
    assert_eq!(bed.landed(), [0, 3]);
    assert!(bed.b.take().is_empty());
    bed.net.release_writes();
    drain(&bed.net);
    assert_eq!(bed.landed(), [0, 1, 2, 3]);
    assert_eq!(bed.count(FaultKind::HoldWrite), 1);
    let on_lane_0: Vec<_> = bed.completions().into_iter().filter(|done| done.0 != 5).collect();
    assert_eq!(on_lane_0, [(1, OK), (2, OK), (3, OK), (4, OK)]);
    assert!(matches!(bed.b.take()[..], [Event::MarkerSeen { .. }]));
}

#[test]
fn a_dropped_write_has_no_completion_until_its_lane_ends() {
    for fenced in [true, false] {
        let bed = ready();
        bed.net.inject(Fault::DropWrite, Filter::any().writes().nth(1));
        for block in 0..3 {
            bed.write(L0, u64::from(block), block..block + 1);
        }
        bed.marker(L0, 3);
        drain(&bed.net);
        assert_eq!(bed.landed(), [0, 2]);
        assert_eq!(bed.completions(), [(0, OK), (2, OK), (3, OK)]);
        assert!(matches!(bed.b.take()[..], [Event::MarkerSeen { .. }]), "and the marker lies");
        match fenced {
            true => bed.b.transport.fence_lane(bed.lb, L0),
            false => bed.a.transport.kill_lane(bed.la, L0),
        }
        drain(&bed.net);
        let heard = bed.a.take();
        assert!(
            matches!(
                heard[..],
                [
                    Event::WriteDone { ticket: Ticket(1), status: FLUSHED, .. },
                    Event::LaneDown { .. }
                ]
            ),
            "{heard:?}"
        );
        assert_eq!(bed.count(FaultKind::DropWrite), 1);
        assert!(!bed.digests_agree());
    }
}

#[test]
fn a_lost_marker_is_not_seen() {
    let bed = ready();
    bed.net.inject(Fault::DropWrite, Filter::any().markers());
    bed.write(L0, 1, 0..8);
    bed.marker(L0, 2);
    drain(&bed.net);
    assert_eq!(bed.completions(), [(1, OK)]);
    assert!(bed.b.take().is_empty());
}

#[test]
fn a_write_that_lands_twice_is_refused_by_a_confined_reader() {
    let bed = ready();
    bed.net.inject(Fault::DuplicateWrite, Filter::any().times(1));
    bed.write(L0, 1, 0..8);
    drain(&bed.net);
    let heard = bed.b.take();
    assert!(
        matches!(
            heard[..],
            [
                Event::WriteRefused {
                    why: crate::transport::LandingError::DuplicateBlock { .. },
                    ..
                },
                Event::LaneDown { role: LaneRole::Reader, .. }
            ]
        ),
        "{heard:?}"
    );
    let heard = bed.a.take();
    let done = |event: &&Event| matches!(event, Event::WriteDone { .. });
    assert_eq!(heard.iter().filter(done).count(), 1, "one post, one completion: {heard:?}");
    assert!(matches!(heard.last(), Some(Event::LaneDown { role: LaneRole::Writer, .. })));
    assert!(bed.digests_agree(), "the second time didn't count");
    assert_eq!(bed.count(FaultKind::DuplicateWrite), 1);
    assert_eq!(bed.count(FaultKind::RefusedWrite), 1);
}

#[test]
fn a_marker_can_be_seen_twice() {
    let bed = ready();
    bed.net.inject(Fault::DuplicateWrite, Filter::any().markers());
    bed.marker(L0, 1);
    drain(&bed.net);
    assert_eq!(bed.completions(), [(1, OK)]);
    assert_eq!(bed.b.take().len(), 2);
}

#[test]
fn reordering_within_a_lane_lets_the_marker_overtake() {
    let bed = ready();
    bed.net.inject(Fault::ReorderWithinLane(MILLI), Filter::any().writes().times(1));
    bed.write(L0, 1, 0..1);
    bed.write(L0, 2, 1..2);
    bed.marker(L0, 3);
    bed.step_until(|bed| !bed.b.log.lock().unwrap().is_empty());
    assert_eq!(bed.landed(), [1]);
    drain(&bed.net);
    assert_eq!(bed.landed(), [0, 1]);
    assert_eq!(bed.completions().len(), 3);
    assert_eq!(bed.count(FaultKind::ReorderWithinLane), 1);
}

#[test]
fn one_flipped_bit_shows_in_the_digest() {
    let bed = ready();
    bed.net.inject(Fault::CorruptBlock, Filter::any().transfer(T).times(1));
    bed.write(L0, 1, 0..8);
    drain(&bed.net);
    assert_eq!(bed.completions(), [(1, OK)]);
    let flipped: u32 = (0..8u32)
        .flat_map(|block| {
            let (plane, index) = ((block / 4) as u16, block % 4);
            let sent = page(&bed.a.memory, plane, index);
            let found = page(&bed.b.memory, plane, [7, 5, 3, 1][index as usize]);
            sent.into_iter().zip(found).map(|(a, b)| (a ^ b).count_ones())
        })
        .sum();
    assert_eq!(flipped, 1);
    assert!(!bed.digests_agree());
    assert_eq!(bed.count(FaultKind::CorruptBlock), 1);
}

#[test]
fn two_swapped_blocks_show_in_the_digest() {
    let bed = ready();
    bed.net.inject(Fault::SwapBlocks, Filter::any());
    bed.write(L0, 1, 0..1);
    drain(&bed.net);
    assert_eq!(bed.count(FaultKind::SwapBlocks), 0, "one block has nothing to swap with");
    assert_eq!(bed.landed(), [0]);
    bed.write(L0, 2, 1..3);
    drain(&bed.net);
    assert_eq!(bed.count(FaultKind::SwapBlocks), 1);
    assert_eq!(page(&bed.b.memory, 0, 5), page(&bed.a.memory, 0, 2));
    assert_eq!(page(&bed.b.memory, 0, 3), page(&bed.a.memory, 0, 1));
    assert!(!bed.digests_agree());
}

#[test]
fn bytes_can_come_after_the_completion_and_the_marker() {
    let bed = ready();
    bed.net.inject(Fault::DelayVisibility(MILLI), Filter::any().writes());
    bed.write(L0, 1, 0..8);
    bed.marker(L0, 2);
    bed.net.advance(MILLI / 3);
    assert_eq!(bed.completions(), [(1, OK), (2, OK)]);
    assert!(matches!(bed.b.take()[..], [Event::MarkerSeen { .. }]));
    assert_eq!(bed.landed(), [0; 0]);
    assert_eq!(close(&bed), 8 * u64::from(PAGE_LEN), "said to have landed");
    assert!(!bed.digests_agree(), "and the digest knows better");
    assert_eq!(bed.landed().len(), 8, "they come in the end");
    assert_eq!(bed.count(FaultKind::DelayVisibility), 1);
}

#[test]
fn a_fence_stops_bytes_that_are_not_visible_yet() {
    let bed = ready();
    bed.net.inject(Fault::DelayVisibility(MILLI), Filter::any().writes());
    bed.write(L0, 1, 0..8);
    bed.net.advance(MILLI / 3);
    bed.b.transport.fence_lane(bed.lb, L0);
    drain(&bed.net);
    assert_eq!(bed.landed(), [0; 0]);
    assert_eq!(bed.count(FaultKind::FencedInFlight), 1);
}

#[test]
fn completion_number_k_states_what_it_is_told() {
    let strange = [
        CompletionStatus::Unknown(12),
        CompletionStatus::Cancelled,
        CompletionStatus::Refused,
        FLUSHED,
    ];
    for status in strange {
        let bed = ready();
        bed.net.complete_next_with(Filter::any().skip(1), status);
        for block in 0..3 {
            bed.write(L0, u64::from(block), block..block + 1);
        }
        drain(&bed.net);
        assert_eq!(bed.completions(), [(0, OK), (1, status), (2, OK)]);
        assert_eq!(bed.landed(), [0, 1, 2], "it landed all the same");
        assert_eq!(bed.count(FaultKind::CompleteWith), 1);
    }
}

#[test]
fn an_early_completion_proves_nothing() {
    let bed = ready();
    bed.net.inject(Fault::AckEarly, Filter::any());
    bed.net.hold_writes(Filter::any());
    bed.write(L0, 1, 0..8);
    drain(&bed.net);
    assert_eq!(bed.completions(), [(1, OK)]);
    assert_eq!(bed.landed(), [0; 0]);
    bed.net.release_writes();
    drain(&bed.net);
    assert_eq!(bed.landed().len(), 8);
    assert!(bed.a.take().is_empty(), "completed once");
    assert_eq!(bed.count(FaultKind::AckEarly), 1);
}
