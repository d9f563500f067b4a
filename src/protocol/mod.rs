//! The protocol as pure state machines: events in (timers are events), actions out.
//!
//! What may live here: ids, layouts, the page ledger, messages and their codec, the sender, the
//! receiver and the session. What may not: I/O, a clock (time comes in as a [`Time`]), threads,
//! `unsafe`. The same code is model-checked, simulated and shipped.
#![forbid(unsafe_code)]

mod blocks;
mod extent;
mod ids;

pub use blocks::{BlockError, BlockMap, BlockPlace, BlockRange, ComponentShape};
pub use extent::{Extent, ExtentError};
pub use ids::{
    BlockIndex, ComponentIndex, Generation, Incarnation, LaneId, PageIndex, PlaneIndex, PoolId,
    Round, Ticket, Time, TransferId,
};
