//! Every fault and every promise of the simulated network, with real memory and its bytes compared.

mod determinism;
mod ends;
mod lanes;
mod links;
mod live;
mod semantics;
mod verbs;
mod writes;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::memory::{HostRegion, PlaneMemory, PoolMemory};
use crate::protocol::{
    BlockIndex, BlockRange, Extent, Generation, Incarnation, LaneId, PageIndex, PlaneIndex, Round,
    Ticket, TransferId,
};
use crate::transport::{
    CompletionStatus, DigestTable, Event, Landing, LaneRole, LinkId, Placement, Transport,
    WriteRequest,
};

const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);
const PLANES: u16 = 2;
const PAGES: u32 = 8;
const PAGE_LEN: u32 = 64;
const GENERATION: Generation = Generation(5);
const T: TransferId = TransferId { receiver: Incarnation(9), counter: 1 };
const U: TransferId = TransferId { receiver: Incarnation(9), counter: 2 };
const L0: LaneId = LaneId { index: 0, epoch: 100 };
const L1: LaneId = LaneId { index: 1, epoch: 101 };

fn pool() -> Arc<PoolMemory> {
    let plane = |_| PlaneMemory {
        region: HostRegion::owned((PAGES * PAGE_LEN) as usize).unwrap(),
        offset: 0,
        stride: PAGE_LEN as usize,
        item_len: PAGE_LEN,
    };
    Arc::new(PoolMemory::new((0..PLANES).map(plane).collect(), PAGES).unwrap())
}

/// Pages `pages` of `memory`, whole, in all planes.
fn placement(memory: &Arc<PoolMemory>, pages: &[u32]) -> Arc<Placement> {
    let pages = pages.iter().map(|&page| PageIndex(page)).collect();
    let extents = vec![Extent::whole(PlaneIndex(0), PLANES, PAGE_LEN)];
    Arc::new(Placement::new(vec![(Arc::clone(memory), pages, extents)]).unwrap())
}

fn page(memory: &PoolMemory, plane: u16, page: u32) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_LEN as usize];
    memory.read(plane, PageIndex(page), 0, &mut bytes);
    bytes
}

/// An endpoint, its memory and what it heard.
struct Node {
    transport: SimTransport,
    memory: Arc<PoolMemory>,
    log: Arc<Mutex<Vec<Event>>>,
}

impl Node {
    fn new(net: &SimNet, name: &str) -> Node {
        let log = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&log);
        let transport = net.endpoint(name, Arc::new(move |event| sink.lock().unwrap().push(event)));
        Node { transport, memory: pool(), log }
    }

    /// What it heard since the last look.
    fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.log.lock().unwrap())
    }

    /// The control frames among that.
    fn frames(&self) -> Vec<Vec<u8>> {
        let frame = |event| match event {
            Event::Control { frame, .. } => Some(frame),
            _ => None,
        };
        self.take().into_iter().filter_map(frame).collect()
    }

    /// As text, one event an entry, for comparison.
    fn text(&self) -> Vec<String> {
        self.take().iter().map(|event| format!("{event:?}")).collect()
    }
}

/// Writer `a` and reader `b` with a link; source and destination pages differ in every byte.
struct Bed {
    net: SimNet,
    a: Node,
    b: Node,
    la: LinkId,
    lb: LinkId,
    source: Arc<Placement>,
    target: Arc<Placement>,
    sent: Arc<DigestTable>,
    received: Arc<DigestTable>,
}

fn drain(net: &SimNet) {
    while net.step() {}
}

impl Bed {
    fn new(config: SimConfig) -> Bed {
        let net = SimNet::new(SimConfig { trace_len: 10_000, ..config });
        let (a, b) = (Node::new(&net, "a"), Node::new(&net, "b"));
        for plane in 0..PLANES {
            for page in 0..PAGES {
                let fill = |base: u32| (base + u32::from(plane) * PAGES + page) as u8;
                a.memory.fill_page(plane, PageIndex(page), fill(1));
                b.memory.fill_page(plane, PageIndex(page), fill(101));
            }
        }
        let la = a.transport.connect("b", SECOND).unwrap();
        drain(&net);
        a.take();
        let lb = match b.take().pop() {
            Some(Event::LinkUp { link, dialled: false, .. }) => link,
            other => panic!("{other:?}"),
        };
        let source = placement(&a.memory, &[0, 1, 2, 3]);
        let target = placement(&b.memory, &[7, 5, 3, 1]);
        let sent = Arc::new(DigestTable::new(source.map()));
        let received = Arc::new(DigestTable::new(target.map()));
        Bed { net, a, b, la, lb, source, target, sent, received }
    }

    /// With lanes 0 and 1 up, and transfer `T` open.
    fn ready(config: SimConfig) -> Bed {
        let bed = Bed::new(config);
        bed.join(L0);
        bed.join(L1);
        bed.open(T, &bed.received);
        bed
    }

    fn join(&self, lane: LaneId) {
        let (a, b) = (&self.a.transport, &self.b.transport);
        let of_b = b.prepare_lane(self.lb, lane, LaneRole::Reader).unwrap();
        let of_a = a.prepare_lane(self.la, lane, LaneRole::Writer).unwrap();
        a.start_lane(self.la, lane, LaneRole::Writer, &of_b, SECOND).unwrap();
        b.start_lane(self.lb, lane, LaneRole::Reader, &of_a, SECOND).unwrap();
        drain(&self.net);
        assert!(matches!(self.a.take()[..], [Event::LaneUp { role: LaneRole::Writer, .. }]));
        assert!(matches!(self.b.take()[..], [Event::LaneUp { role: LaneRole::Reader, .. }]));
    }

    fn open(&self, transfer: TransferId, digests: &Arc<DigestTable>) {
        self.b.transport.open_landing(Landing {
            transfer,
            generation: GENERATION,
            placement: Arc::clone(&self.target),
            digests: Some(Arc::clone(digests)),
            landed_bytes: Arc::new(AtomicU64::new(0)),
            lanes: Arc::new(crate::transport::LaneSet::of(all_lanes())),
        });
    }

    fn request(&self, ticket: u64, blocks: std::ops::Range<u32>) -> WriteRequest {
        let count = blocks.end - blocks.start;
        WriteRequest {
            transfer: T,
            generation: GENERATION,
            ticket: Ticket(ticket),
            blocks: vec![BlockRange { first: BlockIndex(blocks.start), count }],
            source: Arc::clone(&self.source),
            digests: Some(Arc::clone(&self.sent)),
        }
    }

    fn write(&self, lane: LaneId, ticket: u64, blocks: std::ops::Range<u32>) {
        self.a.transport.post_write(self.la, lane, self.request(ticket, blocks));
    }

    fn marker(&self, lane: LaneId, ticket: u64) {
        self.a.transport.post_marker(self.la, lane, T, Round(0), Ticket(ticket));
    }

    /// Which of the blocks 0..8 hold the source's bytes at the reader; the others hold the old.
    fn landed(&self) -> Vec<u32> {
        let here = |block: u32| {
            let (plane, index) = ((block / 4) as u16, block % 4);
            let old = (101 + u32::from(plane) * PAGES + [7, 5, 3, 1][index as usize]) as u8;
            let found = page(&self.b.memory, plane, [7, 5, 3, 1][index as usize]);
            let expected = page(&self.a.memory, plane, index);
            assert!(
                found == expected || found == [old; PAGE_LEN as usize],
                "block {block} is torn"
            );
            found == expected
        };
        (0..8).filter(|&block| here(block)).collect()
    }

    fn digests_agree(&self) -> bool {
        self.sent.snapshot() == self.received.snapshot()
    }

    /// Completions since the last look; nothing else may have come.
    fn completions(&self) -> Vec<(u64, CompletionStatus)> {
        let done = |event| match event {
            Event::WriteDone { ticket, status, .. } => (ticket.0, status),
            other => panic!("{other:?}"),
        };
        self.a.take().into_iter().map(done).collect()
    }

    fn count(&self, kind: FaultKind) -> u64 {
        self.net.stats().count(kind)
    }

    /// Steps until the writer or reader hears something.
    fn step_until(&self, mut happened: impl FnMut(&Bed) -> bool) {
        while !happened(self) {
            assert!(self.net.step(), "it never happened");
        }
    }
}

const OK: CompletionStatus = CompletionStatus::Success;
const FLUSHED: CompletionStatus = CompletionStatus::Flushed;

fn certain_late(late_landing: f64) -> SimConfig {
    SimConfig { late_landing, ..SimConfig::seeded(3) }
}

/// A bed with block 0..8 posted over lane 0 and held in flight.
fn in_flight(config: SimConfig) -> Bed {
    let bed = Bed::ready(config);
    bed.net.hold_writes(Filter::any());
    bed.write(L0, 1, 0..8);
    bed.marker(L0, 2);
    drain(&bed.net);
    bed
}

fn release(bed: &Bed) {
    bed.net.release_writes();
    drain(&bed.net);
}

/// Every lane that these tests open.
fn all_lanes() -> impl Iterator<Item = LaneId> {
    (0..8).flat_map(|index| (0..128).map(move |epoch| LaneId { index, epoch }))
}
