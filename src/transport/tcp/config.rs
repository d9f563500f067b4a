//! The settings of the TCP provider.

use std::time::Duration;

/// How a [`super::TcpTransport`] listens, dials and moves bytes.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Where to listen, as `host:port` or `host:first-last` (the first free port of the range is
    /// taken; port 0 lets the system choose). `None`: this side only dials.
    pub listen: Option<String>,
    /// What peers are told to dial, where that differs from what is bound: `host` or `host:port`.
    /// A missing port, or port 0, stands for the one that was bound.
    pub advertise: Option<String>,
    /// Threads that move bytes, however many peers there are.
    pub io_threads: usize,
    /// Kernel buffer of each socket and direction, in bytes. `None` leaves it to the kernel, whose
    /// autotuning is right on most machines.
    pub socket_buffer: Option<usize>,
    /// Payload bytes per frame, unless a single block is longer.
    pub frame_bytes: usize,
    /// How long an accepted connection may take to say what it is.
    pub handshake_timeout: Duration,
    /// Accepted connections that have not said yet what they are. Past it the oldest is dropped:
    /// honest peers speak at once, so what is old is idle or hostile.
    pub max_half_open: usize,
    /// Control connections, dialled and accepted. Past it dials are refused and callers sent away.
    pub max_links: usize,
    /// Control bytes that may wait for one peer.
    pub control_queue_bytes: usize,
    /// Idle time after which the kernel probes a silent peer. `None`: never.
    pub keepalive: Option<Duration>,
}

/// Enough payload that a header costs nothing, little enough that a close waits for little.
const FRAME_BYTES: usize = 512 * 1024;

impl Default for TcpConfig {
    fn default() -> TcpConfig {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        TcpConfig {
            listen: None,
            advertise: None,
            io_threads: (cores / 2).clamp(1, 4),
            socket_buffer: None,
            frame_bytes: FRAME_BYTES,
            handshake_timeout: Duration::from_secs(5),
            max_half_open: 256,
            max_links: 4096,
            control_queue_bytes: 8 * 1024 * 1024,
            keepalive: Some(Duration::from_secs(15)),
        }
    }
}

impl TcpConfig {
    /// The settings with every number brought into the range that the code is built for.
    pub(super) fn clamped(mut self) -> TcpConfig {
        self.io_threads = self.io_threads.clamp(1, 64);
        self.frame_bytes = self.frame_bytes.clamp(1, 64 * 1024 * 1024);
        self.max_half_open = self.max_half_open.max(1);
        self.max_links = self.max_links.max(1);
        // The kernel counts in seconds, and refuses 0.
        self.keepalive = self.keepalive.map(|idle| idle.max(Duration::from_secs(3)));
        self.control_queue_bytes = self.control_queue_bytes.max(super::super::MAX_CONTROL_LEN + 4);
        self
    }
}
