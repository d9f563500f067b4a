//! Control connections: dialling, frames, and how they end.

use std::collections::VecDeque;
use std::time::Duration;

use super::super::{Event, LaneRole, LinkId, MAX_CONTROL_LEN, TransportError};
use super::fault::{CallKind, Fault, FaultKind};
use super::filter::{Filter, Subject};
use super::world::{Due, EndpointId, Life, What, World};
use crate::protocol::Time;

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    Dialler,
    Listener,
}

impl Side {
    pub(super) const BOTH: [Side; 2] = [Side::Dialler, Side::Listener];

    pub(super) fn other(self) -> Side {
        match self {
            Side::Dialler => Side::Listener,
            Side::Listener => Side::Dialler,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndState {
    /// The dialler waits for the listener, the listener hasn't heard of it.
    Dialling,
    Up,
    Down,
}

#[derive(Debug)]
pub(super) struct End {
    pub(super) endpoint: EndpointId,
    pub(super) link: LinkId,
    state: EndState,
    dial_timer: Option<Due>,
    /// When the last frame toward this end is due: a stream keeps order.
    inbound_at: u64,
    /// Bytes on the way toward this end.
    inbound_len: usize,
    held: VecDeque<Vec<u8>>,
}

/// One connection. Its two ends have a link id each.
#[derive(Debug)]
pub(super) struct Conn {
    ends: [End; 2],
    /// No way through any more, whether or not an end has noticed.
    pub(super) severed: bool,
    /// The latest post that landed at each side, over all lanes, to see them run apart.
    pub(super) newest_landed: [u64; 2],
}

impl Conn {
    pub(super) fn end(&self, side: Side) -> &End {
        &self.ends[side as usize]
    }

    fn end_mut(&mut self, side: Side) -> &mut End {
        &mut self.ends[side as usize]
    }
}

impl World {
    /// The connection and side that `link` is, if it is one of `endpoint`'s.
    pub(super) fn find_link(&self, endpoint: EndpointId, link: LinkId) -> Option<(usize, Side)> {
        let &(conn, side) = self.links.get(&link)?;
        (self.conns[conn].end(side).endpoint == endpoint).then_some((conn, side))
    }

    /// As [`World::find_link`], and up.
    pub(super) fn find_up(
        &self,
        endpoint: EndpointId,
        link: LinkId,
    ) -> Result<(usize, Side), TransportError> {
        self.find_link(endpoint, link)
            .filter(|_| !matches!(self.endpoints[endpoint].life, Life::Stopped | Life::Crashed))
            .filter(|&(conn, side)| self.conns[conn].end(side).state == EndState::Up)
            .ok_or(TransportError::NoLink(link))
    }

    /// What goes through `conn` from `from`, for a fault's filter.
    pub(super) fn subject(&self, conn: usize, from: Side) -> Subject {
        let conn = &self.conns[conn];
        let (from, to) = (conn.end(from), conn.end(from.other()));
        Subject {
            from: self.name(from.endpoint).clone(),
            to: Some(self.name(to.endpoint).clone()),
            links: [Some(from.link), Some(to.link)],
            lane: None,
            transfer: None,
            marker: None,
        }
    }

    pub(super) fn connect(
        &mut self,
        dialler: EndpointId,
        address: &str,
        timeout: Duration,
    ) -> Result<LinkId, TransportError> {
        if matches!(self.endpoints[dialler].life, Life::Stopped | Life::Crashed) {
            return Err(TransportError::System { what: "connect", why: "shut down".into() });
        }
        if address.is_empty() {
            let (address, why) = (String::new(), "it is empty".into());
            return Err(TransportError::Address { address, why });
        }
        let (from, to) = (self.name(dialler).clone(), Some(address.into()));
        let (links, lane, transfer, marker) = ([None, None], None, None, None);
        self.check_call(CallKind::Connect, &Subject { from, to, links, lane, transfer, marker })?;
        let listener = self.names.get(address).copied();
        let (conn, link) = self.add_conn(dialler, listener.unwrap_or(dialler));
        if listener.is_none() {
            // It has no other end: only the dialler may ever hear of it.
            self.conns[conn].end_mut(Side::Listener).state = EndState::Down;
            let (side, why) = (Side::Dialler, "nobody listens there");
            let at = self.soon();
            self.schedule(at, Some(dialler), What::LinkLost { conn, side, why });
            return Ok(link);
        }
        let deadline = Time(self.now).after(timeout).0;
        let timer = self.schedule(deadline, Some(dialler), What::DialTimeout(conn));
        self.conns[conn].end_mut(Side::Dialler).dial_timer = Some(timer);
        let at = self.soon();
        self.schedule(at, listener, What::Dialled(conn));
        Ok(link)
    }

    fn add_conn(&mut self, dialler: EndpointId, listener: EndpointId) -> (usize, LinkId) {
        let conn = self.conns.len();
        let ends =
            [(Side::Dialler, dialler), (Side::Listener, listener)].map(|(side, endpoint)| {
                let link = LinkId(self.fresh());
                self.links.insert(link, (conn, side));
                End {
                    endpoint,
                    link,
                    state: EndState::Dialling,
                    dial_timer: None,
                    inbound_at: 0,
                    inbound_len: 0,
                    held: VecDeque::new(),
                }
            });
        let link = ends[0].link;
        self.conns.push(Conn { ends, severed: false, newest_landed: [0; 2] });
        (conn, link)
    }

    /// The dial has come to the listener.
    pub(super) fn dialled(&mut self, conn: usize) {
        let ends = &self.conns[conn].ends;
        let caller = ends[0].endpoint;
        let both_wait = ends.iter().all(|end| end.state == EndState::Dialling);
        if !both_wait || self.conns[conn].severed {
            return;
        }
        let end = self.conns[conn].end_mut(Side::Listener);
        end.state = EndState::Up;
        let (endpoint, link) = (end.endpoint, end.link);
        let peer = self.name(caller).to_string();
        self.tell(endpoint, Event::LinkUp { link, peer, dialled: false });
        let at = self.soon();
        self.schedule(at, Some(caller), What::Answered(conn));
        // A frame of the listener's can't come before its answer.
        self.conns[conn].end_mut(Side::Dialler).inbound_at = at;
    }

    /// The listener's answer has come to the dialler.
    pub(super) fn answered(&mut self, conn: usize) {
        let peer = self.conns[conn].end(Side::Listener).endpoint;
        let peer = self.name(peer).to_string();
        let severed = self.conns[conn].severed;
        let end = self.conns[conn].end_mut(Side::Dialler);
        if end.state != EndState::Dialling || severed {
            return;
        }
        end.state = EndState::Up;
        let (endpoint, link, timer) = (end.endpoint, end.link, end.dial_timer.take());
        self.unschedule(timer);
        self.tell(endpoint, Event::LinkUp { link, peer, dialled: true });
    }

    pub(super) fn send_control(
        &mut self,
        endpoint: EndpointId,
        link: LinkId,
        frame: &[u8],
    ) -> Result<(), TransportError> {
        let len = frame.len();
        if len > MAX_CONTROL_LEN {
            return Err(TransportError::ControlTooLong { len });
        }
        let (conn, side) = self.find_up(endpoint, link)?;
        let subject = self.subject(conn, side);
        self.check_call(CallKind::SendControl, &subject)?;
        let queued = self.conns[conn].end(side.other()).inbound_len;
        if queued + len > self.config.control_queue_limit {
            return Err(TransportError::Congested { queued });
        }
        if self.hit(FaultKind::DropControl, &subject).is_some() {
            return Ok(());
        }
        self.ship_frame(conn, side.other(), frame, &subject);
        if self.hit(FaultKind::DuplicateControl, &subject).is_some() {
            self.ship_frame(conn, side.other(), frame, &subject);
        }
        Ok(())
    }

    fn ship_frame(&mut self, conn: usize, to: Side, frame: &[u8], subject: &Subject) {
        let late = match self.hit(FaultKind::DelayControl, subject) {
            Some(Fault::DelayControl(span)) => Some(self.most_of(span)),
            _ => None,
        };
        let mut at = self.soon();
        let end = self.conns[conn].end_mut(to);
        end.inbound_len += frame.len();
        at = at.max(end.inbound_at).saturating_add(late.unwrap_or(0));
        if late.is_none() {
            end.inbound_at = at;
        }
        let endpoint = end.endpoint;
        let (frame, overtaken) = (frame.to_vec(), late.is_some());
        self.schedule(at, Some(endpoint), What::Frame { conn, to, frame, overtaken });
    }

    /// A frame has come to the end `to`.
    pub(super) fn frame(&mut self, conn: usize, to: Side, frame: Vec<u8>, overtaken: bool) {
        if self.conns[conn].severed || self.conns[conn].end(to).state != EndState::Up {
            return;
        }
        let subject = self.subject(conn, to.other());
        let behind = !overtaken && !self.conns[conn].end(to).held.is_empty();
        if behind || self.hit(FaultKind::HoldControl, &subject).is_some() {
            self.conns[conn].end_mut(to).held.push_back(frame);
        } else {
            self.deliver_frame(conn, to, frame);
        }
    }

    fn deliver_frame(&mut self, conn: usize, to: Side, frame: Vec<u8>) {
        let end = self.conns[conn].end_mut(to);
        end.inbound_len = end.inbound_len.saturating_sub(frame.len());
        let (endpoint, link) = (end.endpoint, end.link);
        self.tell(endpoint, Event::Control { link, frame });
    }

    pub(super) fn release_control(&mut self) {
        self.faults.withdraw_certain(FaultKind::HoldControl);
        for conn in 0..self.conns.len() {
            for side in Side::BOTH {
                for frame in std::mem::take(&mut self.conns[conn].end_mut(side).held) {
                    self.deliver_frame(conn, side, frame);
                }
            }
        }
    }

    pub(super) fn close_link(&mut self, endpoint: EndpointId, link: LinkId) {
        let Some((conn, side)) = self.find_link(endpoint, link) else { return };
        self.hang_up(conn, side, "closed here");
    }

    /// One end ends the link; the other learns of it in its time.
    pub(super) fn hang_up(&mut self, conn: usize, side: Side, why: &'static str) {
        if self.conns[conn].end(side).state == EndState::Down {
            return;
        }
        self.end_down(conn, side, why);
        // In the stream, so behind the frames that were sent before.
        let peer = side.other();
        let at = self.soon().max(self.conns[conn].end(peer).inbound_at);
        let actor = self.conns[conn].end(peer).endpoint;
        let why = "closed by the peer";
        self.schedule(at, Some(actor), What::LinkLost { conn, side: peer, why });
    }

    /// One end learns that the link is no more.
    pub(super) fn end_down(&mut self, conn: usize, side: Side, why: &'static str) {
        let end = self.conns[conn].end_mut(side);
        if end.state == EndState::Down {
            return;
        }
        let known = end.state == EndState::Up || side == Side::Dialler;
        end.state = EndState::Down;
        end.held.clear();
        let (endpoint, link, timer) = (end.endpoint, end.link, end.dial_timer.take());
        self.unschedule(timer);
        let keys: Vec<_> = self.lanes.keys().filter(|key| key.conn == conn).copied().collect();
        for key in keys {
            let role = if key.reader == side { LaneRole::Reader } else { LaneRole::Writer };
            self.sever_lane(key);
            self.lane_down(key, role, None, why);
        }
        if known {
            self.tell(endpoint, Event::LinkDown { link, why: why.to_owned() });
        }
    }

    /// Cuts every link that matches, either way round. Both ends notice in their time.
    pub(super) fn cut(&mut self, filter: &Filter) -> usize {
        let live = |end: &End| end.state != EndState::Down;
        let hit: Vec<usize> = (0..self.conns.len())
            .filter(|&conn| self.conns[conn].ends.iter().any(live) && !self.conns[conn].severed)
            .filter(|&conn| filter.matches_either_way(&self.subject(conn, Side::Dialler)))
            .collect();
        for &conn in &hit {
            self.conns[conn].severed = true;
            self.count(FaultKind::CutLink);
            for side in Side::BOTH {
                let endpoint = self.conns[conn].end(side).endpoint;
                let at = self.soon();
                let why = "the link was cut";
                self.schedule(at, Some(endpoint), What::LinkLost { conn, side, why });
            }
        }
        hit.len()
    }
}
