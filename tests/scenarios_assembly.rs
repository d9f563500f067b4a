//! Two senders fill one lease, each its own part; and any failure ends both. [I1] [I2]

mod common;

use std::time::Duration;

use common::bed::{
    BINDING, Node, NodeSetup, SEED, bytes_of, failed, outcome, pages, patient, sealed,
};
use common::*;
use sealift::engine::{Part, Peer, ReadGuard, Source};
use sealift::protocol::{
    Cause, Extent, Label, LedgerCounts, Message, Phase, PlaneIndex, Slice, TransferId,
};

/// Bytes of one token's heads in a page, and how many tokens a page has.
const TOKEN: u32 = 512;
const TOKENS: u32 = ITEM / TOKEN;

/// One half of every token's heads, in all planes.
fn heads(half: u32) -> Extent {
    Extent {
        first_plane: PlaneIndex(0),
        plane_count: PLANES,
        offset: half * TOKEN / 2,
        piece_len: TOKEN / 2,
        piece_count: TOKENS,
        piece_stride: TOKEN,
    }
}

fn plane(plane: u16) -> Extent {
    Extent::whole(PlaneIndex(plane), 1, ITEM)
}

/// A decode node with two prefill nodes of different content.
struct Trio {
    decode: Node,
    senders: [Node; 2],
    peers: [Peer; 2],
    label: Label,
}

impl Trio {
    fn new(fabric: &Fabric) -> Trio {
        let node = |name: &str, skew: u8| {
            let node = Node::new(fabric, name, NodeSetup::default());
            node.shape.fill(&node.region, SEED + skew);
            node
        };
        let senders = [node("left", 0), node("right", 1)];
        let decode = Node::new(fabric, "decode", NodeSetup::default());
        let connect = |node: &Node| decode.engine.connect(&node.address(), GUARD).unwrap();
        let peers = [connect(&senders[0]), connect(&senders[1])];
        Trio { decode, senders, peers, label: Label::from(1) }
    }

    fn part(&self, which: usize, extent: Extent, pages: u32) -> Part {
        let slices: Vec<Slice> = vec![Part::slice(0, 0..pages, vec![extent])];
        Part::slices(&self.peers[which], self.label.clone(), BINDING, slices)
    }

    fn source(&self, which: usize, extent: Extent) -> Source {
        let pool = &self.senders[which].pool;
        Source::default().and_extents(pool, &pages(0..4), vec![extent])
    }

    fn clean(&self) {
        self.decode.assert_clean();
        self.senders.iter().for_each(Node::assert_clean);
    }

    /// Both send their halves, and the receiver gets all of it.
    fn fill(&self, extents: [Extent; 2], is_right: fn(plane: u16, byte: usize) -> bool) {
        let lease = self.decode.pool.reserve(4).unwrap();
        let sent = [0, 1].map(|which| {
            let source = self.source(which, extents[which]);
            let engine = &self.senders[which].engine;
            let send = engine.send(self.label.clone(), BINDING, source, GUARD);
            send.write_all();
            send.complete()
        });
        let parts = vec![self.part(0, extents[0], 4), self.part(1, extents[1], 4)];
        let pages = sealed(self.decode.engine.receive_parts(parts, lease, GUARD));
        sent.iter().for_each(|sent| outcome(sent).unwrap());
        assert_eq!(pages.transfers(), [self.decode.transfer(1), self.decode.transfer(2)]);
        assert_mix(&pages.read().unwrap(), is_right);
        self.decode.shape.assert_untouched_but(&self.decode.region, pages.pages(0));
        drop(pages);
        self.clean();
    }
}

#[track_caller]
fn assert_mix(guard: &ReadGuard, is_right: fn(plane: u16, byte: usize) -> bool) {
    let mut bytes = vec![0; ITEM as usize];
    for page in 0..4 {
        for plane in 0..PLANES {
            guard.copy(0, plane, page, 0, &mut bytes);
            let of = |skew| pattern(SEED + skew, plane, page as u32, ITEM as usize);
            let (left, right) = (of(0), of(1));
            let wrong = |at: &usize| {
                let want = if is_right(plane, *at) { right[*at] } else { left[*at] };
                bytes[*at] != want
            };
            assert_eq!((0..bytes.len()).find(wrong), None, "page {page}, plane {plane}");
        }
    }
}

on_both! {
    fn disjoint_head_slices_make_whole_pages(fabric) {
        let trio = Trio::new(fabric);
        trio.fill([heads(0), heads(1)], |_, byte| byte as u32 % TOKEN >= TOKEN / 2);
    }

    fn disjoint_planes_make_whole_pages(fabric) {
        let trio = Trio::new(fabric);
        trio.fill([plane(0), plane(1)], |plane, _| plane == 1);
    }

    fn one_that_fails_ends_the_other(fabric) {
        let trio = Trio::new(fabric);
        let lease = trio.decode.pool.reserve(4).unwrap();
        let extents = [heads(0), heads(1)];
        let sends = [0, 1].map(|which| {
            let source = trio.source(which, extents[which]);
            let engine = &trio.senders[which].engine;
            engine.send(trio.label.clone(), BINDING, source, GUARD)
        });
        let parts = vec![trio.part(0, extents[0], 4), trio.part(1, extents[1], 4)];
        let receive = trio.decode.engine.receive_parts(parts, lease, GUARD);
        let [left, right] = sends;
        left.write_all();
        right.write(0, 0..1);
        let landed = || trio.decode.bytes().iter().filter(|&&byte| byte != MARK).count();
        eventually("both write", || landed() > bytes_of(4) as usize / 2);
        let sent = [left.complete(), right.abort("preempted")];

        let error = failed(receive);
        let cause = Cause::AbortedBySender { why: "preempted".into() };
        let expect = |counter: u64, which: usize, cause: Cause| Expect {
            transfer: Some(trio.decode.transfer(counter)),
            label: trio.label.clone(),
            peer: Some(trio.senders[which].engine.incarnation()),
            phase: Phase::Writing,
            done: 0..=bytes_of(4) / 2,
            total: bytes_of(4) / 2,
            cause,
        };
        assert_error(&error, expect(2, 1, cause.clone()));
        let peer = Some(trio.decode.engine.incarnation());
        let theirs = outcome(&sent[1]).unwrap_err();
        assert_error(&theirs, Expect { peer, ..expect(2, 1, cause) });
        let theirs = outcome(&sent[0]).unwrap_err();
        let sibling = Cause::SiblingFailed { sibling: trio.decode.transfer(2) };
        let phase = theirs.phase;
        assert_error(&theirs, Expect { peer, phase, ..expect(1, 0, sibling) });
        trio.clean();
    }

    fn pages_come_back_only_when_both_have_drained(fabric) {
        let rogues = [Rogue::new(fabric, "left"), Rogue::new(fabric, "right")];
        let setup = NodeSetup { tune: patient, ..NodeSetup::default() };
        let decode = Node::new(fabric, "decode", setup);
        let label = Label::from(1);
        let part = |rogue: &Rogue, extent| {
            let peer = decode.engine.connect(&rogue.address(), GUARD).unwrap();
            let slices = vec![Part::slice(0, 0..4, vec![extent])];
            Part::slices(&peer, label.clone(), BINDING, slices)
        };
        let parts = vec![part(&rogues[0], heads(0)), part(&rogues[1], heads(1))];
        let lease = decode.pool.reserve(4).unwrap();
        let receive = decode.engine.receive_parts(parts, lease, GUARD);
        let grants = [rogues[0].grant(), rogues[1].grant()];
        let lanes = [rogues[0].accept(&grants[0]), rogues[1].accept(&grants[1])];
        rogues[1].write_blocks(lanes[1][0], &grants[1], 0, 3);

        let cause = Cause::AbortedBySender { why: "preempted".into() };
        rogues[0].round_trip();
        rogues[1].round_trip();
        rogues[0].send(&Message::Abort { id: grants[0].id, cause: cause.clone() });
        let error = failed(receive);
        assert_eq!((error.cause, error.transfer), (cause.clone(), Some(grants[0].id)));
        let sibling = Cause::SiblingFailed { sibling: grants[0].id };
        assert_eq!(rogues[1].aborted(grants[1].id), sibling);
        let held = LedgerCounts { free: 12, quarantined: 4, ..LedgerCounts::default() };
        assert_eq!(decode.pool.counts(), held);
        rogues[0].drain(&grants[0], cause.clone(), &lanes[0]);
        rogues[0].round_trip();
        assert_eq!(decode.pool.counts(), held, "the other may still write");
        rogues[1].drain(&grants[1], cause, &lanes[1]);
        decode.assert_clean();
    }

    fn one_that_never_appears_is_the_one_that_is_named(fabric) {
        let trio = Trio::new(fabric);
        let lease = trio.decode.pool.reserve(4).unwrap();
        let engine = &trio.senders[0].engine;
        let source = trio.source(0, plane(0));
        let send = engine.send(trio.label.clone(), BINDING, source, GUARD);
        send.write_all();
        let sent = send.complete();
        let parts = vec![trio.part(0, plane(0), 4), trio.part(1, plane(1), 4)];
        let deadline = Duration::from_millis(400);
        let error = failed(trio.decode.engine.receive_parts(parts, lease, deadline));
        let expect = Expect {
            transfer: Some(trio.decode.transfer(2)),
            label: trio.label.clone(),
            peer: Some(trio.senders[1].engine.incarnation()),
            phase: Phase::Matching,
            done: 0..=0,
            total: bytes_of(2),
            cause: Cause::DeadlineExceeded {},
        };
        assert_error(&error, expect);
        let theirs = outcome(&sent).unwrap_err();
        let sibling = Cause::SiblingFailed { sibling: trio.decode.transfer(2) };
        // The grant's deadline is known to the sender too: whoever is first.
        assert!([sibling, Cause::DeadlineExceeded {}].contains(&theirs.cause), "{theirs}");
        assert_eq!(theirs.transfer, Some(trio.decode.transfer(1)));
        trio.clean();
    }

    fn parts_that_leave_a_gap_or_overlap_are_refused_before_anything_is_said(fabric) {
        let trio = Trio::new(fabric);
        let cases = [
            ([heads(0), heads(0)], "byte 0 is in two grants"),
            ([plane(0), plane(0)], "byte 0 is in two grants"),
            ([plane(1), heads(0)], "byte 256 is in no grant"),
        ];
        for (extents, why) in cases {
            let lease = trio.decode.pool.reserve(4).unwrap();
            let parts = vec![trio.part(0, extents[0], 4), trio.part(1, extents[1], 4)];
            let error = failed(trio.decode.engine.receive_parts(parts, lease, GUARD));
            assert_eq!(error.transfer, None::<TransferId>);
            assert_eq!((error.phase, error.bytes_total), (Phase::Admission, bytes_of(4)));
            let text = error.to_string();
            assert!(matches!(error.cause, Cause::ProtocolViolation { .. }), "{text}");
            assert!(text.contains(why), "{text}");
            assert!(trio.decode.is_free());
        }
        trio.clean();
    }
}
