//! A network that isn't confined: what only fences and digests are worth there.

use super::*;
use crate::transport::Capabilities;

fn config() -> SimConfig {
    SimConfig { confined: false, ..SimConfig::seeded(8) }
}

fn closed_with(bed: &Bed) -> Option<u64> {
    let bytes = |event| match event {
        Event::LandingClosed { landed_bytes, .. } => Some(landed_bytes),
        _ => None,
    };
    bed.b.take().into_iter().find_map(bytes)
}

#[test]
fn it_says_so() {
    let bed = Bed::new(config());
    let all = Capabilities::all();
    assert_eq!(bed.a.transport.capabilities(), all - Capabilities::CONFINED);
    assert_eq!(Bed::new(SimConfig::seeded(8)).a.transport.capabilities(), all);
}

#[test]
fn a_good_transfer_is_digested_at_its_close() {
    let bed = Bed::ready(config());
    bed.write(L0, 1, 0..4);
    bed.write(L1, 2, 4..8);
    drain(&bed.net);
    assert_eq!(bed.landed().len(), 8);
    assert!(bed.received.snapshot().iter().flatten().all(|&sum| sum == 0), "not before");
    bed.b.transport.close_landing(T);
    bed.b.transport.close_landing(T);
    drain(&bed.net);
    assert!(bed.digests_agree());
    assert_eq!(closed_with(&bed), Some(8 * u64::from(PAGE_LEN)));
    assert_eq!(closed_with(&bed), None);
}

#[test]
fn a_write_lands_after_the_close_and_after_the_forget() {
    for forget in [false, true] {
        let bed = Bed::ready(config());
        bed.net.hold_writes(Filter::any());
        bed.write(L0, 1, 0..8);
        drain(&bed.net);
        bed.b.transport.close_landing(T);
        if forget {
            bed.b.transport.forget_landing(T);
        }
        bed.net.release_writes();
        drain(&bed.net);
        assert_eq!(closed_with(&bed), Some(0));
        assert_eq!(bed.landed().len(), 8, "nobody asked the reader");
        assert!(!bed.digests_agree(), "what was in memory at the close is what was digested");
        assert_eq!(bed.completions(), [(1, OK)]);
    }
}

#[test]
fn only_the_fence_stops_it() {
    let bed = Bed::ready(config());
    bed.net.hold_writes(Filter::any());
    bed.write(L0, 1, 0..8);
    drain(&bed.net);
    bed.b.transport.fence_lane(bed.lb, L0);
    drain(&bed.net);
    bed.net.release_writes();
    drain(&bed.net);
    assert_eq!(bed.landed(), [0; 0]);
}

#[test]
fn a_stale_generation_lands() {
    let bed = Bed::ready(config());
    let stale = WriteRequest { generation: Generation(4), ..bed.request(1, 0..8) };
    bed.a.transport.post_write(bed.la, L0, stale);
    drain(&bed.net);
    assert_eq!(bed.landed().len(), 8);
}

#[test]
fn a_write_that_lands_twice_goes_unnoticed_and_counts_once() {
    let bed = Bed::ready(config());
    bed.net.inject(Fault::DuplicateWrite, Filter::any());
    bed.write(L0, 1, 0..8);
    drain(&bed.net);
    assert_eq!(bed.completions(), [(1, OK)]);
    assert!(bed.b.take().is_empty());
    assert_eq!(bed.count(FaultKind::DuplicateWrite), 1);
    bed.b.transport.close_landing(T);
    drain(&bed.net);
    assert_eq!(closed_with(&bed), Some(8 * u64::from(PAGE_LEN)));
}

#[test]
fn an_address_that_was_never_given_breaks_the_lane() {
    let bed = Bed::ready(config());
    let wild = WriteRequest { transfer: U, ..bed.request(1, 0..1) };
    bed.a.transport.post_write(bed.la, L0, wild);
    drain(&bed.net);
    assert!(matches!(bed.b.take()[..], [Event::LaneDown { .. }]), "the NIC names no transfer");
    assert!(matches!(
        bed.a.take()[..],
        [Event::WriteDone { status: CompletionStatus::Refused, .. }, Event::LaneDown { .. }]
    ));
}

#[test]
fn nics_go_on_without_their_processes() {
    let bed = Bed::ready(config());
    bed.net.pause("b");
    bed.write(L0, 1, 0..8);
    bed.net.pause("a");
    bed.marker(L0, 2);
    drain(&bed.net);
    assert_eq!(bed.landed().len(), 8);
    assert!(bed.a.take().is_empty() && bed.b.take().is_empty());
    bed.net.resume("a");
    bed.net.resume("b");
    drain(&bed.net);
    assert_eq!(bed.completions(), [(1, OK), (2, OK)]);
    assert!(matches!(bed.b.take()[..], [Event::MarkerSeen { .. }]));
}

#[test]
fn a_writers_kill_is_not_seen_by_the_reader() {
    let bed = Bed::ready(SimConfig { late_landing: 1.0, ..config() });
    bed.net.hold_writes(Filter::any());
    bed.write(L0, 1, 0..8);
    drain(&bed.net);
    bed.a.transport.kill_lane(bed.la, L0);
    bed.net.release_writes();
    drain(&bed.net);
    assert!(bed.b.take().is_empty());
    assert_eq!(bed.landed().len(), 8);
}

#[test]
fn the_memory_of_a_forgotten_landing_is_let_go_with_the_last_lane() {
    let mut bed = Bed::ready(config());
    bed.b.transport.close_landing(T);
    bed.b.transport.forget_landing(T);
    let of_net = {
        let other = pool();
        std::mem::replace(&mut bed.target, placement(&other, &[0])).map().block_count()
    };
    assert_eq!(of_net, 8);
    assert_eq!(bed.b.memory.pins(), 1, "a lane could still write it");
    bed.b.transport.fence_lane(bed.lb, L0);
    drain(&bed.net);
    assert_eq!(bed.b.memory.pins(), 1);
    bed.b.transport.fence_lane(bed.lb, L1);
    drain(&bed.net);
    assert_eq!(bed.b.memory.pins(), 0);
}

#[test]
fn unland_counts_blocks_out_and_in_again() {
    let bed = Bed::ready(config());
    bed.write(L0, 1, 0..8);
    drain(&bed.net);
    bed.b.transport.fence_lane(bed.lb, L0);
    drain(&bed.net);
    bed.b.transport.unland(T, L0);
    let again = WriteRequest { digests: None, ..bed.request(2, 0..8) };
    bed.a.transport.post_write(bed.la, L1, again);
    drain(&bed.net);
    bed.b.transport.close_landing(T);
    drain(&bed.net);
    assert_eq!(closed_with(&bed), Some(8 * u64::from(PAGE_LEN)));
    assert!(bed.digests_agree());
}
