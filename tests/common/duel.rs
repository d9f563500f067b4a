//! A decode node against a hand-driven sender.

use sealift::engine::{Peer, ReceiveHandle, SealedPages};
use sealift::protocol::{Cause, Label, LedgerCounts, PageIndex, Phase};

use super::bed::{BINDING, Node, NodeSetup, bytes_of, failed, pages, patient};
use super::check::{Expect, GUARD, assert_error, eventually};
use super::fabric::Fabric;
use super::rogue::Rogue;
use super::source::PAGES;

/// One receive of pages 4 to 8 is under way.
pub struct Duel {
    pub decode: Node,
    pub rogue: Rogue,
    pub peer: Peer,
    pub label: Label,
    pub receive: ReceiveHandle<SealedPages>,
    pub page_numbers: Vec<PageIndex>,
}

impl Duel {
    pub fn new(fabric: &Fabric) -> Duel {
        Duel::with(fabric, NodeSetup::default())
    }

    /// Nothing is fenced only because the sender takes its time.
    pub fn patient(fabric: &Fabric) -> Duel {
        Duel::with(fabric, NodeSetup { tune: patient, ..NodeSetup::default() })
    }

    pub fn with(fabric: &Fabric, setup: NodeSetup) -> Duel {
        let rogue = Rogue::new(fabric, "rogue");
        let decode = Node::new(fabric, "decode", setup);
        let peer = decode.engine.connect(&rogue.address(), GUARD).unwrap();
        let lease = decode.pool.claim(&pages(4..8)).unwrap();
        let page_numbers = lease.pages(0).to_vec();
        let label = Label::new("duel").unwrap();
        let receive = decode.engine.receive(&peer, label.clone(), BINDING, lease, GUARD);
        Duel { decode, rogue, peer, label, receive, page_numbers }
    }

    /// Another receive, of one page.
    pub fn other_receive(&self) -> ReceiveHandle<SealedPages> {
        let lease = self.decode.pool.reserve(1).unwrap();
        let label = Label::new("other").unwrap();
        self.decode.engine.receive(&self.peer, label, BINDING, lease, GUARD)
    }

    /// The decode node's memory as it is now.
    pub fn bytes(&self) -> Vec<u8> {
        self.decode.bytes()
    }

    /// What the receiver's error has to be.
    pub fn expects(&self, phase: Phase, done: u64, cause: Cause) -> Expect {
        Expect {
            transfer: Some(self.decode.transfer(1)),
            label: self.label.clone(),
            peer: Some(self.rogue.incarnation()),
            phase,
            done: done..=done,
            total: bytes_of(4),
            cause,
        }
    }

    /// The receive fails so, the sender is told, and the pages come back.
    #[track_caller]
    pub fn fails(self, phase: Phase, done: u64, cause: Cause) {
        let expect = self.expects(phase, done, cause.clone());
        let Duel { decode, rogue, receive, page_numbers, .. } = self;
        assert_error(&failed(receive), expect);
        assert_eq!(rogue.aborted(decode.transfer(1)), cause, "the sender is told");
        decode.shape.assert_untouched_but(&decode.region, &page_numbers);
        decode.assert_clean();
    }

    /// The four pages are quarantined: neither readable nor free.
    #[track_caller]
    pub fn assert_quarantined(&self) {
        let free = PAGES as usize - 4;
        let held = LedgerCounts { free, quarantined: 4, ..LedgerCounts::default() };
        eventually("the pages are quarantined", || self.decode.pool.counts() == held);
        // Whatever the other side said so far doesn't free them.
        self.rogue.round_trip();
        assert_eq!(self.decode.pool.counts(), held);
    }
}
