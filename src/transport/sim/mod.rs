//! A network inside the process, for tests: deterministic by seed, with every fault on demand.
//!
//! What may live here: the network, its faults, and a [`super::Transport`] over it. What may not:
//! anything that a real provider doesn't promise too, other than a fault that a test asked for.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use std::time::Duration;
//! use sealift::transport::sim::{Fault, FaultKind, Filter, SimConfig, SimNet};
//! use sealift::transport::{Event, Transport};
//!
//! let net = SimNet::new(SimConfig::seeded(7));
//! let log = Arc::new(Mutex::new(Vec::new()));
//! let sink = Arc::clone(&log);
//! let prefill = net.endpoint("prefill", Arc::new(|_| ()));
//! let _decode = net.endpoint("decode", Arc::new(move |event| sink.lock().unwrap().push(event)));
//!
//! let link = prefill.connect("decode", Duration::from_secs(1))?;
//! while net.step() {}
//! net.inject(Fault::DropControl, Filter::any().from("prefill").nth(1));
//! for frame in [b"one", b"two", b"six"] {
//!     prefill.send_control(link, frame)?;
//! }
//! while net.step() {}
//!
//! let frames = log.lock().unwrap().drain(..).filter(|e| matches!(e, Event::Control { .. })).count();
//! assert_eq!(frames, 2);
//! assert_eq!(net.stats().count(FaultKind::DropControl), 1);
//! # Ok::<(), sealift::transport::TransportError>(())
//! ```

mod arrive;
mod bytes;
mod config;
mod endpoint;
mod fault;
mod filter;
mod flight;
mod landings;
mod lane;
mod link;
mod net;
mod pump;
mod rng;
#[cfg(test)]
mod tests;
mod world;
mod write;

pub use config::SimConfig;
pub use endpoint::SimTransport;
pub use fault::{CallKind, Fault, FaultKind};
pub use filter::{FaultId, Filter, SimStats};
pub use net::SimNet;
pub use pump::SimPump;
