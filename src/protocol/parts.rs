//! Cuts long messages into bounded parts and joins them again.
//!
//! A control frame is one part: message number, part index, part count, bytes. Parts of a message
//! follow each other on the ordered stream, so at most one message is being joined at a time, and
//! a part out of order ends it: the sender of the message sends it again anyway.

use super::message::Message;
use super::wire::{DecodeError, Reader, Wire};

/// Most bytes of a message in one part.
pub const MAX_PART_LEN: usize = 60 * 1024;
/// Most bytes of one message: a grant of a few million pages.
pub const MAX_MESSAGE_LEN: usize = 32 * 1024 * 1024;
const HEADER_LEN: usize = 8;

/// Encodes a message into control frames. `number` tells messages of one link apart.
pub fn split(number: u32, message: &Message) -> Result<Vec<Vec<u8>>, DecodeError> {
    let mut bytes = Vec::new();
    message.put(&mut bytes);
    if bytes.len() > MAX_MESSAGE_LEN {
        return Err(DecodeError::Framing("the message is too long"));
    }
    let chunks = bytes.chunks(MAX_PART_LEN);
    let count = chunks.len() as u16;
    let frame = |(index, chunk): (usize, &[u8])| {
        let mut frame = Vec::with_capacity(HEADER_LEN + chunk.len());
        number.put(&mut frame);
        (index as u16).put(&mut frame);
        count.put(&mut frame);
        frame.extend_from_slice(chunk);
        frame
    };
    Ok(chunks.enumerate().map(frame).collect())
}

/// Joins the parts that one link brings.
#[derive(Clone, Debug, Default)]
pub struct Joiner {
    number: u32,
    next: u16,
    count: u16,
    bytes: Vec<u8>,
}

impl Joiner {
    /// Takes the next control frame; returns the message that it completes. A message longer than
    /// `max_len` is refused at its first part.
    pub fn push(&mut self, frame: &[u8], max_len: usize) -> Result<Option<Message>, DecodeError> {
        let mut reader = Reader::new(frame);
        let number = u32::get(&mut reader)?;
        let (index, count) = (u16::get(&mut reader)?, u16::get(&mut reader)?);
        let chunk = reader.take(reader.remaining(), "a part")?;
        if count == 0 || index >= count || chunk.is_empty() || chunk.len() > MAX_PART_LEN {
            return Err(DecodeError::Framing("part header"));
        }
        if usize::from(count) > max_len.div_ceil(MAX_PART_LEN) {
            return Err(DecodeError::Framing("too many parts"));
        }
        if index == 0 {
            *self = Joiner { number, next: 0, count, bytes: Vec::new() };
        } else if (number, count, index) != (self.number, self.count, self.next) {
            *self = Joiner::default();
            return Ok(None);
        }
        self.next += 1;
        self.bytes.extend_from_slice(chunk);
        if self.next < count {
            return Ok(None);
        }
        let whole = std::mem::take(self);
        let mut reader = Reader::new(&whole.bytes);
        let message = Message::get(&mut reader)?;
        reader.finish()?;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::protocol::{
        Binding, Extent, Fingerprint, Generation, Grant, GrantComponent, Incarnation, Label,
        PageIndex, PlaneIndex, TransferId,
    };

    fn grant(pages: u32) -> Message {
        let id = TransferId { receiver: Incarnation(7), counter: 9 };
        let layout = Fingerprint {
            name: "kv".into(),
            dtype: "bf16".into(),
            tokens_per_page: 16,
            item_lens: vec![(64, 32768)],
        };
        let component = GrantComponent {
            layout,
            pages: (0..pages).map(|p| PageIndex(p.wrapping_mul(2_654_435_761))).collect(),
            extents: vec![Extent::whole(PlaneIndex(0), 64, 32768)],
            whole_pages: true,
        };
        let grant = Grant {
            id,
            label: Label::from(5),
            binding: Binding::hashed(16, 3),
            generation: Generation(4),
            deadline_ms: 1000,
            integrity: true,
            oldest_live: 2,
            components: vec![component],
        };
        Message::Grant { grant }
    }

    #[test]
    fn a_million_page_grant_travels_in_bounded_parts() {
        let message = grant(1_000_000);
        let frames = split(3, &message).unwrap();
        assert!(frames.len() > 60);
        assert!(frames.iter().all(|f| f.len() <= crate::transport::MAX_CONTROL_LEN));
        let mut joiner = Joiner::default();
        for frame in &frames[..frames.len() - 1] {
            assert_eq!(joiner.push(frame, MAX_MESSAGE_LEN).unwrap(), None);
        }
        assert_eq!(joiner.push(&frames[frames.len() - 1], MAX_MESSAGE_LEN).unwrap(), Some(message));
    }

    #[test]
    fn a_lost_part_loses_the_message_and_nothing_else() {
        let frames = split(1, &grant(40_000)).unwrap();
        let mut joiner = Joiner::default();
        for (index, frame) in frames.iter().enumerate().filter(|(index, _)| *index != 1) {
            assert_eq!(joiner.push(frame, MAX_MESSAGE_LEN).unwrap(), None, "part {index}");
        }
        let again = grant(3);
        let frames = split(2, &again).unwrap();
        assert_eq!(joiner.push(&frames[0], MAX_MESSAGE_LEN).unwrap(), Some(again));
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_error_or_a_message(frame in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Joiner::default().push(&frame, MAX_MESSAGE_LEN);
        }

        #[test]
        fn flipped_bytes_of_a_real_message_never_panic(at in 0usize..200, to: u8) {
            let mut frame = split(1, &grant(20)).unwrap().remove(0);
            let at = at % frame.len();
            frame[at] = to;
            let _ = Joiner::default().push(&frame, MAX_MESSAGE_LEN);
        }
    }
}
