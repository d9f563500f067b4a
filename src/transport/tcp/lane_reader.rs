//! The reader's end of a lane: admits each frame before a byte of it lands, then receives straight
//! into the granted memory.
//!
//! What is read ahead of a header is about as long as the last header was, so hardly a payload
//! byte is ever copied. A frame counts as landed, with its digests, once it is whole; a frame that
//! is cut off leaves nothing behind in the books.

use std::sync::Arc;

use super::frame::{self, FrameError, Header};
use super::iov::{BlockCursor, IoBatch};
use super::socket::Stream;
use crate::protocol::{BlockRange, Generation, LaneId, Round, TransferId};
use crate::transport::landing::{Admission, LandingTable};
use crate::transport::{DigestTable, LandingError, Placement};

/// Bytes received in one go: they are digested next, while they are in the cache.
const CHUNK_BYTES: usize = 256 * 1024;
/// Where bytes land that nobody wants.
const SCRATCH_BYTES: usize = 64 * 1024;

/// What the reader has to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Note {
    Marker {
        transfer: TransferId,
        round: Round,
    },
    Refused {
        transfer: TransferId,
        why: LandingError,
    },
    /// A landing that waited for this frame is closed.
    Closed {
        transfer: TransferId,
    },
}

/// Why a lane ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadEnd {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("the peer closed the connection")]
    Eof,
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("refused a write of {transfer}: {why}")]
    Refused { transfer: TransferId, why: LandingError },
}

/// A frame that was admitted and isn't whole yet.
struct Frame {
    transfer: TransferId,
    ranges: Vec<BlockRange>,
    placement: Arc<Placement>,
    table: Option<Arc<DigestTable>>,
    /// Up to here iovecs are staged.
    staged: BlockCursor,
    /// Bytes to come.
    missing: u64,
    /// The first block that isn't digested, and bytes of it and all after it that are to come
    /// once it is whole.
    whole: BlockCursor,
    whole_at: u64,
    payload: u64,
    sums: Vec<u64>,
}

enum State {
    Header,
    Landing(Frame),
    Discarding(u64),
}

/// The reader's end of a lane.
pub(super) struct LaneReader {
    lane: LaneId,
    state: State,
    batch: IoBatch,
    /// Read ahead: bytes `start..end` are not parsed yet.
    ahead: Box<[u8]>,
    start: usize,
    end: usize,
    /// How much to read ahead.
    peek: usize,
    scratch: Box<[u8]>,
}

impl LaneReader {
    pub(super) fn new(lane: LaneId) -> LaneReader {
        LaneReader {
            lane,
            state: State::Header,
            batch: IoBatch::new(),
            ahead: vec![0; frame::MAX_HEADER_LEN].into(),
            start: 0,
            end: 0,
            peek: frame::FIXED_LEN,
            scratch: Box::default(),
        }
    }

    /// Reads until the socket is empty (`false`) or `budget` bytes came in (`true`: go on soon).
    pub(super) fn drive(
        &mut self,
        stream: &mut Stream,
        landings: &LandingTable,
        budget: usize,
        mut report: impl FnMut(Note),
    ) -> Result<bool, ReadEnd> {
        let mut taken = 0;
        while taken < budget {
            self.use_ahead(landings, &mut report)?;
            let Some(got) = self.receive(stream)? else { return Ok(false) };
            if got == 0 {
                return Err(ReadEnd::Eof);
            }
            taken += got;
            self.settle(landings, &mut report);
        }
        Ok(true)
    }

    /// Uses up what was read ahead: headers, and payload that came with them.
    fn use_ahead(
        &mut self,
        landings: &LandingTable,
        report: &mut impl FnMut(Note),
    ) -> Result<(), ReadEnd> {
        loop {
            match &mut self.state {
                State::Header => {
                    let parsed = frame::parse_header(&self.ahead[self.start..self.end]);
                    let parsed = parsed.inspect_err(|error| {
                        let why = LandingError::Malformed;
                        report(Note::Refused { transfer: error.transfer, why });
                    })?;
                    let Some((header, len)) = parsed else { return Ok(()) };
                    self.start += len;
                    self.accept(header, len, landings, report)?;
                }
                _ if self.start == self.end => return Ok(()),
                State::Discarding(missing) => {
                    let step = (self.end - self.start)
                        .min(usize::try_from(*missing).unwrap_or(usize::MAX));
                    *missing -= step as u64;
                    self.start += step;
                    self.settle(landings, report);
                }
                State::Landing(frame) => {
                    let bytes = &self.ahead[self.start..self.end];
                    frame.stage(&mut self.batch);
                    // SAFETY: the batch points into memory that `frame.placement` keeps, and that
                    // was admitted for this frame; `ahead` is a buffer of its own.
                    let step = unsafe { self.batch.copy_from(bytes) };
                    frame.missing -= step as u64;
                    self.start += step;
                    self.settle(landings, report);
                }
            }
        }
    }

    /// Takes a header in: from here on the state says where payload goes.
    fn accept(
        &mut self,
        header: Header,
        len: usize,
        landings: &LandingTable,
        report: &mut impl FnMut(Note),
    ) -> Result<(), ReadEnd> {
        match header {
            Header::Marker { transfer, round } => report(Note::Marker { transfer, round }),
            Header::Write { transfer, generation, ranges, payload } => {
                self.peek = len;
                match admit(landings, self.lane, transfer, generation, ranges, payload) {
                    Ok(state) => self.state = state,
                    Err(why) => {
                        report(Note::Refused { transfer, why });
                        return Err(ReadEnd::Refused { transfer, why });
                    }
                }
            }
        }
        Ok(())
    }

    /// One receive call: into the frame's memory, and ahead where the frame's end is in reach.
    fn receive(&mut self, stream: &mut Stream) -> Result<Option<usize>, ReadEnd> {
        if self.start > 0 {
            self.ahead.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let missing = match &mut self.state {
            State::Header => 0,
            State::Landing(frame) => {
                frame.stage(&mut self.batch);
                frame.missing
            }
            State::Discarding(missing) => {
                if self.scratch.is_empty() {
                    self.scratch = vec![0; SCRATCH_BYTES].into();
                }
                let len = usize::try_from(*missing).unwrap_or(usize::MAX).min(SCRATCH_BYTES);
                self.batch.clear();
                self.batch.push(self.scratch.as_mut_ptr(), len);
                *missing
            }
        };
        let in_reach = missing == self.batch.bytes() as u64;
        let peek = if in_reach { self.peek.min(self.ahead.len() - self.end) } else { 0 };
        let tail = &mut self.ahead[self.end..self.end + peek];
        let batch = &mut self.batch;
        // SAFETY: the batch points into `scratch`, or into memory that the frame's placement keeps
        // and that was admitted for this frame.
        let Some((body, tail)) = stream.read_with(|fd| unsafe { batch.receive(fd, tail) })? else {
            return Ok(None);
        };
        self.end += tail;
        match &mut self.state {
            State::Header => {}
            State::Landing(frame) => frame.missing -= body as u64,
            State::Discarding(missing) => *missing -= body as u64,
        }
        Ok(Some(body + tail))
    }

    /// Digests the blocks that are whole, and ends the frame if it is.
    fn settle(&mut self, landings: &LandingTable, report: &mut impl FnMut(Note)) {
        match &mut self.state {
            State::Landing(frame) => {
                frame.digest_whole();
                if frame.missing == 0 {
                    let transfer = frame.transfer;
                    let closed = frame.record(landings, self.lane);
                    // Unpinned before it is reported.
                    self.state = State::Header;
                    if closed {
                        report(Note::Closed { transfer });
                    }
                }
            }
            State::Discarding(0) => self.state = State::Header,
            State::Header | State::Discarding(_) => {}
        }
        if matches!(self.state, State::Header) {
            self.batch.clear();
        }
    }

    /// Gives back what was admitted and will not be read to its end. The transfer, if that closed
    /// its landing.
    pub(super) fn abandon(&mut self, landings: &LandingTable) -> Option<TransferId> {
        self.batch.clear();
        match std::mem::replace(&mut self.state, State::Header) {
            State::Landing(frame) if landings.abandon(frame.transfer, &frame.ranges) => {
                Some(frame.transfer)
            }
            _ => None,
        }
    }
}

fn admit(
    landings: &LandingTable,
    lane: LaneId,
    transfer: TransferId,
    generation: Generation,
    ranges: Vec<BlockRange>,
    payload: u32,
) -> Result<State, LandingError> {
    let payload = u64::from(payload);
    match landings.admit(lane, transfer, generation, &ranges, payload)? {
        Admission::Discard => Ok(State::Discarding(payload)),
        Admission::Land(placement) => {
            let (_, table) = landings.sinks(transfer).ok_or(LandingError::UnknownTransfer)?;
            let whole = BlockCursor::default();
            let mut frame = Frame {
                transfer,
                ranges,
                placement,
                table,
                staged: BlockCursor::default(),
                missing: payload,
                whole,
                whole_at: 0,
                payload,
                sums: Vec::new(),
            };
            frame.whole_at = frame.len_of(&whole);
            Ok(State::Landing(frame))
        }
    }
}

impl Frame {
    /// Keeps enough memory staged that a receive call is worth it.
    fn stage(&mut self, batch: &mut IoBatch) {
        if batch.bytes() < CHUNK_BYTES / 2 {
            batch.compact();
            self.staged.stage(&self.placement, &self.ranges, batch, CHUNK_BYTES, |_| {});
        }
    }

    fn len_of(&self, cursor: &BlockCursor) -> u64 {
        let place = cursor.block(&self.ranges).and_then(|b| self.placement.map().locate(b));
        place.map_or(0, |place| place.len)
    }

    /// Digests each block whose last byte has landed since.
    fn digest_whole(&mut self) {
        if self.table.is_none() {
            return;
        }
        let landed = self.payload - self.missing;
        while landed >= self.whole_at
            && let Some(block) = self.whole.block(&self.ranges)
        {
            self.sums.push(self.placement.digest(self.transfer, block).unwrap_or(0));
            self.whole.next_block(&self.ranges);
            self.whole_at += self.len_of(&self.whole);
        }
    }

    /// Enters the whole frame in the books. `true` if that closed its landing.
    fn record(&mut self, landings: &LandingTable, lane: LaneId) -> bool {
        if let Some(table) = &self.table {
            let blocks = self.ranges.iter().flat_map(BlockRange::blocks);
            for (block, &sum) in blocks.zip(&self.sums) {
                if let Some(place) = self.placement.map().locate(block) {
                    table.add(place.component, place.page, sum);
                }
            }
        }
        landings.record(self.transfer, lane, &self.ranges, self.payload)
    }
}
