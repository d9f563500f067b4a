//! What joins the engines of a test: the simulated network in real time, or TCP on loopback.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sealift::engine::{Builder, Engine};
use sealift::transport::sim::{Fault, FaultKind, Filter, SimConfig, SimNet, SimPump};
use sealift::transport::tcp::{TcpConfig, TcpTransport};
use sealift::transport::{CompletionStatus, EventSink, Transport};

use super::check::eventually;
use super::proxy::{Proxy, Tamper};

pub enum Fabric {
    Sim { net: SimNet, _pump: SimPump },
    Tcp,
}

static SEED: AtomicU64 = AtomicU64::new(1);

impl Fabric {
    /// A simulated network of its own, with random delays and no faults.
    pub fn sim() -> Fabric {
        let net = SimNet::new(SimConfig::seeded(SEED.fetch_add(1, Ordering::Relaxed)));
        let _pump = net.spawn_pump();
        Fabric::Sim { net, _pump }
    }

    /// An engine that listens.
    pub fn build(&self, name: &str, builder: Builder) -> Engine {
        let builder = builder.name(name);
        match self {
            Fabric::Sim { net, .. } => {
                builder.build_over(|sink| Ok(Arc::new(net.endpoint(name, sink)))).unwrap()
            }
            Fabric::Tcp => builder.listen("127.0.0.1:0").io_threads(1).build().unwrap(),
        }
    }

    /// A bare transport that listens.
    pub fn transport(&self, name: &str, sink: EventSink) -> Arc<dyn Transport> {
        match self {
            Fabric::Sim { net, .. } => Arc::new(net.endpoint(name, sink)),
            Fabric::Tcp => {
                let listen = Some("127.0.0.1:0".to_owned());
                let config = TcpConfig { listen, io_threads: 1, ..TcpConfig::default() };
                Arc::new(TcpTransport::start(config, sink).unwrap())
            }
        }
    }

    /// The way to the writer that listens at `address`: one that can be spoilt.
    pub fn route(&self, address: &str) -> Route {
        match self {
            Fabric::Sim { net, .. } => Route::Sim { net: net.clone(), writer: address.to_owned() },
            Fabric::Tcp => Route::Proxy(Proxy::to(address)),
        }
    }
}

/// The way from a reader, which dials, to a writer.
pub enum Route {
    Sim { net: SimNet, writer: String },
    Proxy(Proxy),
}

impl Route {
    /// What the reader dials.
    pub fn address(&self) -> String {
        match self {
            Route::Sim { writer, .. } => writer.clone(),
            Route::Proxy(proxy) => proxy.address().to_owned(),
        }
    }

    /// Keeps everything that the writer writes in flight.
    pub fn hold_writes(&self) {
        match self {
            Route::Sim { net, writer } => {
                net.hold_writes(Filter::any().from(writer));
            }
            Route::Proxy(proxy) => proxy.hold_lanes(true),
        }
    }

    pub fn release_writes(&self) {
        match self {
            Route::Sim { net, .. } => net.release_writes(),
            Route::Proxy(proxy) => proxy.hold_lanes(false),
        }
    }

    /// Keeps back what the reader says to the writer.
    pub fn hold_words(&self) {
        match self {
            Route::Sim { net, writer } => {
                net.hold_control(Filter::any().to(writer));
            }
            Route::Proxy(proxy) => proxy.hold_words(true),
        }
    }

    pub fn release_words(&self) {
        match self {
            Route::Sim { net, .. } => net.release_control(),
            Route::Proxy(proxy) => proxy.hold_words(false),
        }
    }

    /// One bit of the next write lands flipped.
    pub fn flip_bit(&self) {
        self.spoil(Fault::CorruptBlock, Tamper::FlipBit);
    }

    /// Two blocks, of `len` bytes each, of the next write land in each other's place.
    pub fn swap_blocks(&self, len: u32) {
        self.spoil(Fault::SwapBlocks, Tamper::SwapBlocks { len: len as usize });
    }

    fn spoil(&self, fault: Fault, tamper: Tamper) {
        match self {
            Route::Sim { net, writer } => {
                net.inject(fault, Filter::any().from(writer).writes().times(1));
            }
            Route::Proxy(proxy) => proxy.tamper(tamper, 0),
        }
    }

    /// Was the write spoilt?
    pub fn was_spoilt(&self) -> bool {
        match self {
            Route::Sim { net, .. } => {
                let stats = net.stats();
                let kinds =
                    [FaultKind::CorruptBlock, FaultKind::SwapBlocks, FaultKind::CompleteWith];
                kinds.into_iter().any(|kind| stats.count(kind) > 0)
            }
            Route::Proxy(proxy) => proxy.tampered() > 0,
        }
    }

    /// One lane breaks after so many writes, in the middle of the next.
    pub fn break_lane(&self, after: u64) {
        match self {
            Route::Sim { net, writer } => {
                let filter = Filter::any().from(writer).lane_index(0).writes().skip(after);
                net.complete_next_with(filter, CompletionStatus::Flushed);
            }
            Route::Proxy(proxy) => proxy.tamper(Tamper::Reset, after),
        }
    }

    /// Cuts the control link, and the lanes with it.
    pub fn cut(&self) {
        match self {
            Route::Sim { net, writer } => {
                eventually("a link is there to cut", || net.cut(&Filter::any().to(writer)) > 0);
            }
            Route::Proxy(proxy) => proxy.cut(),
        }
    }
}
