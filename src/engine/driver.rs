//! Drives the core: one thread and the real clock, or a caller and whatever clock it has.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};

use super::command::Input;
use super::config::Clock;
use super::core::Core;
use super::shared::Shared;
use crate::protocol::Time;
use crate::transport::EventSink;

/// Inputs after which a transport thread waits for the core: back-pressure on peers that flood.
const MAX_QUEUED: usize = 64 * 1024;
/// Inputs that are taken before timers are looked at again.
const BATCH: usize = 256;
/// The longest sleep: a guard, not a poll; an idle engine wakes once in it.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// The queue into a core.
pub(crate) struct EventGate {
    sender: Sender<Input>,
    receiver: Receiver<Input>,
    limit: usize,
    open: Arc<AtomicBool>,
}

impl EventGate {
    /// For a core with its own thread.
    pub(crate) fn bounded() -> EventGate {
        EventGate { limit: MAX_QUEUED, ..EventGate::unbounded() }
    }

    /// For a core that is stepped: nobody would empty the queue while its filler waits.
    pub(crate) fn unbounded() -> EventGate {
        let (sender, receiver) = unbounded();
        let open = Arc::new(AtomicBool::new(true));
        EventGate { sender, receiver, limit: usize::MAX, open }
    }

    pub(crate) fn input(&self) -> Sender<Input> {
        self.sender.clone()
    }

    /// Where the transport puts its events. Its own threads wait when the core is behind; the
    /// core's thread never does, or it would wait for itself.
    pub(crate) fn sink(&self) -> EventSink {
        let (sender, limit, open) = (self.sender.clone(), self.limit, self.open.clone());
        Arc::new(move |event| {
            while sender.len() > limit && open.load(Ordering::Relaxed) && !is_core_thread() {
                std::thread::sleep(Duration::from_micros(200));
            }
            // A core that is gone needs no events.
            let _ = sender.send(Input::Event(event));
        })
    }
}

thread_local! {
    static IS_CORE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

fn is_core_thread() -> bool {
    IS_CORE.with(std::cell::Cell::get)
}

/// Starts the core's thread. If it panics, everything that waits is told, and health fails. `[I14]`
pub(crate) fn spawn(
    mut core: Core,
    gate: EventGate,
    shared: Arc<Shared>,
) -> std::io::Result<JoinHandle<()>> {
    let body = move || {
        IS_CORE.with(|flag| flag.set(true));
        let run = AssertUnwindSafe(|| run(&mut core, &gate.receiver));
        if let Err(panic) = catch_unwind(run) {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            shared.fault(format!("the engine's thread died: {}", text.unwrap_or_default()));
        }
        gate.open.store(false, Ordering::Relaxed);
        shared.transport.shutdown();
        // Dropping the core and what is queued resolves every handle.
    };
    std::thread::Builder::new().name("sealift-core".into()).spawn(body)
}

fn run(core: &mut Core, inputs: &Receiver<Input>) {
    let clock = Clock::start();
    loop {
        // What came in counts before silence does: after a stall, peers aren't lost for it.
        let now = clock.now();
        for input in inputs.try_iter().take(BATCH) {
            core.on_input(now, input);
        }
        if core.is_over() {
            // It has nothing to wake up for any more.
            return;
        }
        core.on_timeout(now);
        let sleep = clock.now().until(core.next_timeout()).min(LONGEST_SLEEP);
        match inputs.recv_timeout(sleep) {
            Ok(input) => core.on_input(clock.now(), input),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Steps an engine that has no thread of its own.
pub struct Driver {
    core: Core,
    gate: EventGate,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

impl Driver {
    pub(crate) fn new(core: Core, gate: EventGate) -> Driver {
        Driver { core, gate }
    }

    /// Handles everything that is queued, and the timers that are due at `now`. `true` if there
    /// was anything.
    pub fn step(&mut self, now: Time) -> bool {
        let mut busy = false;
        while let Ok(input) = self.gate.receiver.try_recv() {
            busy = true;
            self.core.on_input(now, input);
        }
        busy |= self.core.next_timeout() <= now;
        self.core.on_timeout(now);
        busy
    }

    /// When a timer is due next.
    pub fn next_timeout(&self) -> Time {
        self.core.next_timeout()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.core.close_transport();
    }
}
