//! One engine with one pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sealift::engine::{Completion, Engine, Peer, Pool, PoolOptions, ReceiveHandle, SealedPages};
use sealift::engine::{SendHandle, Source};
use sealift::memory::{HostRegion, PlaneMemory};
use sealift::protocol::{Binding, Label, PageIndex, PoolLayout, TransferError};

use super::{HANG, PAGES, eventually, memory};

pub(crate) const ITEM: usize = 32 * 1024;
pub(crate) const PLANES: usize = 4;
/// Small enough that a stopped reader stalls its writer in the middle of a frame.
const SOCKET_BUFFER: usize = 256 * 1024;
/// Pause between two pages: a transfer lasts, and always has bytes on the way.
const PACE: Duration = Duration::from_millis(2);
const TOKENS: u64 = 16;

/// What a node is made of. Travels to a child as one line.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) listen: String,
    pub(crate) liveness: Duration,
    pub(crate) reconnect_grace: Duration,
    pub(crate) pages: u32,
    /// Windows through which the pool is seen: its memory is that much smaller than its size.
    pub(crate) windows: usize,
    /// Memory shared with another process, or `-`.
    pub(crate) memory: String,
}

impl Default for Spec {
    fn default() -> Spec {
        Spec {
            listen: "127.0.0.1:0".into(),
            liveness: Duration::from_secs(20),
            reconnect_grace: Duration::from_millis(200),
            pages: PAGES,
            windows: 1,
            memory: "-".into(),
        }
    }
}

impl Spec {
    pub(crate) fn pool_bytes(&self) -> usize {
        self.pages as usize * PLANES * ITEM
    }

    pub(crate) fn to_line(&self) -> String {
        let Spec { listen, liveness, reconnect_grace, pages, windows, memory } = self;
        let (liveness, grace) = (liveness.as_millis(), reconnect_grace.as_millis());
        format!("{listen} {liveness} {grace} {pages} {windows} {memory}")
    }

    pub(crate) fn from_line(line: &str) -> Spec {
        let words: Vec<&str> = line.split(' ').collect();
        let millis = |word: &str| Duration::from_millis(word.parse().unwrap());
        Spec {
            listen: words[0].into(),
            liveness: millis(words[1]),
            reconnect_grace: millis(words[2]),
            pages: words[3].parse().unwrap(),
            windows: words[4].parse().unwrap(),
            memory: words[5].into(),
        }
    }

    fn region(&self) -> HostRegion {
        match (self.memory.as_str(), self.windows) {
            ("-", 1) => HostRegion::owned(self.pool_bytes()).unwrap(),
            ("-", times) => memory::windows(self.pool_bytes() / times, times),
            (path, _) => memory::open(path, self.pool_bytes()),
        }
    }
}

pub(crate) struct Node {
    pub(crate) engine: Engine,
    pub(crate) pool: Pool,
    pub(crate) region: HostRegion,
    pages: u32,
}

impl Node {
    pub(crate) fn start(spec: &Spec) -> Node {
        let grace = spec.reconnect_grace;
        let engine = Engine::builder()
            .listen(&spec.listen)
            .liveness(spec.liveness)
            // Longer than the default, so that a slow machine sees what lies between a failure
            // and its fence.
            .drain_grace(Duration::from_secs(1))
            .configure(move |config| config.session.reconnect_grace = grace)
            .tcp(|tcp| tcp.socket_buffer = Some(SOCKET_BUFFER))
            .build()
            .unwrap();
        let region = spec.region();
        let plane_bytes = spec.pages as usize * ITEM;
        let layout = PoolLayout {
            name: "kv".into(),
            dtype: "bf16".into(),
            tokens_per_page: TOKENS as u32,
            page_count: spec.pages,
            item_lens: vec![ITEM as u32; PLANES],
        };
        let plane = |k: usize| PlaneMemory {
            region: region.clone(),
            offset: k * plane_bytes,
            stride: ITEM,
            item_len: ITEM as u32,
        };
        let planes = (0..PLANES).map(plane).collect();
        // All pages may be quarantined at once here, and that is no fault of the engine.
        let options = PoolOptions { quarantine_budget: Some(spec.pages), ..Default::default() };
        let pool = engine.register_pool(layout, planes, options).unwrap();
        Node { engine, pool, region, pages: spec.pages }
    }

    pub(crate) fn address(&self) -> String {
        self.engine.listen_address().unwrap()
    }

    pub(crate) fn connect(&self, address: &str) -> Peer {
        self.engine.connect(address, HANG).unwrap()
    }

    pub(crate) fn fill(&self, byte: u8) {
        self.region.fill(0, self.region.len(), byte).unwrap();
    }

    pub(crate) fn all_pages(&self) -> Vec<PageIndex> {
        (0..self.pages).map(PageIndex).collect()
    }

    /// Receives into the first `pages` pages, in order.
    pub(crate) fn receive(
        &self,
        peer: &Peer,
        label: u64,
        pages: u32,
        deadline: Duration,
    ) -> ReceiveHandle<SealedPages> {
        let pages: Vec<PageIndex> = (0..pages).map(PageIndex).collect();
        let lease = self.pool.claim(&pages).unwrap();
        let binding = binding(&pages);
        self.engine.receive(peer, Label::from(label), binding, lease, deadline)
    }

    /// Sends the first `pages` pages, all at once.
    pub(crate) fn send(&self, label: u64, pages: u32, deadline: Duration) -> Sending {
        self.begin(label, pages, deadline, None)
    }

    /// Sends them one by one, and the last one only when told to: it can't end before.
    pub(crate) fn send_slowly(&self, label: u64, pages: u32, deadline: Duration) -> Sending {
        self.begin(label, pages, deadline, Some(PACE))
    }

    fn begin(&self, label: u64, count: u32, deadline: Duration, pace: Option<Duration>) -> Sending {
        let pages: Vec<PageIndex> = (0..count).map(PageIndex).collect();
        let source = Source::pages(&self.pool, &pages);
        let handle = self.engine.send(Label::from(label), binding(&pages), source, deadline);
        let go_on = Arc::new(AtomicBool::new(pace.is_none()));
        let told = go_on.clone();
        Sending { go_on, writer: std::thread::spawn(move || write(handle, count, pace, &told)) }
    }

    pub(crate) fn is_all_free(&self) -> bool {
        self.pool.counts().free == self.pages as usize
    }

    pub(crate) fn wait_all_free(&self) {
        eventually("all pages are free", || self.is_all_free());
    }
}

fn binding(pages: &[PageIndex]) -> Binding {
    Binding::tokens(pages.len() as u64 * TOKENS)
}

/// A send under way.
pub(crate) struct Sending {
    go_on: Arc<AtomicBool>,
    writer: JoinHandle<Sent>,
}

/// A send that is over.
pub(crate) struct Sent {
    pub(crate) result: Result<(), TransferError>,
    pub(crate) at: Instant,
    pub(crate) completion: Completion,
    /// Something still read the source when the result was known.
    pub(crate) was_pinned: bool,
}

impl Sending {
    /// The last page may go.
    pub(crate) fn go_on(&self) {
        self.go_on.store(true, Ordering::Relaxed);
    }

    pub(crate) fn wait(self) -> Sent {
        self.writer.join().unwrap()
    }
}

fn write(handle: SendHandle, pages: u32, pace: Option<Duration>, go_on: &AtomicBool) -> Sent {
    let last = pages - 1;
    match pace {
        None => handle.write(0, 0..last),
        Some(pace) => {
            for page in (0..last).take_while(|_| !handle.is_over()) {
                handle.write(0, page..page + 1);
                std::thread::sleep(pace);
            }
        }
    }
    while !handle.is_over() && !go_on.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(1));
    }
    handle.write(0, last..pages);
    // If it failed before, this changes nothing: the first cause stands.
    let completion = handle.complete();
    let result = completion.wait();
    let (at, was_pinned) = (Instant::now(), !completion.wait_source_free(Duration::ZERO));
    Sent { result, at, completion, was_pinned }
}

/// The name of a failure's cause.
pub(crate) fn cause(error: &TransferError) -> String {
    let text = format!("{:?}", error.cause);
    text.chars().take_while(|c| c.is_alphanumeric()).collect()
}

/// It failed in the middle.
pub(crate) fn assert_midway(error: &TransferError) {
    let TransferError { bytes_done, bytes_total, .. } = error;
    assert!(0 < *bytes_done && bytes_done < bytes_total, "{error}");
}
