//! The same seed and the same calls give the same events.

use super::*;
use crate::transport::TransportError;

fn every_fault() -> Vec<(Fault, Filter)> {
    let error = TransportError::System { what: "test", why: "chance".into() };
    let fail = |call| Fault::FailCall(call, error.clone());
    let faults = [
        Fault::DropControl,
        Fault::DuplicateControl,
        Fault::DelayControl(MILLI),
        Fault::HoldControl,
        Fault::HoldWrite,
        Fault::DropWrite,
        Fault::DuplicateWrite,
        Fault::DelayWrite(MILLI),
        Fault::ReorderWithinLane(MILLI),
        Fault::CorruptBlock,
        Fault::SwapBlocks,
        Fault::DelayVisibility(MILLI),
        Fault::CompleteWith(CompletionStatus::Unknown(7)),
        Fault::AckEarly,
        fail(CallKind::SendControl),
        fail(CallKind::Connect),
        fail(CallKind::PrepareLane),
        fail(CallKind::StartLane),
    ];
    faults.map(|fault| (fault, Filter::any().chance(0.1))).into()
}

/// A wild run; what both ends heard, what happened, and how often.
fn wild(seed: u64, confined: bool) -> (Vec<String>, Vec<String>, SimStats) {
    let config = SimConfig { confined, ..SimConfig::seeded(seed) };
    let bed = Bed::ready(config);
    for (fault, filter) in every_fault() {
        bed.net.inject(fault, filter);
    }
    for round in 0..20u64 {
        let lane = if round % 2 == 0 { L0 } else { L1 };
        bed.write(lane, round * 10, (round % 6) as u32..(round % 6) as u32 + 2);
        bed.marker(lane, round * 10 + 1);
        let _ = bed.a.transport.send_control(bed.la, &round.to_le_bytes());
        let _ = bed.b.transport.send_control(bed.lb, &round.to_le_bytes());
        let _ = bed.a.transport.connect("b", MILLI);
        let fresh = LaneId { index: 2, epoch: 200 + round };
        if let Ok(params) = bed.b.transport.prepare_lane(bed.lb, fresh, LaneRole::Reader) {
            let _ = bed.a.transport.prepare_lane(bed.la, fresh, LaneRole::Writer);
            let writer = LaneRole::Writer;
            let _ = bed.a.transport.start_lane(bed.la, fresh, writer, &params, MILLI);
        }
        match round {
            5 => bed.a.transport.cancel(T),
            8 => assert!(bed.net.pause("b")),
            10 => assert!(bed.net.resume("b")),
            12 => bed.a.transport.kill_lane(bed.la, L0),
            13 => bed.b.transport.fence_lane(bed.lb, L1),
            15 => bed.net.release_writes(),
            16 => drop(bed.net.cut(&Filter::any().link(bed.la))),
            17 => bed.b.transport.close_landing(T),
            18 => assert!(bed.net.crash("a")),
            _ => {}
        }
        bed.net.advance(Duration::from_micros(30));
    }
    drain(&bed.net);
    let mut heard = bed.a.text();
    heard.extend(bed.b.text());
    (heard, bed.net.trace(), bed.net.stats())
}

#[test]
fn a_seed_reproduces_a_wild_run() {
    for confined in [true, false] {
        let first = wild(1, confined);
        assert_eq!(first, wild(1, confined));
        assert_ne!(first.1, wild(2, confined).1, "another seed is another run");
    }
}

#[test]
fn the_wild_runs_reach_every_fault() {
    let runs: Vec<_> =
        (0..40).flat_map(|seed| [true, false].map(|confined| wild(seed, confined).2)).collect();
    for kind in FaultKind::ALL {
        assert!(runs.iter().any(|stats| stats.count(kind) > 0), "{kind:?}");
    }
}

#[test]
fn a_rough_network_keeps_its_promises() {
    for seed in 0..200 {
        let bed = Bed::ready(SimConfig::rough(seed));
        for block in 0..8 {
            bed.write([L0, L1][block as usize % 2], u64::from(block), block..block + 1);
        }
        bed.marker(L0, 8);
        bed.marker(L1, 9);
        let markers = |bed: &Bed| bed.b.log.lock().unwrap().len() == 2;
        bed.step_until(markers);
        assert_eq!(bed.landed().len(), 8, "seed {seed}");
        assert!(bed.digests_agree());
        drain(&bed.net);
        let mut done = bed.completions();
        done.sort_by_key(|done| done.0);
        assert_eq!(done, (0..10).map(|n| (n, OK)).collect::<Vec<_>>());
    }
}

#[test]
fn the_trace_tells_what_happened_and_keeps_its_length() {
    let net = SimNet::new(SimConfig { trace_len: 3, ..SimConfig::seeded(1) });
    let (a, _b) = (Node::new(&net, "a"), Node::new(&net, "b"));
    let link = a.transport.connect("b", SECOND).unwrap();
    drain(&net);
    a.transport.send_control(link, b"hello").unwrap();
    drain(&net);
    let trace = net.trace();
    assert_eq!(trace.len(), 3);
    assert!(trace[2].contains("b <- control of 5 bytes"), "{trace:?}");
    assert!(trace[2].contains(" ns "));
}
