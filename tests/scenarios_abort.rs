//! Abort is first, sticky and said aloud; no page comes back before its writes have ended.
//! [I2] [I3] [I5] [I9]

mod common;

use std::time::Duration;

use common::bed::{BINDING, assert_content, bytes_of, failed, outcome, sealed};
use common::duel::Duel;
use common::*;
use sealift::protocol::{BlockIndex, BlockRange, Cause, Label, Message, Phase, TransferError};

const SHORT: Duration = Duration::from_millis(200);

/// The error that the sender's application caused, at both ends.
#[track_caller]
fn assert_both(
    bed: &Bed,
    label: &Label,
    receiver: &TransferError,
    sender: &TransferError,
    cause: &Cause,
) {
    let total = bytes_of(4);
    let phase = receiver.phase;
    let expect = bed.receiver_expects(label, 1, total);
    assert_error(receiver, Expect { phase, cause: cause.clone(), done: 0..=total, ..expect });
    let phase = sender.phase;
    let expect = bed.sender_expects(label, 1, total);
    assert_error(sender, Expect { phase, cause: cause.clone(), done: 0..=total, ..expect });
}

on_both! {
    fn a_refusal_before_the_grant_answers_it_at_once(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        bed.prefill.engine.refuse(label.clone(), "the prompt is too long");
        let error = failed(bed.receive(&label, 4));
        let cause = Cause::Refused { why: "the prompt is too long".into() };
        let expect = bed.receiver_expects(&label, 1, bytes_of(4));
        assert_error(&error, Expect { cause, ..expect });
        bed.decode.assert_untouched();
        bed.finish();
    }

    fn a_refusal_after_the_grant_ends_it(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let request = bed.prefill.engine.announce(label.clone(), None, GUARD);
        let receive = bed.receive(&label, 4);
        // The grant is there: another that was sent after it has been served.
        bed.assert_works();
        request.refuse("rejected by the scheduler");
        let cause = Cause::Refused { why: "rejected by the scheduler".into() };
        let expect = bed.receiver_expects(&label, 1, bytes_of(4));
        assert_error(&failed(receive), Expect { cause: cause.clone(), ..expect });
        // And it goes on saying so.
        let expect = bed.receiver_expects(&label, 3, bytes_of(2));
        assert_error(&failed(bed.receive(&label, 2)), Expect { cause, ..expect });
    }

    fn a_dropped_request_is_refused(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        drop(bed.prefill.engine.announce(label.clone(), Some(&bed.decode_peer()), GUARD));
        let cause = Cause::Refused { why: "the request was dropped".into() };
        let expect = bed.receiver_expects(&label, 1, bytes_of(4));
        assert_error(&failed(bed.receive(&label, 4)), Expect { cause, ..expect });
        bed.finish();
    }

    fn a_sender_that_never_appears_ends_by_the_deadline(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let lease = bed.decode.pool.reserve(4).unwrap();
        let engine = &bed.decode.engine;
        let error = failed(engine.receive(&bed.peer, label.clone(), BINDING, lease, SHORT));
        assert_error(&error, bed.receiver_expects(&label, 1, bytes_of(4)));
        // A send that comes once both sides know finds nobody.
        eventually("the sender has answered", || bed.decode.is_free());
        let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..4), SHORT);
        send.write_all();
        let expect = bed.sender_expects(&label, 1, bytes_of(4));
        let expect = Expect { transfer: None, peer: None, ..expect };
        assert_error(&outcome(&send.complete()).unwrap_err(), expect);
        bed.decode.assert_untouched();
        bed.finish();
    }

    fn a_sender_that_stops_halfway_ends_by_the_deadline(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..4), GUARD);
        send.write(0, 0..1);
        let lease = bed.decode.pool.reserve(4).unwrap();
        let engine = &bed.decode.engine;
        let error = failed(engine.receive(&bed.peer, label.clone(), BINDING, lease, 2 * SHORT));
        assert_eq!(error.cause, Cause::DeadlineExceeded {});
        eventually("the sender knows", || send.is_over());
        let sent = send.complete();
        let theirs = outcome(&sent).unwrap_err();
        // Either its own timer, which is the grant's too, or the receiver's word.
        assert_both(&bed, &label, &error, &theirs, &Cause::DeadlineExceeded {});
        bed.finish();
    }

    fn a_dropped_send_is_heard_at_once(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..4), GUARD);
        send.write(0, 0..2);
        let receive = bed.receive(&label, 4);
        bed.assert_works();
        drop(send);
        let error = failed(receive);
        let cause = Cause::AbortedBySender { why: "the handle was dropped".into() };
        let expect = bed.receiver_expects(&label, 1, bytes_of(4));
        let done = 0..=bytes_of(2);
        assert_error(&error, Expect { phase: Phase::Writing, cause, done, ..expect });
        bed.finish();
    }

    fn an_aborted_send_fails_on_both_sides_and_frees_its_source(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..4), GUARD);
        send.write(0, 1..3);
        let receive = bed.receive(&label, 4);
        bed.assert_works();
        let sent = send.abort("prefill was preempted");
        let cause = Cause::AbortedBySender { why: "prefill was preempted".into() };
        let theirs = outcome(&sent).unwrap_err();
        assert_both(&bed, &label, &failed(receive), &theirs, &cause);
        bed.finish();
    }

    fn a_dropped_receive_gives_its_pages_back_only_when_the_sender_has_drained(fabric) {
        let mut duel = Duel::patient(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        duel.rogue.write_blocks(lanes[0], &grant, 0, 3);
        let other = duel.other_receive();
        let receive = std::mem::replace(&mut duel.receive, other);
        let second = duel.rogue.grant();
        drop(receive);
        let cause = Cause::AbortedByReceiver { why: "the handle was dropped".into() };
        assert_eq!(duel.rogue.aborted(grant.id), cause);
        // "Abort received" isn't "writes drained", and no timer makes it so.
        let held = || {
            let counts = duel.decode.pool.counts();
            (counts.quarantined, counts.granted)
        };
        duel.rogue.round_trip();
        assert_eq!(held(), (4, 1));
        // What is written now is thrown away.
        let before = duel.bytes();
        duel.rogue.write_blocks(lanes[1], &grant, 3, 5);
        duel.rogue.marker(lanes[1], grant.id, sealift::protocol::Round(0));
        duel.rogue.say_drained(&grant, cause.clone(), &lanes, false);
        duel.rogue.round_trip();
        assert_eq!(held(), (4, 1), "the marker of one lane is missing");
        assert!(before == duel.bytes(), "a byte landed after the abort");
        duel.rogue.marker(lanes[0], grant.id, sealift::protocol::Round(0));
        eventually("the pages are back", || held() == (0, 1));
        // It says so again, because its acknowledgement was lost, say.
        duel.rogue.say_drained(&grant, cause, &lanes, false);
        duel.rogue.send(&Message::Refuse { id: second.id, cause: Cause::EmptyTransfer {} });
        duel.decode.assert_clean();
    }

    fn a_silent_sender_is_fenced_and_its_pages_come_back(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        duel.rogue.write_blocks(lanes[0], &grant, 0, 3);
        duel.rogue.marker(lanes[0], grant.id, sealift::protocol::Round(0));
        duel.rogue.round_trip();
        duel.rogue.go_mute();
        duel.receive.abort();
        let cause = Cause::AbortedByReceiver { why: "cancelled by the caller".into() };
        let expect = duel.expects(Phase::Writing, 3 * u64::from(ITEM), cause);
        assert_error(&failed(duel.receive), expect);
        eventually("a fence gives the pages back", || duel.decode.is_free());
        // Its lanes are dead: what it still writes goes nowhere.
        let source = duel.rogue.placement(&grant);
        let range = [BlockRange { first: BlockIndex(4), count: 2 }];
        let before = duel.decode.bytes();
        duel.rogue.write(lanes[1], grant.id, grant.generation, &range, &source);
        assert!(before == duel.decode.bytes());
        duel.decode.assert_clean();
    }

    fn a_drain_that_needs_a_fence_gets_one(fabric) {
        let duel = Duel::patient(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        duel.receive.abort();
        duel.assert_quarantined();
        let cause = Cause::DeadlineExceeded {};
        duel.rogue.say_drained(&grant, cause, &lanes, true);
        eventually("the fences give the pages back", || duel.decode.is_free());
        duel.decode.assert_clean();
    }

    fn an_abort_after_the_seal_comes_too_late(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..4), GUARD);
        send.write(0, 0..1);
        let receive = bed.receive(&label, 4);
        // From the first byte on the sender needs no more words to complete.
        eventually("a byte lands", || bed.decode.bytes().iter().any(|&byte| byte != MARK));
        bed.route.hold_words();
        send.write(0, 1..4);
        let sent = send.complete();
        let pages = sealed(receive);
        sent.abort("changed my mind");
        bed.route.release_words();
        outcome(&sent).expect("the receiver decided before");
        assert_content(&pages.read().unwrap(), 0, 0..4);
        drop(pages);
        bed.finish();
    }

    fn the_first_completion_counts_and_only_once(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let manifest = duel.rogue.write_all(&grant);
        let mut other = manifest.clone();
        other.bytes -= 1;
        duel.rogue.complete(&grant, manifest);
        duel.rogue.complete(&grant, other);
        let pages = sealed(duel.receive);
        assert_content(&pages.read().unwrap(), 0, 0..4);
        drop(pages);
        duel.decode.assert_clean();
    }

    fn a_bad_completion_is_not_mended_by_a_good_one(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let manifest = duel.rogue.write_all(&grant);
        let mut short = manifest.clone();
        short.bytes -= 1;
        let (granted_bytes, covered_bytes) = (bytes_of(4), short.bytes);
        duel.rogue.complete(&grant, short);
        duel.rogue.complete(&grant, manifest);
        let cause = Cause::IncompleteCoverage { granted_bytes, covered_bytes };
        duel.fails(Phase::Completing, bytes_of(4), cause);
    }

    fn a_completion_after_an_abort_changes_nothing(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let manifest = duel.rogue.write_all(&grant);
        let cause = Cause::AbortedBySender { why: "no".into() };
        duel.rogue.send(&Message::Abort { id: grant.id, cause: cause.clone() });
        duel.rogue.complete(&grant, manifest);
        duel.fails(Phase::Writing, bytes_of(4), cause);
    }

    fn a_drained_engine_takes_nothing_new_and_lets_live_ones_end(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..4), GUARD);
        let receive = bed.receive(&label, 4);
        bed.assert_works();
        std::thread::scope(|scope| {
            let drain = scope.spawn(|| bed.decode.engine.drain(GUARD));
            eventually("new ones are refused", || {
                let refused = failed_soon(&bed);
                refused.is_some_and(|error| error.cause == Cause::ShuttingDown {})
            });
            send.write_all();
            let sent = send.complete();
            drop(sealed(receive));
            outcome(&sent).unwrap();
            let report = drain.join().unwrap().unwrap();
            assert_eq!((report.aborted, report.undrained), (0, 0));
        });
        bed.decode.assert_clean();
        bed.prefill.assert_clean();
    }

    fn a_drain_aborts_what_is_left_at_its_deadline(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..4), GUARD);
        send.write(0, 0..2);
        let receive = bed.receive(&label, 4);
        bed.assert_works();
        let report = bed.decode.engine.drain(Duration::from_millis(50)).unwrap();
        assert_eq!((report.aborted, report.undrained), (1, 0));
        let theirs = outcome(&send.complete()).unwrap_err();
        assert_both(&bed, &label, &failed(receive), &theirs, &Cause::ShuttingDown {});
        bed.decode.assert_clean();
        bed.prefill.assert_clean();
    }
}

/// The error of a receive that nobody serves, if it fails at once.
fn failed_soon(bed: &Bed) -> Option<TransferError> {
    let lease = bed.decode.pool.reserve(1).unwrap();
    let label = Label::new("nobody").unwrap();
    let mut receive = bed.decode.engine.receive(&bed.peer, label, BINDING, lease, GUARD);
    receive.wait_for(SHORT)?.err()
}
