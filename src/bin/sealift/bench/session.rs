//! The receiver's half of a bench: a pool, an engine, and rounds of requests against one `serve`.

use std::net::SocketAddr;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use sealift::engine::{
    Engine, Lease, Peer, Pool, PoolOptions, ReadGuard, SealedPages, UnverifiedPages,
};
use sealift::memory::HostRegion;
use sealift::protocol::TransferError;

use super::measure;
use super::side::{Answer, Ask, Settled, Side, Tuning, VERSION};
use super::stop::{Interrupted, POLL, Stop};
use super::verify;
use super::workload::{End, MARKER, Workload};

/// How long the other end may take to fill its source.
const FILLING: Duration = Duration::from_secs(300);
/// How long a small question may take.
const SOON: Duration = Duration::from_secs(10);
/// Past its deadline a request has ended; an engine for which that isn't so is broken.
const GRACE: Duration = Duration::from_secs(30);

/// What the receiver's half has seen so far. It is right after a failure too.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) sealed_requests: u64,
    pub(super) sealed_bytes: u64,
    pub(super) failed_requests: u64,
    pub(super) verified_bytes: u64,
    /// From receive to sealed, of each request.
    pub(super) latencies: Vec<Duration>,
    /// The time of the rounds: first receive to last seal.
    pub(super) time: Duration,
    /// What was moved in that time.
    pub(super) timed_bytes: u64,
    /// Of the rounds that ended well.
    pub(super) receiver_cpu: Duration,
    pub(super) sender_cpu: Duration,
    pub(super) receiver_growth: u64,
    pub(super) sender_growth: u64,
}

/// One end of a bench, connected.
#[derive(Debug)]
pub(super) struct Session {
    workload: Workload,
    region: HostRegion,
    pool: Pool,
    engine: Engine,
    peer: Peer,
    side: Side,
    stop: Stop,
    baseline: u64,
    rounds: u64,
    pub(super) tally: Tally,
}

/// Pages that came, of either type.
enum Landed {
    Sealed(SealedPages),
    Unverified(UnverifiedPages),
}

impl Landed {
    fn read(&self) -> Result<ReadGuard> {
        Ok(match self {
            Landed::Sealed(pages) => pages.read()?,
            Landed::Unverified(pages) => pages.read()?,
        })
    }
}

/// One request's end.
type Ended = (Result<Landed>, Duration);

impl Session {
    /// Asks the `serve` at `address` for a source, and connects both engines.
    pub(super) fn open(
        address: &str,
        workload: &Workload,
        tuning: &Tuning,
        stop: &Stop,
    ) -> Result<Session> {
        let mut side = Side::connect(address, stop)?;
        let (workload, tuning) = (workload.clone(), tuning.clone());
        let open =
            Ask::Open { version: VERSION, workload: workload.clone(), tuning: tuning.clone() };
        let Answer::Ready { data_port } = side.ask(&open, FILLING)? else {
            bail!("an answer out of turn");
        };
        let region = workload.region()?;
        region.fill(0, region.len(), MARKER)?;
        let baseline = measure::resident_bytes();
        let engine = tuning.builder().build()?;
        let planes = workload.plane_memory(&region);
        let pool = engine.register_pool(workload.layout(), planes, PoolOptions::default())?;
        let data = SocketAddr::new(side.peer()?.ip(), data_port);
        let peer = engine.connect(&data.to_string(), SOON)?;
        let stop = stop.clone();
        let (rounds, tally) = (0, Tally::default());
        Ok(Session { workload, region, pool, engine, peer, side, stop, baseline, rounds, tally })
    }

    /// The transport in use.
    pub(super) fn transport(&self) -> &'static str {
        self.engine.transport_name()
    }

    /// Pages that are in quarantine now.
    pub(super) fn quarantined(&self) -> u64 {
        self.pool.counts().quarantined as u64
    }

    /// Moves `requests` requests at once, and compares every byte of them and of the pages between
    /// them. The time that it took: first receive to last seal.
    pub(super) fn round(
        &mut self,
        requests: u16,
        integrity: bool,
        timeout: Duration,
    ) -> Result<Duration> {
        self.stop.check()?;
        let round = self.rounds;
        self.rounds += 1;
        self.region.fill(0, self.region.len(), MARKER)?;
        let leases = self.lease(round, requests)?;
        let timeout_ms = u64::try_from(timeout.as_millis())?;
        let ask = Ask::Round { round, requests, timeout_ms };
        ensure!(matches!(self.side.ask(&ask, SOON)?, Answer::Posted), "an answer out of turn");

        let cpu = measure::cpu_time();
        let (ended, time) = self.receive_all(round, leases, integrity, timeout);
        let cpu = measure::cpu_time().saturating_sub(cpu);
        let landed = self.count(ended, time)?;
        let settled = self.settle(timeout)?;
        self.tally.time += time;
        self.tally.timed_bytes += self.workload.request_bytes() * u64::from(requests);
        self.tally.receiver_cpu += cpu;
        self.tally.sender_cpu += Duration::from_nanos(settled.cpu_ns);
        self.tally.sender_growth = self.tally.sender_growth.max(settled.grown_bytes);
        let growth = measure::resident_bytes().saturating_sub(self.baseline);
        self.tally.receiver_growth = self.tally.receiver_growth.max(growth);
        self.verify(round, &landed)?;
        Ok(time)
    }

    /// Claims every request's own pages, by number, as an engine's allocator would.
    fn lease(&self, round: u64, requests: u16) -> Result<Vec<Lease>> {
        let order = self.workload.order(round, End::Destination);
        let claim = |i| Ok(self.pool.claim(self.workload.of_request(&order, i))?);
        (0..requests).map(claim).collect()
    }

    fn receive_all(
        &self,
        round: u64,
        leases: Vec<Lease>,
        integrity: bool,
        timeout: Duration,
    ) -> (Vec<Ended>, Duration) {
        let start = Barrier::new(leases.len() + 1);
        std::thread::scope(|scope| {
            let start = &start;
            let receive = |(request, lease)| {
                scope.spawn(move || {
                    start.wait();
                    let began = Instant::now();
                    let landed = self.receive(round, request, lease, integrity, timeout);
                    (landed, began.elapsed())
                })
            };
            let threads: Vec<_> = (0u16..).zip(leases).map(receive).collect();
            start.wait();
            let began = Instant::now();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Ended>| {
                let panicked = |_| (Err(anyhow::anyhow!("a receiving thread panicked")), timeout);
                thread.join().unwrap_or_else(panicked)
            };
            let ended = threads.into_iter().map(join).collect();
            (ended, began.elapsed())
        })
    }

    fn receive(
        &self,
        round: u64,
        request: u16,
        lease: Lease,
        integrity: bool,
        timeout: Duration,
    ) -> Result<Landed> {
        let label = Workload::label(round, request);
        let binding = self.workload.binding(round, request);
        if integrity {
            let mut handle = self.engine.receive(&self.peer, label, binding, lease, timeout);
            self.wait(timeout, |slice| handle.wait_for(slice)).map(Landed::Sealed)
        } else {
            let mut handle =
                self.engine.receive_unverified(&self.peer, label, binding, lease, timeout);
            self.wait(timeout, |slice| handle.wait_for(slice)).map(Landed::Unverified)
        }
    }

    /// Waits for a receive, and for Ctrl-C: then the caller drops the handle, which aborts.
    fn wait<P>(
        &self,
        timeout: Duration,
        mut wait_for: impl FnMut(Duration) -> Option<Result<P, TransferError>>,
    ) -> Result<P> {
        let until = Instant::now() + timeout + GRACE;
        while Instant::now() < until {
            if let Some(result) = wait_for(POLL) {
                return Ok(result?);
            }
            self.stop.check()?;
        }
        bail!("the engine did not end a request {GRACE:?} after its deadline")
    }

    /// Counts what came; the first failure is an error, an interruption before any other.
    fn count(&mut self, ended: Vec<Ended>, time: Duration) -> Result<Vec<Landed>> {
        let mut landed = Vec::new();
        let mut failed = None;
        for (result, latency) in ended {
            match result {
                Ok(pages) => {
                    self.tally.sealed_requests += 1;
                    self.tally.sealed_bytes += self.workload.request_bytes();
                    self.tally.latencies.push(latency);
                    landed.push(pages);
                }
                Err(why) => {
                    self.tally.failed_requests += 1;
                    failed = failed.or(Some(why));
                }
            }
        }
        match failed {
            Some(_) if self.stop.is_set() => bail!(Interrupted::default()),
            Some(why) => Err(why.context(format!("after {time:.1?}"))),
            None => Ok(landed),
        }
    }

    /// Hears how the round ended on the other side.
    fn settle(&mut self, timeout: Duration) -> Result<Settled> {
        let Answer::Settled(settled) = self.side.ask(&Ask::Settle, timeout + GRACE)? else {
            bail!("an answer out of turn");
        };
        if let Some(why) = settled.failed.first() {
            bail!("all is sealed here, but the sender says: {why}");
        }
        Ok(settled)
    }

    fn verify(&mut self, round: u64, landed: &[Landed]) -> Result<()> {
        let requests = u16::try_from(landed.len()).context("too many requests")?;
        for (request, pages) in (0..).zip(landed) {
            let guard = pages.read()?;
            let bytes = verify::request(&self.workload, round, request, &guard, &self.stop)?;
            self.tally.verified_bytes += bytes;
        }
        verify::unused(&self.workload, round, requests, &self.region, &self.stop)
    }
}
