//! A place for one result: waited on with a deadline, polled, awaited, or watched through an eventfd.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

#[derive(Debug)]
struct State<T> {
    value: Option<T>,
    done: bool,
    waker: Option<Waker>,
    event: Option<Arc<OwnedFd>>,
}

#[derive(Debug)]
struct Inner<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
}

impl<T> Inner<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The waiting side.
#[derive(Debug)]
pub(crate) struct Slot<T>(Arc<Inner<T>>);

/// The side that fills it. Dropping it unfilled fills in the fallback: nobody waits for ever.
#[derive(Debug)]
pub(crate) struct Resolver<T> {
    inner: Arc<Inner<T>>,
    fallback: Option<T>,
}

impl<T> Slot<T> {
    /// A slot and what fills it.
    pub(crate) fn new(fallback: T) -> (Slot<T>, Resolver<T>) {
        let state = State { value: None, done: false, waker: None, event: None };
        let inner = Arc::new(Inner { state: Mutex::new(state), ready: Condvar::new() });
        (Slot(inner.clone()), Resolver { inner, fallback: Some(fallback) })
    }

    /// Takes the result, waiting for at most `timeout`. `None` if it isn't there by then, or was
    /// taken before.
    pub(crate) fn wait(&self, timeout: Duration) -> Option<T> {
        self.wait_done(timeout)?.value.take()
    }

    fn wait_done(&self, timeout: Duration) -> Option<MutexGuard<'_, State<T>>> {
        let until = Instant::now() + timeout;
        let mut state = self.0.lock();
        while !state.done {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let woken = self.0.ready.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(state)
    }

    /// The result, left for others to see, waiting for at most `timeout`.
    pub(crate) fn peek(&self, timeout: Duration) -> Option<T>
    where
        T: Clone,
    {
        self.wait_done(timeout)?.value.clone()
    }

    /// The result is or was there.
    pub(crate) fn is_done(&self) -> bool {
        self.0.lock().done
    }

    /// Leaves `waker` to be woken, unless the result is or was there.
    pub(crate) fn poll_done(&self, waker: &Waker) -> Poll<()> {
        let mut state = self.0.lock();
        if state.done {
            return Poll::Ready(());
        }
        state.waker = Some(waker.clone());
        Poll::Pending
    }

    /// A descriptor that becomes readable once the result is there.
    pub(crate) fn event_fd(&self) -> std::io::Result<Arc<OwnedFd>> {
        let mut state = self.0.lock();
        if let Some(event) = &state.event {
            return Ok(event.clone());
        }
        let initial = u32::from(state.done);
        let event = Arc::new(eventfd(initial, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        state.event = Some(event.clone());
        Ok(event)
    }
}

impl<T> Resolver<T> {
    /// Fills the slot, and wakes whoever waits.
    pub(crate) fn resolve(mut self, value: T) {
        self.fallback = None;
        self.fill(value);
    }

    fn fill(&self, value: T) {
        let mut state = self.inner.lock();
        state.value = Some(value);
        state.done = true;
        if let Some(event) = &state.event {
            // A full counter is readable already.
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
        let waker = state.waker.take();
        drop(state);
        self.inner.ready.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Drop for Resolver<T> {
    fn drop(&mut self) {
        if let Some(fallback) = self.fallback.take() {
            self.fill(fallback);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_taken_once_and_the_event_says_so() {
        let (slot, resolver) = Slot::new(0);
        assert_eq!(slot.wait(Duration::from_millis(1)), None);
        let event = slot.event_fd().unwrap();
        assert!(rustix::io::read(&event, &mut [0u8; 8]).is_err(), "not readable yet");
        let waiter = std::thread::spawn(move || resolver.resolve(7));
        assert_eq!(slot.wait(Duration::from_secs(10)), Some(7));
        waiter.join().unwrap();
        assert!(slot.is_done());
        assert_eq!(rustix::io::read(&event, &mut [0u8; 8]).unwrap(), 8);
        assert_eq!(slot.wait(Duration::from_millis(1)), None);
    }

    #[test]
    fn nobody_waits_for_a_dropped_resolver() {
        let (slot, resolver) = Slot::new("fallback");
        drop(resolver);
        assert_eq!(slot.wait(Duration::from_secs(10)), Some("fallback"));
    }
}
