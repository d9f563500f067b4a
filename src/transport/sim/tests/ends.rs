//! Lanes, links and endpoints that end with writes in flight.

use super::*;

#[test]
fn a_killed_lane_flushes_and_its_writes_may_still_land() {
    for lands in [true, false] {
        let bed = in_flight(certain_late(f64::from(u8::from(lands))));
        bed.a.transport.kill_lane(bed.la, L0);
        bed.a.transport.kill_lane(bed.la, L0);
        drain(&bed.net);
        let heard = bed.a.take();
        assert!(
            matches!(
                heard[..],
                [
                    Event::WriteDone { status: FLUSHED, .. },
                    Event::WriteDone { status: FLUSHED, .. },
                    Event::LaneDown { role: LaneRole::Writer, .. }
                ]
            ),
            "{heard:?}"
        );
        assert!(matches!(bed.b.take()[..], [Event::LaneDown { role: LaneRole::Reader, .. }]));
        release(&bed);
        assert_eq!(!bed.landed().is_empty(), lands, "a flush error is not a proof");
        assert_eq!(bed.count(FaultKind::LateLanding) > 0, lands);
        assert!(bed.a.take().is_empty(), "completed once");
        assert!(bed.b.take().is_empty(), "after LaneDown no marker is reported");
    }
}

#[test]
fn only_a_fence_stops_what_a_killed_lane_left_behind() {
    let bed = in_flight(certain_late(1.0));
    bed.a.transport.kill_lane(bed.la, L0);
    drain(&bed.net);
    bed.b.transport.fence_lane(bed.lb, L0);
    drain(&bed.net);
    release(&bed);
    assert_eq!(bed.landed(), [0; 0]);
}

#[test]
fn a_killed_lane_sends_no_more() {
    let bed = Bed::ready(certain_late(1.0));
    bed.net.pause("a");
    bed.write(L0, 1, 0..8);
    drain(&bed.net);
    bed.a.transport.kill_lane(bed.la, L0);
    bed.net.resume("a");
    drain(&bed.net);
    assert_eq!(bed.landed(), [0; 0], "it had not left");
}

#[test]
fn what_was_lost_takes_all_behind_it_along() {
    for seed in 0..100 {
        let bed = Bed::ready(SimConfig::seeded(seed));
        bed.net.hold_writes(Filter::any());
        for block in 0..8 {
            bed.write(L0, u64::from(block), block..block + 1);
        }
        drain(&bed.net);
        bed.net.cut(&Filter::any());
        release(&bed);
        let landed = bed.landed();
        assert_eq!(landed, (0..landed.len() as u32).collect::<Vec<_>>(), "seed {seed}");
    }
}

#[test]
fn a_cut_link_flushes_and_late_writes_land_until_the_fence() {
    let bed = in_flight(certain_late(1.0));
    bed.net.cut(&Filter::any());
    drain(&bed.net);
    let heard = bed.a.take();
    assert!(
        matches!(
            heard[..],
            [
                Event::WriteDone { status: FLUSHED, .. },
                Event::WriteDone { status: FLUSHED, .. },
                Event::LaneDown { lane: L0, .. },
                Event::LaneDown { lane: L1, .. },
                Event::LinkDown { .. }
            ]
        ),
        "{heard:?}"
    );
    assert_eq!(bed.b.take().len(), 3);
    release(&bed);
    assert_eq!(bed.landed().len(), 8);
}

#[test]
fn a_crashed_writers_writes_land_unless_fenced() {
    for fenced in [false, true] {
        let bed = in_flight(certain_late(0.0));
        bed.write(L1, 3, 0..1);
        bed.net.crash("a");
        drain(&bed.net);
        assert!(bed.b.take().is_empty(), "nobody says goodbye");
        if fenced {
            bed.b.transport.fence_lane(bed.lb, L0);
            drain(&bed.net);
        }
        release(&bed);
        assert_eq!(bed.landed().len(), if fenced { 0 } else { 8 });
        assert!(bed.a.take().is_empty());
    }
}

#[test]
fn a_crashed_reader_fails_the_writer_in_the_end() {
    let bed = Bed::ready(SimConfig::seeded(6));
    bed.net.crash("b");
    let before = bed.net.now();
    bed.write(L0, 1, 0..8);
    bed.marker(L0, 2);
    drain(&bed.net);
    let heard = bed.a.take();
    assert!(
        matches!(
            heard[..],
            [
                Event::WriteDone { status: FLUSHED, .. },
                Event::WriteDone { status: FLUSHED, .. },
                Event::LaneDown { .. }
            ]
        ),
        "{heard:?}"
    );
    assert!(bed.net.now() >= before.after(SimConfig::default().retry_timeout));
    assert_eq!(bed.landed(), [0; 0]);
}

#[test]
fn a_paused_writers_writes_land_if_they_had_left() {
    let bed = in_flight(SimConfig::seeded(6));
    bed.net.pause("a");
    bed.write(L1, 3, 0..1);
    release(&bed);
    assert_eq!(bed.landed().len(), 8);
    assert!(bed.a.take().is_empty(), "and it doesn't hear of it");
    bed.b.transport.close_landing(T);
    bed.net.resume("a");
    drain(&bed.net);
    let mut done = bed.completions();
    done.sort_by_key(|done| done.0);
    assert_eq!(done, [(1, OK), (2, OK), (3, OK)], "what hadn't left left then");
}

#[test]
fn a_paused_confined_reader_lands_nothing_until_it_resumes() {
    let bed = Bed::ready(SimConfig::seeded(6));
    bed.net.pause("b");
    bed.write(L0, 1, 0..4);
    bed.write(L0, 2, 4..8);
    bed.marker(L0, 3);
    drain(&bed.net);
    assert_eq!(bed.landed(), [0; 0]);
    bed.net.resume("b");
    drain(&bed.net);
    assert_eq!(bed.landed().len(), 8);
    assert_eq!(bed.completions(), [(1, OK), (2, OK), (3, OK)]);
}

#[test]
fn a_shut_down_reader_lands_nothing_and_a_shut_down_writer_flushes() {
    let bed = in_flight(certain_late(1.0));
    bed.b.transport.shutdown();
    release(&bed);
    assert_eq!(bed.landed(), [0; 0]);
    let bed = in_flight(certain_late(0.0));
    bed.a.transport.shutdown();
    drain(&bed.net);
    let done = |event: &&Event| matches!(event, Event::WriteDone { status: FLUSHED, .. });
    assert_eq!(bed.a.take().iter().filter(done).count(), 2);
}

#[test]
fn nothing_is_acknowledged_over_a_cut_link() {
    for seed in 0..50 {
        let bed = in_flight(SimConfig { late_landing: 1.0, ..SimConfig::seeded(seed) });
        bed.net.cut(&Filter::any());
        release(&bed);
        assert_eq!(bed.landed().len(), 8);
        let success = |event: &Event| matches!(event, Event::WriteDone { status: OK, .. });
        assert!(!bed.a.take().iter().any(success), "seed {seed}");
    }
}

#[test]
fn what_had_not_left_dies_with_its_writer() {
    for confined in [true, false] {
        let bed = Bed::ready(SimConfig { confined, ..SimConfig::seeded(6) });
        bed.write(L0, 1, 0..8);
        bed.net.crash("a");
        drain(&bed.net);
        assert_eq!(bed.landed(), [0; 0]);
    }
}

#[test]
fn a_release_lands_nothing_at_a_paused_confined_reader() {
    let bed = in_flight(SimConfig::seeded(6));
    bed.net.pause("b");
    release(&bed);
    assert_eq!(bed.landed(), [0; 0]);
    bed.net.resume("b");
    drain(&bed.net);
    assert_eq!(bed.landed().len(), 8);
    assert_eq!(bed.completions(), [(1, OK), (2, OK)]);
}
