//! What a transport promises: completions, fences and landings.

use super::*;
use crate::transport::LandingError;

#[test]
fn after_a_fence_nothing_lands() {
    let bed = in_flight(SimConfig::seeded(6));
    bed.b.transport.fence_lane(bed.lb, L0);
    drain(&bed.net);
    assert!(matches!(bed.b.take()[..], [Event::LaneFenced { .. }]));
    release(&bed);
    assert_eq!(bed.landed(), [0; 0]);
    assert!(bed.b.take().is_empty(), "not even a marker");
    assert_eq!(bed.count(FaultKind::FencedInFlight), 2);
    let flushed = bed.a.take();
    assert!(matches!(
        flushed[..],
        [
            Event::WriteDone { status: FLUSHED, .. },
            Event::WriteDone { status: FLUSHED, .. },
            Event::LaneDown { .. }
        ]
    ));
}

#[test]
fn between_the_call_and_the_event_a_write_may_land_and_after_it_none() {
    let (mut landed_before, mut stopped) = (0, 0);
    for seed in 0..200 {
        let bed = Bed::ready(SimConfig::seeded(seed));
        bed.write(L0, 1, 0..1);
        bed.net.advance(Duration::from_micros(20));
        bed.b.transport.fence_lane(bed.lb, L0);
        bed.step_until(|bed| !bed.b.log.lock().unwrap().is_empty());
        let before = page(&bed.b.memory, 0, 7);
        drain(&bed.net);
        assert_eq!(page(&bed.b.memory, 0, 7), before, "seed {seed}");
        match before == page(&bed.a.memory, 0, 0) {
            true => landed_before += 1,
            false => stopped += 1,
        }
    }
    assert!(landed_before > 20 && stopped > 20, "{landed_before} {stopped}");
}

#[test]
fn a_fence_can_stop_a_write_half_way_and_its_landing_closes() {
    let torn = (0..400).any(|seed| {
        let bed = Bed::ready(SimConfig::seeded(seed));
        bed.write(L0, 1, 0..1);
        bed.b.transport.fence_lane(bed.lb, L0);
        bed.b.transport.close_landing(T);
        drain(&bed.net);
        let closed = |event: &&Event| matches!(event, Event::LandingClosed { .. });
        assert_eq!(bed.b.take().iter().filter(closed).count(), 1, "seed {seed}");
        let bytes = page(&bed.b.memory, 0, 7);
        bytes[0] != bytes[bytes.len() - 1]
    });
    assert!(!torn, "a landing that is closed first lets nothing begin");

    let torn = (0..400).filter(|&seed| {
        let bed = Bed::ready(SimConfig::seeded(seed));
        bed.write(L0, 1, 0..1);
        bed.net.advance(Duration::from_micros(seed % 60));
        bed.b.transport.fence_lane(bed.lb, L0);
        bed.step_until(|bed| !bed.b.log.lock().unwrap().is_empty());
        bed.b.transport.close_landing(T);
        drain(&bed.net);
        let bytes = page(&bed.b.memory, 0, 7);
        let torn = bytes[0] != bytes[bytes.len() - 1];
        let heard = bed.b.take();
        if torn {
            let none = matches!(heard.last(), Some(Event::LandingClosed { landed_bytes: 0, .. }));
            assert!(none, "half a block counts for nothing: {heard:?}");
        }
        torn
    });
    assert!(torn.count() > 0);
}

#[test]
fn a_close_waits_for_what_is_landing() {
    let mut waited = 0;
    for seed in 0..200 {
        let bed = Bed::ready(SimConfig::seeded(seed));
        bed.write(L0, 1, 0..8);
        let first = |bed: &Bed| page(&bed.b.memory, 0, 7)[0] == 1;
        bed.step_until(first);
        let half = page(&bed.b.memory, 0, 7)[PAGE_LEN as usize - 1] != 1;
        bed.b.transport.close_landing(T);
        bed.b.transport.close_landing(T);
        bed.step_until(|bed| !bed.b.log.lock().unwrap().is_empty());
        assert_eq!(bed.landed().len(), 8, "closed means that no byte comes any more");
        assert!(bed.digests_agree());
        drain(&bed.net);
        assert_eq!(bed.b.take().len(), 1);
        waited += usize::from(half);
    }
    assert!(waited > 100);
}

#[test]
fn what_comes_after_a_close_is_thrown_away_and_its_marker_reported() {
    let bed = in_flight(SimConfig::seeded(6));
    bed.b.transport.close_landing(T);
    drain(&bed.net);
    assert!(matches!(bed.b.take()[..], [Event::LandingClosed { landed_bytes: 0, .. }]));
    release(&bed);
    assert_eq!(bed.landed(), [0; 0]);
    assert_eq!(bed.completions(), [(1, OK), (2, OK)], "a success that proves nothing");
    assert!(matches!(bed.b.take()[..], [Event::MarkerSeen { .. }]));
}

#[test]
fn what_comes_after_a_forget_is_a_violation() {
    let bed = in_flight(SimConfig::seeded(6));
    bed.b.transport.close_landing(T);
    bed.b.transport.forget_landing(T);
    release(&bed);
    assert_eq!(bed.landed(), [0; 0]);
    let heard = bed.b.take();
    assert!(
        matches!(
            heard[..],
            [
                Event::LandingClosed { .. },
                Event::WriteRefused { why: LandingError::UnknownTransfer, .. },
                Event::LaneDown { .. }
            ]
        ),
        "{heard:?}"
    );
    let heard = bed.a.take();
    let statuses: Vec<_> = heard
        .iter()
        .filter_map(|event| match event {
            Event::WriteDone { status, .. } => Some(*status),
            _ => None,
        })
        .collect();
    assert_eq!(statuses, [CompletionStatus::Refused, FLUSHED], "and nothing behind it is read");
}

#[test]
fn an_unknown_landing_is_closed() {
    let bed = Bed::ready(SimConfig::seeded(6));
    bed.b.transport.close_landing(U);
    drain(&bed.net);
    assert!(matches!(bed.b.take()[..], [Event::LandingClosed { transfer: U, landed_bytes: 0 }]));
}

#[test]
fn a_stale_generation_and_a_wild_block_are_refused() {
    let bed = Bed::ready(SimConfig::seeded(6));
    let stale = WriteRequest { generation: Generation(4), ..bed.request(1, 0..1) };
    bed.a.transport.post_write(bed.la, L0, stale);
    bed.a.transport.post_write(bed.la, L1, bed.request(2, 7..9));
    drain(&bed.net);
    let why: Vec<_> = bed
        .b
        .take()
        .into_iter()
        .filter_map(|event| match event {
            Event::WriteRefused { lane, why, .. } => Some((lane, why)),
            _ => None,
        })
        .collect();
    let stale = LandingError::StaleGeneration { stated: Generation(4), granted: GENERATION };
    assert!(why.contains(&(L0, stale)), "{why:?}");
    assert!(why.contains(&(L1, LandingError::OutsideGrant { first: 7, end: 9, count: 8 })));
    assert_eq!(bed.landed(), [0; 0]);
}

#[test]
fn cancel_takes_what_has_not_begun_and_no_markers() {
    let mut counts = [0; 2];
    for seed in 0..100 {
        let bed = Bed::ready(SimConfig::seeded(seed));
        let other = WriteRequest { transfer: U, ..bed.request(90, 0..1) };
        for block in 0..4 {
            bed.write(L0, u64::from(block), block..block + 1);
        }
        bed.marker(L0, 80);
        bed.a.transport.post_write(bed.la, L1, other);
        bed.net.advance(Duration::from_micros(25));
        bed.a.transport.cancel(T);
        drain(&bed.net);
        let mut done: Vec<_> = bed
            .a
            .take()
            .into_iter()
            .filter_map(|event| match event {
                Event::WriteDone { ticket, status, .. } => Some((ticket.0, status)),
                _ => None,
            })
            .collect();
        done.sort_by_key(|done| done.0);
        assert_eq!(done.len(), 6, "seed {seed}: one each");
        assert_eq!(done[4], (80, OK));
        assert_ne!(done[5].1, CompletionStatus::Cancelled, "another transfer's");
        let landed = bed.landed();
        for &(ticket, status) in &done[..4] {
            assert_eq!(status == OK, landed.contains(&(ticket as u32)), "seed {seed}");
            counts[usize::from(status == CompletionStatus::Cancelled)] += 1;
        }
    }
    assert!(counts[0] > 50 && counts[1] > 50, "{counts:?}");
}

#[test]
fn requests_on_what_is_gone_complete_as_flushed() {
    let bed = Bed::new(SimConfig::seeded(6));
    bed.write(L0, 1, 0..1);
    bed.a.transport.post_write(LinkId(999), L0, bed.request(2, 0..1));
    bed.a.transport.post_marker(bed.lb, L0, T, Round(0), Ticket(3));
    drain(&bed.net);
    assert_eq!(bed.completions(), [(1, FLUSHED), (2, FLUSHED), (3, FLUSHED)]);
}

#[test]
fn unland_lets_a_fenced_lanes_blocks_be_written_again() {
    let bed = Bed::ready(SimConfig::seeded(6));
    bed.write(L0, 1, 0..4);
    bed.write(L1, 2, 4..8);
    drain(&bed.net);
    bed.b.transport.fence_lane(bed.lb, L0);
    drain(&bed.net);
    bed.b.transport.unland(T, L0);
    let again = WriteRequest { digests: None, ..bed.request(3, 0..4) };
    bed.a.transport.post_write(bed.la, L1, again);
    drain(&bed.net);
    bed.b.transport.close_landing(T);
    drain(&bed.net);
    let heard = bed.b.take();
    assert!(
        matches!(heard.last(), Some(Event::LandingClosed { landed_bytes, .. })
            if *landed_bytes == 8 * u64::from(PAGE_LEN)),
        "{heard:?}"
    );
    assert!(bed.digests_agree());
}
