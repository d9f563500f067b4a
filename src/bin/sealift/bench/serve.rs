//! The prefill end: owns sources, and sends what clients ask for.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sealift::engine::{Completion, Engine, Pool, PoolOptions, Source};

use super::args::ServeArgs;
use super::side::{Answer, Ask, Settled, Side, Tuning, VERSION};
use super::stop::{Interrupted, POLL, Stop};
use super::workload::{End, Workload};
use super::{child, measure, raw, report};

/// Connections at a time.
const MAX_CLIENTS: usize = 64;
/// How long a new connection may take to say what it wants.
const HELLO: Duration = Duration::from_secs(5);
/// How long a client may think; it compares every byte meanwhile.
const IDLE: Duration = Duration::from_secs(600);
/// The longest deadline of one request.
const MAX_TIMEOUT: Duration = Duration::from_secs(600);
/// Past its deadline a send has ended; an engine for which that isn't so is broken.
const GRACE: Duration = Duration::from_secs(20);
/// How long clients may take to end after Ctrl-C.
const ENDING: Duration = Duration::from_secs(10);

/// What all clients share.
#[derive(Debug)]
struct Shared {
    data_ports: String,
    memory_limit: u64,
    memory_used: AtomicU64,
    stop: Stop,
    moved: Mutex<Moved>,
}

/// What was sent, over all clients.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    finished: u64,
    aborted: u64,
    bytes: u64,
}

impl Shared {
    fn moved(&self) -> std::sync::MutexGuard<'_, Moved> {
        self.moved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves until Ctrl-C.
pub(super) fn serve(args: &ServeArgs) -> Result<()> {
    let stop = Stop::on_signals()?;
    if args.until_stdin_closes {
        child::end_with_stdin();
    }
    let listener =
        TcpListener::bind(&args.listen).with_context(|| format!("listening on {}", args.listen))?;
    listener.set_nonblocking(true)?;
    println!("sealift bench serve: {}{}", child::LISTENING, listener.local_addr()?);
    let shared = Arc::new(Shared {
        data_ports: args.data_ports.clone().unwrap_or_else(|| "0".into()),
        memory_limit: args.memory_limit.saturating_mul(1 << 20),
        memory_used: AtomicU64::new(0),
        stop: stop.clone(),
        moved: Mutex::default(),
    });
    let mut clients: Vec<JoinHandle<()>> = Vec::new();
    while !stop.is_set() {
        clients.retain(|client| !client.is_finished());
        if let Some((stream, address)) = accept(&listener)?
            && clients.len() < MAX_CLIENTS
        {
            let shared = shared.clone();
            let client = std::thread::Builder::new().name("client".into());
            clients.push(client.spawn(move || client_thread(stream, address, &shared))?);
        }
    }
    join(clients);
    let Moved { finished, aborted, bytes } = *shared.moved();
    let bytes = report::grouped(bytes);
    Err(Interrupted::default()).with_context(|| {
        format!("sent {bytes} bytes; {finished} requests finished, {aborted} aborted")
    })
}

/// The next connection, if one comes soon.
fn accept(listener: &TcpListener) -> Result<Option<(TcpStream, SocketAddr)>> {
    let wait = Timespec { tv_sec: 0, tv_nsec: i64::from(POLL.subsec_nanos()) };
    match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&wait)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(None),
        Ok(_) => {}
        Err(why) => return Err(why).context("waiting for clients"),
    }
    match listener.accept() {
        Ok(accepted) => Ok(Some(accepted)),
        Err(why) if why.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(why) => {
            // The caller gave up, or descriptors ran out: neither ends the others.
            eprintln!("a connection was not accepted: {why}");
            std::thread::sleep(POLL);
            Ok(None)
        }
    }
}

/// Waits for threads that look at the flag; what doesn't end is left to the end of the process.
fn join(clients: Vec<JoinHandle<()>>) {
    let until = Instant::now() + ENDING;
    for client in clients {
        while !client.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        if client.is_finished() {
            // A panic was printed already.
            let _ = client.join();
        }
    }
}

fn client_thread(stream: TcpStream, address: SocketAddr, shared: &Shared) {
    let result = Side::new(stream, &shared.stop).and_then(|mut side| {
        let served = client(&mut side, shared);
        if let Err(why) = &served {
            // If the client is gone it can't be told, and needn't be.
            let _ = side.send(&Answer::Failed { why: format!("{why:#}") });
        }
        served
    });
    if let Err(why) = result
        && !shared.stop.is_set()
    {
        eprintln!("client {address}: {why:#}");
    }
}

fn client(side: &mut Side, shared: &Shared) -> Result<()> {
    let same = |version| {
        ensure!(version == VERSION, "this end speaks bench version {VERSION}, not {version}");
        Ok(())
    };
    match side.receive(HELLO)? {
        Ask::Open { version, workload, tuning } => {
            same(version)?;
            workload.check()?;
            let _memory = Memory::take(shared, workload.pool_bytes())?;
            let mut client = Client::open(side, workload, &tuning, shared)?;
            client.serve(side)
        }
        Ask::Raw { version, bytes } => {
            same(version)?;
            raw::send(side, bytes, &shared.stop)
        }
        other => bail!("{other:?} before Open"),
    }
}

/// Memory that a client's source takes of what all may take.
struct Memory<'a> {
    shared: &'a Shared,
    bytes: u64,
}

impl Memory<'_> {
    fn take(shared: &Shared, bytes: u64) -> Result<Memory<'_>> {
        let limit = shared.memory_limit;
        let taken = shared.memory_used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|&sum| sum <= limit)
        });
        let wanted = report::size(bytes);
        ensure!(taken.is_ok(), "a source of {wanted} is above the limit (--memory-limit)");
        let memory = Memory { shared, bytes };
        if let Some(there) = measure::available_bytes() {
            let there_text = report::size(there);
            ensure!(bytes < there, "a source of {wanted} doesn't fit in {there_text} of memory");
        }
        Ok(memory)
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        self.shared.memory_used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// One client: a source of its own, and an engine of its own, so that none harms another.
struct Client<'a> {
    shared: &'a Shared,
    workload: Workload,
    pool: Pool,
    engine: Engine,
    baseline: u64,
    sends: Vec<Completion>,
    cpu: Duration,
    until: Instant,
}

impl<'a> Client<'a> {
    fn open(
        side: &mut Side,
        workload: Workload,
        tuning: &Tuning,
        shared: &'a Shared,
    ) -> Result<Client<'a>> {
        let stop = &shared.stop;
        let region = workload.source_region(&|| stop.is_set())?;
        let baseline = measure::resident_bytes();
        // The address that the client reached this end by is one that it reaches.
        let host = SocketAddr::new(side.local()?.ip(), 0).to_string();
        let host = host.trim_end_matches('0');
        let engine = tuning.builder().listen(&format!("{host}{}", shared.data_ports)).build()?;
        let planes = workload.plane_memory(&region);
        let pool = engine.register_pool(workload.layout(), planes, PoolOptions::default())?;
        let address = engine.listen_address().context("the engine doesn't listen")?;
        let port = address.rsplit_once(':').context("the engine has no port")?.1;
        side.send(&Answer::Ready { data_port: port.parse()? })?;
        let (sends, cpu, until) = (Vec::new(), Duration::ZERO, Instant::now());
        Ok(Client { shared, workload, pool, engine, baseline, sends, cpu, until })
    }

    fn serve(&mut self, side: &mut Side) -> Result<()> {
        loop {
            // The end of the connection is how a client says that it is done.
            let Some(ask) = side.next(IDLE)? else { return Ok(()) };
            match ask {
                Ask::Round { round, requests, timeout_ms } => {
                    self.post(round, requests, Duration::from_millis(timeout_ms))?;
                    side.send(&Answer::Posted)?;
                    self.cpu = measure::cpu_time();
                }
                Ask::Settle => {
                    let settled = self.settle()?;
                    side.send(&Answer::Settled(settled))?;
                }
                other => bail!("{other:?} after Open"),
            }
        }
    }

    /// Offers a round's requests, all of their pages ready.
    fn post(&mut self, round: u64, requests: u16, timeout: Duration) -> Result<()> {
        let most = self.workload.concurrency;
        ensure!((1..=most).contains(&requests), "a round of {requests} requests, not 1 to {most}");
        ensure!(timeout <= MAX_TIMEOUT, "a deadline of {timeout:?}, at most {MAX_TIMEOUT:?}");
        ensure!(self.sends.is_empty(), "the last round isn't settled");
        let order = self.workload.order(round, End::Source);
        for request in 0..requests {
            let source = Source::pages(&self.pool, self.workload.of_request(&order, request));
            let label = Workload::label(round, request);
            let binding = self.workload.binding(round, request);
            let send = self.engine.send(label, binding, source, timeout);
            send.write_all();
            self.sends.push(send.complete());
        }
        self.until = Instant::now() + timeout + GRACE;
        Ok(())
    }

    /// Waits for the round's ends.
    fn settle(&mut self) -> Result<Settled> {
        let mut failed = Vec::new();
        while let Some(send) = self.sends.last() {
            let Some(result) = send.wait_for(POLL) else {
                self.shared.stop.check()?;
                ensure!(Instant::now() < self.until, "the engine did not end a send in time");
                continue;
            };
            self.count(result.is_ok());
            match result {
                Ok(()) if send_is_free(&self.sends, self.until) => {}
                Ok(()) => failed.push("a source is still in use after its transfer".into()),
                // A few tell enough, and the line is bounded.
                Err(why) if failed.len() < 8 => failed.push(why.to_string()),
                Err(_) => {}
            }
            self.sends.pop();
        }
        let cpu = measure::cpu_time().saturating_sub(self.cpu);
        let grown_bytes = measure::resident_bytes().saturating_sub(self.baseline);
        Ok(Settled { cpu_ns: u64::try_from(cpu.as_nanos())?, grown_bytes, failed })
    }

    fn count(&self, finished: bool) {
        let mut moved = self.shared.moved();
        if finished {
            moved.finished += 1;
            moved.bytes += self.workload.request_bytes();
        } else {
            moved.aborted += 1;
        }
    }
}

/// Whether nothing reads the source of the last send any more.
fn send_is_free(sends: &[Completion], until: Instant) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    sends.last().is_some_and(|send| send.wait_source_free(left))
}

impl Drop for Client<'_> {
    /// What the client left behind: finished meanwhile, or aborted with the engine.
    fn drop(&mut self) {
        for send in std::mem::take(&mut self.sends) {
            let finished = matches!(send.wait_for(Duration::ZERO), Some(Ok(())));
            self.count(finished);
        }
    }
}
