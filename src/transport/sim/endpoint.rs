//! One endpoint as a [`Transport`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::super::{
    Capabilities, EventSink, Landing, LaneRole, LinkId, Transport, TransportError, WriteRequest,
};
use super::flight::Posted;
use super::lane::LaneKey;
use super::net::SimNet;
use super::world::{EndpointId, Life, What, World};
use crate::protocol::{BlockRange, LaneId, Round, Ticket, TransferId};

/// An endpoint of a [`SimNet`]. Clones are the same endpoint.
#[derive(Clone)]
pub struct SimTransport {
    net: SimNet,
    id: EndpointId,
    name: Arc<str>,
    confined: bool,
}

impl fmt::Debug for SimTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimTransport").field(&self.name).finish()
    }
}

impl SimTransport {
    pub(super) fn new(net: SimNet, name: &str, sink: EventSink) -> SimTransport {
        let (id, confined) =
            net.with(|world| (world.add_endpoint(name, sink), world.config.confined));
        SimTransport { net, id, name: name.into(), confined }
    }

    /// Makes a call that answers by events. Void after a crash: a dead process, whatever its
    /// engine still does while it is dropped, says nothing more.
    fn call(&self, act: impl FnOnce(&mut World)) {
        self.net.with(|world| {
            if world.endpoints[self.id].life != Life::Crashed {
                act(world);
            }
        });
    }

    /// The network it belongs to.
    pub fn net(&self) -> &SimNet {
        &self.net
    }
}

impl Transport for SimTransport {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn capabilities(&self) -> Capabilities {
        match self.confined {
            true => Capabilities::all(),
            false => Capabilities::all() - Capabilities::CONFINED,
        }
    }

    fn listen_address(&self) -> Option<String> {
        Some(self.name.to_string())
    }

    fn connect(&self, address: &str, timeout: Duration) -> Result<LinkId, TransportError> {
        self.net.with(|world| world.connect(self.id, address, timeout))
    }

    fn send_control(&self, link: LinkId, frame: &[u8]) -> Result<(), TransportError> {
        self.net.with(|world| world.send_control(self.id, link, frame))
    }

    fn close_link(&self, link: LinkId) {
        self.call(|world| world.close_link(self.id, link));
    }

    fn prepare_lane(
        &self,
        link: LinkId,
        lane: LaneId,
        role: LaneRole,
    ) -> Result<Vec<u8>, TransportError> {
        self.net.with(|world| world.prepare_lane(self.id, link, lane, role))
    }

    fn start_lane(
        &self,
        link: LinkId,
        lane: LaneId,
        role: LaneRole,
        peer_params: &[u8],
        timeout: Duration,
    ) -> Result<(), TransportError> {
        self.net.with(|world| world.start_lane(self.id, link, lane, role, peer_params, timeout))
    }

    fn fence_lane(&self, link: LinkId, lane: LaneId) {
        self.call(|world| {
            let at = world.soon();
            world.schedule(at, Some(self.id), What::Fence { reader: self.id, link, lane });
        });
    }

    fn kill_lane(&self, link: LinkId, lane: LaneId) {
        self.call(|world| world.kill_lane(self.id, link, lane));
    }

    fn post_write(&self, link: LinkId, lane: LaneId, write: WriteRequest) {
        if let Some(table) = write.digests.as_deref() {
            for block in write.blocks.iter().flat_map(BlockRange::blocks) {
                table.add_source(&write.source, write.transfer, block);
            }
        }
        self.call(|world| world.post(self.id, link, lane, Posted::Write(write)));
    }

    fn post_marker(
        &self,
        link: LinkId,
        lane: LaneId,
        transfer: TransferId,
        round: Round,
        ticket: Ticket,
    ) {
        let marker = Posted::Marker { transfer, round, ticket };
        self.call(|world| world.post(self.id, link, lane, marker));
    }

    fn cancel(&self, transfer: TransferId) {
        self.call(|world| world.cancel(self.id, transfer));
    }

    fn open_landing(&self, landing: Landing) {
        self.call(|world| world.endpoints[self.id].landings.open(landing));
    }

    fn close_landing(&self, transfer: TransferId) {
        self.call(|world| {
            if world.endpoints[self.id].landings.close(transfer) {
                world.report_closed(self.id, transfer);
            }
        });
    }

    fn forget_landing(&self, transfer: TransferId) {
        self.call(|world| {
            world.endpoints[self.id].landings.forget(transfer);
            world.forget_unreachable(self.id);
        });
    }

    fn unland(&self, transfer: TransferId, lane: LaneId) {
        self.call(|world| world.endpoints[self.id].landings.unland(transfer, lane));
    }

    fn shutdown(&self) {
        self.call(|world| world.shut_down(self.id));
    }
}

impl World {
    /// Ends an endpoint in good order: its peers are told, its readers are fenced, and its own last
    /// events are still delivered.
    fn shut_down(&mut self, endpoint: EndpointId) {
        if self.endpoints[endpoint].life == Life::Stopped {
            return;
        }
        self.resume(endpoint);
        let reads = |key: &LaneKey| self.lane_end(*key, LaneRole::Reader).0 == endpoint;
        let keys: Vec<_> = self.lanes.keys().copied().filter(reads).collect();
        keys.into_iter().for_each(|key| self.fence_now(key));
        let links: Vec<_> = self.links.keys().copied().collect();
        links.into_iter().for_each(|link| self.close_link(endpoint, link));
        self.endpoints[endpoint].life = Life::Stopped;
        let name = self.name(endpoint).clone();
        if self.names.get(&name) == Some(&endpoint) {
            self.names.remove(&name);
        }
    }
}
