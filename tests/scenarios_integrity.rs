//! Bytes are compared where they landed, and stay what they are while they are read.
//! [I12] [I15] [I18]

mod common;

use common::bed::{BINDING, NodeSetup, assert_content, bytes_of, failed, outcome, pages, sealed};
use common::duel::Duel;
use common::*;
use sealift::engine::{PoolError, PoolOptions, UnverifiedPages};
use sealift::protocol::{Cause, ComponentIndex, Label, Manifest, PageIndex, Phase};

/// One write of pages 4 to 8 is spoilt on its way; both sides say what is wrong with how many
/// pages, nothing is readable, and the pair still works.
#[track_caller]
fn spoilt(fabric: &Fabric, spoil: impl Fn(&Route), wrong: u32) {
    let bed = Bed::new(fabric);
    let label = Label::from(1);
    spoil(&bed.route);
    let sent = bed.send(&label, 4);
    let lease = bed.decode.pool.claim(&pages(4..8)).unwrap();
    let engine = &bed.decode.engine;
    let error = failed(engine.receive(&bed.peer, label.clone(), BINDING, lease, GUARD));
    assert!(bed.route.was_spoilt());
    let Cause::DigestMismatch { component, page, wrong_pages } = error.cause else {
        panic!("{error}")
    };
    assert_eq!((component, wrong_pages), (ComponentIndex(0), wrong));
    assert!((4..8).contains(&page.0), "{page}");
    let total = bytes_of(4);
    let cause = error.cause.clone();
    let expect = bed.receiver_expects(&label, 1, total);
    let phase = Phase::Verifying;
    assert_error(&error, Expect { phase, done: total..=total, cause: cause.clone(), ..expect });
    let theirs = outcome(&sent).unwrap_err();
    let expect = bed.sender_expects(&label, 1, total);
    let phase = Phase::Completing;
    assert_error(&theirs, Expect { phase, done: total..=total, cause, ..expect });
    bed.finish();
}

on_both! {
    fn one_flipped_bit_is_found(fabric) {
        spoilt(fabric, Route::flip_bit, 1);
    }

    fn two_swapped_blocks_are_found(fabric) {
        spoilt(fabric, |route| route.swap_blocks(ITEM), 2);
    }

    fn a_digest_of_another_page_is_no_digest_of_this_one(fabric) {
        type Edit = fn(&mut Manifest);
        let cases: [(Edit, PageIndex, u32); 2] = [
            (|m| m.components[0].digests.swap(0, 3), PageIndex(4), 2),
            (|m| m.components[0].digests[2] ^= 1, PageIndex(6), 1),
        ];
        for (edit, page, wrong_pages) in cases {
            let duel = Duel::new(fabric);
            let grant = duel.rogue.grant();
            let mut manifest = duel.rogue.write_all(&grant);
            edit(&mut manifest);
            duel.rogue.complete(&grant, manifest);
            let component = ComponentIndex(0);
            let cause = Cause::DigestMismatch { component, page, wrong_pages };
            duel.fails(Phase::Verifying, bytes_of(4), cause);
        }
    }

    fn without_digests_the_pages_are_of_another_type(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let sent = bed.send(&label, 4);
        let lease = bed.decode.pool.reserve(4).unwrap();
        let engine = &bed.decode.engine;
        let mut receive =
            engine.receive_unverified(&bed.peer, label.clone(), BINDING, lease, GUARD);
        let pages: UnverifiedPages = receive.wait_for(GUARD).unwrap().unwrap();
        outcome(&sent).unwrap();
        assert_content(&pages.read().unwrap(), 0, 0..4);
        drop(pages);

        // Coverage counts all the same.
        let sent = bed.send(&label, 3);
        let lease = bed.decode.pool.reserve(4).unwrap();
        let mut receive =
            engine.receive_unverified(&bed.peer, label.clone(), BINDING, lease, GUARD);
        let error = receive.wait_for(GUARD).unwrap().unwrap_err();
        let cause =
            Cause::PageCountMismatch { component: ComponentIndex(0), granted: 4, offered: 3 };
        let expect = bed.receiver_expects(&label, 2, bytes_of(4));
        assert_error(&error, Expect { cause: cause.clone(), ..expect });
        assert_eq!(outcome(&sent).unwrap_err().cause, cause);
        bed.finish();
    }

    fn a_read_guard_outlives_the_release(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let sent = bed.send(&label, 4);
        let sealed_pages = sealed(bed.receive(&label, 4));
        outcome(&sent).unwrap();
        let numbers = sealed_pages.pages(0).to_vec();
        let generation = sealed_pages.generation(0).unwrap();
        let guards = [sealed_pages.read().unwrap(), sealed_pages.read().unwrap()];
        bed.decode.pool.check(&numbers, generation).unwrap();
        sealed_pages.release();
        assert!(bed.decode.pool.check(&numbers, generation).is_err(), "no new reader gets in");
        for guard in guards {
            assert_content(&guard, 0, 0..4);
            assert!(bed.decode.pool.claim(&numbers[..1]).is_err(), "nobody else gets the pages");
            let busy = bed.decode.engine.unregister_pool(&bed.decode.pool);
            assert!(matches!(busy, Err(PoolError::Busy(_))), "{busy:?}");
            drop(guard);
        }
        assert!(bed.decode.is_free(), "the last guard gives them back, at once");
        assert!(bed.decode.pool.check(&numbers, generation).is_err());
        bed.finish();
    }

    fn a_pool_that_is_in_use_stays_registered(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let is_busy = |node: &Node| {
            matches!(node.engine.unregister_pool(&node.pool), Err(PoolError::Busy(_)))
        };
        let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..4), GUARD);
        assert!(is_busy(&bed.prefill), "a send pins its source");
        let lease = bed.decode.pool.reserve(4).unwrap();
        assert!(is_busy(&bed.decode), "a lease");
        let receive = bed.decode.engine.receive(&bed.peer, label, BINDING, lease, GUARD);
        assert!(is_busy(&bed.decode), "a receive");
        send.write_all();
        let sent = send.complete();
        let pages = sealed(receive);
        outcome(&sent).unwrap();
        assert!(is_busy(&bed.decode), "sealed pages");
        drop(pages);
        bed.finish();
    }

    fn released_pages_are_zeroed_and_nothing_beside_them(fabric) {
        let options = PoolOptions { zero_on_release: true, ..PoolOptions::default() };
        let decode = NodeSetup { options, ..NodeSetup::default() };
        let bed = Bed::with(fabric, Setup { decode, ..Setup::default() });
        let label = Label::from(1);
        let sent = bed.send(&label, 4);
        let lease = bed.decode.pool.claim(&pages(4..8)).unwrap();
        let engine = &bed.decode.engine;
        let sealed_pages = sealed(engine.receive(&bed.peer, label, BINDING, lease, GUARD));
        outcome(&sent).unwrap();
        drop(sealed_pages);
        eventually("the pages are zeroed and free", || bed.decode.is_free());
        bed.decode.shape.assert_untouched_but(&bed.decode.region, &pages(4..8));
        let bytes = bed.decode.bytes();
        for plane in 0..PLANES {
            for page in 4..8 {
                let at = bed.decode.shape.at(plane, page);
                assert!(bytes[at..at + ITEM as usize].iter().all(|&byte| byte == 0));
            }
        }
        bed.finish();
    }
}
