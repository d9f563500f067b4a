//! The states of a send as types, so that a refused request has no way to complete. `[I2]`
//!
//! [`Announced`] → [`Admitted`] → [`Completing`]. Refusing consumes the announcement and leaves
//! nothing that could be completed; completing consumes the admission, so it happens once and
//! nothing is written after it.
//!
//! ```compile_fail
//! fn no_path(announced: sealift::protocol::sender::Announced) {
//!     announced.complete(); // only `Admitted` has it
//! }
//! ```
//! ```compile_fail
//! fn once(admitted: sealift::protocol::sender::Admitted) {
//!     let _first = admitted.complete();
//!     let _second = admitted.complete(); // moved
//! }
//! ```

/// Names one send of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OfferId(pub u64);

/// A label is known here; whether its request will be served isn't decided.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "refuse or admit it"]
pub struct Announced(OfferId);

/// The request was admitted: pages can be written.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "complete or abort it"]
pub struct Admitted(OfferId);

/// Everything was written: the receiver decides.
#[derive(Debug, PartialEq, Eq)]
pub struct Completing(OfferId);

impl Announced {
    /// A new announcement. `id` must be new in this engine.
    pub(crate) fn new(id: OfferId) -> Announced {
        Announced(id)
    }

    /// Which.
    pub fn id(&self) -> OfferId {
        self.0
    }

    /// The request is served.
    pub fn admit(self) -> Admitted {
        Admitted(self.0)
    }
}

impl Admitted {
    /// Which.
    pub fn id(&self) -> OfferId {
        self.0
    }

    /// Everything is written.
    pub fn complete(self) -> Completing {
        Completing(self.0)
    }
}

impl Completing {
    /// Which.
    pub fn id(&self) -> OfferId {
        self.0
    }
}
