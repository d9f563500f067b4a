//! The lanes of every session: prepared, joined, fenced and rebuilt.

use std::sync::Arc;

use super::{Core, is_reader};
use crate::protocol::session::SessionAction;
use crate::protocol::{Incarnation, LaneId, Message, Time};
use crate::transport::{LaneRole, LaneSet, LinkId, TransportError};

/// Most lanes that one peer may ask this side to write through.
const MAX_LANES_PER_PEER: usize = 64;

impl Core {
    /// Opens the lanes that transfers from `peer` want, if that is safe now.
    pub(super) fn want_lanes(&mut self, now: Time, peer: Incarnation) {
        if !self.receiver.wants_lanes(peer) || !self.receiver.may_open_lanes(peer) {
            return;
        }
        let mut epoch = self.last_epoch;
        self.with_session(peer, |session, actions| session.want_lanes(now, &mut epoch, actions));
        self.last_epoch = epoch;
    }

    pub(super) fn prepare_reader(&mut self, now: Time, peer: Incarnation, lane: LaneId) {
        let Some(entry) = self.peers.get(&peer) else { return };
        let link = entry.link;
        entry.lanes.insert(lane);
        // From here on the peer may write through it, before this end is up.
        self.receiver.on_lane_opening(peer, lane);
        self.reader_lanes.insert(lane, (link, peer));
        let prepared = self.transport.prepare_lane(link, lane, LaneRole::Reader);
        self.with_session(peer, |session, actions| match prepared {
            Ok(params) => session.on_reader_prepared(lane, params, actions),
            Err(why) => {
                tracing::warn!(%peer, %lane, %why, "a lane could not be prepared");
                session.on_reader_failed(now, lane, actions);
            }
        });
    }

    pub(super) fn join_writer(
        &mut self,
        now: Time,
        peer: Incarnation,
        lane: LaneId,
        params: &[u8],
    ) {
        let Some(link) = self.peers.get(&peer).map(|entry| entry.link) else { return };
        let open = self.writer_lanes.range((peer, LaneId::default())..);
        let open = open.take_while(|((owner, _), _)| *owner == peer).count();
        let timeout = self.shared.config.session.lane_timeout;
        let joined = if open >= MAX_LANES_PER_PEER {
            Err(TransportError::LaneParams("the peer offers too many lanes".into()))
        } else {
            self.transport.prepare_lane(link, lane, LaneRole::Writer).and_then(|own| {
                self.writer_lanes.insert((peer, lane), link);
                self.sender.on_lane_opening(peer, lane);
                self.send(peer, &Message::LaneAnswer { lane, params: own });
                self.transport.start_lane(link, lane, LaneRole::Writer, params, timeout)
            })
        };
        if let Err(why) = joined {
            tracing::warn!(%peer, %lane, %why, "a lane could not be joined");
            self.writer_lanes.remove(&(peer, lane));
            self.with_sender(|sender, actions| sender.on_lane_down(now, peer, lane, actions));
            self.send(peer, &Message::LaneGone { lane });
        }
    }

    pub(super) fn on_lane_up(&mut self, now: Time, link: LinkId, lane: LaneId, role: LaneRole) {
        if is_reader(role) {
            let Some(&(_, peer)) = self.reader_lanes.get(&lane) else { return };
            self.with_session(peer, |session, actions| session.on_reader_up(lane, actions));
            return;
        }
        let Some(peer) = self.peer_of(link) else { return };
        self.with_sender(|sender, actions| sender.on_lane_up(now, peer, lane, actions));
    }

    pub(super) fn on_lane_down(
        &mut self,
        now: Time,
        link: LinkId,
        lane: LaneId,
        role: LaneRole,
        why: &str,
    ) {
        tracing::debug!(?link, %lane, ?role, %why, "a lane is down");
        if is_reader(role) {
            let Some(&(_, peer)) = self.reader_lanes.get(&lane) else { return };
            self.with_session(peer, |session, actions| session.on_reader_down(now, lane, actions));
            return;
        }
        let mut lanes = self.writer_lanes.iter();
        let found = lanes.find(|((_, other), on)| *other == lane && **on == link);
        let Some(peer) = found.map(|((peer, _), _)| *peer) else { return };
        self.writer_lanes.remove(&(peer, lane));
        self.with_session(peer, |session, actions| session.on_writer_down(lane, actions));
        self.with_sender(|sender, actions| sender.on_lane_down(now, peer, lane, actions));
    }

    pub(super) fn on_lane_fenced(&mut self, lane: LaneId) {
        let Some((_, peer)) = self.reader_lanes.remove(&lane) else { return };
        self.lane_set(peer).remove(lane);
        if self.peers.contains_key(&peer) {
            self.with_session(peer, |session, actions| session.on_fenced(lane, actions));
        } else {
            self.queue(peer, vec![SessionAction::ReaderFenced(lane)]);
        }
        self.forget_lost(peer);
    }

    /// The lanes that a peer may write through: none, for one that is gone.
    pub(super) fn lane_set(&self, peer: Incarnation) -> Arc<LaneSet> {
        self.peers.get(&peer).map(|entry| entry.lanes.clone()).unwrap_or_default()
    }

    pub(super) fn forget_lost(&mut self, peer: Incarnation) {
        let fencing = self.reader_lanes.values().any(|(_, other)| *other == peer);
        let lost = self.peers.get(&peer).is_some_and(|entry| entry.session.is_lost());
        if lost && !fencing {
            // Its last fences are queued already and need no session.
            self.peers.remove(&peer);
        }
    }

    pub(super) fn fence(&mut self, now: Time, peer: Incarnation, lane: LaneId) {
        if self.peers.contains_key(&peer) {
            self.with_session(peer, |session, actions| session.fence(now, lane, actions));
        } else {
            self.queue(peer, vec![SessionAction::Fence(lane)]);
        }
    }
}
