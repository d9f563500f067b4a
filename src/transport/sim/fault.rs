//! What can go wrong.

use std::time::Duration;

use super::super::{CompletionStatus, TransportError};

/// A call that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallKind {
    /// [`super::super::Transport::connect`].
    Connect,
    /// [`super::super::Transport::send_control`].
    SendControl,
    /// [`super::super::Transport::prepare_lane`].
    PrepareLane,
    /// [`super::super::Transport::start_lane`].
    StartLane,
}

/// A fault to inject; which things it hits is a [`super::Filter`]'s matter.
///
/// A write or marker meets its faults when it leaves its writer, [`Fault::HoldWrite`] excepted,
/// which it meets where it would land. "Breaks a promise" means one of
/// [`super::super::Transport`]: no real transport should do that, and digests must find it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The control frame is lost.
    DropControl,
    /// The control frame comes twice.
    DuplicateControl,
    /// The control frame comes later, by up to this and at least half of it; others overtake it.
    DelayControl(Duration),
    /// The control frame, and all behind it, wait for [`super::SimNet::release_control`].
    HoldControl,
    /// The write or marker, and all behind it on its lane, stays in flight until
    /// [`super::SimNet::release_writes`].
    HoldWrite,
    /// The write or marker vanishes and has no completion until its lane goes down. What is behind
    /// it goes on, so the next marker breaks a promise.
    DropWrite,
    /// It lands twice, on verbs-like networks unnoticed. A marker is seen twice.
    DuplicateWrite,
    /// It comes later, by up to this and at least half of it, with all behind it on its lane: so
    /// the lanes run apart.
    DelayWrite(Duration),
    /// As [`Fault::DelayWrite`], but what is behind it on its lane overtakes it. Breaks a promise.
    ReorderWithinLane(Duration),
    /// One bit of one block lands flipped. Breaks a promise.
    CorruptBlock,
    /// Two blocks of the request, of equal length and different content, land in each other's
    /// place. Breaks a promise.
    SwapBlocks,
    /// The write is completed, and counted and digested at the reader, before its bytes are in
    /// memory. They come up to this and at least half of it later, unless the lane is fenced
    /// first. Breaks a promise.
    DelayVisibility(Duration),
    /// The completion states this, whatever became of the write.
    CompleteWith(CompletionStatus),
    /// The completion comes when the bytes have left, as on a socket, and not when they landed.
    AckEarly,
    /// The call fails and does nothing.
    FailCall(CallKind, TransportError),
}

impl Fault {
    /// Its kind, under which it is counted.
    pub fn kind(&self) -> FaultKind {
        match self {
            Fault::DropControl => FaultKind::DropControl,
            Fault::DuplicateControl => FaultKind::DuplicateControl,
            Fault::DelayControl(_) => FaultKind::DelayControl,
            Fault::HoldControl => FaultKind::HoldControl,
            Fault::HoldWrite => FaultKind::HoldWrite,
            Fault::DropWrite => FaultKind::DropWrite,
            Fault::DuplicateWrite => FaultKind::DuplicateWrite,
            Fault::DelayWrite(_) => FaultKind::DelayWrite,
            Fault::ReorderWithinLane(_) => FaultKind::ReorderWithinLane,
            Fault::CorruptBlock => FaultKind::CorruptBlock,
            Fault::SwapBlocks => FaultKind::SwapBlocks,
            Fault::DelayVisibility(_) => FaultKind::DelayVisibility,
            Fault::CompleteWith(_) => FaultKind::CompleteWith,
            Fault::AckEarly => FaultKind::AckEarly,
            Fault::FailCall(call, _) => FaultKind::of_call(*call),
        }
    }
}

/// What [`super::SimStats`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// [`Fault::DropControl`].
    DropControl,
    /// [`Fault::DuplicateControl`].
    DuplicateControl,
    /// [`Fault::DelayControl`].
    DelayControl,
    /// [`Fault::HoldControl`].
    HoldControl,
    /// [`Fault::HoldWrite`].
    HoldWrite,
    /// [`Fault::DropWrite`].
    DropWrite,
    /// [`Fault::DuplicateWrite`].
    DuplicateWrite,
    /// [`Fault::DelayWrite`].
    DelayWrite,
    /// [`Fault::ReorderWithinLane`].
    ReorderWithinLane,
    /// [`Fault::CorruptBlock`].
    CorruptBlock,
    /// [`Fault::SwapBlocks`].
    SwapBlocks,
    /// [`Fault::DelayVisibility`].
    DelayVisibility,
    /// [`Fault::CompleteWith`].
    CompleteWith,
    /// [`Fault::AckEarly`].
    AckEarly,
    /// [`Fault::FailCall`] of [`CallKind::Connect`].
    FailConnect,
    /// [`Fault::FailCall`] of [`CallKind::SendControl`].
    FailSendControl,
    /// [`Fault::FailCall`] of [`CallKind::PrepareLane`].
    FailPrepareLane,
    /// [`Fault::FailCall`] of [`CallKind::StartLane`].
    FailStartLane,
    /// A link cut by [`super::SimNet::cut`].
    CutLink,
    /// [`super::SimNet::crash`].
    Crash,
    /// [`super::SimNet::pause`].
    Pause,
    /// A write landed before one that was posted earlier on another lane of its link.
    LanesReordered,
    /// A write landed after its lane or link had gone down.
    LateLanding,
    /// A fence stopped a write or marker that was in flight.
    FencedInFlight,
    /// A reader refused a write.
    RefusedWrite,
}

impl FaultKind {
    /// Every kind.
    pub const ALL: [FaultKind; 25] = [
        FaultKind::DropControl,
        FaultKind::DuplicateControl,
        FaultKind::DelayControl,
        FaultKind::HoldControl,
        FaultKind::HoldWrite,
        FaultKind::DropWrite,
        FaultKind::DuplicateWrite,
        FaultKind::DelayWrite,
        FaultKind::ReorderWithinLane,
        FaultKind::CorruptBlock,
        FaultKind::SwapBlocks,
        FaultKind::DelayVisibility,
        FaultKind::CompleteWith,
        FaultKind::AckEarly,
        FaultKind::FailConnect,
        FaultKind::FailSendControl,
        FaultKind::FailPrepareLane,
        FaultKind::FailStartLane,
        FaultKind::CutLink,
        FaultKind::Crash,
        FaultKind::Pause,
        FaultKind::LanesReordered,
        FaultKind::LateLanding,
        FaultKind::FencedInFlight,
        FaultKind::RefusedWrite,
    ];

    pub(super) fn of_call(call: CallKind) -> FaultKind {
        match call {
            CallKind::Connect => FaultKind::FailConnect,
            CallKind::SendControl => FaultKind::FailSendControl,
            CallKind::PrepareLane => FaultKind::FailPrepareLane,
            CallKind::StartLane => FaultKind::FailStartLane,
        }
    }
}
