//! Block sizes from 4 KiB to 1 MiB: sealift with and without digests, and the raw stream, in turn.

use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

use super::args::LoadArgs;
use super::measure::{quantile, rate};
use super::report::{self, Status};
use super::session::Session;
use super::stop::Stop;
use super::workload::Workload;
use super::{plot, raw, run};

/// The sizes, in bytes.
const SIZES: [u32; 9] = [4096, 8192, 16384, 32768, 65536, 131_072, 262_144, 524_288, 1_048_576];
/// Bytes of one request.
const REQUEST: u32 = 256 << 20;

/// The medians of one block size, in GB/s.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Point {
    pub(super) block_bytes: u32,
    pub(super) integrity_on: f64,
    pub(super) integrity_off: f64,
    pub(super) raw: f64,
    bytes_verified: u64,
}

#[derive(Debug, Serialize)]
struct Sweep<'a> {
    status: Status,
    request_bytes: u32,
    requests: u32,
    points: &'a [Point],
}

fn workload(block_bytes: u32, seed: u64) -> Workload {
    Workload::of_blocks(REQUEST / block_bytes, block_bytes, 1, seed)
}

/// Bytes of the largest pool of a sweep.
pub(super) fn largest_pool() -> u64 {
    SIZES.iter().map(|&bytes| workload(bytes, 0).pool_bytes()).max().unwrap_or(0)
}

/// Measures all sizes, prints them, and draws them if that was asked for.
pub(super) fn run(args: &LoadArgs, address: &str, stop: &Stop) -> Result<()> {
    let mut points = Vec::new();
    let bar = run::bar(2 * u64::from(args.requests) * u64::from(REQUEST) * SIZES.len() as u64);
    let result = SIZES.iter().try_for_each(|&bytes| {
        points.push(point(args, bytes, address, stop)?);
        bar.inc(2 * u64::from(args.requests) * u64::from(REQUEST));
        Ok(())
    });
    bar.finish_and_clear();
    let result = result.and_then(|()| match &args.plot {
        Some(file) => plot::draw(file, &points),
        None => Ok(()),
    });
    print(args, Status::of(&result), &points)?;
    result.with_context(|| format!("{} of {} block sizes measured", points.len(), SIZES.len()))
}

fn point(args: &LoadArgs, block_bytes: u32, address: &str, stop: &Stop) -> Result<Point> {
    let workload = workload(block_bytes, args.seed);
    let mut session = Session::open(address, &workload, &args.tuning, stop)?;
    let (mut on, mut off, mut stream) = (Vec::new(), Vec::new(), Vec::new());
    let bytes = workload.request_bytes();
    let gb_per_s = |time: Duration| rate(bytes, time);
    for _ in 0..args.requests {
        on.push(gb_per_s(session.round(1, true, args.timeout())?));
        off.push(gb_per_s(session.round(1, false, args.timeout())?));
        stream.push(gb_per_s(raw::receive(address, bytes, stop)?.time));
    }
    Ok(Point {
        block_bytes,
        integrity_on: quantile(&on, 0.5),
        integrity_off: quantile(&off, 0.5),
        raw: quantile(&stream, 0.5),
        bytes_verified: session.tally.verified_bytes,
    })
}

fn print(args: &LoadArgs, status: Status, points: &[Point]) -> Result<()> {
    if args.json {
        let requests = args.requests;
        let sweep = Sweep { status, request_bytes: REQUEST, requests, points };
        println!("{}", serde_json::to_string(&sweep)?);
        return Ok(());
    }
    let head = ["block", "GB/s, digests", "GB/s, no digests", "GB/s, raw stream", "share, digests"];
    let row = |point: &Point| {
        vec![
            report::size(point.block_bytes.into()),
            format!("{:.2}", point.integrity_on),
            format!("{:.2}", point.integrity_off),
            format!("{:.2}", point.raw),
            format!("{:.0} %", point.integrity_on / point.raw * 100.0),
        ]
    };
    println!("{}", report::table(&head, points.iter().map(row)));
    if status == Status::Ok {
        println!("verified: all bytes");
    }
    Ok(())
}
