//! sealift moves the KV-cache pages of large language models between inference nodes, and never
//! lets a request read a page that its own transfer did not write.
//!
//! What lives here: the rooms, and nothing else. Data flows one way through them:
//! bytes → [`transport`] → [`engine`] → [`protocol`] → actions → [`engine`] → [`transport`].
//! Invariants are cited as `[I1]`..`[I18]`; `docs/ARCHITECTURE.md` lists them.

pub mod digest;
pub mod engine;
pub mod memory;
pub mod protocol;
pub mod transport;

/// The README's code compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
