//! Memory that pages live in: who owns it, how long, and where each page of each plane lies.
//!
//! What may live here: regions, their registration, and the arithmetic from (plane, page, offset)
//! to bytes. What may not: knowing which transfer may touch a page. No raw pointer leaves this
//! module and [`crate::transport`].

mod layout;
mod maps;
mod pool;
mod region;
mod registry;
mod span;

pub use layout::{PlaneMemory, PoolMemoryError};
pub use pool::{Busy, Pin, PoolMemory};
pub use region::{HostRegion, MemoryError};
pub use registry::{RegisterError, Registration, Registry};
pub use span::Span;
