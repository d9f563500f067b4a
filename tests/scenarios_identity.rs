//! Who may write what: labels, bindings, layouts, generations, ids, and peers that aren't meant.

mod common;

use common::bed::{BINDING, NodeSetup, assert_content, bytes_of, failed, outcome, pages, sealed};
use common::duel::Duel;
use common::source::Shape;
use common::*;
use sealift::engine::{Builder, PoolOptions};
use sealift::protocol::{
    Binding, BlockIndex, BlockRange, Cause, ComponentIndex, Generation, Label, LedgerError,
    Message, PageIndex, PageState, Phase, PoolLayout,
};
use sealift::transport::CompletionStatus;
use std::time::Duration;

on_both! {
    fn a_write_of_a_stale_generation_lands_nothing(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        let stated = Generation(grant.generation.0 + 1);
        let all = [BlockRange { first: BlockIndex(0), count: 8 }];
        let source = duel.rogue.placement(&grant);
        duel.rogue.write(lanes[0], grant.id, stated, &all, &source);
        let (region, shape) = (duel.decode.region.clone(), duel.decode.shape.clone());
        let granted = grant.generation;
        duel.fails(Phase::Writing, 0, Cause::StaleGeneration { granted, stated });
        shape.assert_untouched_but(&region, &[]);
    }

    fn a_manifest_of_another_generation_is_refused(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let mut manifest = duel.rogue.write_all(&grant);
        manifest.generation.0 += 1;
        duel.rogue.complete(&grant, manifest);
        let granted = grant.generation.0;
        let (field, stated) = ("generation".into(), granted + 1);
        let cause = Cause::ManifestMismatch { field, granted, stated };
        duel.fails(Phase::Completing, bytes_of(4), cause);
    }

    fn a_write_for_a_transfer_that_is_not_open_lands_nothing(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        let mut other = grant.clone();
        other.id.counter += 1;
        let source = duel.rogue.placement(&grant);
        let one = [BlockRange { first: BlockIndex(0), count: 1 }];
        let status = duel.rogue.write(lanes[0], other.id, grant.generation, &one, &source);
        // A socket takes the bytes before anybody looks at them.
        assert!(status != CompletionStatus::Success || matches!(fabric, Fabric::Tcp));
        // The lane is fenced; the transfer, which it didn't name, may go on over others.
        duel.rogue.hear("a resume", |m| matches!(m, Message::Resume { .. }));
        duel.decode.assert_untouched();
        duel.rogue.send(&Message::Abort {
            id: grant.id,
            cause: Cause::AbortedBySender { why: "enough".into() },
        });
        let cause = Cause::AbortedBySender { why: "enough".into() };
        duel.fails(Phase::Writing, 0, cause);
    }

    fn a_reused_label_does_not_seal_another_requests_pages(fabric) {
        let cases = [
            ("token_count", Binding::hashed(60, 1), Binding::hashed(61, 1), "60", "61"),
            ("content_hash", Binding::hashed(60, 1), Binding::hashed(60, 0x2f),
                "0000000000000001", "000000000000002f"),
            ("content_hash", Binding::tokens(60), Binding::hashed(60, 1),
                "absent", "0000000000000001"),
        ];
        for (field, granted, offered, grants, offers) in cases {
            let bed = Bed::new(fabric);
            let label = Label::from(1);
            let engine = &bed.prefill.engine;
            let send = engine.send(label.clone(), offered, bed.source(0..4), GUARD);
            send.write_all();
            let sent = send.complete();
            let receive = |binding| {
                let lease = bed.decode.pool.reserve(4).unwrap();
                bed.decode.engine.receive(&bed.peer, label.clone(), binding, lease, GUARD)
            };
            let error = failed(receive(granted));
            let cause = Cause::BindingMismatch {
                field: field.into(),
                granted: grants.into(),
                offered: offers.into(),
            };
            let expect = bed.receiver_expects(&label, 1, bytes_of(4));
            assert_error(&error, Expect { cause, ..expect });
            bed.decode.assert_untouched();
            assert!(sent.wait_for(Duration::ZERO).is_none(), "it waits for its own request");
            let pages = sealed(receive(offered));
            assert_content(&pages.read().unwrap(), 0, 0..4);
            outcome(&sent).unwrap();
            drop(pages);
            bed.finish();
        }
    }

    fn a_label_is_used_once_at_a_time_by_a_receiver(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let first = bed.receive(&label, 2);
        let error = failed(bed.receive(&label, 3));
        let expect = bed.receiver_expects(&label, 1, bytes_of(3));
        let cause = Cause::DuplicateLabel {};
        let (transfer, phase) = (None, Phase::Admission);
        assert_error(&error, Expect { transfer, phase, cause, ..expect });
        assert_eq!(bed.decode.pool.counts().granted, 2, "only the first one's pages are out");
        let sent = bed.send(&label, 2);
        drop(sealed(first));
        outcome(&sent).unwrap();
        // It is over: the label is free.
        let sent = bed.send(&label, 3);
        drop(sealed(bed.receive(&label, 3)));
        outcome(&sent).unwrap();
        bed.finish();
    }

    fn a_label_is_used_once_at_a_time_by_a_sender(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let first = bed.send(&label, 2);
        let second = bed.send(&label, 3);
        let expect = bed.sender_expects(&label, 1, bytes_of(3));
        let cause = Cause::DuplicateLabel {};
        let (transfer, peer, phase) = (None, None, Phase::Admission);
        let error = outcome(&second).unwrap_err();
        assert_error(&error, Expect { transfer, peer, phase, cause, ..expect });
        let pages = sealed(bed.receive(&label, 2));
        outcome(&first).unwrap();
        drop(pages);
        bed.finish();
    }

    fn pools_of_different_layouts_do_not_meet(fabric) {
        type Edit = fn(&mut PoolLayout);
        let cases: [(&str, Edit, &str, &str); 4] = [
            ("name", |l| l.name = "swa".into(), "kv", "swa"),
            ("dtype", |l| l.dtype = "fp8_e4m3".into(), "bf16", "fp8_e4m3"),
            ("tokens_per_page", |l| l.tokens_per_page = 32, "16", "32"),
            ("item_lens", |l| l.item_lens[1] /= 2, "2x8192", "1x8192+1x4096"),
        ];
        for (field, edit, granted, offered) in cases {
            let mut setup = Setup::default();
            edit(&mut setup.prefill.shape.layout);
            let total = 3 * setup.prefill.shape.layout.page_bytes();
            let bed = Bed::with(fabric, setup);
            let label = Label::from(1);
            let sent = bed.send(&label, 3);
            let error = failed(bed.receive(&label, 3));
            let cause = Cause::LayoutMismatch {
                component: ComponentIndex(0),
                field: field.into(),
                granted: granted.into(),
                offered: offered.into(),
            };
            let expect = bed.receiver_expects(&label, 1, bytes_of(3));
            assert_error(&error, Expect { cause: cause.clone(), ..expect });
            let expect = bed.sender_expects(&label, 1, total);
            assert_error(&outcome(&sent).unwrap_err(), Expect { cause, ..expect });
            bed.decode.assert_untouched();
            bed.decode.assert_clean();
            bed.prefill.assert_clean();
        }
    }

    fn another_peer_can_neither_write_nor_speak_for_a_transfer(fabric) {
        let duel = Duel::new(fabric);
        let intruder = Rogue::new(fabric, "intruder");
        let peer = duel.decode.engine.connect(&intruder.address(), GUARD).unwrap();
        let lease = duel.decode.pool.reserve(2).unwrap();
        let own = duel.decode.engine.receive(&peer, Label::from(9), BINDING, lease, GUARD);
        let own_grant = intruder.grant();
        let own_lanes = intruder.accept(&own_grant);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);

        // It knows everything that a frame or a message states.
        let source = intruder.placed(&grant, pages(8..12));
        let all = [BlockRange { first: BlockIndex(0), count: 8 }];
        intruder.write(own_lanes[0], grant.id, grant.generation, &all, &source);
        intruder.marker(own_lanes[1], grant.id, sealift::protocol::Round(0));
        intruder.hear("its lane is fenced", |m| matches!(m, Message::Resume { .. }));
        let cause = Cause::AbortedBySender { why: "an intruder".into() };
        intruder.send(&Message::Abort { id: grant.id, cause: cause.clone() });
        intruder.send(&Message::Refuse { id: grant.id, cause: cause.clone() });
        intruder.say_drained(&grant, cause, &[], false);
        intruder.complete(&grant, intruder.manifest(&grant, own_lanes));
        intruder.round_trip();
        duel.decode.assert_untouched();

        duel.rogue.write_blocks(lanes[0], &grant, 0, 8);
        duel.rogue.mark(&grant, &lanes);
        duel.rogue.complete(&grant, duel.rogue.manifest(&grant, lanes));
        let pages = sealed(duel.receive);
        assert_content(&pages.read().unwrap(), 0, 0..4);
        drop((pages, own));
        duel.decode.assert_clean();
    }

    fn an_id_that_is_over_is_stale(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let manifest = duel.rogue.write_all(&grant);
        duel.rogue.complete(&grant, manifest.clone());
        let pages = sealed(duel.receive);
        let verified = |m: &Message| matches!(m, Message::Verified { id } if *id == grant.id);
        duel.rogue.hear("verified", verified);
        duel.rogue.round_trip();
        duel.rogue.complete(&grant, manifest);
        duel.rogue.hear("stale", |m| matches!(m, Message::Stale { id } if *id == grant.id));
        assert_content(&pages.read().unwrap(), 0, 0..4);
        drop(pages);
        duel.decode.assert_clean();
    }

    fn a_page_that_has_an_owner_can_not_be_claimed(fabric) {
        let duel = Duel::patient(fabric);
        let pool = duel.decode.pool.clone();
        let refusal = |page: u32| pool.claim(&[PageIndex(0), PageIndex(page)]).unwrap_err();
        let is = |page: u32, state| {
            let page = PageIndex(page);
            LedgerError::State { page, state, wanted: PageState::Free }
        };
        assert_eq!(refusal(5), is(5, PageState::Granted));
        assert_eq!(pool.claim(&pages(15..17)).unwrap_err(),
            LedgerError::OutOfRange { page: PageIndex(16), page_count: PAGES });
        let twice = [3, 2, 3].map(PageIndex);
        assert_eq!(pool.claim(&twice).unwrap_err(), LedgerError::Repeated { page: PageIndex(3) });

        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        duel.receive.abort();
        duel.assert_quarantined();
        assert_eq!(refusal(4), is(4, PageState::Quarantined));
        duel.rogue.drain(&grant, Cause::DeadlineExceeded {}, &lanes);
        eventually("the pages are back", || duel.decode.is_free());

        let lease = pool.claim(&pages(4..8)).unwrap();
        let again = duel.decode.engine.receive(&duel.peer, Label::from(2), BINDING, lease, GUARD);
        let grant = duel.rogue.grant();
        let manifest = duel.rogue.write_all(&grant);
        duel.rogue.complete(&grant, manifest);
        let pages = sealed(again);
        assert_eq!(refusal(7), is(7, PageState::Sealed));
        assert_eq!(pool.counts().free, PAGES as usize - 4, "a refused claim takes nothing");
        drop(pages);
        assert!(pool.claim(&[PageIndex(7)]).is_ok());
        duel.decode.assert_clean();
    }

    fn a_request_larger_than_the_peer_is_refused_with_both_numbers(fabric) {
        let small: fn(Builder) -> Builder =
            |builder| quick(builder).configure(|config| config.max_grant_pages = 5);
        let prefill = NodeSetup { shape: Shape::of(8, PLANES, ITEM), ..NodeSetup::default() };
        let limited = NodeSetup { tune: small, ..NodeSetup::default() };
        let cases = [
            (prefill, 9, BINDING, "pages of the peer's pool kv", 9, 8),
            (limited, 6, BINDING, "pages of one grant", 6, 5),
            (NodeSetup::default(), 1, Binding::tokens(257), "tokens of the peer's pool kv", 257, 256),
        ];
        for (prefill, count, binding, what, asked, limit) in cases {
            let bed = Bed::with(fabric, Setup { prefill, ..Setup::default() });
            let label = Label::from(1);
            let lease = bed.decode.pool.reserve(count).unwrap();
            let engine = &bed.decode.engine;
            let error = failed(engine.receive(&bed.peer, label.clone(), binding, lease, GUARD));
            let expect = bed.receiver_expects(&label, 1, bytes_of(count as u32));
            let cause = Cause::CapacityExceeded { what: what.into(), asked, limit };
            let (transfer, phase) = (None, Phase::Admission);
            assert_error(&error, Expect { transfer, phase, cause, ..expect });
            bed.finish();
        }
    }

    fn a_quarantine_over_its_budget_refuses_new_grants(fabric) {
        let options = PoolOptions { quarantine_budget: Some(3), ..PoolOptions::default() };
        let tune = common::bed::patient;
        let duel = Duel::with(fabric, NodeSetup { options, tune, ..NodeSetup::default() });
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        duel.receive.abort();
        duel.assert_quarantined();
        let full = LedgerError::QuarantineFull { quarantined: 4, budget: 3 };
        assert_eq!(duel.decode.pool.reserve(1).unwrap_err(), full);
        assert_eq!(duel.decode.pool.claim(&pages(0..1)).unwrap_err(), full);
        let faults = duel.decode.engine.health().faults;
        assert_eq!(faults, ["pool kv: 4 pages quarantined, budget 3"]);
        duel.rogue.drain(&grant, Cause::DeadlineExceeded {}, &lanes);
        eventually("the pages are back", || duel.decode.is_free());
        assert!(duel.decode.pool.reserve(PAGES as usize).is_ok());
        duel.decode.assert_clean();
    }
}
