//! A sender that is driven by hand, for everything that the typed API can't express: it keeps up
//! the session by itself, and says and writes what the test tells it to.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sealift::memory::PoolMemory;
use sealift::protocol::parts::{Joiner, MAX_MESSAGE_LEN, split};
use sealift::protocol::{
    BlockIndex, BlockRange, Cause, Generation, Grant, Hello, Incarnation, LaneDrain, LaneId, MAGIC,
    MIN_VERSION, Manifest, ManifestComponent, Message, PageIndex, Round, Ticket, TransferId,
    VERSION, wrapping_total,
};
use sealift::transport::{
    CompletionStatus, DigestTable, Event, LaneRole, LinkId, Placement, Transport, WriteRequest,
};

use super::bed::{SEED, pages};
use super::check::GUARD;
use super::fabric::Fabric;
use super::source::Shape;

#[derive(Default)]
struct State {
    link: Option<LinkId>,
    joiner: Joiner,
    number: u32,
    /// Messages that no test has looked for yet.
    heard: Vec<Message>,
    lanes: Vec<LaneId>,
    done: Vec<(Ticket, CompletionStatus)>,
    tickets: u64,
    pongs: u64,
    /// Acknowledges nothing and answers nothing.
    mute: bool,
}

struct Shared {
    transport: Arc<dyn Transport>,
    hello: Hello,
    state: Mutex<State>,
    changed: Condvar,
}

/// See the module.
pub struct Rogue {
    shared: Arc<Shared>,
    events: Sender<Option<Event>>,
    thread: Option<JoinHandle<()>>,
    pub memory: Arc<PoolMemory>,
}

impl Rogue {
    /// Listens. Its pages have the content of a prefill node's.
    pub fn new(fabric: &Fabric, name: &str) -> Rogue {
        Rogue::with(fabric, name, |_| {})
    }

    /// As [`Rogue::new`], with another Hello.
    pub fn with(fabric: &Fabric, name: &str, change: impl FnOnce(&mut Hello)) -> Rogue {
        let (events, inbox) = channel();
        let sink = events.clone();
        let transport = fabric.transport(
            name,
            Arc::new(move |event| {
                // After the rogue's end nobody listens.
                let _ = sink.send(Some(event));
            }),
        );
        let mut hello = Hello {
            magic: MAGIC,
            min_version: MIN_VERSION,
            max_version: VERSION,
            incarnation: Incarnation(0x0609_0e00 + name.bytes().map(u64::from).sum::<u64>()),
            name: name.into(),
            session: Some(77),
            capabilities: transport.capabilities().bits(),
            transport: transport.name().into(),
            max_grant_pages: 1 << 20,
            window_bytes: 1 << 20,
            liveness_ms: 2000,
            pools: Vec::new(),
            auth: Vec::new(),
        };
        change(&mut hello);
        let state = Mutex::default();
        let shared = Arc::new(Shared { transport, hello, state, changed: Condvar::new() });
        let seen = Arc::clone(&shared);
        let thread = Some(std::thread::spawn(move || run(&seen, &inbox)));
        Rogue { shared, events, thread, memory: Shape::default().memory(SEED) }
    }

    pub fn address(&self) -> String {
        self.shared.transport.listen_address().unwrap()
    }

    pub fn incarnation(&self) -> Incarnation {
        self.shared.hello.incarnation
    }

    /// From now on it acknowledges nothing and answers no ping.
    pub fn go_mute(&self) {
        self.shared.state.lock().unwrap().mute = true;
    }

    #[track_caller]
    fn wait<T>(&self, what: &str, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        let until = Instant::now() + GUARD;
        let mut state = self.shared.state.lock().unwrap();
        loop {
            if let Some(found) = look(&mut state) {
                return found;
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "not within {GUARD:?}: {what}; heard {:?}", state.heard);
            state = self.shared.changed.wait_timeout(state, left).unwrap().0;
        }
    }

    /// The first message that matches, which is then forgotten.
    #[track_caller]
    pub fn hear(&self, what: &str, matches: impl Fn(&Message) -> bool) -> Message {
        self.wait(what, |state| {
            let at = state.heard.iter().position(&matches)?;
            Some(state.heard.remove(at))
        })
    }

    /// Has anything that matches come so far?
    pub fn has_heard(&self, matches: impl Fn(&Message) -> bool) -> bool {
        self.shared.state.lock().unwrap().heard.iter().any(matches)
    }

    #[track_caller]
    pub fn grant(&self) -> Grant {
        match self.hear("a grant", |message| matches!(message, Message::Grant { .. })) {
            Message::Grant { grant } => grant,
            _ => unreachable!(),
        }
    }

    /// The cause of the abort of `id`.
    #[track_caller]
    pub fn aborted(&self, id: TransferId) -> Cause {
        let ours = |m: &Message| matches!(m, Message::Abort { id: other, .. } if *other == id);
        match self.hear("an abort", ours) {
            Message::Abort { cause, .. } => cause,
            _ => unreachable!(),
        }
    }

    /// The lanes that are up, once there are so many.
    #[track_caller]
    pub fn lanes(&self, count: usize) -> Vec<LaneId> {
        self.wait("lanes", |state| (state.lanes.len() >= count).then(|| state.lanes.clone()))
    }

    pub fn send(&self, message: &Message) {
        let mut state = self.shared.state.lock().unwrap();
        self.shared.send(&mut state, message);
    }

    /// Everything that was said before this has been acted on by the other side.
    #[track_caller]
    pub fn round_trip(&self) {
        let before = self.shared.state.lock().unwrap().pongs;
        self.send(&Message::Ping {});
        self.wait("a pong", |state| (state.pongs > before).then_some(()));
    }

    /// Accepts over every lane, once both are up; the receiver has heard it, so no write of what
    /// follows overtakes it.
    #[track_caller]
    pub fn accept(&self, grant: &Grant) -> Vec<LaneId> {
        let lanes = self.lanes(2);
        let bytes = self.placement(grant).map().byte_count();
        self.send(&Message::Accept { id: grant.id, bytes, lanes: lanes.clone() });
        self.round_trip();
        lanes
    }

    /// Where an honest sender would have the grant's blocks: in its pages `0..n`.
    pub fn placement(&self, grant: &Grant) -> Arc<Placement> {
        let count = grant.components[0].pages.len() as u32;
        self.placed(grant, pages(0..count))
    }

    /// Where a sender has them that takes these of its pages.
    pub fn placed(&self, grant: &Grant, pages: Vec<PageIndex>) -> Arc<Placement> {
        let extents = grant.components[0].extents.clone();
        Arc::new(Placement::new(vec![(self.memory.clone(), pages, extents)]).unwrap())
    }

    /// Posts one write and waits for its completion, whatever it says.
    #[track_caller]
    pub fn write(
        &self,
        lane: LaneId,
        transfer: TransferId,
        generation: Generation,
        blocks: &[BlockRange],
        source: &Arc<Placement>,
    ) -> CompletionStatus {
        let (link, ticket) = self.ticket();
        let (blocks, source) = (blocks.to_vec(), source.clone());
        let write = WriteRequest { transfer, generation, ticket, blocks, source, digests: None };
        self.shared.transport.post_write(link, lane, write);
        self.completion(ticket)
    }

    /// Posts the blocks of an honest source as the grant wants them.
    #[track_caller]
    pub fn write_blocks(&self, lane: LaneId, grant: &Grant, first: u32, count: u32) {
        let source = self.placement(grant);
        let range = [BlockRange { first: BlockIndex(first), count }];
        let status = self.write(lane, grant.id, grant.generation, &range, &source);
        assert_eq!(status, CompletionStatus::Success);
    }

    /// Closes this end of a lane.
    pub fn kill_lane(&self, lane: LaneId) {
        let link = self.shared.state.lock().unwrap().link.expect("a link");
        self.shared.transport.kill_lane(link, lane);
    }

    #[track_caller]
    pub fn marker(&self, lane: LaneId, transfer: TransferId, round: Round) -> CompletionStatus {
        let (link, ticket) = self.ticket();
        self.shared.transport.post_marker(link, lane, transfer, round, ticket);
        self.completion(ticket)
    }

    fn ticket(&self) -> (LinkId, Ticket) {
        let mut state = self.shared.state.lock().unwrap();
        state.tickets += 1;
        (state.link.expect("a link"), Ticket(state.tickets))
    }

    #[track_caller]
    fn completion(&self, ticket: Ticket) -> CompletionStatus {
        self.wait("a completion", |state| {
            let at = state.done.iter().position(|(done, _)| *done == ticket)?;
            Some(state.done.remove(at).1)
        })
    }

    /// Everything that an honest sender does up to `Complete`.
    #[track_caller]
    pub fn write_all(&self, grant: &Grant) -> Manifest {
        let lanes = self.accept(grant);
        let all = self.placement(grant).map().block_count();
        let half = all / 2;
        self.write_blocks(lanes[0], grant, 0, half);
        self.write_blocks(lanes[1], grant, half, all - half);
        self.mark(grant, &lanes);
        self.manifest(grant, lanes)
    }

    #[track_caller]
    pub fn mark(&self, grant: &Grant, lanes: &[LaneId]) {
        for &lane in lanes {
            assert_eq!(self.marker(lane, grant.id, Round(0)), CompletionStatus::Success);
        }
    }

    /// What an honest sender says that it wrote.
    pub fn manifest(&self, grant: &Grant, lanes: Vec<LaneId>) -> Manifest {
        let source = self.placement(grant);
        let map = source.map();
        let table = DigestTable::of_source(map);
        map.all().blocks().for_each(|block| table.add_source(&source, grant.id, block));
        let counts = map.page_counts().iter();
        let component = |(&page_count, digests): (&u32, Vec<u64>)| {
            let total = wrapping_total(&digests);
            ManifestComponent { page_count, digests, total }
        };
        Manifest {
            generation: grant.generation,
            block_count: map.block_count(),
            bytes: map.byte_count(),
            components: counts.zip(table.snapshot()).map(component).collect(),
            lanes,
        }
    }

    pub fn complete(&self, grant: &Grant, manifest: Manifest) {
        self.send(&Message::Complete { id: grant.id, round: Round(0), manifest });
    }

    /// Says that nothing is in flight, with the markers before it: so it is true.
    #[track_caller]
    pub fn drain(&self, grant: &Grant, cause: Cause, lanes: &[LaneId]) {
        self.mark(grant, lanes);
        self.say_drained(grant, cause, lanes, false);
    }

    pub fn say_drained(&self, grant: &Grant, cause: Cause, lanes: &[LaneId], needs_fence: bool) {
        let lanes = lanes.iter().map(|&lane| LaneDrain { lane, needs_fence }).collect();
        self.send(&Message::Drained { id: grant.id, round: Round(0), cause, lanes });
    }
}

impl Drop for Rogue {
    fn drop(&mut self) {
        let _ = self.events.send(None);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.shared.transport.shutdown();
    }
}

fn run(shared: &Shared, inbox: &Receiver<Option<Event>>) {
    while let Ok(Some(event)) = inbox.recv() {
        let mut state = shared.state.lock().unwrap();
        shared.on_event(&mut state, event);
        drop(state);
        shared.changed.notify_all();
    }
}

impl Shared {
    fn on_event(&self, state: &mut State, event: Event) {
        match event {
            Event::LinkUp { link, .. } => state.link = Some(link),
            Event::Control { frame, .. } => {
                if let Some(message) = state.joiner.push(&frame, MAX_MESSAGE_LEN).unwrap() {
                    self.on_message(state, message);
                }
            }
            Event::LaneUp { lane, .. } => state.lanes.push(lane),
            Event::LaneDown { lane, .. } => {
                state.lanes.retain(|other| *other != lane);
                self.send(state, &Message::LaneGone { lane });
            }
            Event::WriteDone { ticket, status, .. } => state.done.push((ticket, status)),
            _ => {}
        }
    }

    fn on_message(&self, state: &mut State, message: Message) {
        if state.mute {
            return;
        }
        if let Some(ack) = message.ack() {
            self.send(state, &ack);
        }
        match message {
            Message::Hello { .. } => {
                let welcome = Message::Welcome { hello: self.hello.clone(), resumed: false };
                self.send(state, &welcome);
            }
            Message::Ping {} => self.send(state, &Message::Pong {}),
            Message::Pong {} => state.pongs += 1,
            Message::LaneOffer { lane, params } => self.join_lane(state, lane, &params),
            Message::Ack { .. } => {}
            message if state.heard.contains(&message) => {}
            message => state.heard.push(message),
        }
    }

    fn join_lane(&self, state: &mut State, lane: LaneId, params: &[u8]) {
        let Some(link) = state.link else { return };
        let timeout = Duration::from_secs(2);
        // The link may have gone meanwhile: then there is no lane, and nobody to tell.
        let Ok(own) = self.transport.prepare_lane(link, lane, LaneRole::Writer) else { return };
        self.send(state, &Message::LaneAnswer { lane, params: own });
        let _ = self.transport.start_lane(link, lane, LaneRole::Writer, params, timeout);
    }

    fn send(&self, state: &mut State, message: &Message) {
        let Some(link) = state.link else { return };
        state.number += 1;
        for frame in split(state.number, message).unwrap() {
            // A link that has gone carries nothing; the test sees what follows from that.
            let _ = self.transport.send_control(link, &frame);
        }
    }
}
