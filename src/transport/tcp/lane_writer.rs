//! The writer's end of a lane: cuts requests into frames and sends them straight from registered
//! memory.
//!
//! A batch of at most [`BATCH_BYTES`] is digested, then handed to the kernel in one call, so that
//! the kernel's copy finds the bytes in the cache. A request is *begun* once its first frame is
//! staged; from then on it runs to its end, which the engine's window keeps near. `[I6]`

use std::collections::VecDeque;

use super::frame;
use super::iov::{BlockCursor, IoBatch};
use super::socket::Stream;
use crate::protocol::{BlockIndex, BlockRange, Generation, Round, Ticket, TransferId};
use crate::transport::{CompletionStatus, WriteRequest};

/// Bytes digested and then sent in one go: well inside a core's second-level cache.
const BATCH_BYTES: usize = 256 * 1024;
/// Bytes of headers in one batch.
const HEADER_BYTES: usize = 4 * frame::MAX_HEADER_LEN;
/// A request that names blocks which its source doesn't have.
const BAD_REQUEST: CompletionStatus = CompletionStatus::Unknown(1);

/// What became of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub(super) transfer: TransferId,
    pub(super) ticket: Ticket,
    pub(super) status: CompletionStatus,
}

/// Something to send.
#[derive(Debug)]
pub(super) enum Job {
    Write(WriteRequest),
    Marker { transfer: TransferId, round: Round, ticket: Ticket },
}

impl Job {
    /// The job's end, as reported.
    pub(super) fn done(&self, status: CompletionStatus) -> Done {
        match self {
            Job::Write(write) => Done { transfer: write.transfer, ticket: write.ticket, status },
            &Job::Marker { transfer, ticket, .. } => Done { transfer, ticket, status },
        }
    }
}

/// How far [`LaneWriter::drive`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drive {
    /// There is more that could go on at once.
    Again,
    /// Nothing to do until the socket or a command says so.
    Waiting,
}

/// The request that frames are being cut from.
struct Cutting {
    write: WriteRequest,
    /// Position of the next range in `write.blocks`, and blocks of it that are cut already.
    range: usize,
    block: u32,
}

/// The frame that is being staged; its header is staged already.
struct Frame {
    ranges: Vec<BlockRange>,
    cursor: BlockCursor,
}

/// The writer's end of a lane.
pub(super) struct LaneWriter {
    queue: VecDeque<Job>,
    cutting: Option<Cutting>,
    frame: Frame,
    batch: IoBatch,
    /// The headers that the batch points to. Never grows past its first capacity.
    headers: Vec<u8>,
    /// Stream positions: end of what is staged, end of what the kernel took.
    staged: u64,
    sent: u64,
    /// Jobs that are wholly staged, and the position at which each ends. They keep the memory
    /// that the batch points to. `[I4]`
    endings: VecDeque<(u64, Job)>,
    frame_bytes: usize,
}

impl LaneWriter {
    pub(super) fn new(frame_bytes: usize) -> LaneWriter {
        LaneWriter {
            queue: VecDeque::new(),
            cutting: None,
            frame: Frame { ranges: Vec::new(), cursor: BlockCursor::default() },
            batch: IoBatch::new(),
            headers: Vec::with_capacity(HEADER_BYTES),
            staged: 0,
            sent: 0,
            endings: VecDeque::new(),
            frame_bytes,
        }
    }

    /// Queues a job. One that can't be sent comes back as done.
    pub(super) fn post(&mut self, job: Job) -> Option<Done> {
        if let Job::Write(write) = &job {
            let map = write.source.map();
            let sane = |range: &BlockRange| range.count > 0 && map.range_len(*range).is_ok();
            if !write.blocks.iter().all(sane) {
                return Some(job.done(BAD_REQUEST));
            }
        }
        self.queue.push_back(job);
        None
    }

    /// Takes out the transfer's writes that are not begun.
    pub(super) fn cancel(&mut self, transfer: TransferId) -> Vec<Done> {
        let mut done = Vec::new();
        self.queue.retain(|job| match job {
            Job::Write(write) if write.transfer == transfer => {
                done.push(job.done(CompletionStatus::Cancelled));
                false
            }
            _ => true,
        });
        done
    }

    /// Ends everything that is outstanding, in order.
    pub(super) fn flush(&mut self) -> Vec<Done> {
        self.batch.clear();
        let staged = self.endings.drain(..).map(|(_, job)| job);
        let cut = self.cutting.take().map(|cutting| Job::Write(cutting.write));
        let jobs = staged.chain(cut).chain(self.queue.drain(..));
        jobs.map(|job| job.done(CompletionStatus::Flushed)).collect()
    }

    /// Sends until the socket is full, nothing is left, or `budget` bytes went out.
    pub(super) fn drive(
        &mut self,
        stream: &mut Stream,
        budget: usize,
        mut report: impl FnMut(Done),
    ) -> std::io::Result<Drive> {
        let start = self.sent;
        while self.sent - start < budget as u64 {
            if self.batch.bytes() == 0 {
                self.stage();
                self.settle(&mut report);
                if self.batch.bytes() == 0 {
                    return Ok(Drive::Waiting);
                }
            }
            // SAFETY: the batch points into `headers`, which is neither changed nor moved until
            // the batch is used up, and into memory whose placements `cutting` and `endings` hold.
            let Some(sent) = stream.write_with(|fd| unsafe { self.batch.send(fd) })? else {
                return Ok(Drive::Waiting);
            };
            self.sent += sent as u64;
            self.settle(&mut report);
        }
        Ok(Drive::Again)
    }

    /// Reports the jobs whose last byte the kernel has taken.
    fn settle(&mut self, report: &mut impl FnMut(Done)) {
        while self.endings.front().is_some_and(|&(end, _)| end <= self.sent) {
            if let Some((_, job)) = self.endings.pop_front() {
                let done = job.done(CompletionStatus::Success);
                // Unpinned before it is reported.
                drop(job);
                report(done);
            }
        }
    }

    /// Fills the empty batch from the current frame, the current request and the queue.
    fn stage(&mut self) {
        self.batch.clear();
        self.headers.clear();
        loop {
            self.stage_frame();
            let full = self.batch.bytes() >= BATCH_BYTES
                || self.batch.room() < 2
                || self.headers.capacity() - self.headers.len() < frame::MAX_HEADER_LEN;
            if full || !self.next_frame() {
                return;
            }
        }
    }

    /// Stages what fits of the current frame, digesting each block before its first byte.
    fn stage_frame(&mut self) {
        let Some(Cutting { write, .. }) = &self.cutting else { return };
        let Frame { ranges, cursor } = &mut self.frame;
        let before = self.batch.bytes();
        cursor.stage(&write.source, ranges, &mut self.batch, BATCH_BYTES, |block| {
            if let Some(digests) = &write.digests {
                digests.add_source(&write.source, write.transfer, block);
            }
        });
        self.staged += (self.batch.bytes() - before) as u64;
    }

    /// Starts the next frame, if the current one is staged wholly and there is one.
    fn next_frame(&mut self) -> bool {
        if self.frame.cursor.block(&self.frame.ranges).is_some() {
            return true;
        }
        if self.cutting.is_none() {
            return self.next_job();
        }
        let Some(cutting) = &mut self.cutting else { return false };
        self.frame.ranges.clear();
        self.frame.cursor = BlockCursor::default();
        let payload = cutting.cut(self.frame_bytes, &mut self.frame.ranges);
        if self.frame.ranges.is_empty() {
            if let Some(Cutting { write, .. }) = self.cutting.take() {
                self.endings.push_back((self.staged, Job::Write(write)));
            }
            return true;
        }
        let WriteRequest { transfer, generation, .. } = cutting.write;
        self.stage_header(|out, ranges| encode(out, transfer, generation, ranges, payload));
        true
    }

    fn next_job(&mut self) -> bool {
        match self.queue.pop_front() {
            Some(Job::Write(write)) => {
                self.cutting = Some(Cutting { write, range: 0, block: 0 });
                true
            }
            Some(Job::Marker { transfer, round, ticket }) => {
                self.stage_header(|out, _| frame::encode_marker(out, transfer, round));
                self.endings.push_back((self.staged, Job::Marker { transfer, round, ticket }));
                true
            }
            None => false,
        }
    }

    fn stage_header(&mut self, encode: impl FnOnce(&mut Vec<u8>, &[BlockRange])) {
        let (base, start) = (self.headers.as_mut_ptr(), self.headers.len());
        encode(&mut self.headers, &self.frame.ranges);
        let len = self.headers.len() - start;
        // The batch points to the headers before this one.
        assert_eq!(self.headers.as_mut_ptr(), base, "headers never outgrow their buffer");
        self.batch.push(base.wrapping_add(start), len);
        self.staged += len as u64;
    }
}

fn encode(
    out: &mut Vec<u8>,
    transfer: TransferId,
    generation: Generation,
    ranges: &[BlockRange],
    payload: u64,
) {
    // A block is shorter than 4 GiB since a page is, and several make at most `frame_bytes`.
    let payload = u32::try_from(payload).expect("a frame's payload fits its field");
    frame::encode_write(out, transfer, generation, ranges, payload);
}

impl Cutting {
    /// Moves the next frame's blocks to `ranges` and returns their bytes; none at the end.
    fn cut(&mut self, frame_bytes: usize, ranges: &mut Vec<BlockRange>) -> u64 {
        let map = self.write.source.map();
        let (mut payload, mut blocks) = (0u64, 0);
        while let Some(range) = self.write.blocks.get(self.range) {
            let first = BlockIndex(range.first.0 + self.block);
            let mut run = BlockRange { first, count: 0 };
            while self.block < range.count && blocks < frame::MAX_BLOCKS {
                let block = BlockIndex(run.first.0 + run.count);
                let len = map.locate(block).map_or(0, |place| place.len);
                if payload > 0 && payload + len > frame_bytes as u64 {
                    break;
                }
                payload += len;
                blocks += 1;
                run.count += 1;
                self.block += 1;
            }
            if run.count > 0 {
                ranges.push(run);
            }
            if self.block < range.count {
                break;
            }
            (self.range, self.block) = (self.range + 1, 0);
            if ranges.len() == frame::MAX_RANGES {
                break;
            }
        }
        payload
    }
}
