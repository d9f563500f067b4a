//! Two engines, one that prefills and one that decodes, and what each test checks at its end.

use std::time::Duration;

use sealift::engine::{Builder, Completion, Engine, Peer, Pool, PoolOptions, SealedPages, Source};
use sealift::engine::{ReadGuard, ReceiveHandle};
use sealift::memory::HostRegion;
use sealift::protocol::{
    Binding, Cause, Label, LedgerCounts, PageIndex, Phase, TransferError, TransferId,
};

use super::check::{Expect, GUARD, assert_error, eventually};
use super::fabric::{Fabric, Route};
use super::source::{ITEM, PAGES, PLANES, Shape, pattern};

/// The binding of a test's request, unless the test is about bindings.
pub const BINDING: Binding = Binding { token_count: 60, content_hash: None };

/// Limits that let a test end quickly.
pub fn quick(builder: Builder) -> Builder {
    let ms = Duration::from_millis;
    builder.liveness(ms(2000)).drain_grace(ms(250)).configure(|config| {
        config.receiver.resend = ms(50);
        config.sender.resend = ms(50);
        config.session.lane_timeout = ms(1000);
        config.session.lane_backoff = ms(5);
    })
}

/// As [`quick`], with a grace so long that within a test nothing is ever fenced for want of it.
pub fn patient(builder: Builder) -> Builder {
    quick(builder).drain_grace(Duration::from_secs(60))
}

/// Page numbers.
pub fn pages(range: std::ops::Range<u32>) -> Vec<PageIndex> {
    range.map(PageIndex).collect()
}

/// Bytes of so many pages of the usual pool.
pub fn bytes_of(pages: u32) -> u64 {
    u64::from(pages) * u64::from(PLANES) * u64::from(ITEM)
}

/// One engine and its pool.
pub struct Node {
    pub engine: Engine,
    pub pool: Pool,
    pub region: HostRegion,
    pub shape: Shape,
}

impl Node {
    pub fn new(fabric: &Fabric, name: &str, setup: NodeSetup) -> Node {
        let engine = fabric.build(name, (setup.tune)(Engine::builder()));
        let (region, planes) = setup.shape.make();
        let layout = setup.shape.layout.clone();
        let pool = engine.register_pool(layout, planes, setup.options).unwrap();
        Node { engine, pool, region, shape: setup.shape }
    }

    pub fn address(&self) -> String {
        self.engine.listen_address().unwrap()
    }

    /// The id of the `n`th transfer that this engine opened, from 1.
    pub fn transfer(&self, counter: u64) -> TransferId {
        TransferId { receiver: self.engine.incarnation(), counter }
    }

    /// All pages of the pool are free.
    pub fn is_free(&self) -> bool {
        let free = self.shape.layout.page_count as usize;
        self.pool.counts() == LedgerCounts { free, ..LedgerCounts::default() }
    }

    /// Every page comes back, nothing reads or writes the memory any more, and nothing is amiss.
    #[track_caller]
    pub fn assert_clean(&self) {
        eventually("all pages are free again", || self.is_free());
        eventually("nothing pins the pool", || self.engine.unregister_pool(&self.pool).is_ok());
        assert_eq!(self.engine.health().faults, Vec::<String>::new());
    }

    /// Its memory as it is now.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.region.len()];
        self.region.read_at(0, &mut bytes).unwrap();
        bytes
    }

    #[track_caller]
    pub fn assert_untouched(&self) {
        self.shape.assert_untouched_but(&self.region, &[]);
    }
}

/// What a node is made like.
pub struct NodeSetup {
    pub shape: Shape,
    pub options: PoolOptions,
    pub tune: fn(Builder) -> Builder,
}

impl Default for NodeSetup {
    fn default() -> NodeSetup {
        NodeSetup { shape: Shape::default(), options: PoolOptions::default(), tune: quick }
    }
}

/// What a bed is made like.
#[derive(Default)]
pub struct Setup {
    pub prefill: NodeSetup,
    pub decode: NodeSetup,
}

/// The content that a prefill node's pages have.
pub const SEED: u8 = 7;

/// A prefill node with content, a decode node without, and a session between them.
pub struct Bed {
    pub decode: Node,
    pub prefill: Node,
    pub peer: Peer,
    pub route: Route,
}

impl Bed {
    pub fn new(fabric: &Fabric) -> Bed {
        Bed::with(fabric, Setup::default())
    }

    pub fn with(fabric: &Fabric, setup: Setup) -> Bed {
        let prefill = Node::new(fabric, "prefill", setup.prefill);
        prefill.shape.fill(&prefill.region, SEED);
        let decode = Node::new(fabric, "decode", setup.decode);
        let route = fabric.route(&prefill.address());
        let peer = decode.engine.connect(&route.address(), GUARD).unwrap();
        assert_eq!(peer.incarnation(), prefill.engine.incarnation());
        Bed { decode, prefill, peer, route }
    }

    /// The decode node, as the prefill node sees it.
    pub fn decode_peer(&self) -> Peer {
        eventually("the listener knows its peer", || !self.prefill.engine.peers().is_empty());
        self.prefill.engine.peers().remove(0)
    }

    /// The whole pages `range` of the prefill node.
    pub fn source(&self, range: std::ops::Range<u32>) -> Source {
        Source::pages(&self.prefill.pool, &pages(range))
    }

    /// Offers pages `0..count` under `label`, all written, and completes.
    pub fn send(&self, label: &Label, count: u32) -> Completion {
        let source = self.source(0..count);
        let send = self.prefill.engine.send(label.clone(), BINDING, source, GUARD);
        send.write_all();
        send.complete()
    }

    /// Receives into `count` pages what `label` has.
    pub fn receive(&self, label: &Label, count: usize) -> ReceiveHandle<SealedPages> {
        let lease = self.decode.pool.reserve(count).unwrap();
        self.decode.engine.receive(&self.peer, label.clone(), BINDING, lease, GUARD)
    }

    /// What the receiver's error has to be.
    pub fn receiver_expects(&self, label: &Label, counter: u64, total: u64) -> Expect {
        Expect {
            transfer: Some(self.decode.transfer(counter)),
            label: label.clone(),
            peer: Some(self.prefill.engine.incarnation()),
            phase: Phase::Matching,
            done: 0..=0,
            total,
            cause: Cause::DeadlineExceeded {},
        }
    }

    /// What the sender's error has to be.
    pub fn sender_expects(&self, label: &Label, counter: u64, total: u64) -> Expect {
        let peer = Some(self.decode.engine.incarnation());
        Expect { peer, ..self.receiver_expects(label, counter, total) }
    }

    /// A transfer goes through: whatever went wrong before has left nothing broken.
    #[track_caller]
    pub fn assert_works(&self) {
        let label = Label::new("afterwards").unwrap();
        let sent = self.send(&label, 3);
        let sealed = self.receive(&label, 3).wait().unwrap();
        assert_content(&sealed.read().unwrap(), 0, 0..3);
        sent.wait().unwrap();
    }

    /// The end of every test: all pages are back, and the pair still works.
    #[track_caller]
    pub fn finish(self) {
        eventually("the receiver's pages are free again", || self.decode.is_free());
        self.assert_works();
        self.decode.assert_clean();
        self.prefill.assert_clean();
    }
}

/// The error of a transfer that failed, within the guard.
#[track_caller]
pub fn failed(receive: ReceiveHandle<SealedPages>) -> TransferError {
    let mut receive = receive;
    receive.wait_for(GUARD).expect("the receive ends in time").expect_err("it fails")
}

/// The sealed pages of a transfer that went through, within the guard.
#[track_caller]
pub fn sealed(receive: ReceiveHandle<SealedPages>) -> SealedPages {
    let mut receive = receive;
    receive.wait_for(GUARD).expect("the receive ends in time").expect("it is sealed")
}

/// The outcome of a send, within the guard; and its source is free by then or soon.
#[track_caller]
pub fn outcome(sent: &Completion) -> Result<(), TransferError> {
    let outcome = sent.wait_for(GUARD).expect("the send ends in time");
    assert!(sent.wait_source_free(GUARD), "the source is free again");
    outcome
}

/// The logical pages of component 0 hold what pages `range` of a source filled with `SEED + skew`
/// hold.
#[track_caller]
pub fn assert_content(guard: &ReadGuard, skew: u8, range: std::ops::Range<u32>) {
    assert_eq!(guard.page_count(0), range.len());
    let mut bytes = vec![0; ITEM as usize];
    for (logical, page) in range.enumerate() {
        for plane in 0..PLANES {
            guard.copy(0, plane, logical, 0, &mut bytes);
            let want = pattern(SEED + skew, plane, page, ITEM as usize);
            assert!(bytes == want, "logical page {logical}, plane {plane} holds something else");
        }
    }
}
