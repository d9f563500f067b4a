//! The builder: where to listen, over what, and every limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::core::Core;
use super::driver::{self, Driver, EventGate};
use super::shared::Shared;
use super::{Engine, EngineError};
use crate::protocol::Incarnation;
use crate::protocol::receiver::ReceiverSettings;
use crate::protocol::sender::SenderSettings;
use crate::protocol::session::SessionSettings;
use crate::transport::tcp::{TcpConfig, TcpTransport};
use crate::transport::{EventSink, Transport, TransportError};

/// The longest deadline of a transfer: there is no infinite one. `[I7]`
pub const MAX_DEADLINE: Duration = Duration::from_secs(3600);

/// Every limit of an engine. The defaults suit a data-centre network.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineConfig {
    /// A name for people, in messages on both sides. Default: host and process id.
    pub name: String,
    /// Receiving side.
    pub receiver: ReceiverSettings,
    /// Sending side.
    pub sender: SenderSettings,
    /// Liveness and lanes.
    pub session: SessionSettings,
    /// How long a handshake may take.
    pub handshake: Duration,
    /// Most pages of one grant that this side accepts as a sender.
    pub max_grant_pages: u32,
}

/// Makes an [`Engine`].
#[derive(Clone, Debug)]
pub struct Builder {
    config: EngineConfig,
    tcp: TcpConfig,
}

impl Default for Builder {
    fn default() -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let config = EngineConfig {
            name: format!("{}:{}", host.trim(), std::process::id()),
            receiver: ReceiverSettings::default(),
            sender: SenderSettings::default(),
            session: SessionSettings::default(),
            handshake: Duration::from_secs(5),
            max_grant_pages: 4 << 20,
        };
        Builder { config, tcp: TcpConfig::default() }
    }
}

impl Builder {
    /// Where to listen, as `host:port`; port 0 lets the system choose. Default: don't.
    pub fn listen(mut self, address: &str) -> Self {
        self.tcp.listen = Some(address.to_owned());
        self
    }

    /// What peers are told to dial, where that differs from what is bound.
    pub fn advertise(mut self, address: &str) -> Self {
        self.tcp.advertise = Some(address.to_owned());
        self
    }

    /// A name for people.
    pub fn name(mut self, name: &str) -> Self {
        self.config.name = name.to_owned();
        self
    }

    /// Threads that move bytes, however many peers there are.
    pub fn io_threads(mut self, threads: usize) -> Self {
        self.tcp.io_threads = threads;
        self
    }

    /// Lanes that each peer may write through.
    pub fn lanes(mut self, lanes: u16) -> Self {
        self.config.session.lane_count = lanes;
        self
    }

    /// Silence after which a peer is given up; its transfers fail then at the latest. Of a pair,
    /// each side uses its own. Default 2 s.
    pub fn liveness(mut self, limit: Duration) -> Self {
        self.config.session.liveness = limit;
        self
    }

    /// How long a failed transfer waits for its peer before its lanes are fenced. Default 500 ms.
    pub fn drain_grace(mut self, limit: Duration) -> Self {
        self.config.receiver.drain_grace = limit;
        self.config.sender.drain_grace = limit;
        self
    }

    /// Most bytes in flight on one lane, over all transfers. `[I6]`
    pub fn lane_window_bytes(mut self, bytes: u64) -> Self {
        self.config.sender.lane_window_bytes = bytes;
        self
    }

    /// The settings of the TCP transport, all of them.
    pub fn tcp(mut self, change: impl FnOnce(&mut TcpConfig)) -> Self {
        change(&mut self.tcp);
        self
    }

    /// Every other limit.
    pub fn configure(mut self, change: impl FnOnce(&mut EngineConfig)) -> Self {
        change(&mut self.config);
        self
    }

    fn check(&self) -> Result<(), EngineError> {
        let setting = |name, why: &str| Err(EngineError::Setting { name, why: why.to_owned() });
        let EngineConfig { session, sender, receiver, .. } = &self.config;
        if session.lane_count == 0 || session.lane_count > 64 {
            return setting("lanes", "must be 1 to 64");
        }
        if session.liveness < Duration::from_millis(20) {
            return setting("liveness", "must be at least 20 ms");
        }
        if sender.chunk_bytes == 0 || sender.lane_window_bytes < sender.chunk_bytes {
            return setting("lane_window_bytes", "must be at least one chunk");
        }
        let shortest = Duration::from_millis(1);
        if sender.resend < shortest || receiver.resend < shortest {
            return setting("resend", "must be at least 1 ms");
        }
        if sender.chunk_blocks == 0 || sender.lane_window_writes == 0 {
            return setting("lane_window_writes", "must be at least 1");
        }
        Ok(())
    }

    /// Starts an engine over TCP.
    pub fn build(self) -> Result<Engine, EngineError> {
        let tcp = self.tcp.clone();
        self.build_over(move |sink| Ok(Arc::new(TcpTransport::start(tcp, sink)?)))
    }

    /// Starts an engine over any transport, made by `make` with the sink for its events.
    pub fn build_over(
        self,
        make: impl FnOnce(EventSink) -> Result<Arc<dyn Transport>, TransportError>,
    ) -> Result<Engine, EngineError> {
        let gate = EventGate::bounded();
        let (shared, core) = self.assemble(&gate, make)?;
        let thread = driver::spawn(core, gate, shared.clone()).map_err(|why| {
            EngineError::System { what: "starting the engine's thread", why: why.to_string() }
        })?;
        Ok(Engine { shared, core: Some(thread) })
    }

    /// An engine without a thread: nothing happens until the [`Driver`] is stepped, with whatever
    /// time its caller says it is. For simulations over [`crate::transport::sim`].
    pub fn build_driven(
        self,
        make: impl FnOnce(EventSink) -> Result<Arc<dyn Transport>, TransportError>,
    ) -> Result<(Engine, Driver), EngineError> {
        let gate = EventGate::unbounded();
        let (shared, core) = self.assemble(&gate, make)?;
        Ok((Engine { shared, core: None }, Driver::new(core, gate)))
    }

    fn assemble(
        self,
        gate: &EventGate,
        make: impl FnOnce(EventSink) -> Result<Arc<dyn Transport>, TransportError>,
    ) -> Result<(Arc<Shared>, Core), EngineError> {
        self.check()?;
        let random =
            |what| move |why: getrandom::Error| EngineError::System { what, why: why.to_string() };
        let incarnation = getrandom::u64().map_err(random("drawing an incarnation"))?;
        let incarnation = Incarnation(incarnation.max(1));
        let transport = make(gate.sink())?;
        let shared = Shared::new(incarnation, self.config, transport, gate.input());
        let shared = Arc::new(shared);
        Ok((shared.clone(), Core::new(shared)))
    }
}

/// The clock of a threaded engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Clock {
        Clock(Instant::now())
    }

    pub(crate) fn now(self) -> crate::protocol::Time {
        crate::protocol::Time(u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}
