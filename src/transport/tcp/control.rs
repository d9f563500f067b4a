//! The stream of a control link: frames with their length in front, both ways.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::iov::IoBatch;
use super::socket::Stream;
use crate::transport::MAX_CONTROL_LEN;

/// Bytes of the length.
pub(super) const PREFIX_LEN: usize = 4;
/// Bytes read in one turn, before others are served.
const TURN_BYTES: usize = 256 * 1024;
/// Frames handed to the kernel in one call.
const GATHER: usize = 64;

/// Why a control stream ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum ControlEnd {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the peer closed the connection")]
    Eof,
    #[error("the peer announced a control frame of {0} bytes")]
    TooLong(usize),
}

/// Frames under way in both directions.
pub(super) struct Control {
    outgoing: VecDeque<Vec<u8>>,
    /// Bytes of the first outgoing frame that are sent.
    sent: usize,
    /// A frame that isn't whole yet.
    incoming: Vec<u8>,
}

impl Control {
    pub(super) fn new() -> Control {
        Control { outgoing: VecDeque::new(), sent: 0, incoming: Vec::new() }
    }

    /// Queues a frame that has its length in front.
    pub(super) fn push(&mut self, frame: Vec<u8>) {
        self.outgoing.push_back(frame);
    }

    /// Sends what fits and takes it off `queued`.
    pub(super) fn flush(&mut self, stream: &mut Stream, queued: &AtomicUsize) -> io::Result<()> {
        let mut batch = IoBatch::new();
        while !self.outgoing.is_empty() {
            batch.clear();
            for (index, frame) in self.outgoing.iter_mut().take(GATHER).enumerate() {
                let part = &mut frame[if index == 0 { self.sent } else { 0 }..];
                batch.push(part.as_mut_ptr(), part.len());
            }
            // SAFETY: the batch points into `outgoing`, which isn't touched until after the call.
            let Some(sent) = stream.write_with(|fd| unsafe { batch.send(fd) })? else { break };
            queued.fetch_sub(sent, Ordering::Relaxed);
            self.retire(sent);
        }
        Ok(())
    }

    fn retire(&mut self, sent: usize) {
        self.sent += sent;
        while let Some(frame) = self.outgoing.front()
            && self.sent >= frame.len()
        {
            self.sent -= frame.len();
            self.outgoing.pop_front();
        }
    }

    /// Reads what is there, a bounded amount, by way of `scratch`; `true` if there may be more.
    pub(super) fn read(
        &mut self,
        stream: &mut Stream,
        scratch: &mut [u8],
        mut deliver: impl FnMut(Vec<u8>),
    ) -> Result<bool, ControlEnd> {
        let mut taken = 0;
        while taken < TURN_BYTES {
            let got = match stream.read(scratch)? {
                None => return Ok(false),
                Some(0) => return Err(ControlEnd::Eof),
                Some(got) => got,
            };
            taken += got;
            self.incoming.extend_from_slice(&scratch[..got]);
            let parsed = parse(&self.incoming, &mut deliver)?;
            self.incoming.drain(..parsed);
            if self.incoming.is_empty() {
                // An idle link holds no buffer.
                self.incoming = Vec::new();
            }
        }
        Ok(true)
    }
}

/// Delivers the whole frames at the start of `bytes`; returns their length.
fn parse(bytes: &[u8], deliver: &mut impl FnMut(Vec<u8>)) -> Result<usize, ControlEnd> {
    let mut at = 0;
    while let Some(prefix) = bytes[at..].first_chunk::<PREFIX_LEN>() {
        let len = u32::from_le_bytes(*prefix) as usize;
        if len > MAX_CONTROL_LEN {
            return Err(ControlEnd::TooLong(len));
        }
        let body = at + PREFIX_LEN;
        let Some(frame) = bytes.get(body..body + len) else { break };
        deliver(frame.to_vec());
        at = body + len;
    }
    Ok(at)
}
