//! What the tests are built from. Waits are for events, with a guard against hanging.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use crate::memory::{HostRegion, PlaneMemory, PoolMemory};
use crate::protocol::{
    BlockIndex, BlockRange, Extent, Generation, Incarnation, LaneId, PageIndex, Round, Ticket,
    TransferId,
};
use crate::transport::tcp::preamble::{LaneParams, Preamble, REPLY_LEN, Reply, Secret, opposite};
use crate::transport::tcp::{TcpConfig, TcpTransport, frame};
use crate::transport::{
    CompletionStatus, DigestTable, Event, Landing, LaneRole, LinkId, Placement, Transport,
    WriteRequest,
};

pub(super) const GUARD: Duration = Duration::from_secs(10);
pub(super) const TRANSFER: TransferId = TransferId { receiver: Incarnation(0xabc), counter: 1 };
pub(super) const GENERATION: Generation = Generation(5);
pub(super) const LANE: LaneId = LaneId { index: 0, epoch: 1 };
pub(super) const CANARY: u8 = 0xcc;

/// A transport and what it reports.
pub(super) struct Side {
    pub(super) transport: TcpTransport,
    pub(super) events: Receiver<Event>,
}

pub(super) fn listening() -> TcpConfig {
    TcpConfig { listen: Some("127.0.0.1:0".to_owned()), ..TcpConfig::default() }
}

pub(super) fn side(config: TcpConfig) -> Side {
    let (sender, events) = crossbeam_channel::unbounded();
    let sink = Arc::new(move |event| drop(sender.send(event)));
    Side { transport: TcpTransport::start(config, sink).unwrap(), events }
}

impl Side {
    pub(super) fn next(&self) -> Event {
        self.events.recv_timeout(GUARD).expect("an event in time")
    }

    /// The next event, which `pick` must want.
    #[track_caller]
    pub(super) fn expect<T>(&self, pick: impl FnOnce(&Event) -> Option<T>) -> T {
        let event = self.next();
        pick(&event).unwrap_or_else(|| panic!("unexpected: {event:?}"))
    }

    /// The first event that `pick` wants; others are dropped.
    pub(super) fn until<T>(&self, mut pick: impl FnMut(&Event) -> Option<T>) -> T {
        loop {
            if let Some(found) = pick(&self.next()) {
                return found;
            }
        }
    }

    pub(super) fn nothing_waits(&self) {
        assert!(self.events.is_empty(), "unexpected: {:?}", self.events.try_recv());
    }

    pub(super) fn address(&self) -> String {
        self.transport.listen_address().unwrap()
    }

    #[track_caller]
    pub(super) fn link_up(&self) -> LinkId {
        self.expect(|event| match event {
            Event::LinkUp { link, .. } => Some(*link),
            _ => None,
        })
    }

    #[track_caller]
    pub(super) fn lane_up(&self) {
        self.expect(|event| matches!(event, Event::LaneUp { .. }).then_some(()));
    }

    #[track_caller]
    pub(super) fn lane_down(&self) -> String {
        self.expect(|event| match event {
            Event::LaneDown { why, .. } => Some(why.clone()),
            _ => None,
        })
    }

    #[track_caller]
    pub(super) fn fenced(&self) {
        self.expect(|event| matches!(event, Event::LaneFenced { .. }).then_some(()));
    }

    #[track_caller]
    pub(super) fn closed(&self) -> u64 {
        self.expect(|event| match event {
            Event::LandingClosed { landed_bytes, .. } => Some(*landed_bytes),
            _ => None,
        })
    }

    #[track_caller]
    pub(super) fn done(&self) -> (Ticket, CompletionStatus) {
        self.expect(|event| match event {
            Event::WriteDone { ticket, status, .. } => Some((*ticket, *status)),
            _ => None,
        })
    }

    #[track_caller]
    pub(super) fn marker(&self) -> Round {
        self.expect(|event| match event {
            Event::MarkerSeen { round, .. } => Some(*round),
            _ => None,
        })
    }
}

/// A dialler, a listener and the link between them.
pub(super) fn linked(dialler: TcpConfig, listener: TcpConfig) -> (Side, Side, LinkId, LinkId) {
    let (dialler, listener) = (side(dialler), side(listener));
    let link = dialler.transport.connect(&listener.address(), GUARD).unwrap();
    assert_eq!(dialler.link_up(), link);
    let accepted = listener.link_up();
    (dialler, listener, link, accepted)
}

/// Brings a lane up; the reader prepares first, then the writer, and either starts first.
pub(super) fn join(
    writer: (&Side, LinkId),
    reader: (&Side, LinkId),
    lane: LaneId,
    reader_starts_first: bool,
) {
    let of_reader = reader.0.transport.prepare_lane(reader.1, lane, LaneRole::Reader).unwrap();
    let of_writer = writer.0.transport.prepare_lane(writer.1, lane, LaneRole::Writer).unwrap();
    let start_reader = || {
        let (transport, link) = (&reader.0.transport, reader.1);
        transport.start_lane(link, lane, LaneRole::Reader, &of_writer, GUARD).unwrap();
    };
    if reader_starts_first {
        start_reader();
    }
    let (transport, link) = (&writer.0.transport, writer.1);
    transport.start_lane(link, lane, LaneRole::Writer, &of_reader, GUARD).unwrap();
    if !reader_starts_first {
        start_reader();
    }
    writer.0.lane_up();
    reader.0.lane_up();
}

/// A pool of one region, every byte `fill`.
pub(super) fn pool(item_lens: &[u32], pages: u32, fill: u8) -> Arc<PoolMemory> {
    let bytes: usize = item_lens.iter().map(|&len| len as usize * pages as usize).sum();
    let region = HostRegion::owned(bytes).unwrap();
    region.write_at(0, &vec![fill; bytes]).unwrap();
    let mut offset = 0;
    let planes = item_lens
        .iter()
        .map(|&item_len| {
            let stride = item_len as usize;
            let plane = PlaneMemory { region: region.clone(), offset, stride, item_len };
            offset += stride * pages as usize;
            plane
        })
        .collect();
    Arc::new(PoolMemory::new(planes, pages).unwrap())
}

pub(super) fn place(pool: &Arc<PoolMemory>, pages: &[u32], extents: Vec<Extent>) -> Arc<Placement> {
    let pages = pages.iter().copied().map(PageIndex).collect();
    Arc::new(Placement::new(vec![(Arc::clone(pool), pages, extents)]).unwrap())
}

/// Every byte of a pool.
pub(super) fn bytes_of(pool: &PoolMemory) -> Vec<u8> {
    let mut all = Vec::new();
    for (plane, &len) in pool.item_lens().iter().enumerate() {
        for page in 0..pool.page_count() {
            let mut bytes = vec![0; len as usize];
            pool.read(plane as u16, PageIndex(page), 0, &mut bytes);
            all.extend_from_slice(&bytes);
        }
    }
    all
}

pub(super) fn range(first: u32, count: u32) -> BlockRange {
    BlockRange { first: BlockIndex(first), count }
}

pub(super) fn landing(placement: &Arc<Placement>, digests: Option<&Arc<DigestTable>>) -> Landing {
    Landing {
        transfer: TRANSFER,
        generation: GENERATION,
        placement: Arc::clone(placement),
        digests: digests.cloned(),
        landed_bytes: Arc::default(),
        lanes: Arc::new(crate::transport::LaneSet::of(all_lanes())),
    }
}

pub(super) fn write(
    source: &Arc<Placement>,
    digests: Option<&Arc<DigestTable>>,
    ticket: u64,
    blocks: &[BlockRange],
) -> WriteRequest {
    WriteRequest {
        transfer: TRANSFER,
        generation: GENERATION,
        ticket: Ticket(ticket),
        blocks: blocks.to_vec(),
        source: Arc::clone(source),
        digests: digests.cloned(),
    }
}

/// Waits for a state that no event announces.
pub(super) fn eventually(mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < GUARD, "it never came about");
        std::thread::yield_now();
    }
}

/// A peer played by hand: a control connection, and a lane's connection once it was joined.
pub(super) struct ByHand {
    pub(super) control: TcpStream,
    pub(super) address: String,
    pub(super) link: LinkId,
}

pub(super) fn dial(address: &str, preamble: &Preamble) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(GUARD)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.write_all(&preamble.encode()).unwrap();
    stream
}

pub(super) fn reply(stream: &mut TcpStream) -> Option<Reply> {
    let mut bytes = [0; REPLY_LEN];
    stream.read_exact(&mut bytes).ok()?;
    Reply::decode(&bytes).ok()
}

/// Whether the other side has closed or reset the connection, within the guard.
pub(super) fn is_closed(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 64]) {
        Ok(got) => got == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

impl ByHand {
    pub(super) fn link(to: &Side) -> ByHand {
        let address = to.address();
        let mut control = dial(&address, &Preamble::Control);
        let link = to.link_up();
        assert!(matches!(reply(&mut control), Some(Reply::Welcome(_))));
        ByHand { control, address, link }
    }

    /// Prepares and starts the lane at `to`; the preamble that its connection needs.
    pub(super) fn expected(&self, to: &Side, lane: LaneId, role: LaneRole) -> Preamble {
        let params = to.transport.prepare_lane(self.link, lane, role).unwrap();
        let params = LaneParams::decode(&params).unwrap();
        let secret = Secret::new().unwrap();
        let ours = LaneParams { role: opposite(role), link: LinkId(99), lane, secret };
        to.transport.start_lane(self.link, lane, role, &ours.encode(), GUARD).unwrap();
        let LaneParams { link, secret, .. } = params;
        Preamble::Lane { link, lane, dialler: opposite(role), secret }
    }

    /// A lane at whose other end `to` is `role`.
    pub(super) fn lane(&self, to: &Side, lane: LaneId, role: LaneRole) -> TcpStream {
        let preamble = self.expected(to, lane, role);
        let mut stream = dial(&self.address, &preamble);
        assert!(matches!(reply(&mut stream), Some(Reply::Welcome(_))));
        to.lane_up();
        stream
    }
}

/// A write frame's header.
pub(super) fn header(ranges: &[BlockRange], payload: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::encode_write(&mut bytes, TRANSFER, GENERATION, ranges, payload);
    bytes
}

pub(super) fn marker(round: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::encode_marker(&mut bytes, TRANSFER, Round(round));
    bytes
}

/// Every lane that these tests open.
fn all_lanes() -> impl Iterator<Item = LaneId> {
    (0..8).flat_map(|index| (0..128).map(move |epoch| LaneId { index, epoch }))
}
