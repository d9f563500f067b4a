//! What the callers on both sides know a transfer by, and what request it is for.

use std::fmt;

use super::wire::{DecodeError, Reader, Text, Wire, wire_struct};

/// A caller's name for a transfer, at most [`Label::MAX_LEN`] bytes. Only a label: it finds the
/// other side's half, and proves nothing. `[I10]`
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Label(Vec<u8>);

impl Label {
    /// Longest label, in bytes.
    pub const MAX_LEN: usize = 64;

    /// `None` if longer than [`Label::MAX_LEN`].
    pub fn new(bytes: impl Into<Vec<u8>>) -> Option<Label> {
        let bytes = bytes.into();
        (bytes.len() <= Self::MAX_LEN).then_some(Label(bytes))
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<u64> for Label {
    fn from(number: u64) -> Label {
        Label(number.to_string().into_bytes())
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Wire for Label {
    fn put(&self, out: &mut Vec<u8>) {
        (self.0.len() as u8).put(out);
        out.extend_from_slice(&self.0);
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let len = usize::from(u8::get(from)?);
        let bytes = from.take(len, "a label")?;
        Label::new(bytes).ok_or(DecodeError::Text)
    }
}

wire_struct! {
    /// The request that a transfer is for. Compared on both sides before a byte moves. `[I17]`
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Binding {
        /// Tokens of the prompt.
        pub token_count: u64,
        /// A hash of the token ids and the model, where the caller has one.
        pub content_hash: Option<u64>,
    }
}

impl Binding {
    /// A binding by token count alone.
    pub fn tokens(token_count: u64) -> Binding {
        Binding { token_count, content_hash: None }
    }

    /// A binding by token count and a hash of the token ids and the model.
    pub fn hashed(token_count: u64, content_hash: u64) -> Binding {
        Binding { token_count, content_hash: Some(content_hash) }
    }

    /// The first field that differs: its name, its value here and there. A hash that only one
    /// side has is a difference: otherwise leaving it out would pass.
    pub fn difference(&self, other: &Binding) -> Option<(Text, Text, Text)> {
        let hash = |b: &Binding| match b.content_hash {
            Some(hash) => format!("{hash:016x}"),
            None => "absent".to_owned(),
        };
        if self.token_count != other.token_count {
            let counts = (self.token_count.to_string(), other.token_count.to_string());
            return Some(("token_count".into(), counts.0.into(), counts.1.into()));
        }
        (self.content_hash != other.content_hash)
            .then(|| ("content_hash".into(), hash(self).into(), hash(other).into()))
    }
}
