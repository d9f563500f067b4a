//! Ready is proof of coverage: less, more or something else than was granted is a failure. [I1]

mod common;

use common::bed::{BINDING, assert_content, bytes_of, failed, outcome, pages, sealed};
use common::duel::Duel;
use common::*;
use sealift::engine::{ReceiveHandle, SealedPages, Source};
use sealift::protocol::{
    BlockIndex, BlockRange, Cause, ComponentIndex, Label, LedgerError, Message, PageIndex, Phase,
};

on_both! {
    fn the_incident_is_refused_before_a_byte_moves(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let sent = bed.send(&label, 1);
        let receive = bed.receive(&label, 8);
        let cause =
            Cause::PageCountMismatch { component: ComponentIndex(0), granted: 8, offered: 1 };
        let expect = bed.receiver_expects(&label, 1, bytes_of(8));
        assert_error(&failed(receive), Expect { cause: cause.clone(), ..expect });
        let expect = bed.sender_expects(&label, 1, bytes_of(1));
        assert_error(&outcome(&sent).unwrap_err(), Expect { cause, ..expect });
        bed.decode.assert_untouched();
        bed.finish();
    }

    fn whole_pages_arrive_and_nothing_beside_them_changes(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let sent = bed.send(&label, 5);
        let pages = sealed(bed.receive(&label, 5));
        outcome(&sent).unwrap();
        assert_content(&pages.read().unwrap(), 0, 0..5);
        bed.decode.shape.assert_untouched_but(&bed.decode.region, pages.pages(0));
        drop(pages);
        bed.finish();
    }

    fn completing_before_everything_is_written_fails_on_both_sides(fabric) {
        let bed = Bed::new(fabric);
        let label = Label::from(1);
        let send = bed.prefill.engine.send(label.clone(), BINDING, bed.source(0..4), GUARD);
        let receive = bed.receive(&label, 4);
        send.write(0, 0..3);
        let sent = send.complete();
        let cause =
            Cause::IncompleteWrite { granted_bytes: bytes_of(4), written_bytes: bytes_of(3) };
        let error = outcome(&sent).unwrap_err();
        assert_eq!(error.cause, cause);
        let phase = failed_phase(receive, &cause);
        assert!(matches!(phase, Phase::Matching | Phase::Writing), "{phase}");
        bed.finish();
    }

    fn a_manifest_of_fewer_bytes_is_never_a_short_success(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        duel.rogue.write_blocks(lanes[0], &grant, 0, 2);
        duel.rogue.mark(&grant, &lanes);
        let mut manifest = duel.rogue.manifest(&grant, lanes);
        let covered_bytes = 2 * u64::from(ITEM);
        manifest.bytes = covered_bytes;
        duel.rogue.complete(&grant, manifest);
        let cause = Cause::IncompleteCoverage { granted_bytes: bytes_of(4), covered_bytes };
        duel.fails(Phase::Completing, covered_bytes, cause);
    }

    fn a_manifest_that_claims_what_never_landed_is_found_out(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        duel.rogue.write_blocks(lanes[1], &grant, 0, 7);
        duel.rogue.mark(&grant, &lanes);
        let manifest = duel.rogue.manifest(&grant, lanes);
        duel.rogue.complete(&grant, manifest);
        let covered_bytes = 7 * u64::from(ITEM);
        let cause = Cause::IncompleteCoverage { granted_bytes: bytes_of(4), covered_bytes };
        duel.fails(Phase::Verifying, covered_bytes, cause);
    }

    fn an_accept_of_fewer_bytes_ends_it_before_the_first(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.lanes(2);
        duel.rogue.send(&Message::Accept { id: grant.id, bytes: bytes_of(1), lanes });
        let (granted_bytes, covered_bytes) = (bytes_of(4), bytes_of(1));
        duel.fails(Phase::Writing, 0, Cause::IncompleteCoverage { granted_bytes, covered_bytes });
    }

    fn an_accept_of_more_bytes_says_so(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.lanes(2);
        duel.rogue.send(&Message::Accept { id: grant.id, bytes: bytes_of(5), lanes });
        let (granted, stated) = (bytes_of(4), bytes_of(5));
        let cause = Cause::ManifestMismatch { field: "bytes".into(), granted, stated };
        duel.fails(Phase::Writing, 0, cause);
    }

    fn a_frame_shorter_or_longer_than_its_blocks_lands_nothing(fabric) {
        for item in [ITEM / 2, ITEM * 2] {
            let duel = Duel::new(fabric);
            let grant = duel.rogue.grant();
            let lanes = duel.rogue.accept(&grant);
            let shape = common::source::Shape::of(4, PLANES, item);
            let memory = shape.memory(9);
            let extents = shape.layout.whole_page();
            let source = sealift::transport::Placement::new(vec![(memory, pages(0..4), extents)]);
            let source = std::sync::Arc::new(source.unwrap());
            let range = [BlockRange { first: BlockIndex(0), count: 2 }];
            duel.rogue.write(lanes[0], grant.id, grant.generation, &range, &source);
            let (payload, blocks) = (2 * u64::from(item), 2 * u64::from(ITEM));
            let why = format!("the frame carries {payload} bytes for blocks of {blocks}");
            duel.decode.assert_untouched();
            duel.fails(Phase::Writing, 0, Cause::ProtocolViolation { why: why.into() });
        }
    }

    fn a_write_past_the_grant_lands_nothing(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        let source = duel.rogue.placed(&grant, pages(0..6));
        let range = [BlockRange { first: BlockIndex(7), count: 3 }];
        duel.rogue.write(lanes[0], grant.id, grant.generation, &range, &source);
        let decode = (duel.decode.region.clone(), duel.decode.shape.clone());
        duel.fails(Phase::Writing, 0, Cause::OutsideGrant { first_block: 7, block_count: 8 });
        decode.1.assert_untouched_but(&decode.0, &[]);
    }

    fn a_misplaced_write_is_found_by_its_digest(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        let swapped = [0, 2, 1, 3].map(PageIndex).to_vec();
        let source = duel.rogue.placed(&grant, swapped);
        let all = [BlockRange { first: BlockIndex(0), count: 8 }];
        duel.rogue.write(lanes[0], grant.id, grant.generation, &all, &source);
        duel.rogue.mark(&grant, &lanes);
        let manifest = duel.rogue.manifest(&grant, lanes);
        duel.rogue.complete(&grant, manifest);
        let (component, page) = (ComponentIndex(0), PageIndex(5));
        let cause = Cause::DigestMismatch { component, page, wrong_pages: 2 };
        duel.fails(Phase::Verifying, bytes_of(4), cause);
    }

    fn a_block_written_twice_is_refused(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let lanes = duel.rogue.accept(&grant);
        duel.rogue.write_blocks(lanes[0], &grant, 3, 1);
        // Its marker proves that the first of the two has landed.
        duel.rogue.marker(lanes[0], grant.id, sealift::protocol::Round(0));
        let source = duel.rogue.placement(&grant);
        let again = [BlockRange { first: BlockIndex(3), count: 1 }];
        duel.rogue.write(lanes[1], grant.id, grant.generation, &again, &source);
        duel.fails(Phase::Writing, ITEM.into(), Cause::DuplicateBlock { block: 3 });
    }

    fn a_manifest_that_differs_anywhere_is_refused(fabric) {
        type Edit = fn(&mut sealift::protocol::Manifest);
        let cases: [(&str, Phase, Edit, u64, i64); 5] = [
            ("block_count", Phase::Completing, |m| m.block_count += 1, 8, 1),
            ("bytes", Phase::Completing, |m| m.bytes += 1, bytes_of(4), 1),
            ("page_count", Phase::Completing, |m| m.components[0].page_count = 3, 4, -1),
            ("components", Phase::Completing, |m| m.components.push(m.components[0].clone()), 1, 1),
            ("digests", Phase::Verifying, |m| m.components[0].digests.truncate(3), 4, -1),
        ];
        for (field, phase, edit, granted, by) in cases {
            let duel = Duel::new(fabric);
            let grant = duel.rogue.grant();
            let mut manifest = duel.rogue.write_all(&grant);
            edit(&mut manifest);
            duel.rogue.complete(&grant, manifest);
            let stated = granted.checked_add_signed(by).unwrap();
            let cause = Cause::ManifestMismatch { field: field.into(), granted, stated };
            duel.fails(phase, bytes_of(4), cause);
        }
    }

    fn a_total_that_is_not_the_sum_of_its_pages_is_refused(fabric) {
        let duel = Duel::new(fabric);
        let grant = duel.rogue.grant();
        let mut manifest = duel.rogue.write_all(&grant);
        let granted = manifest.components[0].total;
        let stated = granted.wrapping_add(1);
        manifest.components[0].total = stated;
        duel.rogue.complete(&grant, manifest);
        let cause = Cause::ManifestMismatch { field: "total".into(), granted, stated };
        duel.fails(Phase::Verifying, bytes_of(4), cause);
    }

    fn nothing_can_not_be_transferred(fabric) {
        let bed = Bed::new(fabric);
        assert_eq!(bed.decode.pool.reserve(0).unwrap_err(), LedgerError::Empty);
        assert_eq!(bed.decode.pool.claim(&[]).unwrap_err(), LedgerError::Empty);
        let label = Label::from(1);
        let source = Source::pages(&bed.prefill.pool, &[]);
        let send = bed.prefill.engine.send(label.clone(), BINDING, source, GUARD);
        send.write_all();
        let expect = bed.sender_expects(&label, 1, 0);
        let expect = Expect {
            transfer: None,
            peer: None,
            phase: Phase::Admission,
            cause: Cause::EmptyTransfer {},
            ..expect
        };
        assert_error(&outcome(&send.complete()).unwrap_err(), expect);
        let lease = bed.decode.pool.reserve(2).unwrap();
        let error = failed(bed.decode.engine.receive_parts(Vec::new(), lease, GUARD));
        assert_eq!((error.cause, error.bytes_total), (Cause::EmptyTransfer {}, bytes_of(2)));
        bed.finish();
    }
}

/// The receive failed for `cause`; when depends on which side was first.
#[track_caller]
fn failed_phase(receive: ReceiveHandle<SealedPages>, cause: &Cause) -> Phase {
    let error = failed(receive);
    assert_eq!(error.cause, *cause, "{error}");
    error.phase
}
