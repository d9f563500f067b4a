//! The decode end: rounds of requests, each followed by the raw stream, and the report.

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};

use super::args::{LoadArgs, Switch};
use super::child::Serve;
use super::raw::{self, Raw};
use super::report::{self, Report, Status};
use super::session::Session;
use super::stop::Stop;
use super::workload::Workload;
use super::{measure, preset, sweep};

/// Runs against the `serve` at `peer`; without one, against one that it starts itself.
pub(super) fn run(args: &LoadArgs, peer: Option<&str>) -> Result<()> {
    if args.list_presets {
        preset::list();
        return Ok(());
    }
    args.check_transport()?;
    let workload = args.workload()?;
    let stop = Stop::on_signals()?;
    let sweeps = args.sweep || args.plot.is_some();
    let largest = if sweeps { sweep::largest_pool() } else { workload.pool_bytes() };
    check_memory(largest, if peer.is_some() { 1 } else { 2 })?;
    let serve = if peer.is_some() { None } else { Some(Serve::start()?) };
    let address = peer.or(serve.as_ref().map(|serve| serve.address.as_str()));
    let address = address.context("no other end")?;
    if sweeps { sweep::run(args, address, &stop) } else { one(args, workload, address, &stop) }
}

/// Every page of a pool is put in place when it is made: too large a pool would have this process
/// killed, or another one.
fn check_memory(pool: u64, pools: u64) -> Result<()> {
    let Some(there) = measure::available_bytes() else { return Ok(()) };
    let wanted = pool.saturating_mul(pools);
    let text = (report::size(wanted), report::size(there));
    ensure!(wanted < there, "this needs {} of memory, and {} is available", text.0, text.1);
    Ok(())
}

/// One workload.
fn one(args: &LoadArgs, workload: Workload, address: &str, stop: &Stop) -> Result<()> {
    let mut session = Session::open(address, &workload, &args.tuning, stop)?;
    let bar = bar(u64::from(args.requests) * workload.request_bytes());
    let mut raw = (args.raw == Switch::On).then(Raw::default);
    let result = rounds(args, &mut session, &mut raw, &workload, address, stop, &bar);
    bar.finish_and_clear();
    let report = Report::of(Status::of(&result), args, workload, &session, raw);
    if args.json || result.is_ok() {
        report.print(args.json)?;
    }
    result.with_context(|| report.moved())
}

fn rounds(
    args: &LoadArgs,
    session: &mut Session,
    raw: &mut Option<Raw>,
    workload: &Workload,
    address: &str,
    stop: &Stop,
    bar: &ProgressBar,
) -> Result<()> {
    let mut left = args.requests;
    while left > 0 {
        let requests = workload.concurrency.min(u16::try_from(left).unwrap_or(u16::MAX));
        session.round(requests, args.verified(), args.timeout())?;
        left -= u32::from(requests);
        bar.set_position(session.tally.sealed_bytes);
        if let Some(raw) = raw {
            let bytes = u64::from(requests) * workload.request_bytes();
            raw.add(raw::receive(address, bytes, stop)?);
        }
    }
    Ok(())
}

/// A progress bar; without a terminal, none.
pub(super) fn bar(bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} sealed, {elapsed}");
    let bar = ProgressBar::new(bytes);
    // The template is a constant; should it be wrong, the default will do.
    style.map(|style| bar.clone().with_style(style)).unwrap_or(bar)
}
