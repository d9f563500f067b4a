//! The handle of a simulated network.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::super::{CompletionStatus, EventSink};
use super::config::SimConfig;
use super::endpoint::SimTransport;
use super::fault::Fault;
use super::filter::{FaultId, Filter, SimStats};
use super::pump::SimPump;
use super::world::{EndpointId, World};
use crate::protocol::Time;

pub(super) struct Shared {
    world: Mutex<World>,
    /// Held while one thing happens and its events are handed out, so that events keep their
    /// order. `world` isn't held meanwhile: a sink may call the transport.
    turn: Mutex<()>,
    /// Something was queued, or a pump is to stop.
    pub(super) wake: Condvar,
}

/// A network inside this process, deterministic by seed. Clones are handles of the same network.
///
/// Time is virtual: nothing happens until [`SimNet::step`] or one of its kin is called, or a pump
/// runs ([`SimNet::spawn_pump`]). No sink may call those: each event is handed out while they run.
#[derive(Clone)]
pub struct SimNet(pub(super) Arc<Shared>);

impl fmt::Debug for SimNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimNet").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl SimNet {
    /// A network with no endpoints, at time 0.
    pub fn new(config: SimConfig) -> SimNet {
        SimNet(Arc::new(Shared {
            world: Mutex::new(World::new(config)),
            turn: Mutex::new(()),
            wake: Condvar::new(),
        }))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        // A panic in here is a failed test already; the others may go on.
        self.0.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn with<R>(&self, act: impl FnOnce(&mut World) -> R) -> R {
        let mut world = self.lock();
        world.tick();
        let result = act(&mut world);
        drop(world);
        self.0.wake.notify_all();
        result
    }

    /// A new endpoint, listening at `name`. After a crash or a shutdown a name may be used again;
    /// from a live endpoint it is taken away, and that one only keeps its links.
    pub fn endpoint(&self, name: &str, sink: EventSink) -> SimTransport {
        SimTransport::new(self.clone(), name, sink)
    }

    /// The virtual time.
    pub fn now(&self) -> Time {
        self.with(|world| Time(world.now))
    }

    /// When the next thing is due.
    pub fn next_delivery(&self) -> Option<Time> {
        self.with(|world| world.next_due().map(Time))
    }

    /// Makes the next thing happen, and moves virtual time to it. `false` if nothing is queued.
    pub fn step(&self) -> bool {
        let _turn = self.0.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (stepped, out) = self.with(|world| (world.step(), std::mem::take(&mut world.out)));
        for (sink, event) in out {
            sink(event);
        }
        stepped
    }

    /// Makes everything happen that is due until `time`, and moves virtual time to it.
    pub fn run_until(&self, time: Time) {
        while self.next_delivery().is_some_and(|due| due <= time) {
            self.step();
        }
        self.with(|world| world.now = world.now.max(time.0));
    }

    /// [`SimNet::run_until`] that much later than now.
    pub fn advance(&self, span: Duration) {
        self.run_until(self.now().after(span));
    }

    /// Starts a thread that makes things happen in real time, until the pump is dropped.
    pub fn spawn_pump(&self) -> SimPump {
        SimPump::start(self.clone())
    }

    /// Injects a fault: it hits what matches `filter`, from now on.
    pub fn inject(&self, fault: Fault, filter: Filter) -> FaultId {
        self.with(|world| world.faults.inject(fault, filter))
    }

    /// Takes an injected fault back. What it hit stays hit. `false` if it is spent.
    pub fn withdraw(&self, fault: FaultId) -> bool {
        self.with(|world| world.faults.withdraw(fault))
    }

    /// Keeps matching writes and markers in flight: [`Fault::HoldWrite`].
    pub fn hold_writes(&self, filter: Filter) -> FaultId {
        self.inject(Fault::HoldWrite, filter)
    }

    /// Lets all held writes land, in order, and holds no more; holds with a chance below 1 stay.
    pub fn release_writes(&self) {
        self.with(World::release_writes);
    }

    /// Keeps matching control frames on the way: [`Fault::HoldControl`].
    pub fn hold_control(&self, filter: Filter) -> FaultId {
        self.inject(Fault::HoldControl, filter)
    }

    /// As [`SimNet::release_writes`], for control frames.
    pub fn release_control(&self) {
        self.with(World::release_control);
    }

    /// The next matching write or marker to leave completes with `status`, whatever becomes of it.
    pub fn complete_next_with(&self, filter: Filter, status: CompletionStatus) -> FaultId {
        self.inject(Fault::CompleteWith(status), filter.times(1))
    }

    /// Cuts every link that matches, either way round. Both ends learn of it in their time; frames
    /// on the way are lost, writes on the way may still land. Returns how many were cut.
    pub fn cut(&self, filter: &Filter) -> usize {
        self.with(|world| world.cut(filter))
    }

    /// Ends the endpoint at `name` as a power cut would: no event reaches it any more, its peers
    /// aren't told, its writes in flight still land. `false` if there is none.
    pub fn crash(&self, name: &str) -> bool {
        self.with_endpoint(name, World::crash)
    }

    /// Stops the endpoint at `name` as SIGSTOP would: its events wait. What it posted and hasn't
    /// left waits too, and so does what would land at it, if the network is confined: else NICs go
    /// on without it. Its own calls aren't stopped. `false` if there is none.
    pub fn pause(&self, name: &str) -> bool {
        self.with_endpoint(name, World::pause)
    }

    /// Lets it run again; it gets what waited, in order.
    pub fn resume(&self, name: &str) -> bool {
        self.with_endpoint(name, World::resume)
    }

    fn with_endpoint(&self, name: &str, act: impl FnOnce(&mut World, EndpointId)) -> bool {
        self.with(|world| match world.names.get(name).copied() {
            Some(endpoint) => {
                act(world, endpoint);
                true
            }
            None => false,
        })
    }

    /// How often each kind of fault was applied.
    pub fn stats(&self) -> SimStats {
        self.with(|world| world.faults.stats.clone())
    }

    /// The last things that happened, with their virtual times: [`SimConfig::trace_len`] of them.
    pub fn trace(&self) -> Vec<String> {
        self.with(|world| world.trace.iter().cloned().collect())
    }
}
