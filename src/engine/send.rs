//! The handles of a send, one per state: what can't happen in a state has no method there.

use std::future::Future;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::MAX_DEADLINE;
use super::command::{Command, SendResult};
use super::pool::Pool;
use super::receive::check_deadline;
use super::shared::Shared;
use super::slot::Slot;
use crate::protocol::sender::{Admitted, Announced, OfferId, SourceComponent};
use crate::protocol::{
    Binding, BlockRange, Cause, ComponentIndex, Extent, Incarnation, Label, PageIndex, Phase,
    PlaneIndex, TransferError,
};
use crate::transport::{Placement, PlacementError};

/// The pages that a send offers: components in the order of the receiver's lease.
#[derive(Clone, Debug, Default)]
pub struct Source {
    components: Vec<(Pool, Vec<PageIndex>, Vec<Extent>)>,
}

impl Source {
    /// Whole pages of one pool.
    pub fn pages(pool: &Pool, pages: &[PageIndex]) -> Source {
        Source::default().and(pool, pages)
    }

    /// Whole pages of another pool, as a further component.
    pub fn and(self, pool: &Pool, pages: &[PageIndex]) -> Source {
        let extents = pool.layout().whole_page();
        self.and_extents(pool, pages, extents)
    }

    /// Parts of pages, as a further component: as many extents as the receiver grants, each as
    /// long as its.
    pub fn and_extents(mut self, pool: &Pool, pages: &[PageIndex], extents: Vec<Extent>) -> Source {
        self.components.push((pool.clone(), pages.to_vec(), extents));
        self
    }

    fn describe(&self) -> Vec<SourceComponent> {
        let component =
            |(pool, pages, extents): &(Pool, Vec<PageIndex>, Vec<Extent>)| SourceComponent {
                layout: pool.layout().fingerprint(),
                page_count: pages.len() as u32,
                whole_pages: *extents == pool.layout().whole_page(),
                extents: extents.clone(),
            };
        self.components.iter().map(component).collect()
    }

    fn place(self, shared: &Arc<Shared>) -> Result<Placement, PlacementError> {
        let pools = shared.pools();
        let memory = |(pool, pages, extents): (Pool, Vec<PageIndex>, Vec<Extent>)| {
            // A pool of another engine has the number of some pool here, and is not it.
            let entry =
                pools.entries.get(&pool.id).filter(|_| Arc::ptr_eq(&pool.shared, shared))?;
            Some((entry.memory.clone(), pages, extents))
        };
        let placed: Option<Vec<_>> = self.components.into_iter().map(memory).collect();
        Placement::new(placed.unwrap_or_default())
    }
}

/// A request that is known and not decided on. It can be refused or admitted; it can't complete:
/// a rejected request has no such method. `[I2]`
///
/// ```compile_fail
/// fn no_path(request: sealift::engine::Request) {
///     request.complete();
/// }
/// ```
/// ```compile_fail
/// fn not_after_refusal(request: sealift::engine::Request) {
///     request.refuse("too long").complete();
/// }
/// ```
///
/// Dropping it refuses.
#[derive(Debug)]
#[must_use = "dropping a request refuses it"]
pub struct Request {
    shared: Arc<Shared>,
    announced: Option<Announced>,
    label: Label,
    peer: Option<Incarnation>,
    late: Option<Cause>,
}

impl Request {
    pub(super) fn open(
        shared: &Arc<Shared>,
        announced: Announced,
        label: Label,
        peer: Option<Incarnation>,
        deadline: Duration,
    ) -> Request {
        let late = check_deadline(deadline).err();
        let deadline = deadline.min(MAX_DEADLINE);
        let (id, label_sent) = (announced.id(), label.clone());
        let copy = Announced::new(id);
        let command = Command::Announce { announced: copy, label: label_sent, peer, deadline };
        shared.command(command);
        Request { shared: shared.clone(), announced: Some(announced), label, peer, late }
    }

    /// This request won't be served. Whoever granted its label, or does so later, hears it at once.
    pub fn refuse(mut self, why: &str) {
        self.refuse_now(why);
    }

    fn refuse_now(&mut self, why: &str) {
        if let Some(announced) = self.announced.take() {
            let (offer, why) = (announced.id(), why.to_owned());
            self.shared.command(Command::Refuse { offer, why });
        }
    }

    /// This request is served from `source`, if the receiver's grant is for `binding` and for
    /// exactly these many pages. Nothing blocks; whatever is wrong comes out of the handle.
    pub fn admit(mut self, binding: Binding, source: Source) -> SendHandle {
        let announced = self.announced.take().unwrap_or_else(|| Announced::new(OfferId(0)));
        let admitted = announced.admit();
        let components = source.describe();
        let placed = source.place(&self.shared).map(Arc::new);
        let error = |cause: Cause| TransferError {
            transfer: None,
            label: self.label.clone(),
            peer: self.peer,
            phase: Phase::Admission,
            bytes_done: 0,
            bytes_total: placed.as_ref().map_or(0, |p| p.map().byte_count()),
            cause,
        };
        let (slot, resolver) = Slot::new(Err(error(Cause::ShuttingDown {})));
        let (free, source_free) = Slot::new(());
        let bad = self.late.take().or_else(|| placed.as_ref().err().map(source_cause));
        let mut handle = SendHandle {
            shared: self.shared.clone(),
            firsts: components.iter().map(first_planes).collect(),
            admitted: None,
            completion: Completion {
                shared: self.shared.clone(),
                offer: admitted.id(),
                slot,
                free,
            },
            placement: placed.as_ref().ok().cloned(),
        };
        if let Some(cause) = bad {
            resolver.resolve(Err(error(cause.clone())));
            self.shared.command(Command::Refuse { offer: admitted.id(), why: cause.to_string() });
            return handle;
        }
        let offer = Announced::new(admitted.id()).admit();
        let placement = placed.ok();
        let command =
            Command::Admit { offer, binding, components, placement, resolver, source_free };
        self.shared.command(command);
        handle.admitted = Some(admitted);
        handle
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.refuse_now("the request was dropped");
    }
}

fn source_cause(why: &PlacementError) -> Cause {
    match why {
        PlacementError::Blocks(crate::protocol::BlockError::Empty) => Cause::EmptyTransfer {},
        PlacementError::Page { component, page, page_count } => Cause::CapacityExceeded {
            what: format!("{component}: page number").into(),
            asked: page.0.into(),
            limit: u64::from(*page_count).saturating_sub(1),
        },
        why => Cause::ProtocolViolation { why: why.to_string().into() },
    }
}

fn first_planes(component: &SourceComponent) -> Vec<PlaneIndex> {
    component.extents.iter().map(|extent| extent.first_plane).collect()
}

/// An admitted send: pages can be written as they become ready. `[I11]` Each block once.
///
/// Dropping it aborts; the source is free when [`Completion::wait_source_free`] says so, or when
/// the engine has been drained.
///
/// ```compile_fail
/// fn nothing_after_complete(handle: sealift::engine::SendHandle) {
///     let _completion = handle.complete();
///     handle.write_all();
/// }
/// ```
#[derive(Debug)]
#[must_use = "dropping a handle aborts its transfer"]
pub struct SendHandle {
    shared: Arc<Shared>,
    admitted: Option<Admitted>,
    placement: Option<Arc<Placement>>,
    /// First planes of each component's extents.
    firsts: Vec<Vec<PlaneIndex>>,
    completion: Completion,
}

impl SendHandle {
    /// Logical pages `pages` of a component are ready, in all planes.
    pub fn write(&self, component: usize, pages: Range<u32>) {
        self.write_planes(component, 0..u16::MAX, pages);
    }

    /// Logical pages `pages` of a component are ready in planes `planes` of this side's pool: for
    /// sending layer by layer as a forward pass goes on.
    pub fn write_planes(&self, component: usize, planes: Range<u16>, pages: Range<u32>) {
        let Some(placement) = &self.placement else { return };
        let firsts = self.firsts.get(component).map_or(&[][..], |firsts| firsts);
        let component = ComponentIndex(u16::try_from(component).unwrap_or(u16::MAX));
        self.send_ranges(placement.map().planes_of_pages(component, firsts, planes, pages));
    }

    /// Everything is ready.
    pub fn write_all(&self) {
        if let Some(placement) = &self.placement {
            self.send_ranges(vec![placement.map().all()]);
        }
    }

    fn send_ranges(&self, ranges: Vec<BlockRange>) {
        if !ranges.is_empty() {
            let offer = self.completion.offer;
            self.shared.command(Command::Write { offer, ranges });
        }
    }

    /// Everything was written: the receiver verifies and decides. If a block is missing, the
    /// transfer fails on both sides with what is missing. `[I1]`
    pub fn complete(mut self) -> Completion {
        if let Some(admitted) = self.admitted.take() {
            self.shared.command(Command::Complete { completing: admitted.complete() });
        }
        self.detach()
    }

    /// Gives up. The receiver hears it at once, and that nothing more comes once that is true.
    pub fn abort(mut self, why: &str) -> Completion {
        self.abort_now(why);
        self.detach()
    }

    fn abort_now(&mut self, why: &str) {
        if self.admitted.take().is_some() {
            let (offer, why) = (self.completion.offer, why.to_owned());
            self.shared.command(Command::AbortSend { offer, why });
        }
    }

    fn detach(&mut self) -> Completion {
        let (slot, _) = Slot::new(Ok(()));
        let (free, _) = Slot::new(());
        let (shared, offer) = (self.shared.clone(), self.completion.offer);
        let spent = Completion { shared, offer, slot, free };
        std::mem::replace(&mut self.completion, spent)
    }

    /// Has it failed already? Never blocks; the result stays for [`Completion::wait`].
    pub fn is_over(&self) -> bool {
        self.completion.slot.is_done()
    }
}

impl Drop for SendHandle {
    fn drop(&mut self) {
        self.abort_now("the handle was dropped");
    }
}

/// A send whose end is awaited. Dropping it changes nothing: the transfer goes on.
#[derive(Debug)]
pub struct Completion {
    shared: Arc<Shared>,
    offer: OfferId,
    slot: Slot<SendResult>,
    free: Slot<()>,
}

impl Completion {
    /// Blocks until the receiver has verified, or the transfer failed: by its deadline at the latest.
    pub fn wait(&self) -> Result<(), TransferError> {
        loop {
            // The engine ends every transfer by its deadline, and a dead engine resolves too.
            if let Some(result) = self.slot.peek(MAX_DEADLINE) {
                return result;
            }
        }
    }

    /// Blocks for at most `timeout`. `None` if the transfer goes on. The result stays.
    pub fn wait_for(&self, timeout: Duration) -> Option<Result<(), TransferError>> {
        self.slot.peek(timeout)
    }

    /// Blocks until nothing reads the source any more, for at most `timeout`: from then on its
    /// pages may be reused, and nothing of what is put there can reach the peer. `[I4]`
    pub fn wait_source_free(&self, timeout: Duration) -> bool {
        self.free.wait(timeout).is_some() || self.free.is_done()
    }

    /// Gives up. After everything was written the receiver decides: it may have sealed already.
    pub fn abort(&self, why: &str) {
        let why = why.to_owned();
        self.shared.command(Command::AbortSend { offer: self.offer, why });
    }

    /// A descriptor that becomes readable when the result is there; for `epoll` and the like.
    pub fn event_fd(&self) -> std::io::Result<Arc<OwnedFd>> {
        self.slot.event_fd()
    }
}

impl Future for Completion {
    type Output = Result<(), TransferError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.slot.poll_done(context.waker()) {
            Poll::Ready(()) => self.slot.peek(Duration::ZERO).map_or(Poll::Pending, Poll::Ready),
            Poll::Pending => Poll::Pending,
        }
    }
}
