//! Fences: after one, nothing lands.

use std::io::Write as _;
use std::sync::Arc;

use super::rig::*;
use crate::protocol::{Extent, LaneId, PageIndex, PlaneIndex};
use crate::transport::tcp::TcpConfig;
use crate::transport::tcp::preamble::{LaneParams, Preamble, Reply};
use crate::transport::{Event, LaneRole, Transport};

const PAGE: u32 = 100_000;

#[test]
fn a_fence_in_the_middle_of_a_frame_is_final() {
    let side = side(listening());
    let peer = ByHand::link(&side);
    let preamble = peer.expected(&side, LANE, LaneRole::Reader);
    let mut lane = dial(&peer.address, &preamble);
    assert!(matches!(reply(&mut lane), Some(Reply::Welcome(_))));
    side.lane_up();
    let pool = pool(&[PAGE], 4, CANARY);
    let placement = place(&pool, &[0, 1, 2], vec![Extent::whole(PlaneIndex(0), 1, PAGE)]);
    side.transport.open_landing(landing(&placement, None));
    let head = header(&[range(0, 3)], 3 * PAGE);
    lane.write_all(&[head, vec![0x11; PAGE as usize + 5]].concat()).unwrap();
    let mut first = vec![0; PAGE as usize];
    eventually(|| {
        pool.read(0, PageIndex(0), 0, &mut first);
        first.iter().all(|&byte| byte == 0x11)
    });
    side.transport.close_landing(TRANSFER);
    side.transport.fence_lane(peer.link, LANE);
    assert_eq!(side.closed(), 0, "the frame was given up, and with it the landing closes");
    side.fenced();
    let then = bytes_of(&pool);
    // The peer doesn't care and goes on, until the system tells it that nobody is there.
    while lane.write_all(&[0x22; 64 * 1024]).is_ok() {}
    // Nor does the old secret open the lane again.
    let mut again = dial(&peer.address, &preamble);
    assert!(matches!(reply(&mut again), Some(Reply::Refused)));
    assert!(is_closed(&mut again));
    assert_eq!(side.transport.counters().lanes_refused, 1);
    assert_eq!(bytes_of(&pool), then);
    side.transport.fence_lane(peer.link, LANE);
    side.fenced();
    side.nothing_waits();
}

#[test]
fn a_lane_that_is_fenced_before_it_stands_never_does() {
    // Prepared only, the connection there already, or started and waiting.
    let side = side(listening());
    let peer = ByHand::link(&side);
    let lane = |epoch| LaneId { index: 0, epoch };
    let preambles = [1, 2].map(|epoch| peer.expected(&side, lane(epoch), LaneRole::Reader));
    for epoch in 1..=3 {
        side.transport.fence_lane(peer.link, lane(epoch));
        side.fenced();
    }
    for preamble in preambles {
        let mut late = dial(&peer.address, &preamble);
        assert!(matches!(reply(&mut late), Some(Reply::Refused)));
    }
    // A connection that came before the start is kept, the first one, and goes with the fence.
    let params = side.transport.prepare_lane(peer.link, lane(4), LaneRole::Reader).unwrap();
    let LaneParams { link, lane, secret, .. } = LaneParams::decode(&params).unwrap();
    let preamble = Preamble::Lane { link, lane, dialler: LaneRole::Writer, secret };
    let connections = [0; 2].map(|_| dial(&peer.address, &preamble));
    let refused = || side.transport.counters().lanes_refused;
    eventually(|| refused() == 3);
    side.transport.fence_lane(peer.link, lane);
    side.fenced();
    for mut connection in connections {
        assert!(!matches!(reply(&mut connection), Some(Reply::Welcome(_))));
    }
    side.nothing_waits();
}

#[test]
fn a_dialled_lane_is_fenced_like_an_accepted_one() {
    // The reader dialled: its fence also calls the dial off.
    let (reader, writer, at_reader, at_writer) = linked(TcpConfig::default(), listening());
    let of_reader = reader.transport.prepare_lane(at_reader, LANE, LaneRole::Reader).unwrap();
    let of_writer = writer.transport.prepare_lane(at_writer, LANE, LaneRole::Writer).unwrap();
    let start = |side: &Side, link, role, params: &[u8]| {
        side.transport.start_lane(link, LANE, role, params, GUARD).unwrap();
    };
    start(&reader, at_reader, LaneRole::Reader, &of_writer);
    reader.transport.fence_lane(at_reader, LANE);
    reader.fenced();
    start(&writer, at_writer, LaneRole::Writer, &of_reader);
    // The reader's connection came, or didn't: either way the writer's end is down in the end.
    writer.transport.kill_lane(at_writer, LANE);
    writer.until(|event| matches!(event, Event::LaneDown { .. }).then_some(()));
    reader.nothing_waits();
    // An established one goes down at the writer by itself.
    let next = LaneId { index: 0, epoch: 2 };
    join((&writer, at_writer), (&reader, at_reader), next, true);
    reader.transport.fence_lane(at_reader, next);
    reader.fenced();
    writer.lane_down();
}

#[test]
fn a_fence_is_answered_after_the_thread_died_of_a_panic() {
    let (sender, events) = crossbeam_channel::unbounded();
    let sink = Arc::new(move |event: Event| {
        if matches!(&event, Event::Control { frame, .. } if frame == b"die") {
            panic!("as the test wants it");
        }
        drop(sender.send(event));
    });
    let config = TcpConfig { io_threads: 1, ..listening() };
    let transport = crate::transport::tcp::TcpTransport::start(config, sink).unwrap();
    let b = Side { transport, events };
    let a = side(TcpConfig::default());
    let at_a = a.transport.connect(&b.address(), GUARD).unwrap();
    let (_, at_b) = (a.link_up(), b.link_up());
    join((&a, at_a), (&b, at_b), LANE, true);
    a.transport.send_control(at_a, b"die").unwrap();
    b.expect(|event| match event {
        Event::WorkerDied { why } => why.contains("as the test wants it").then_some(()),
        _ => None,
    });
    b.lane_down();
    b.expect(|event| matches!(event, Event::LinkDown { .. }).then_some(()));
    b.transport.fence_lane(at_b, LANE);
    b.fenced();
    // It takes nothing new.
    let c = side(TcpConfig::default());
    c.transport.connect(&b.address(), GUARD).unwrap();
    c.expect(|event| matches!(event, Event::LinkDown { .. }).then_some(()));
}
