//! What is said at the end: a table, or one JSON object.

use std::time::Duration;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use sealift::protocol::session::SessionSettings;
use sealift::transport::tcp::TcpConfig;
use serde::Serialize;

use super::args::LoadArgs;
use super::measure::{quantile, rate};
use super::raw::Raw;
use super::session::Session;
use super::workload::Workload;

const GIB: f64 = (1u64 << 30) as f64;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    Ok,
    Interrupted,
    Failed,
    WrongByte,
}

impl Status {
    pub(super) fn of<T>(result: &anyhow::Result<T>) -> Status {
        match result.as_ref().map_err(super::exit_code) {
            Ok(_) => Status::Ok,
            Err(130) => Status::Interrupted,
            Err(2) => Status::WrongByte,
            Err(_) => Status::Failed,
        }
    }
}

/// CPU seconds for each GiB, at each end.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Cpu {
    receiver: f64,
    sender: f64,
}

impl Cpu {
    fn of(bytes: u64, receiver: Duration, sender: Duration) -> Cpu {
        let per = |time: Duration| {
            if bytes == 0 { 0.0 } else { time.as_secs_f64() / (bytes as f64 / GIB) }
        };
        Cpu { receiver: per(receiver), sender: per(sender) }
    }
}

/// The raw stream of the same run.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct RawReport {
    bytes: u64,
    gb_per_s: f64,
    cpu_s_per_gib: Cpu,
    /// sealift's rate over the raw stream's.
    share: f64,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    status: Status,
    workload: Workload,
    request_bytes: u64,
    transport: &'static str,
    integrity: bool,
    lanes: u16,
    io_threads: usize,
    requests: u32,
    requests_sealed: u64,
    requests_failed: u64,
    bytes_sealed: u64,
    bytes_verified: u64,
    gb_per_s: f64,
    p50_ms: f64,
    p99_ms: f64,
    cpu_s_per_gib: Cpu,
    pages_quarantined: u64,
    receiver_growth_bytes: u64,
    sender_growth_bytes: u64,
    raw: Option<RawReport>,
}

impl Report {
    pub(super) fn of(
        status: Status,
        args: &LoadArgs,
        workload: Workload,
        session: &Session,
        raw: Option<Raw>,
    ) -> Report {
        let tally = &session.tally;
        let latencies: Vec<f64> = tally.latencies.iter().map(|l| l.as_secs_f64() * 1e3).collect();
        let gb_per_s = rate(tally.timed_bytes, tally.time);
        let raw = raw.filter(|raw| raw.bytes > 0).map(|raw| {
            let raw_rate = rate(raw.bytes, raw.time);
            RawReport {
                bytes: raw.bytes,
                gb_per_s: raw_rate,
                cpu_s_per_gib: Cpu::of(raw.bytes, raw.receiver_cpu, raw.sender_cpu),
                share: gb_per_s / raw_rate,
            }
        });
        let lanes = args.tuning.lanes.unwrap_or(SessionSettings::default().lane_count);
        let threads = args.tuning.io_threads.map(usize::from);
        Report {
            status,
            request_bytes: workload.request_bytes(),
            workload,
            transport: session.transport(),
            integrity: args.verified(),
            lanes,
            io_threads: threads.unwrap_or(TcpConfig::default().io_threads),
            requests: args.requests,
            requests_sealed: tally.sealed_requests,
            requests_failed: tally.failed_requests,
            bytes_sealed: tally.sealed_bytes,
            bytes_verified: tally.verified_bytes,
            gb_per_s,
            p50_ms: quantile(&latencies, 0.5),
            p99_ms: quantile(&latencies, 0.99),
            cpu_s_per_gib: Cpu::of(tally.timed_bytes, tally.receiver_cpu, tally.sender_cpu),
            pages_quarantined: session.quarantined(),
            receiver_growth_bytes: tally.receiver_growth,
            sender_growth_bytes: tally.sender_growth,
            raw,
        }
    }

    /// What was moved, in a line.
    pub(super) fn moved(&self) -> String {
        let Report { requests, requests_sealed, requests_failed, bytes_sealed, .. } = self;
        let bytes = grouped(*bytes_sealed);
        format!(
            "{requests_sealed} of {requests} requests sealed ({bytes} bytes), {requests_failed} \
             aborted"
        )
    }

    /// On standard output.
    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        if json {
            println!("{}", serde_json::to_string(self)?);
            return Ok(());
        }
        println!("{}", table(&["", "sealift", "raw stream"], self.rows()));
        if self.status == Status::Ok && self.bytes_verified == self.bytes_sealed {
            println!("verified: all bytes");
        }
        Ok(())
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let shape = &self.workload;
        let row = |name: &str, ours: String, raw: String| vec![name.to_owned(), ours, raw];
        let raw =
            |text: &dyn Fn(&RawReport) -> String| self.raw.as_ref().map(text).unwrap_or_default();
        let cpu = |cpu: Cpu| format!("{:.3} + {:.3}", cpu.receiver, cpu.sender);
        let integrity = if self.integrity { "digests" } else { "no digests" };
        let blocks =
            format!("{} x {} x {}", shape.pages, shape.planes, size(shape.plane_bytes.into()));
        let none = String::new;
        vec![
            row("workload", shape.describe(), none()),
            row("a request: pages x planes x bytes", blocks, none()),
            row(
                "requests sealed (at a time)",
                format!("{} of {} ({})", self.requests_sealed, self.requests, shape.concurrency),
                none(),
            ),
            row(
                "over",
                format!("{}, {} lanes, {integrity}", self.transport, self.lanes),
                raw(&|_| "1 stream".into()),
            ),
            row("bytes moved", size(self.bytes_sealed), raw(&|raw| size(raw.bytes))),
            row(
                "GB/s",
                format!("{:.2}", self.gb_per_s),
                raw(&|raw| format!("{:.2}", raw.gb_per_s)),
            ),
            row(
                "share of the raw stream",
                raw(&|raw| format!("{:.0} %", raw.share * 100.0)),
                none(),
            ),
            row("receive to sealed, p50 / p99", self.latency(), none()),
            row(
                "CPU s per GiB, receiver + sender",
                cpu(self.cpu_s_per_gib),
                raw(&|raw| cpu(raw.cpu_s_per_gib)),
            ),
            row(
                "memory grown, receiver + sender",
                format!(
                    "{} + {}",
                    size(self.receiver_growth_bytes),
                    size(self.sender_growth_bytes)
                ),
                none(),
            ),
            row("pages quarantined", self.pages_quarantined.to_string(), none()),
            row("bytes verified", grouped(self.bytes_verified), none()),
        ]
    }

    fn latency(&self) -> String {
        format!("{:.1} ms / {:.1} ms", self.p50_ms, self.p99_ms)
    }
}

/// A table with its numbers to the right.
pub(super) fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(head.iter().copied());
    table.add_rows(rows);
    for index in 1..head.len() {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// `1,234,567`.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `32 KiB`: in the largest unit of which there is one at least.
pub(super) fn size(bytes: u64) -> String {
    let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    for (name, unit) in units {
        if bytes >= unit {
            let whole = bytes.is_multiple_of(unit);
            let digits = if whole { 0 } else { 2 };
            return format!("{:.digits$} {name}", bytes as f64 / unit as f64);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(size(18_432), "18 KiB");
        assert_eq!(size(1_500), "1.46 KiB");
        assert_eq!(size(1 << 30), "1 GiB");
        assert_eq!(size(7), "7 B");
    }
}
