//! The yardstick: one raw TCP stream between the same two processes.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::measure;
use super::side::{Answer, Ask, Side, VERSION};
use super::stop::Stop;

/// Bytes of one call to the kernel, and of the one buffer that is used again and again.
const CALL: usize = 256 * 1024;
/// How long the stream may stall.
const STALL: Duration = Duration::from_secs(10);
/// The most that a stranger may ask for.
const MAX_BYTES: u64 = 1 << 40;

/// What the raw stream took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Raw {
    pub(super) bytes: u64,
    pub(super) time: Duration,
    pub(super) receiver_cpu: Duration,
    pub(super) sender_cpu: Duration,
}

impl Raw {
    pub(super) fn add(&mut self, other: Raw) {
        self.bytes += other.bytes;
        self.time += other.time;
        self.receiver_cpu += other.receiver_cpu;
        self.sender_cpu += other.sender_cpu;
    }
}

/// Takes `bytes` from the `serve` at `address`, over a connection that stands before the clock runs.
pub(super) fn receive(address: &str, bytes: u64, stop: &Stop) -> Result<Raw> {
    let mut side = Side::connect(address, stop)?;
    let mut buffer = vec![0; CALL];
    let (cpu, began) = (measure::cpu_time(), Instant::now());
    side.send(&Ask::Raw { version: VERSION, bytes })?;
    let mut left = bytes;
    while left > 0 {
        stop.check()?;
        let want = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        left -= side.read(&mut buffer[..want], STALL)? as u64;
    }
    let (time, receiver_cpu) = (began.elapsed(), measure::cpu_time().saturating_sub(cpu));
    match side.receive(STALL)? {
        Answer::Sent { cpu_ns } => {
            let sender_cpu = Duration::from_nanos(cpu_ns);
            Ok(Raw { bytes, time, receiver_cpu, sender_cpu })
        }
        other => bail!("an answer out of turn: {other:?}"),
    }
}

/// Sends what [`receive`] asked for.
pub(super) fn send(side: &mut Side, bytes: u64, stop: &Stop) -> Result<()> {
    ensure!(bytes <= MAX_BYTES, "{bytes} raw bytes, the limit is {MAX_BYTES}");
    let buffer = vec![0x5A; CALL];
    let cpu = measure::cpu_time();
    let mut left = bytes;
    while left > 0 {
        stop.check()?;
        let count = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        side.write(&buffer[..count], STALL)?;
        left -= count as u64;
    }
    let cpu = measure::cpu_time().saturating_sub(cpu);
    side.send(&Answer::Sent { cpu_ns: u64::try_from(cpu.as_nanos())? })
}
