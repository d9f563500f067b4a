//! How lanes join and end.

use super::*;
use crate::transport::TransportError;

fn bed() -> Bed {
    Bed::new(SimConfig::seeded(2))
}

#[test]
fn the_reader_is_up_before_the_writer() {
    for seed in 0..50 {
        let bed = Bed::new(SimConfig::seeded(seed));
        let (a, b) = (&bed.a.transport, &bed.b.transport);
        let of_b = b.prepare_lane(bed.lb, L0, LaneRole::Reader).unwrap();
        let of_a = a.prepare_lane(bed.la, L0, LaneRole::Writer).unwrap();
        b.start_lane(bed.lb, L0, LaneRole::Reader, &of_a, SECOND).unwrap();
        a.start_lane(bed.la, L0, LaneRole::Writer, &of_b, SECOND).unwrap();
        bed.step_until(|bed| !bed.a.log.lock().unwrap().is_empty());
        assert!(matches!(bed.b.take()[..], [Event::LaneUp { role: LaneRole::Reader, .. }]));
    }
}

#[test]
fn the_same_lane_id_may_run_both_ways() {
    let bed = Bed::ready(SimConfig::seeded(2));
    let (a, b) = (&bed.a.transport, &bed.b.transport);
    let of_a = a.prepare_lane(bed.la, L0, LaneRole::Reader).unwrap();
    let of_b = b.prepare_lane(bed.lb, L0, LaneRole::Writer).unwrap();
    a.start_lane(bed.la, L0, LaneRole::Reader, &of_b, SECOND).unwrap();
    b.start_lane(bed.lb, L0, LaneRole::Writer, &of_a, SECOND).unwrap();
    drain(&bed.net);
    assert!(matches!(bed.b.take()[..], [Event::LaneUp { role: LaneRole::Writer, .. }]));
    a.fence_lane(bed.la, L0);
    drain(&bed.net);
    bed.a.take();
    bed.write(L0, 1, 0..8);
    drain(&bed.net);
    assert_eq!(bed.completions(), [(1, OK)], "the other direction has nothing to do with it");
}

#[test]
fn mixed_up_parameters_and_orders_are_refused() {
    let bed = bed();
    let (a, b) = (&bed.a.transport, &bed.b.transport);
    let of_b = b.prepare_lane(bed.lb, L0, LaneRole::Reader).unwrap();
    let of_b1 = b.prepare_lane(bed.lb, L1, LaneRole::Reader).unwrap();
    let writer = LaneRole::Writer;
    let start = |params: &[u8]| a.start_lane(bed.la, L0, writer, params, SECOND);
    assert_eq!(start(&of_b), Err(TransportError::NoLane(L0)), "not prepared");
    let of_a = a.prepare_lane(bed.la, L0, writer).unwrap();
    for wrong in [&of_b1[..], &of_a[..], &[]] {
        assert!(matches!(start(wrong), Err(TransportError::LaneParams(_))));
    }
    start(&of_b).unwrap();
    assert_eq!(start(&of_b), Err(TransportError::NoLane(L0)), "started before");
    let again = b.prepare_lane(bed.lb, L0, LaneRole::Reader);
    assert_eq!(again, Err(TransportError::NoLane(L0)), "an epoch is never used twice");
}

#[test]
fn a_half_that_is_alone_times_out() {
    let bed = bed();
    let of_b = bed.b.transport.prepare_lane(bed.lb, L0, LaneRole::Reader).unwrap();
    bed.a.transport.prepare_lane(bed.la, L0, LaneRole::Writer).unwrap();
    bed.a.transport.start_lane(bed.la, L0, LaneRole::Writer, &of_b, MILLI).unwrap();
    drain(&bed.net);
    assert!(matches!(bed.a.take()[..], [Event::LaneDown { role: LaneRole::Writer, .. }]));
    assert!(bed.net.now() >= crate::protocol::Time(0).after(MILLI));
    assert!(bed.b.take().is_empty(), "it was prepared and not started");
}

#[test]
fn no_timer_is_left_once_lanes_and_links_are_up() {
    let bed = Bed::ready(SimConfig::seeded(2));
    assert_eq!(bed.net.next_delivery(), None);
}

#[test]
fn a_fence_answers_always_and_for_ever() {
    let bed = bed();
    let unknown = LinkId(999);
    bed.b.transport.fence_lane(unknown, L0);
    bed.b.transport.fence_lane(bed.lb, L0);
    bed.b.transport.fence_lane(bed.lb, L0);
    drain(&bed.net);
    let fenced = |link| format!("{:?}", Event::LaneFenced { link, lane: L0 });
    let mut heard = bed.b.text();
    heard.sort();
    let mut expected = [fenced(unknown), fenced(bed.lb), fenced(bed.lb)];
    expected.sort();
    assert_eq!(heard, expected);
    let prepared = bed.b.transport.prepare_lane(bed.lb, L0, LaneRole::Reader);
    assert_eq!(prepared, Err(TransportError::NoLane(L0)), "what was fenced never comes to be");
}

#[test]
fn a_fence_ends_the_writer_too() {
    let bed = Bed::ready(SimConfig::seeded(2));
    bed.b.transport.fence_lane(bed.lb, L0);
    drain(&bed.net);
    assert!(matches!(bed.b.take()[..], [Event::LaneFenced { lane: L0, .. }]));
    let heard = bed.a.take();
    assert!(
        matches!(heard[..], [Event::LaneDown { lane: L0, role: LaneRole::Writer, .. }]),
        "{heard:?}"
    );
    bed.write(L0, 1, 0..8);
    bed.write(L1, 2, 0..8);
    drain(&bed.net);
    assert_eq!(bed.completions(), [(1, FLUSHED), (2, OK)]);
}

#[test]
fn a_link_takes_its_lanes_down_at_both_ends() {
    let bed = Bed::ready(SimConfig::seeded(2));
    bed.b.transport.fence_lane(bed.lb, L1);
    drain(&bed.net);
    bed.a.take();
    bed.b.take();
    bed.net.cut(&Filter::any());
    drain(&bed.net);
    for node in [&bed.a, &bed.b] {
        let heard = node.take();
        assert!(
            matches!(heard[..], [Event::LaneDown { lane: L0, .. }, Event::LinkDown { .. }]),
            "{heard:?}"
        );
    }
    bed.b.transport.fence_lane(bed.lb, L0);
    drain(&bed.net);
    assert!(matches!(bed.b.take()[..], [Event::LaneFenced { lane: L0, .. }]));
}
