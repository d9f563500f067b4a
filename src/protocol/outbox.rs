//! Messages of one transfer that the peer hasn't acknowledged yet.

use std::time::Duration;

use super::ids::{Round, Time};
use super::message::Message;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Unacked {
    message: Message,
    due: Time,
    interval: Duration,
}

/// Resends with doubling intervals, up to sixteen times the first. Holds one message per kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Outbox {
    first_interval: Duration,
    unacked: Vec<Unacked>,
}

impl Outbox {
    /// Empty; the first resend comes after `first_interval`.
    pub(super) fn new(first_interval: Duration) -> Outbox {
        Outbox { first_interval, unacked: Vec::new() }
    }

    /// Keeps `message` until it is acknowledged, in place of an older one of its kind. The caller
    /// sends it now.
    pub(super) fn push(&mut self, now: Time, message: Message) {
        self.unacked.retain(|entry| entry.message.code() != message.code());
        let (due, interval) = (now.after(self.first_interval), self.first_interval);
        self.unacked.push(Unacked { message, due, interval });
    }

    /// Drops what the acknowledgement is for.
    pub(super) fn ack(&mut self, of: u8, round: Round) {
        self.unacked.retain(|entry| (entry.message.code(), entry.message.round()) != (of, round));
    }

    /// Drops the messages of one kind: something else answered them.
    pub(super) fn settle(&mut self, code: u8) {
        self.unacked.retain(|entry| entry.message.code() != code);
    }

    /// A message of this kind waits for its acknowledgement.
    pub(super) fn holds(&self, code: u8) -> bool {
        self.unacked.iter().any(|entry| entry.message.code() == code)
    }

    /// Drops everything: the peer is gone.
    pub(super) fn clear(&mut self) {
        self.unacked.clear();
    }

    /// Everything is acknowledged.
    pub(super) fn is_empty(&self) -> bool {
        self.unacked.is_empty()
    }

    /// What is to be sent again now.
    pub(super) fn due(&mut self, now: Time) -> Vec<Message> {
        let longest = self.first_interval * 16;
        let due = self.unacked.iter_mut().filter(|entry| entry.due <= now);
        due.map(|entry| {
            entry.interval = (entry.interval * 2).min(longest);
            entry.due = now.after(entry.interval);
            entry.message.clone()
        })
        .collect()
    }

    /// Makes everything due: the session came back.
    pub(super) fn hurry(&mut self, now: Time) {
        self.unacked.iter_mut().for_each(|entry| entry.due = now);
    }

    /// When the next message is due.
    pub(super) fn next_due(&self) -> Time {
        self.unacked.iter().map(|entry| entry.due).min().unwrap_or(Time::NEVER)
    }
}
