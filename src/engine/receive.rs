//! The handle of a receive.

use std::future::Future;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::command::{Command, ReceiveKey, ReceiveResult};
use super::pages::Held;
use super::pool::Lease;
use super::shared::Shared;
use super::slot::{Resolver, Slot};
use super::{MAX_DEADLINE, Peer, Slices};
use crate::protocol::receiver::OpenPart;
use crate::protocol::{Binding, Cause, Extent, Label, Phase, Slice, TransferError};

/// What one of several senders is asked for.
#[derive(Clone, Debug)]
pub struct Part(OpenPart);

impl Part {
    /// Every byte of every page of `lease`.
    pub fn whole(peer: &Peer, label: Label, binding: Binding, lease: &Lease) -> Part {
        let slice = |(component, c): (usize, &crate::protocol::receiver::LeaseComponent)| Slice {
            component,
            pages: 0..c.pages.len() as u32,
            extents: c.layout.whole_page(),
        };
        let slices = lease.components().iter().enumerate().map(slice).collect();
        Part(OpenPart { peer: peer.incarnation(), label, binding, slices })
    }

    /// Some extents of some logical pages: planes of a pipeline stage, head slices of a
    /// tensor-parallel rank.
    pub fn slices(peer: &Peer, label: Label, binding: Binding, slices: Slices) -> Part {
        Part(OpenPart { peer: peer.incarnation(), label, binding, slices })
    }

    /// A slice for [`Part::slices`].
    pub fn slice(component: usize, pages: std::ops::Range<u32>, extents: Vec<Extent>) -> Slice {
        Slice { component, pages, extents }
    }
}

/// A receive under way. `P` is [`super::SealedPages`] or [`super::UnverifiedPages`].
///
/// Ends within its deadline, whatever the peer does; waits don't spin. Dropping it aborts: its
/// pages go back once nothing can write them any more, never earlier. `[I3]` Safe from any thread.
#[derive(Debug)]
#[must_use = "dropping a handle aborts its transfer"]
pub struct ReceiveHandle<P> {
    shared: Arc<Shared>,
    key: ReceiveKey,
    slot: Slot<ReceiveResult>,
    pages: PhantomData<fn() -> P>,
}

impl<P: From<Held>> ReceiveHandle<P> {
    pub(super) fn open(
        shared: &Arc<Shared>,
        parts: Vec<Part>,
        lease: Lease,
        deadline: Duration,
        integrity: bool,
    ) -> ReceiveHandle<P> {
        let parts: Vec<OpenPart> = parts.into_iter().map(|part| part.0).collect();
        let (slot, resolver) = Slot::new(Err(refusal(&parts, &lease, Cause::ShuttingDown {})));
        let key = ReceiveKey(shared.next_offer());
        let handle = ReceiveHandle { shared: shared.clone(), key, slot, pages: PhantomData };
        let foreign = !lease.is_of(shared);
        let foreign =
            foreign.then(|| Cause::Unsupported { what: "a lease of another engine".into() });
        if let Some(cause) = check_deadline(deadline).err().or(foreign) {
            resolver.resolve(Err(refusal(&parts, &lease, cause)));
            return handle;
        }
        handle.start(parts, lease, deadline, integrity, resolver);
        handle
    }

    fn start(
        &self,
        parts: Vec<OpenPart>,
        lease: Lease,
        deadline: Duration,
        integrity: bool,
        resolver: Resolver<ReceiveResult>,
    ) {
        let (key, lease) = (self.key, lease.into_components());
        let command = Command::Receive { key, lease, parts, deadline, integrity, resolver };
        self.shared.command(command);
    }

    /// Blocks until the receive ends: by its deadline at the latest.
    ///
    /// # Panics
    ///
    /// If [`ReceiveHandle::wait_for`] or [`ReceiveHandle::poll_result`] gave the result already.
    pub fn wait(self) -> Result<P, TransferError> {
        loop {
            // The engine ends every transfer by its deadline, and a dead engine resolves too.
            if let Some(result) = self.slot.wait(MAX_DEADLINE) {
                return result.map(P::from);
            }
            assert!(!self.slot.is_done(), "the result of this receive was taken before");
        }
    }

    /// Blocks for at most `timeout`. `None` if the receive goes on, or the result was taken.
    pub fn wait_for(&mut self, timeout: Duration) -> Option<Result<P, TransferError>> {
        self.slot.wait(timeout).map(|result| result.map(P::from))
    }

    /// The result, if it is there. Never blocks.
    pub fn poll_result(&mut self) -> Option<Result<P, TransferError>> {
        self.wait_for(Duration::ZERO)
    }
}

impl<P> ReceiveHandle<P> {
    /// A descriptor that becomes readable when the result is there; for `epoll` and the like.
    pub fn event_fd(&self) -> std::io::Result<Arc<OwnedFd>> {
        self.slot.event_fd()
    }

    /// Gives up; the result follows at once, the pages when they are safe.
    pub fn abort(&self) {
        self.shared
            .command(Command::AbortReceive { key: self.key, why: "cancelled by the caller" });
    }
}

impl<P: From<Held>> Future for ReceiveHandle<P> {
    type Output = Result<P, TransferError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.slot.poll_done(context.waker()) {
            Poll::Ready(()) => Poll::Ready(
                self.slot.wait(Duration::ZERO).expect("polled after it was ready").map(P::from),
            ),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<P> Drop for ReceiveHandle<P> {
    fn drop(&mut self) {
        if !self.slot.is_done() {
            let why = "the handle was dropped";
            self.shared.command(Command::AbortReceive { key: self.key, why });
        }
    }
}

/// Deadlines are finite. `[I7]`
pub(super) fn check_deadline(deadline: Duration) -> Result<(), Cause> {
    let (asked, limit) = (deadline.as_millis(), MAX_DEADLINE.as_millis());
    match () {
        () if deadline.is_zero() => Err(Cause::DeadlineExceeded {}),
        () if asked > limit => Err(Cause::CapacityExceeded {
            what: "milliseconds of deadline".into(),
            asked: u64::try_from(asked).unwrap_or(u64::MAX),
            limit: limit as u64,
        }),
        () => Ok(()),
    }
}

fn refusal(parts: &[OpenPart], lease: &Lease, cause: Cause) -> TransferError {
    let first = parts.first();
    let bytes = |c: &crate::protocol::receiver::LeaseComponent| {
        c.layout.page_bytes() * c.pages.len() as u64
    };
    TransferError {
        transfer: None,
        label: first.map(|part| part.label.clone()).unwrap_or_default(),
        peer: first.map(|part| part.peer),
        phase: Phase::Admission,
        bytes_done: 0,
        bytes_total: lease.components().iter().map(bytes).sum(),
        cause,
    }
}
