//! The encoding of control messages: fixed-width little-endian fields, lengths before lists.
//!
//! Decoding never trusts a length: a list can't claim more elements than bytes that are left.

use super::ids::{
    ComponentIndex, Generation, Incarnation, LaneId, PageIndex, PlaneIndex, Round, TransferId,
};
use super::{BlockIndex, Extent};

/// Why bytes from a peer aren't a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end inside a field.
    #[error("the message ends inside {0}")]
    Truncated(&'static str),
    /// Bytes are left after the last field.
    #[error("{0} bytes follow the end of the message")]
    Trailing(usize),
    /// A code that this version doesn't know.
    #[error("unknown {what} code {code}")]
    UnknownCode {
        /// Of which enumeration.
        what: &'static str,
        /// The code.
        code: u32,
    },
    /// A text that isn't UTF-8 or is too long.
    #[error("a text field is malformed")]
    Text,
    /// A frame or part header that contradicts itself or the limits.
    #[error("the framing is malformed: {0}")]
    Framing(&'static str),
}

/// Reads fields off the front of a message.
#[derive(Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes }
    }

    /// Takes the next `len` bytes.
    pub fn take(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], DecodeError> {
        let (head, tail) = self.bytes.split_at_checked(len).ok_or(DecodeError::Truncated(what))?;
        self.bytes = tail;
        Ok(head)
    }

    /// Bytes not yet read.
    pub fn remaining(&self) -> usize {
        self.bytes.len()
    }

    /// Checks that nothing is left.
    pub fn finish(self) -> Result<(), DecodeError> {
        match self.bytes.len() {
            0 => Ok(()),
            left => Err(DecodeError::Trailing(left)),
        }
    }
}

/// A value with an encoding.
pub trait Wire: Sized {
    /// Appends the encoding.
    fn put(&self, out: &mut Vec<u8>);
    /// Reads one value.
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError>;
}

macro_rules! wire_int {
    ($($int:ty),*) => {$(
        impl Wire for $int {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
                let bytes = from.take(size_of::<$int>(), stringify!($int))?;
                Ok(<$int>::from_le_bytes(bytes.try_into().unwrap_or_default()))
            }
        }
    )*};
}
wire_int!(u8, u16, u32, u64);

macro_rules! wire_newtype {
    ($($name:ident),*) => {$(
        impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                self.0.put(out);
            }
            fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
                Ok($name(Wire::get(from)?))
            }
        }
    )*};
}
wire_newtype!(PageIndex, PlaneIndex, ComponentIndex, BlockIndex, Generation, Round, Incarnation);

impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        u8::from(*self).put(out);
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match u8::get(from)? {
            0 => Ok(false),
            1 => Ok(true),
            code => Err(DecodeError::UnknownCode { what: "bool", code: code.into() }),
        }
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(if bool::get(from)? { Some(T::get(from)?) } else { None })
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        self.iter().for_each(|item| item.put(out));
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let len = u32::get(from)? as usize;
        if len > from.remaining() {
            return Err(DecodeError::Truncated("a list"));
        }
        // Grown as elements prove to be there, so a lying length costs nothing.
        let mut items = Vec::with_capacity(len.min(1024));
        for _ in 0..len {
            items.push(T::get(from)?);
        }
        Ok(items)
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok((A::get(from)?, B::get(from)?))
    }
}

/// A short text for people, at most [`Text::MAX_LEN`] bytes of UTF-8.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Text(String);

impl Text {
    /// Longest text, in bytes.
    pub const MAX_LEN: usize = 200;

    /// Keeps the first [`Text::MAX_LEN`] bytes, cut at a character.
    pub fn new(text: impl Into<String>) -> Text {
        let mut text: String = text.into();
        if text.len() > Self::MAX_LEN {
            let end = (0..=Self::MAX_LEN).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
            text.truncate(end);
        }
        Text(text)
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl<T: Into<String>> From<T> for Text {
    fn from(text: T) -> Text {
        Text::new(text)
    }
}

impl Wire for Text {
    fn put(&self, out: &mut Vec<u8>) {
        (self.0.len() as u8).put(out);
        out.extend_from_slice(self.0.as_bytes());
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let len = usize::from(u8::get(from)?);
        if len > Self::MAX_LEN {
            return Err(DecodeError::Text);
        }
        let text = std::str::from_utf8(from.take(len, "a text")?);
        Ok(Text(text.map_err(|_| DecodeError::Text)?.to_owned()))
    }
}

/// Derives [`Wire`] for a struct: its fields in order.
macro_rules! wire_struct {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$field_meta:meta])* pub $field:ident: $ty:ty,)*
    }) => {
        $(#[$meta])*
        pub struct $name { $($(#[$field_meta])* pub $field: $ty,)* }

        impl $crate::protocol::wire::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }
            fn get(
                from: &mut $crate::protocol::wire::Reader<'_>,
            ) -> Result<Self, $crate::protocol::wire::DecodeError> {
                Ok($name { $($field: $crate::protocol::wire::Wire::get(from)?,)* })
            }
        }
    };
}

/// Derives [`Wire`] for an enumeration of structs: a one-byte code, then the fields in order.
/// Codes are part of the wire format and never reused.
macro_rules! wire_enum {
    ($(#[$meta:meta])* pub enum $name:ident {
        $($(#[$variant_meta:meta])* $code:literal => $variant:ident {
            $($(#[$field_meta:meta])* $field:ident: $ty:ty,)*
        },)*
    }) => {
        $(#[$meta])*
        pub enum $name {
            $($(#[$variant_meta])* $variant { $($(#[$field_meta])* $field: $ty,)* },)*
        }

        impl $name {
            /// The code that starts the encoding.
            pub fn code(&self) -> u8 {
                match self { $($name::$variant { .. } => $code,)* }
            }

            /// The variant's name.
            pub fn name(&self) -> &'static str {
                match self { $($name::$variant { .. } => stringify!($variant),)* }
            }
        }

        impl $crate::protocol::wire::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                self.code().put(out);
                match self {
                    $($name::$variant { $($field,)* } => { $($field.put(out);)* })*
                }
            }
            fn get(
                from: &mut $crate::protocol::wire::Reader<'_>,
            ) -> Result<Self, $crate::protocol::wire::DecodeError> {
                match u8::get(from)? {
                    $($code => Ok($name::$variant {
                        $($field: $crate::protocol::wire::Wire::get(from)?,)*
                    }),)*
                    code => Err($crate::protocol::wire::DecodeError::UnknownCode {
                        what: stringify!($name),
                        code: u32::from(code),
                    }),
                }
            }
        }
    };
}

pub(crate) use {wire_enum, wire_struct};

macro_rules! wire_fields {
    ($($name:ident { $($field:ident),* })*) => {$(
        impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }
            fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
                Ok($name { $($field: Wire::get(from)?),* })
            }
        }
    )*};
}
wire_fields! {
    TransferId { receiver, counter }
    LaneId { index, epoch }
    Extent { first_plane, plane_count, offset, piece_len, piece_count, piece_stride }
}
