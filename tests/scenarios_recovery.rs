//! Lanes break, links are cut, messages are lost, peers vanish: what can go on goes on, and what
//! can't ends with a cause. [I3] [I7] [I8]

mod common;

use std::time::Duration;

use common::bed::{BINDING, NodeSetup, assert_content, bytes_of, failed, outcome, sealed};
use common::duel::Duel;
use common::*;
use sealift::engine::Builder;
use sealift::protocol::{Cause, Class, Label, Message, Phase};
use sealift::transport::CompletionStatus;
use sealift::transport::sim::{Fault, FaultKind, Filter};

/// Many small writes: two blocks each, so that something is always in the middle.
fn small_writes(builder: Builder) -> Builder {
    quick(builder).configure(|config| config.sender.chunk_blocks = 2)
}

fn bed(fabric: &Fabric) -> Bed {
    let prefill = NodeSetup { tune: small_writes, ..NodeSetup::default() };
    Bed::with(fabric, Setup { prefill, ..Setup::default() })
}

/// A transfer of 12 pages goes through, whatever `trouble` is made in the middle of it.
#[track_caller]
fn survives(bed: Bed, trouble: impl Fn(&Bed)) {
    let label = Label::from(1);
    let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..12), GUARD);
    let receive = bed.receive(&label, 12);
    send.write(0, 0..4);
    eventually("a byte lands", || bed.decode.bytes().iter().any(|&byte| byte != MARK));
    trouble(&bed);
    send.write(0, 4..12);
    let sent = send.complete();
    let pages = sealed(receive);
    outcome(&sent).unwrap();
    assert_content(&pages.read().unwrap(), 0, 0..12);
    bed.decode.shape.assert_untouched_but(&bed.decode.region, pages.pages(0));
    drop(pages);
    bed.finish();
}

on_both! {
    fn a_lane_that_breaks_is_fenced_and_the_transfer_resumed(fabric) {
        for after in [0, 2] {
            let bed = bed(fabric);
            bed.route.break_lane(after);
            survives(bed, |_| {});
        }
    }

    fn a_lane_that_breaks_later_is_resumed_too(fabric) {
        survives(bed(fabric), |bed| bed.route.break_lane(1));
    }

    fn a_link_that_is_cut_comes_back_and_the_transfer_goes_on(fabric) {
        survives(bed(fabric), |bed| bed.route.cut());
    }

    fn a_link_that_is_cut_before_anything_was_said_comes_back(fabric) {
        let bed = bed(fabric);
        bed.route.cut();
        survives(bed, |_| {});
    }

    fn what_landed_over_a_lane_that_died_before_the_accept_is_written_again(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let first = duel.rogue.lanes(2);
        duel.rogue.write_blocks(first[0], &grant, 0, 3);
        let landed = || duel.bytes().iter().filter(|&&byte| byte != MARK).count();
        eventually("it landed", || landed() > 2 * ITEM as usize + ITEM as usize / 2);
        duel.rogue.kill_lane(first[0]);
        // The lane's successor is up, so it is fenced.
        eventually("another lane", || {
            let lanes = duel.rogue.lanes(1);
            lanes.len() == 2 && !lanes.contains(&first[0])
        });
        let bytes = bytes_of(4);
        duel.rogue.send(&Message::Accept { id: grant.id, bytes, lanes: first.clone() });
        let resume = duel.rogue.hear("a resume", |m| matches!(m, Message::Resume { .. }));
        let Message::Resume { dead, lanes, round, .. } = resume else { unreachable!() };
        assert_eq!(dead, [first[0]]);
        assert!(lanes.contains(&first[1]) && !lanes.contains(&first[0]));
        duel.rogue.write_blocks(first[1], &grant, 0, 8);
        for &lane in &lanes {
            duel.rogue.marker(lane, grant.id, round);
        }
        let manifest = duel.rogue.manifest(&grant, lanes);
        duel.rogue.send(&Message::Complete { id: grant.id, round, manifest });
        let pages = sealed(duel.receive);
        assert_content(&pages.read().unwrap(), 0, 0..4);
        drop(pages);
        duel.decode.assert_clean();
    }

    fn layers_are_sent_as_they_are_ready(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..6), GUARD);
        let receive = bed.receive(&label, 6);
        for plane in 0..PLANES {
            send.write_planes(0, plane..plane + 1, 0..3);
            let plane_bytes = |plane: u16| {
                let at = bed.decode.shape.at(plane, 0);
                let end = bed.decode.shape.at(plane, PAGES - 1);
                bed.decode.bytes()[at..end].iter().any(|&byte| byte != MARK)
            };
            eventually("this layer lands while the next isn't there", || plane_bytes(plane));
            assert!((plane + 1..PLANES).all(|later| !plane_bytes(later)));
        }
        assert!(!send.is_over());
        send.write_planes(0, 0..PLANES, 3..6);
        let sent = send.complete();
        let pages = sealed(receive);
        outcome(&sent).unwrap();
        assert_content(&pages.read().unwrap(), 0, 0..6);
        drop(pages);
        bed.finish();
    }

    fn a_peer_that_shuts_down_ends_its_transfers(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let Bed { prefill, decode, peer, route } = bed;
        let lease = decode.pool.reserve(4).unwrap();
        let source = sealift::engine::Source::pages(&prefill.pool, &common::bed::pages(0..4));
        let send = prefill.engine.send(label.clone(), BINDING, source, GUARD);
        send.write(0, 0..2);
        let receive = decode.engine.receive(&peer, label.clone(), BINDING, lease, GUARD);
        eventually("a byte lands", || decode.bytes().iter().any(|&byte| byte != MARK));
        let gone = prefill.engine.incarnation();
        drop(prefill);
        let theirs = outcome(&send.complete()).unwrap_err();
        assert_eq!((theirs.cause, theirs.bytes_total), (Cause::ShuttingDown {}, bytes_of(4)));
        let error = failed(receive);
        let expect = Expect {
            transfer: Some(decode.transfer(1)),
            label: label.clone(),
            peer: Some(gone),
            phase: Phase::Writing,
            done: 0..=bytes_of(2),
            total: bytes_of(4),
            cause: error.cause.clone(),
        };
        assert!(matches!(error.cause, Cause::ShuttingDown {} | Cause::PeerLost { .. }), "{error}");
        assert_eq!(error.class(), Class::Retry);
        assert_error(&error, expect);
        // A receive from it now fails at once.
        let lease = decode.pool.reserve(1).unwrap();
        let error = failed(decode.engine.receive(&peer, label, BINDING, lease, GUARD));
        assert!(matches!(error.cause, Cause::PeerLost { .. }), "{error}");
        assert_eq!(error.phase, Phase::Admission);
        decode.assert_clean();
        drop(route);
    }

    fn a_peer_that_falls_silent_is_given_up(fabric) {
        let rogue = Rogue::new(fabric, "rogue");
        let setup = NodeSetup { tune: common::bed::patient, ..NodeSetup::default() };
        let decode = Node::new(fabric, "decode", setup);
        let peer = decode.engine.connect(&rogue.address(), GUARD).unwrap();
        let lease = decode.pool.reserve(4).unwrap();
        let label = Label::from(1);
        let receive = decode.engine.receive(&peer, label.clone(), BINDING, lease, GUARD);
        let grant = rogue.grant();
        let lanes = rogue.accept(&grant);
        rogue.write_blocks(lanes[0], &grant, 0, 2);
        rogue.round_trip();
        rogue.go_mute();
        let error = failed(receive);
        let expect = Expect {
            transfer: Some(grant.id),
            label,
            peer: Some(rogue.incarnation()),
            phase: Phase::Writing,
            done: 0..=2 * u64::from(ITEM),
            total: bytes_of(4),
            cause: Cause::PeerLost { why: "silent for 2000 ms".into() },
        };
        assert_error(&error, expect);
        decode.assert_clean();
    }
}

/// The simulated network of a fabric.
fn net(fabric: &Fabric) -> &sealift::transport::sim::SimNet {
    match fabric {
        Fabric::Sim { net, .. } => net,
        Fabric::Tcp => unreachable!("this scenario is simulated"),
    }
}

#[test]
fn lost_doubled_and_overtaken_messages_are_said_again() {
    let fabric = Fabric::sim();
    let bed = bed(&fabric);
    let sometimes = |chance| Filter::any().chance(chance);
    let late = Duration::from_millis(20);
    let faults = [
        net(&fabric).inject(Fault::DropControl, sometimes(0.25)),
        net(&fabric).inject(Fault::DuplicateControl, sometimes(0.25)),
        net(&fabric).inject(Fault::DelayControl(late), sometimes(0.25)),
    ];
    for round in 1..=8 {
        let label = Label::from(round);
        let sent = bed.send(&label, 12);
        let pages = sealed(bed.receive(&label, 12));
        assert_content(&pages.read().unwrap(), 0, 0..12);
        outcome(&sent).unwrap();
        drop(pages);
        eventually("the pages are back", || bed.decode.is_free());
    }
    for round in 9..=12 {
        let label = Label::from(round);
        let source = bed.source(0..12);
        let send = bed.prefill.engine.send(label.clone(), BINDING, source, GUARD);
        send.write(0, 0..6);
        let receive = bed.receive(&label, 12);
        let sent = send.abort("preempted");
        let cause = Cause::AbortedBySender { why: "preempted".into() };
        assert_eq!(failed(receive).cause, cause);
        assert_eq!(outcome(&sent).unwrap_err().cause, cause);
        eventually("the pages are back", || bed.decode.is_free());
    }
    let stats = net(&fabric).stats();
    for kind in [FaultKind::DropControl, FaultKind::DuplicateControl, FaultKind::DelayControl] {
        assert!(stats.count(kind) > 5, "{kind:?} came {} times", stats.count(kind));
    }
    faults.into_iter().for_each(|fault| assert!(net(&fabric).withdraw(fault)));
    bed.finish();
}

#[test]
fn a_status_that_nobody_knows_is_a_failure_and_costs_a_lane() {
    for status in [CompletionStatus::Unknown(77), CompletionStatus::Refused] {
        let fabric = Fabric::sim();
        let bed = bed(&fabric);
        let filter = Filter::any().from("prefill").writes().skip(1);
        net(&fabric).complete_next_with(filter, status);
        survives(bed, |_| {});
        assert_eq!(net(&fabric).stats().count(FaultKind::CompleteWith), 1);
    }
}

#[test]
fn a_marker_that_fails_is_no_proof() {
    let fabric = Fabric::sim();
    let bed = bed(&fabric);
    let filter = Filter::any().from("prefill").markers();
    net(&fabric).complete_next_with(filter, CompletionStatus::Flushed);
    survives(bed, |_| {});
    assert_eq!(net(&fabric).stats().count(FaultKind::CompleteWith), 1);
}

#[test]
fn a_peer_that_crashes_is_given_up_and_its_late_writes_are_fenced_off() {
    let fabric = Fabric::sim();
    let bed = bed(&fabric);
    let label = Label::from(1);
    let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..4), GUARD);
    send.write(0, 0..2);
    let receive = bed.receive(&label, 4);
    eventually("a byte lands", || bed.decode.bytes().iter().any(|&byte| byte != MARK));
    assert!(net(&fabric).crash("prefill"));
    let error = failed(receive);
    let expect = bed.receiver_expects(&label, 1, bytes_of(4));
    let cause = error.cause.clone();
    assert!(matches!(cause, Cause::PeerLost { .. }), "{error}");
    let done = 0..=bytes_of(2);
    assert_error(&error, Expect { phase: Phase::Writing, done, cause, ..expect });
    bed.decode.assert_clean();
}
