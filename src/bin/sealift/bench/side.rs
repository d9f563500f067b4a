//! The side connection: how the two ends of a bench agree on what to move.
//!
//! One JSON object a line, asked by `run` and answered by `serve`; for the bench only, and not
//! authenticated. Lines are bounded, and so is every wait.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use sealift::engine::{Builder, Engine};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::stop::{POLL, Stop};
use super::workload::Workload;

/// Both ends must be of the same.
pub(super) const VERSION: u32 = 1;
/// The longest line.
const MAX_LINE: usize = 64 * 1024;
/// How long sending a line, or connecting, may take.
const SOON: Duration = Duration::from_secs(5);
const CLOSED: &str = "the other end closed the side connection";

/// What `run` asks for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Ask {
    /// Make a source, and an engine that sends from it.
    Open { version: u32, workload: Workload, tuning: Tuning },
    /// Send these requests of this round, each within so many milliseconds.
    Round { round: u64, requests: u16, timeout_ms: u64 },
    /// How did the round end?
    Settle,
    /// Send this many raw bytes. Instead of `Open`, on a connection of its own.
    Raw { version: u32, bytes: u64 },
}

/// What `serve` answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Answer {
    /// The source is there, and the engine listens on this port of the same host.
    Ready { data_port: u16 },
    /// The round's requests wait for their grants.
    Posted,
    /// The round is over on this side.
    Settled(Settled),
    /// All raw bytes are sent.
    Sent { cpu_ns: u64 },
    /// What was asked for can't be had.
    Failed { why: String },
}

/// A round, as the sender saw it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Settled {
    /// CPU time from `Posted` until here.
    pub(super) cpu_ns: u64,
    /// What the process has grown by since its pool was filled.
    pub(super) grown_bytes: u64,
    /// Why requests failed.
    pub(super) failed: Vec<String>,
}

/// Settings of both engines. What isn't given is the library's default.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tuning {
    /// Lanes (TCP streams) that the sender may write through.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(super) lanes: Option<u16>,
    /// Threads that move bytes, at each end.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(super) io_threads: Option<u16>,
    /// Bytes of one write.
    #[arg(long, value_name = "BYTES")]
    pub(super) chunk_bytes: Option<u64>,
    /// Bytes in flight on one lane.
    #[arg(long, value_name = "BYTES")]
    pub(super) window_bytes: Option<u64>,
    /// Payload bytes of a TCP frame.
    #[arg(long, value_name = "BYTES")]
    pub(super) frame_bytes: Option<u32>,
    /// Kernel buffer of each socket and direction; without, the kernel decides.
    #[arg(long, value_name = "BYTES")]
    pub(super) socket_buffer: Option<u32>,
}

impl Tuning {
    /// A builder with these settings.
    pub(super) fn builder(&self) -> Builder {
        let mut builder = Engine::builder();
        if let Some(lanes) = self.lanes {
            builder = builder.lanes(lanes);
        }
        if let Some(threads) = self.io_threads {
            builder = builder.io_threads(usize::from(threads));
        }
        builder
            .configure(|config| {
                let sender = &mut config.sender;
                sender.chunk_bytes = self.chunk_bytes.unwrap_or(sender.chunk_bytes);
                let window = self.window_bytes.unwrap_or(sender.lane_window_bytes);
                sender.lane_window_bytes = window;
                // A transfer may fill the windows of several lanes, as by default.
                sender.transfer_window_bytes =
                    sender.transfer_window_bytes.max(window.saturating_mul(4));
            })
            .tcp(|tcp| {
                let frame = self.frame_bytes.and_then(|bytes| usize::try_from(bytes).ok());
                tcp.frame_bytes = frame.unwrap_or(tcp.frame_bytes);
                let buffer = self.socket_buffer.and_then(|bytes| usize::try_from(bytes).ok());
                tcp.socket_buffer = buffer.or(tcp.socket_buffer);
            })
    }
}

/// One end of a side connection.
#[derive(Debug)]
pub(super) struct Side {
    stream: TcpStream,
    /// What has come after the last line that was taken.
    buffered: Vec<u8>,
    stop: Stop,
}

impl Side {
    /// Dials the other end.
    pub(super) fn connect(address: &str, stop: &Stop) -> Result<Side> {
        let addresses = address.to_socket_addrs();
        let addresses: Vec<SocketAddr> =
            addresses.with_context(|| format!("{address:?} is not a HOST:PORT"))?.collect();
        let mut last = None;
        for candidate in &addresses {
            match TcpStream::connect_timeout(candidate, SOON) {
                Ok(stream) => return Side::new(stream, stop),
                Err(why) => last = Some(why),
            }
        }
        let why = last.unwrap_or_else(|| ErrorKind::AddrNotAvailable.into());
        Err(why).with_context(|| format!("connecting to the bench at {address}"))
    }

    /// Takes a connection that stands.
    pub(super) fn new(stream: TcpStream, stop: &Stop) -> Result<Side> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(POLL))?;
        stream.set_write_timeout(Some(POLL))?;
        Ok(Side { stream, buffered: Vec::new(), stop: stop.clone() })
    }

    /// The other end.
    pub(super) fn peer(&self) -> Result<SocketAddr> {
        Ok(self.stream.peer_addr()?)
    }

    /// This end.
    pub(super) fn local(&self) -> Result<SocketAddr> {
        Ok(self.stream.local_addr()?)
    }

    /// Sends a line.
    pub(super) fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        ensure!(line.len() < MAX_LINE, "a line of {} bytes", line.len());
        line.push(b'\n');
        self.write(&line, SOON)
    }

    /// Sends bytes; they may stall for at most `patience` at a time.
    pub(super) fn write(&mut self, mut bytes: &[u8], patience: Duration) -> Result<()> {
        let mut moved = Instant::now();
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(0) => bail!(CLOSED),
                Ok(count) => {
                    bytes = &bytes[count..];
                    moved = Instant::now();
                }
                Err(why) => self.waited(why, moved, patience)?,
            }
        }
        Ok(())
    }

    /// Takes bytes into `out`, some at least; they may stall for at most `patience`.
    pub(super) fn read(&mut self, out: &mut [u8], patience: Duration) -> Result<usize> {
        if !self.buffered.is_empty() {
            let count = out.len().min(self.buffered.len());
            out[..count].copy_from_slice(&self.buffered[..count]);
            self.buffered.drain(..count);
            return Ok(count);
        }
        let count = self.read_some(out, patience)?;
        ensure!(count > 0, CLOSED);
        Ok(count)
    }

    /// Takes bytes from the socket; 0 if the other end closed it.
    fn read_some(&self, out: &mut [u8], patience: Duration) -> Result<usize> {
        let began = Instant::now();
        loop {
            match (&self.stream).read(out) {
                Ok(count) => return Ok(count),
                Err(why) => self.waited(why, began, patience)?,
            }
        }
    }

    /// Whether a failed call may be tried again.
    fn waited(&self, why: std::io::Error, since: Instant, patience: Duration) -> Result<()> {
        match why.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {
                self.stop.check()?;
                ensure!(since.elapsed() < patience, "the other end is silent for {patience:?}");
                Ok(())
            }
            _ => Err(why).context("the side connection broke"),
        }
    }

    /// Takes a line, which may be as long in coming as `patience`.
    pub(super) fn receive<T: DeserializeOwned>(&mut self, patience: Duration) -> Result<T> {
        self.next(patience)?.context(CLOSED)
    }

    /// As [`Side::receive`]; `None` if the other end closed the connection instead.
    pub(super) fn next<T: DeserializeOwned>(&mut self, patience: Duration) -> Result<Option<T>> {
        let until = Instant::now() + patience;
        let mut chunk = [0; 4096];
        // Lines of a peer that sends a byte now and then end by the same deadline.
        let end = loop {
            if let Some(end) = self.buffered.iter().position(|byte| *byte == b'\n') {
                break end;
            }
            ensure!(self.buffered.len() < MAX_LINE, "a line of more than {MAX_LINE} bytes");
            let left = until.saturating_duration_since(Instant::now());
            match self.read_some(&mut chunk, left)? {
                0 if self.buffered.is_empty() => return Ok(None),
                0 => bail!(CLOSED),
                count => self.buffered.extend_from_slice(&chunk[..count]),
            }
        };
        let line: Vec<u8> = self.buffered.drain(..=end).collect();
        serde_json::from_slice(&line).map(Some).context("a line that isn't of this protocol")
    }

    /// Asks, and waits for the answer; a refusal is an error.
    pub(super) fn ask(&mut self, ask: &Ask, patience: Duration) -> Result<Answer> {
        self.send(ask)?;
        match self.receive(patience)? {
            Answer::Failed { why } => bail!("the other end: {why}"),
            answer => Ok(answer),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (Side, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let side = Side::connect(&address, &Stop::default()).unwrap();
        (side, listener.accept().unwrap().0)
    }

    #[test]
    fn lines_come_whole_however_they_are_cut() {
        let (mut side, mut peer) = pair();
        peer.write_all(b"\"Set").unwrap();
        let rest = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(250));
            peer.write_all(b"tle\"\n\"Settle\"\nraw").unwrap();
            peer
        });
        for _ in 0..2 {
            let ask: Ask = side.receive(Duration::from_secs(10)).unwrap();
            assert!(matches!(ask, Ask::Settle));
        }
        let mut raw = [0; 8];
        assert_eq!(side.read(&mut raw, Duration::from_secs(10)).unwrap(), 3);
        drop(rest.join().unwrap());
    }

    #[test]
    fn strangers_are_refused() {
        let ends = |bytes: Vec<u8>| {
            let (mut side, mut peer) = pair();
            let writer = std::thread::spawn(move || drop((peer.write_all(&bytes), peer)));
            let why = side.receive::<Ask>(Duration::from_secs(10)).unwrap_err();
            drop(side);
            writer.join().unwrap();
            format!("{why:#}")
        };
        assert!(ends(b"GET / HTTP/1.1\r\n".to_vec()).contains("protocol"));
        assert!(ends(vec![b'x'; 2 * MAX_LINE]).contains("a line of more"));
        assert!(ends(b"{\"Settle\"".to_vec()).contains("closed"));
    }

    #[test]
    fn silence_ends() {
        let (mut side, _peer) = pair();
        let why = side.receive::<Ask>(Duration::from_millis(150)).unwrap_err();
        assert!(why.to_string().contains("silent"), "{why}");
    }
}
