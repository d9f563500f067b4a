//! Scatter/gather: from blocks to iovecs, and the two system calls that take them.
//!
//! Data goes straight between registered memory and the socket. The pointers here come from
//! [`Placement::spans`], whose memory stays registered while the placement lives; whoever stages
//! blocks keeps that placement until the batch is used up.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use crate::protocol::{BlockIndex, BlockRange};
use crate::transport::Placement;

/// The most iovecs in one call (Linux's `IOV_MAX`).
const MAX_IOVECS: usize = 1024;

/// Memory to send from or receive into, in order, and how much of it is done.
pub(super) struct IoBatch {
    iovecs: Vec<libc::iovec>,
    next: usize,
    bytes: usize,
}

impl IoBatch {
    pub(super) fn new() -> IoBatch {
        IoBatch { iovecs: Vec::new(), next: 0, bytes: 0 }
    }

    /// Bytes not done yet.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.iovecs.clear();
        (self.next, self.bytes) = (0, 0);
    }

    /// How many more pieces fit, with one place left for a header.
    pub(super) fn room(&self) -> usize {
        (MAX_IOVECS - 1).saturating_sub(self.iovecs.len())
    }

    /// Makes room by dropping what is done.
    pub(super) fn compact(&mut self) {
        self.iovecs.drain(..self.next);
        self.next = 0;
    }

    /// Adds a piece, joined to the last one where they touch in memory.
    pub(super) fn push(&mut self, ptr: *mut u8, len: usize) {
        self.bytes += len;
        if let Some(last) = self.iovecs[self.next..].last_mut()
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == ptr
        {
            last.iov_len += len;
            return;
        }
        self.iovecs.push(libc::iovec { iov_base: ptr.cast(), iov_len: len });
    }

    /// Counts `done` bytes as sent or received.
    pub(super) fn advance(&mut self, mut done: usize) {
        self.bytes -= done;
        while done > 0 {
            let piece = &mut self.iovecs[self.next];
            let step = done.min(piece.iov_len);
            piece.iov_base = piece.iov_base.cast::<u8>().wrapping_add(step).cast();
            piece.iov_len -= step;
            done -= step;
            if piece.iov_len == 0 {
                self.next += 1;
            }
        }
    }

    /// Sends from the batch without blocking and without SIGPIPE.
    ///
    /// # Safety
    /// Every piece that isn't done must be valid for reads.
    pub(super) unsafe fn send(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let pieces = &self.iovecs[self.next..];
        let message = message(pieces);
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: `message` names `pieces`, which outlives the call; the caller vouches for them.
        let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &message, flags) };
        let sent = usize::try_from(sent).map_err(|_| io::Error::last_os_error())?;
        self.advance(sent);
        Ok(sent)
    }

    /// Receives into the batch, and what is beyond it into `tail`, without blocking. Returns the
    /// bytes that each of the two got; both 0 means that the stream ended.
    ///
    /// # Safety
    /// Every piece that isn't done must be valid for writes.
    pub(super) unsafe fn receive(
        &mut self,
        fd: BorrowedFd<'_>,
        tail: &mut [u8],
    ) -> io::Result<(usize, usize)> {
        // Not joined to the batch, even if the two should touch: it isn't part of it.
        let tail = libc::iovec { iov_base: tail.as_mut_ptr().cast(), iov_len: tail.len() };
        self.iovecs.push(tail);
        let mut message = message(&self.iovecs[self.next..]);
        // SAFETY: `message` names pieces that outlive the call: the caller vouches for the
        // batch's, and the last is a live exclusive slice.
        let got = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        let failed = io::Error::last_os_error();
        self.iovecs.pop();
        let got = usize::try_from(got).map_err(|_| failed)?;
        let body = got.min(self.bytes);
        self.advance(body);
        Ok((body, got - body))
    }

    /// Copies the start of `bytes` into the batch; returns how many.
    ///
    /// # Safety
    /// Every piece that isn't done must be valid for writes and not overlap `bytes`.
    pub(super) unsafe fn copy_from(&mut self, bytes: &[u8]) -> usize {
        let mut copied = 0;
        while copied < bytes.len() && self.bytes > 0 {
            let piece = self.iovecs[self.next];
            let step = piece.iov_len.min(bytes.len() - copied);
            // SAFETY: the piece is valid for `iov_len` >= `step` bytes by the caller's word, and
            // `step` bytes remain in `bytes`.
            unsafe {
                ptr::copy_nonoverlapping(bytes[copied..].as_ptr(), piece.iov_base.cast(), step);
            }
            self.advance(step);
            copied += step;
        }
        copied
    }
}

fn message(pieces: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: a msghdr of zeros is valid: no name, no pieces, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len() as _;
    message
}

/// Walks the bytes of the blocks of some ranges, in order.
#[derive(Clone, Copy, Default)]
pub(super) struct BlockCursor {
    range: usize,
    block: u32,
    piece: usize,
    offset: usize,
}

impl BlockCursor {
    /// The block that the cursor is in; `None` at the end.
    pub(super) fn block(&self, ranges: &[BlockRange]) -> Option<BlockIndex> {
        ranges.get(self.range).map(|range| BlockIndex(range.first.0 + self.block))
    }

    /// Moves to the start of the next block.
    pub(super) fn next_block(&mut self, ranges: &[BlockRange]) {
        (self.piece, self.offset) = (0, 0);
        self.block += 1;
        if ranges.get(self.range).is_none_or(|range| self.block >= range.count) {
            self.range += 1;
            self.block = 0;
        }
    }

    /// Stages what comes next until the batch holds `limit` bytes, is full, or the ranges end.
    /// `entered` is called with each block before its first byte is staged.
    pub(super) fn stage(
        &mut self,
        placement: &Placement,
        ranges: &[BlockRange],
        batch: &mut IoBatch,
        limit: usize,
        mut entered: impl FnMut(BlockIndex),
    ) {
        while let Some(block) = self.block(ranges) {
            if batch.bytes() >= limit || batch.room() == 0 {
                return;
            }
            if (self.piece, self.offset) == (0, 0) {
                entered(block);
            }
            let Some(spans) = placement.spans(block) else { return };
            for span in spans.skip(self.piece) {
                let libc::iovec { iov_base, iov_len } = span.iovec();
                let take = (iov_len - self.offset).min(limit - batch.bytes());
                batch.push(iov_base.cast::<u8>().wrapping_add(self.offset), take);
                self.offset += take;
                if self.offset < iov_len {
                    return;
                }
                (self.piece, self.offset) = (self.piece + 1, 0);
                if batch.bytes() >= limit || batch.room() == 0 {
                    break;
                }
            }
            if placement.spans(block).is_some_and(|spans| self.piece >= spans.len()) {
                self.next_block(ranges);
            }
        }
    }
}
