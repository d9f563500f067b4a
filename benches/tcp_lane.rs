//! One TCP lane over loopback beside a raw stream of the same run.
//!
//! Pages of 32 KiB, in an order of their own on each side; a window of requests outstanding, as an
//! engine would keep. `cargo bench --bench tcp_lane [-- MiB rounds]`.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use sealift::memory::{HostRegion, PlaneMemory, PoolMemory};
use sealift::protocol::{
    BlockIndex, BlockRange, Extent, Generation, Incarnation, LaneId, PageIndex, PlaneIndex, Ticket,
    TransferId,
};
use sealift::transport::tcp::{TcpConfig, TcpTransport};
use sealift::transport::{
    CompletionStatus, DigestTable, Event, Landing, LaneRole, LaneSet, LinkId, Placement, Transport,
    WriteRequest,
};

const PAGE: usize = 32 * 1024;
const BLOCKS_PER_REQUEST: u32 = 32;
const REQUESTS_IN_FLIGHT: u64 = 16;
const WAIT: Duration = Duration::from_secs(10);

struct Side {
    transport: TcpTransport,
    events: Receiver<Event>,
    pool: Arc<PoolMemory>,
    placement: Arc<Placement>,
}

fn side(listen: bool, pages: u32, seed: u64) -> Side {
    let (sender, events) = crossbeam_channel::unbounded();
    let config = TcpConfig {
        listen: listen.then(|| "127.0.0.1:0".to_owned()),
        frame_bytes: env("FRAME_BYTES").unwrap_or(TcpConfig::default().frame_bytes),
        socket_buffer: env("SOCKET_BUFFER"),
        io_threads: 1,
        ..TcpConfig::default()
    };
    let sink = Arc::new(move |event| drop(sender.send(event)));
    let transport = TcpTransport::start(config, sink).expect("loopback is there");
    let region = HostRegion::owned(PAGE * pages as usize).expect("the memory is there");
    let plane = PlaneMemory { region, offset: 0, stride: PAGE, item_len: PAGE as u32 };
    let pool = Arc::new(PoolMemory::new(vec![plane], pages).expect("a plain pool"));
    let mut order: Vec<PageIndex> = (0..pages).map(PageIndex).collect();
    let mut state = seed;
    for last in (1..order.len()).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        order.swap(last, (state >> 33) as usize % (last + 1));
    }
    let extents = vec![Extent::whole(PlaneIndex(0), 1, PAGE as u32)];
    let placement = Placement::new(vec![(Arc::clone(&pool), order, extents)]).expect("it fits");
    Side { transport, events, pool, placement: Arc::new(placement) }
}

fn env(name: &str) -> Option<usize> {
    std::env::var(name).ok()?.parse().ok()
}

impl Side {
    fn next(&self) -> Event {
        self.events.recv_timeout(WAIT).expect("an event in time")
    }

    fn link(&self) -> LinkId {
        match self.next() {
            Event::LinkUp { link, .. } => link,
            other => panic!("expected a link, got {other:?}"),
        }
    }

    fn lane_up(&self) {
        let event = self.next();
        assert!(matches!(event, Event::LaneUp { .. }), "{event:?}");
    }
}

/// Two sides, a link and a lane from the first to the second.
fn pair(pages: u32) -> (Side, Side, LinkId, LaneId) {
    let (writer, reader) = (side(false, pages, 1), side(true, pages, 2));
    let address = reader.transport.listen_address().expect("it listens");
    writer.transport.connect(&address, WAIT).expect("loopback");
    let (ours, theirs) = (writer.link(), reader.link());
    let lane = LaneId { index: 0, epoch: 1 };
    let for_writer = reader.transport.prepare_lane(theirs, lane, LaneRole::Reader).unwrap();
    let for_reader = writer.transport.prepare_lane(ours, lane, LaneRole::Writer).unwrap();
    reader.transport.start_lane(theirs, lane, LaneRole::Reader, &for_reader, WAIT).unwrap();
    writer.transport.start_lane(ours, lane, LaneRole::Writer, &for_writer, WAIT).unwrap();
    writer.lane_up();
    reader.lane_up();
    (writer, reader, ours, lane)
}

/// Moves all pages once; the time until the last one is placed.
fn transfer(
    (writer, reader, link, lane): &(Side, Side, LinkId, LaneId),
    counter: u64,
    digest: bool,
) -> Duration {
    let transfer = TransferId { receiver: Incarnation(1), counter };
    let sent = digest.then(|| Arc::new(DigestTable::of_source(writer.placement.map())));
    let landed = digest.then(|| Arc::new(DigestTable::new(reader.placement.map())));
    reader.transport.open_landing(Landing {
        transfer,
        generation: Generation(1),
        placement: Arc::clone(&reader.placement),
        digests: landed.clone(),
        landed_bytes: Arc::default(),
        lanes: Arc::new(LaneSet::of([*lane])),
    });
    let start = Instant::now();
    let count = writer.placement.map().block_count();
    let (mut next, mut done) = (0u64, 0u64);
    let total = u64::from(count.div_ceil(BLOCKS_PER_REQUEST));
    while done < total {
        while next < total && next - done < REQUESTS_IN_FLIGHT {
            let first = next as u32 * BLOCKS_PER_REQUEST;
            let range = BlockRange {
                first: BlockIndex(first),
                count: BLOCKS_PER_REQUEST.min(count - first),
            };
            let request = WriteRequest {
                transfer,
                generation: Generation(1),
                ticket: Ticket(next),
                blocks: vec![range],
                source: Arc::clone(&writer.placement),
                digests: sent.clone(),
            };
            writer.transport.post_write(*link, *lane, request);
            next += 1;
        }
        let event = writer.next();
        assert!(
            matches!(event, Event::WriteDone { status: CompletionStatus::Success, .. }),
            "{event:?}"
        );
        done += 1;
    }
    writer.transport.post_marker(*link, *lane, transfer, Default::default(), Ticket(next));
    let event = reader.next();
    assert!(matches!(event, Event::MarkerSeen { .. }), "{event:?}");
    let taken = start.elapsed();
    let _ = writer.next();
    if let (Some(sent), Some(landed)) = (sent, landed) {
        assert_eq!(sent.snapshot(), landed.snapshot(), "both ends digested the same");
    }
    reader.transport.close_landing(transfer);
    let _ = reader.next();
    reader.transport.forget_landing(transfer);
    taken
}

/// The same bytes through a plain blocking stream, 256 KiB a call, memory in order.
fn raw(bytes: usize, from: &[u8], to: &mut [u8]) -> Duration {
    const CALL: usize = 256 * 1024;
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut receiver, _) = listener.accept().unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| from[..bytes].chunks(CALL).for_each(|c| sender.write_all(c).unwrap()));
        to[..bytes].chunks_mut(CALL).for_each(|c| receiver.read_exact(c).unwrap());
    });
    start.elapsed()
}

fn main() {
    // `cargo test --benches` runs this too: then a little is enough.
    let numbers: Vec<usize> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    let measure = std::env::args().any(|arg| arg == "--bench");
    let mib = numbers.first().copied().unwrap_or(if measure { 256 } else { 8 });
    let rounds = numbers.get(1).copied().unwrap_or(if measure { 9 } else { 1 });
    let bytes = mib << 20;
    let pair = pair((bytes / PAGE) as u32);
    for page in 0..(bytes / PAGE) as u32 {
        pair.0.pool.write(0, PageIndex(page), 0, &[page as u8; PAGE]);
    }
    let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
    let mut rates: [Vec<f64>; 3] = Default::default();
    for round in 0..rounds as u64 {
        let taken = [
            raw(bytes, &from, &mut to),
            transfer(&pair, 2 * round + 1, false),
            transfer(&pair, 2 * round + 2, true),
        ];
        for (rates, taken) in rates.iter_mut().zip(taken) {
            rates.push(bytes as f64 / taken.as_secs_f64() / 1e9);
        }
    }
    println!("{mib} MiB in shuffled 32 KiB pages, one lane, {rounds} rounds, GB/s:");
    let mut median_raw = 0.0;
    for (name, mut rates) in ["raw stream", "lane, digest off", "lane, digest on"].iter().zip(rates)
    {
        rates.sort_by(f64::total_cmp);
        let median = rates[rates.len() / 2];
        median_raw = if *name == "raw stream" { median } else { median_raw };
        println!(
            "  {name:<17} median {median:.2}  best {:.2}  ({:.2} of raw)",
            rates[rates.len() - 1],
            median / median_raw
        );
    }
}
