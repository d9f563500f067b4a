//! The world that schedules run in, and the invariants that it asserts.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::protocol::receiver::{
    AssemblyId, LeaseComponent, Ledgers, OpenPart, Receiver, ReceiverAction, ReceiverSettings,
};
use crate::protocol::sender::{
    Announced, OfferId, Sender, SenderAction, SenderSettings, SourceComponent, WriteEnd,
};
use crate::protocol::{
    Binding, BlockRange, Cause, Generation, Incarnation, Label, LaneId, Ledger, Message, PageIndex,
    PageState, PoolId, PoolLayout, Round, Slice, Ticket, Time, TransferId,
};

const RECEIVER: Incarnation = Incarnation(1);
const SENDER: Incarnation = Incarnation(2);
const POOL: PoolId = PoolId(1);
const PAGES: u32 = 6;
const TRANSFERS: u64 = 5;
const STEPS: usize = 500;

/// What may go wrong.
#[derive(Clone, Copy)]
pub(super) struct Faults {
    pub(super) messages: bool,
    pub(super) lanes: bool,
    pub(super) aborts: bool,
    pub(super) death: bool,
}

impl Faults {
    pub(super) fn any(self) -> bool {
        self.lanes || self.aborts || self.death
    }
}

#[derive(Clone, Debug)]
enum Item {
    Write { id: TransferId, generation: Generation, blocks: Vec<BlockRange>, ticket: Ticket },
    Marker { id: TransferId, round: Round },
}

#[derive(Default)]
struct Lane {
    items: VecDeque<Item>,
    writer_open: bool,
    told_writer: bool,
    reader_open: bool,
    fencing: bool,
}

/// What a page's bytes are: who wrote them, as which logical page.
type Bytes = Option<(TransferId, u32)>;

struct Part {
    pages: Vec<PageIndex>,
    generation: Generation,
    assembly: AssemblyId,
}

pub(super) struct World {
    seed: u64,
    faults: Faults,
    random: u64,
    now: Time,
    receiver: Receiver,
    sender: Sender,
    ledgers: Ledgers,
    to_sender: Vec<Message>,
    to_receiver: Vec<Message>,
    lanes: BTreeMap<LaneId, Lane>,
    unreaped: Vec<(LaneId, TransferId, Ticket)>,
    closing: Vec<TransferId>,
    half_open: Vec<LaneId>,
    bytes: Vec<Bytes>,
    parts: BTreeMap<TransferId, Part>,
    sealed_now: Vec<AssemblyId>,
    outcomes: BTreeMap<AssemblyId, bool>,
    send_outcomes: BTreeMap<OfferId, bool>,
    freed: BTreeMap<OfferId, u32>,
    written: BTreeMap<u64, (u32, u32, bool)>,
    opened: u64,
    last_epoch: u64,
    dead: bool,
    lost: bool,
    pub(super) sealed: u64,
    pub(super) failed: u64,
    pub(super) resumed: u64,
}

fn layout() -> PoolLayout {
    PoolLayout {
        name: "kv".into(),
        dtype: "u8".into(),
        tokens_per_page: 1,
        page_count: PAGES,
        item_lens: vec![8],
    }
}

/// A page's digest: right only for the bytes of this transfer at this place.
fn digest(bytes: Bytes) -> u64 {
    bytes.map_or(0, |(id, page)| (id.counter << 32) + u64::from(page) + 1)
}

impl World {
    pub(super) fn new(seed: u64, faults: Faults) -> World {
        let settings = SenderSettings {
            chunk_bytes: 8,
            lane_window_bytes: 16,
            resend: Duration::from_millis(10),
            drain_grace: Duration::from_millis(10),
            ..SenderSettings::default()
        };
        let receiver = ReceiverSettings {
            resend: Duration::from_millis(10),
            drain_grace: Duration::from_millis(10),
            linger: Duration::from_millis(50),
            ..ReceiverSettings::default()
        };
        World {
            seed,
            faults,
            random: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5EED,
            now: Time(0),
            receiver: Receiver::new(RECEIVER, receiver),
            sender: Sender::new(settings),
            ledgers: [(POOL, Ledger::new(PAGES, PAGES as usize, false))].into(),
            to_sender: Vec::new(),
            to_receiver: Vec::new(),
            lanes: BTreeMap::new(),
            unreaped: Vec::new(),
            closing: Vec::new(),
            half_open: Vec::new(),
            bytes: vec![None; PAGES as usize],
            parts: BTreeMap::new(),
            sealed_now: Vec::new(),
            outcomes: BTreeMap::new(),
            send_outcomes: BTreeMap::new(),
            freed: BTreeMap::new(),
            written: BTreeMap::new(),
            opened: 0,
            last_epoch: 0,
            dead: false,
            lost: false,
            sealed: 0,
            failed: 0,
            resumed: 0,
        }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % limit.max(1) as u64) as usize
    }

    fn one_in(&mut self, chance: usize) -> bool {
        self.below(chance) == 0
    }

    /// A schedule with faults, then a calm end in which everything must come home.
    pub(super) fn run(&mut self) {
        for _ in 0..STEPS {
            self.step();
        }
        let calm = Faults { messages: false, lanes: false, aborts: false, death: false };
        let faults = std::mem::replace(&mut self.faults, calm);
        if self.dead {
            self.lose_sender();
        }
        for _ in 0..4000 {
            self.step();
            if self.is_home() {
                break;
            }
        }
        self.faults = faults;
        self.check_end();
    }

    fn is_home(&self) -> bool {
        let counts = self.ledgers[&POOL].counts();
        self.opened == TRANSFERS
            && counts.free == PAGES as usize
            && self.receiver.live_assemblies() == 0
            && (self.lost || self.sender.live_offers() == 0)
    }

    fn check_end(&self) {
        let seed = self.seed;
        assert!(
            self.is_home(),
            "seed {seed}: {:?}, {} opened, {:#?} {:#?}",
            self.ledgers[&POOL].counts(),
            self.opened,
            self.receiver,
            self.sender
        );
        assert_eq!(self.outcomes.len() as u64, TRANSFERS, "seed {seed}: one end each [I9]");
        if self.lost {
            return;
        }
        for (offer, ok) in &self.send_outcomes {
            let assembly = AssemblyId(offer.0);
            if *ok {
                assert!(
                    self.outcomes[&assembly],
                    "seed {seed}: {offer:?} claims what was not sealed"
                );
            }
            assert_eq!(self.freed.get(offer), Some(&1), "seed {seed}: {offer:?} freed once [I4]");
        }
        assert_eq!(self.send_outcomes.len() as u64, TRANSFERS, "seed {seed}");
    }

    fn step(&mut self) {
        match self.below(12) {
            0 | 1 => self.deliver(true),
            2 | 3 => self.deliver(false),
            4 | 5 => self.land(),
            6 => self.reap(),
            7 => self.application(),
            8 => self.open_lanes(),
            9 => self.close_landing(),
            10 => self.fence_or_break(),
            _ => self.pass_time(),
        }
    }

    fn deliver(&mut self, to_sender: bool) {
        let faulty = self.faults.messages;
        let len = if to_sender { self.to_sender.len() } else { self.to_receiver.len() };
        if len == 0 {
            return;
        }
        let at = if faulty { self.below(len) } else { 0 };
        let (lose, double) = (faulty && self.one_in(8), faulty && self.one_in(8));
        let queue = if to_sender { &mut self.to_sender } else { &mut self.to_receiver };
        let message = if double { queue[at].clone() } else { queue.remove(at) };
        if lose {
            return;
        }
        if to_sender {
            if !self.dead {
                let mut actions = Vec::new();
                self.sender.on_message(self.now, RECEIVER, message, &mut actions);
                self.do_sender(actions);
            }
        } else if !self.lost {
            self.with_receiver(|r, now, ledgers, actions| {
                r.on_message(now, SENDER, message, ledgers, actions);
            });
        }
    }

    fn with_receiver(
        &mut self,
        act: impl FnOnce(&mut Receiver, Time, &mut Ledgers, &mut Vec<ReceiverAction>),
    ) {
        let mut actions = Vec::new();
        act(&mut self.receiver, self.now, &mut self.ledgers, &mut actions);
        actions.into_iter().for_each(|action| self.do_receiver(action));
    }

    fn do_receiver(&mut self, action: ReceiverAction) {
        match action {
            ReceiverAction::Send { message, .. } => {
                self.resumed += u64::from(matches!(message, Message::Resume { .. }));
                if !self.lost {
                    self.to_sender.push(message);
                }
            }
            ReceiverAction::OpenLanding { id, .. } => {
                let page = self.ledgers[&POOL].counts();
                assert!(page.granted > 0, "seed {}: {id} opened without pages", self.seed);
            }
            ReceiverAction::CloseLanding { id } => self.closing.push(id),
            ReceiverAction::Fence { lane, .. } => self.begin_fence(lane),
            ReceiverAction::Finished { assembly, outcome } => {
                self.finished(assembly, outcome.is_ok())
            }
            ReceiverAction::Unland { .. }
            | ReceiverAction::ForgetLanding { .. }
            | ReceiverAction::Released { .. } => {}
        }
    }

    fn finished(&mut self, assembly: AssemblyId, ok: bool) {
        let seed = self.seed;
        assert_eq!(
            self.outcomes.insert(assembly, ok),
            None,
            "seed {seed}: {assembly:?} ended twice"
        );
        if !ok {
            self.failed += 1;
            return;
        }
        self.sealed += 1;
        self.sealed_now.push(assembly);
        self.check_sealed(assembly);
    }

    /// [I1]: every page holds what this transfer wrote there.
    fn check_sealed(&self, assembly: AssemblyId) {
        let (id, part) = self.parts.iter().find(|(_, part)| part.assembly == assembly).unwrap();
        for (logical, page) in part.pages.iter().enumerate() {
            let found = self.bytes[page.0 as usize];
            assert_eq!(found, Some((*id, logical as u32)), "seed {}: {page} of {id}", self.seed);
        }
    }

    fn do_sender(&mut self, actions: Vec<SenderAction>) {
        for action in actions {
            match action {
                SenderAction::Send { message, .. } => self.to_receiver.push(message),
                SenderAction::Post { id, lane, ticket, generation, blocks, .. } => {
                    self.post(lane, Item::Write { id, generation, blocks, ticket }, id, ticket);
                }
                SenderAction::Marker { id, lane, round, ticket, .. } => {
                    self.post(lane, Item::Marker { id, round }, id, ticket);
                }
                SenderAction::KillLane { lane, .. } => self.break_lane(lane),
                SenderAction::Digest { id } => {
                    let pages = self.parts[&id].pages.len() as u32;
                    let digests = (0..pages).map(|page| digest(Some((id, page)))).collect();
                    let mut actions = Vec::new();
                    self.sender.on_digests(self.now, id, Some(vec![digests]), &mut actions);
                    self.do_sender(actions);
                }
                SenderAction::Finished { offer, outcome } => {
                    let twice = self.send_outcomes.insert(offer, outcome.is_ok());
                    assert_eq!(twice, None, "seed {}: {offer:?} ended twice [I9]", self.seed);
                }
                SenderAction::SourceFree { offer } => {
                    *self.freed.entry(offer).or_default() += 1;
                    self.check_source_free(offer);
                }
                SenderAction::Matched { .. } | SenderAction::Cancel { .. } => {}
            }
        }
    }

    /// [I4]: nothing local will read the source again.
    fn check_source_free(&self, offer: OfferId) {
        let of = |id: &TransferId| self.parts[id].assembly == AssemblyId(offer.0);
        let item_is_write = |ticket: Ticket| {
            self.lanes
                .values()
                .flat_map(|lane| &lane.items)
                .any(|item| matches!(item, Item::Write { ticket: t, .. } if *t == ticket))
        };
        let pending = self.unreaped.iter().any(|(_, id, ticket)| of(id) && item_is_write(*ticket));
        assert!(!pending, "seed {}: {offer:?} freed under a pending write [I4]", self.seed);
    }

    fn post(&mut self, lane: LaneId, item: Item, id: TransferId, ticket: Ticket) {
        self.unreaped.push((lane, id, ticket));
        if let Some(lane) = self.lanes.get_mut(&lane).filter(|lane| lane.writer_open) {
            lane.items.push_back(item);
        }
    }

    /// The first item of some lane arrives, unless its lane is fenced. [I3]
    fn land(&mut self) {
        let open: Vec<LaneId> =
            self.lanes.iter().filter(|(_, l)| l.reader_open).map(|(id, _)| *id).collect();
        if open.is_empty() {
            return;
        }
        let lane = open[self.below(open.len())];
        let Some(item) = self.lanes.get_mut(&lane).and_then(|l| l.items.pop_front()) else {
            return;
        };
        match item {
            Item::Write { id, generation, blocks, .. } => {
                for block in blocks.iter().flat_map(BlockRange::blocks) {
                    self.land_block(id, generation, block.0);
                }
            }
            Item::Marker { id, round } => self.with_receiver(|r, now, ledgers, actions| {
                r.on_marker(now, SENDER, lane, id, round, ledgers, actions);
            }),
        }
    }

    fn land_block(&mut self, id: TransferId, generation: Generation, logical: u32) {
        let part = &self.parts[&id];
        let page = part.pages[logical as usize];
        let (state, now) = self.ledgers[&POOL].page(page).unwrap();
        let own = now == generation && part.generation == generation;
        let may = own && matches!(state, PageState::Granted | PageState::Quarantined);
        assert!(may, "seed {}: {id} wrote {page}, {state} at {now} [I3]", self.seed);
        self.bytes[page.0 as usize] = Some((id, logical));
    }

    /// A local completion, before or after the landing: it proves nothing either way.
    fn reap(&mut self) {
        if self.unreaped.is_empty() || self.dead {
            return;
        }
        let at = self.below(self.unreaped.len());
        let (lane, id, ticket) = self.unreaped[at];
        // Completions of one lane come in order.
        let at = self.unreaped.iter().position(|(other, ..)| *other == lane).unwrap_or(at);
        let (lane, id, ticket) =
            if at == self.unreaped.len() { (lane, id, ticket) } else { self.unreaped[at] };
        self.unreaped.remove(at);
        let open = self.lanes.get(&lane).is_some_and(|lane| lane.writer_open);
        let end = if open { WriteEnd::Success } else { WriteEnd::Failed };
        let mut actions = Vec::new();
        self.sender.on_write_done(self.now, id, lane, ticket, end, &mut actions);
        self.do_sender(actions);
    }

    fn application(&mut self) {
        match self.below(4) {
            0 => self.open_transfer(),
            1 => self.write_some(),
            2 => self.release_sealed(),
            _ if self.faults.aborts && self.one_in(6) => self.abort_some(),
            _ if self.faults.death && self.one_in(20) => self.dead = true,
            _ if self.dead && self.faults.death && self.one_in(10) => self.lose_sender(),
            _ => {}
        }
    }

    fn open_transfer(&mut self) {
        let count = 1 + self.below(4);
        let ledger = self.ledgers.get_mut(&POOL).unwrap();
        if self.opened == TRANSFERS || ledger.counts().free < count {
            return;
        }
        let (pages, generation) = ledger.reserve(count).unwrap();
        self.opened += 1;
        let (label, binding) = (Label::from(self.opened), Binding::tokens(count as u64));
        let extents = layout().whole_page();
        let slices = vec![Slice { component: 0, pages: 0..count as u32, extents: extents.clone() }];
        let part = OpenPart { peer: SENDER, label: label.clone(), binding, slices };
        let component =
            LeaseComponent { pool: POOL, layout: layout(), pages: pages.clone(), generation };
        let deadline =
            self.now.after(Duration::from_millis(if self.faults.any() { 300 } else { 100_000 }));
        let (assembly, id) =
            (AssemblyId(self.opened), TransferId { receiver: RECEIVER, counter: self.opened });
        self.parts.insert(id, Part { pages, generation, assembly });
        self.with_receiver(|r, now, _, actions| {
            let opened = r.open(now, vec![component], vec![part], deadline, true, actions).unwrap();
            assert_eq!(opened, assembly);
        });
        self.announce(label, binding, count as u32, extents, deadline);
        if self.lost {
            let cause = Cause::PeerLost { why: "gone".into() };
            self.with_receiver(|r, now, ledgers, actions| {
                r.on_peer_lost(now, SENDER, &cause, ledgers, actions);
            });
        }
    }

    fn announce(
        &mut self,
        label: Label,
        binding: Binding,
        page_count: u32,
        extents: Vec<crate::protocol::Extent>,
        deadline: Time,
    ) {
        if self.dead {
            return;
        }
        let offer = Announced::new(OfferId(self.opened));
        let mut actions = Vec::new();
        self.sender.announce(&offer, label, None, deadline, &mut actions);
        let component = SourceComponent {
            layout: layout().fingerprint(),
            page_count,
            extents,
            whole_pages: true,
        };
        let admitted = offer.admit();
        self.sender.admit(self.now, &admitted, binding, vec![component], &mut actions);
        self.written.insert(admitted.id().0, (0, page_count, false));
        self.do_sender(actions);
    }

    fn write_some(&mut self) {
        let open: Vec<u64> = self.written.iter().filter(|(_, w)| !w.2).map(|(id, _)| *id).collect();
        if open.is_empty() || self.dead {
            return;
        }
        let id = open[self.below(open.len())];
        let (next, count, _) = self.written[&id];
        let mut actions = Vec::new();
        if next < count {
            let blocks = 1 + self.below((count - next) as usize) as u32;
            let first = crate::protocol::BlockIndex(next);
            let range = BlockRange { first, count: blocks };
            self.sender.write(self.now, OfferId(id), &[range], &mut actions);
            self.written.insert(id, (next + blocks, count, false));
        } else {
            let completing = Announced::new(OfferId(id)).admit().complete();
            self.sender.complete(self.now, &completing, &mut actions);
            self.written.insert(id, (next, count, true));
        }
        self.do_sender(actions);
    }

    fn abort_some(&mut self) {
        if self.opened == 0 {
            return;
        }
        let number = 1 + self.below(self.opened as usize) as u64;
        if self.one_in(2) {
            let cause = Cause::AbortedByReceiver { why: "test".into() };
            self.with_receiver(|r, now, ledgers, actions| {
                r.abort(now, AssemblyId(number), cause, ledgers, actions);
            });
        } else if !self.dead {
            let cause = Cause::AbortedBySender { why: "test".into() };
            let mut actions = Vec::new();
            self.sender.abort(self.now, OfferId(number), cause, &mut actions);
            self.do_sender(actions);
        }
    }

    fn release_sealed(&mut self) {
        if self.sealed_now.is_empty() {
            return;
        }
        let at = self.below(self.sealed_now.len());
        let assembly = self.sealed_now.remove(at);
        self.check_sealed(assembly);
        let part = self.parts.values().find(|part| part.assembly == assembly).unwrap();
        let (pages, generation) = (part.pages.clone(), part.generation);
        self.ledgers.get_mut(&POOL).unwrap().release(&pages, generation).unwrap();
    }

    /// As the session does: only when the receiver says that it is safe.
    fn open_lanes(&mut self) {
        let open = self.lanes.values().filter(|lane| lane.reader_open).count();
        let wanted = self.receiver.wants_lanes(SENDER) && self.receiver.may_open_lanes(SENDER);
        if open < 2 && wanted && !self.lost {
            self.last_epoch += 1;
            let id = LaneId { index: 0, epoch: self.last_epoch };
            let lane = Lane { writer_open: true, reader_open: true, ..Lane::default() };
            self.lanes.insert(id, lane);
            self.receiver.on_lane_opening(SENDER, id);
            self.half_open.push(id);
        }
        // Either end may be up first.
        if self.one_in(2)
            && let Some(id) = self.half_open.pop()
            && self.lanes[&id].reader_open
        {
            self.with_receiver(|r, now, ledgers, actions| {
                r.on_lane_up(now, SENDER, id, ledgers, actions);
            });
        }
        let untold = self.lanes.iter().find(|(_, lane)| !lane.told_writer && lane.writer_open);
        if let Some(id) = untold.map(|(id, _)| *id) {
            self.lanes.get_mut(&id).unwrap().told_writer = true;
            if !self.dead {
                let mut actions = Vec::new();
                self.sender.on_lane_up(self.now, RECEIVER, id, &mut actions);
                self.do_sender(actions);
            }
        }
    }

    fn close_landing(&mut self) {
        if self.closing.is_empty() {
            return;
        }
        let at = self.below(self.closing.len());
        let id = self.closing.remove(at);
        let bytes: Vec<Bytes> =
            self.parts[&id].pages.iter().map(|page| self.bytes[page.0 as usize]).collect();
        let own = bytes.iter().filter(|bytes| bytes.is_some_and(|(by, _)| by == id)).count();
        let digests = bytes.into_iter().map(digest).collect();
        self.with_receiver(|r, now, ledgers, actions| {
            r.on_landing_closed(now, id, own as u64 * 8, Some(vec![digests]), ledgers, actions);
        });
    }

    fn fence_or_break(&mut self) {
        let fencing: Vec<LaneId> =
            self.lanes.iter().filter(|(_, l)| l.fencing).map(|(id, _)| *id).collect();
        if !fencing.is_empty() {
            let lane = fencing[self.below(fencing.len())];
            self.end_fence(lane);
        } else if self.faults.lanes && self.one_in(6) {
            let alive: Vec<LaneId> = self
                .lanes
                .iter()
                .filter(|(_, l)| l.writer_open && l.reader_open)
                .map(|(id, _)| *id)
                .collect();
            if !alive.is_empty() {
                let lane = alive[self.below(alive.len())];
                if self.one_in(2) {
                    self.break_lane(lane);
                } else {
                    self.begin_fence(lane);
                }
            }
        }
    }

    /// The writer's end goes; what left may still land.
    fn break_lane(&mut self, id: LaneId) {
        let Some(lane) = self.lanes.get_mut(&id).filter(|lane| lane.writer_open) else { return };
        lane.writer_open = false;
        if !self.dead {
            let mut actions = Vec::new();
            self.sender.on_lane_down(self.now, RECEIVER, id, &mut actions);
            self.do_sender(actions);
        }
        self.begin_fence(id);
    }

    fn begin_fence(&mut self, id: LaneId) {
        self.receiver.on_lane_down(SENDER, id);
        let lane = self.lanes.entry(id).or_default();
        lane.fencing = true;
    }

    fn end_fence(&mut self, id: LaneId) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        lane.fencing = false;
        lane.reader_open = false;
        lane.items.clear();
        self.break_lane(id);
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.fencing = false;
        }
        self.with_receiver(|r, now, ledgers, actions| {
            r.on_lane_fenced(now, SENDER, id, ledgers, actions);
        });
    }

    fn lose_sender(&mut self) {
        if std::mem::replace(&mut self.lost, true) {
            return;
        }
        self.dead = true;
        for lane in self.lanes.keys().copied().collect::<Vec<_>>() {
            self.begin_fence(lane);
        }
        let cause = Cause::PeerLost { why: "gone".into() };
        self.with_receiver(|r, now, ledgers, actions| {
            r.on_peer_lost(now, SENDER, &cause, ledgers, actions);
        });
    }

    fn pass_time(&mut self) {
        let span = [1, 5, 20][self.below(3)];
        self.now = self.now.after(Duration::from_millis(span));
        self.with_receiver(|r, now, ledgers, actions| r.on_timeout(now, ledgers, actions));
        if !self.dead {
            let mut actions = Vec::new();
            self.sender.on_timeout(self.now, &mut actions);
            self.do_sender(actions);
        }
    }
}
