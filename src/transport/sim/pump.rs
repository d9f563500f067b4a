//! Live mode: virtual time runs with real time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::net::SimNet;
use crate::protocol::Time;

/// Makes things happen in real time, from a thread of its own, until it is dropped.
#[derive(Debug)]
pub struct SimPump {
    net: SimNet,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl SimPump {
    pub(super) fn start(net: SimNet) -> SimPump {
        let stop = Arc::new(AtomicBool::new(false));
        {
            let mut world = net.lock();
            world.pumps += 1;
            let now = world.now;
            world.clock.get_or_insert_with(|| (Instant::now(), now));
        }
        let (pumped, told) = (net.clone(), Arc::clone(&stop));
        let pump = std::thread::Builder::new().name("sealift-sim".into());
        let thread = pump.spawn(move || run(&pumped, &told)).expect("a test machine has threads");
        SimPump { net, stop, thread: Some(thread) }
    }
}

fn run(net: &SimNet, stop: &AtomicBool) {
    while wait_for_due(net, stop) {
        net.step();
    }
}

/// Parks until something is due; `false` to stop.
fn wait_for_due(net: &SimNet, stop: &AtomicBool) -> bool {
    let mut world = net.lock();
    loop {
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        world.tick();
        let wait = world.next_due().map(|due| Time(world.now).until(Time(due)));
        world = match wait {
            Some(Duration::ZERO) => return true,
            Some(wait) => {
                let waited = net.0.wake.wait_timeout(world, wait);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => net.0.wake.wait(world).unwrap_or_else(PoisonError::into_inner),
        };
    }
}

impl Drop for SimPump {
    fn drop(&mut self) {
        {
            let mut world = self.net.lock();
            world.tick();
            world.pumps -= 1;
            if world.pumps == 0 {
                world.clock = None;
            }
            // Under the lock, so that the thread can't miss it between looking and parking.
            self.stop.store(true, Ordering::Relaxed);
        }
        self.net.0.wake.notify_all();
        let thread = self.thread.take();
        // A sink may drop the last handle of its own pump; that thread ends by itself.
        let other = |thread: &JoinHandle<()>| thread.thread().id() != std::thread::current().id();
        if let Some(thread) = thread.filter(other) {
            // A panic in a sink has been printed by its thread.
            let _ = thread.join();
        }
    }
}
