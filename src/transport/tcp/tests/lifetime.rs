//! Ends: kill, cancel, shutdown, and what is left of fifty of them.

use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::rig::*;
use crate::memory::PoolMemory;
use crate::protocol::{Extent, PlaneIndex, Round, Ticket};
use crate::transport::tcp::TcpConfig;
use crate::transport::{CompletionStatus, Event, LaneRole, Placement, Transport};

const PAGE: u32 = 1 << 20;
const PAGES: u32 = 64;

/// A lane to a reader that doesn't read, with more posted than the kernel will ever take.
fn stalled() -> (Side, ByHand, std::net::TcpStream, Arc<PoolMemory>, Arc<Placement>) {
    let side = side(listening());
    let peer = ByHand::link(&side);
    let lane = peer.lane(&side, LANE, LaneRole::Writer);
    let pool = pool(&[PAGE], PAGES, 3);
    let pages: Vec<u32> = (0..PAGES).collect();
    let source = place(&pool, &pages, vec![Extent::whole(PlaneIndex(0), 1, PAGE)]);
    for block in 0..PAGES {
        let request = write(&source, None, u64::from(block), &[range(block, 1)]);
        side.transport.post_write(peer.link, LANE, request);
    }
    (side, peer, lane, pool, source)
}

/// Collects the ends of all posted writes, in order.
fn ends(side: &Side) -> Vec<CompletionStatus> {
    let mut ends = Vec::new();
    while ends.len() < PAGES as usize {
        let (ticket, status) = side.done();
        assert_eq!(ticket, Ticket(ends.len() as u64), "in order, each once");
        ends.push(status);
    }
    ends
}

#[test]
fn a_killed_lane_flushes_what_was_outstanding_and_unpins_the_source() {
    let (side, peer, _lane, pool, source) = stalled();
    side.transport.kill_lane(peer.link, LANE);
    let ends = ends(&side);
    let sent = ends.iter().take_while(|&&end| end == CompletionStatus::Success).count();
    assert!(sent < PAGES as usize, "the kernel can't hold {PAGES} MiB");
    assert!(ends[sent..].iter().all(|&end| end == CompletionStatus::Flushed));
    side.lane_down();
    assert_eq!(pool.pins(), 1);
    drop(source);
    assert_eq!(pool.pins(), 0);
    side.transport.kill_lane(peer.link, LANE);
    side.transport.post_marker(peer.link, LANE, TRANSFER, Round(0), Ticket(99));
    assert_eq!(side.done(), (Ticket(99), CompletionStatus::Flushed));
    side.nothing_waits();
}

#[test]
fn a_cancel_takes_what_is_not_begun_and_what_is_begun_runs_to_its_end() {
    let (side, peer, mut lane, _pool, _source) = stalled();
    side.transport.post_marker(peer.link, LANE, TRANSFER, Round(0), Ticket(1000));
    let other = crate::protocol::TransferId { counter: 9, ..TRANSFER };
    side.transport.cancel(other);
    side.transport.cancel(TRANSFER);
    let mut cancelled = Vec::new();
    let mut sent = Vec::new();
    let total = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&total);
    // Every write ends, cancelled or sent, while the peer reads again.
    let reader = std::thread::spawn(move || {
        let mut bytes = vec![0; PAGE as usize];
        while let Ok(got @ 1..) = lane.read(&mut bytes) {
            count.fetch_add(got as u64, Ordering::Relaxed);
        }
    });
    loop {
        match side.done() {
            (Ticket(1000), status) => break assert_eq!(status, CompletionStatus::Success),
            (ticket, CompletionStatus::Cancelled) => cancelled.push(ticket.0),
            (ticket, CompletionStatus::Success) => sent.push(ticket.0),
            other => panic!("unexpected: {other:?}"),
        }
    }
    assert!(!cancelled.is_empty(), "the kernel can't hold {PAGES} MiB");
    assert_eq!(sent.len() + cancelled.len(), PAGES as usize, "the marker came after all of them");
    let all: Vec<u64> = sent.iter().chain(&cancelled).copied().collect();
    assert_eq!(all, (0..u64::from(PAGES)).collect::<Vec<_>>());
    // One frame each, since a page is longer than a frame would be, and the marker.
    let head = header(&[range(0, 1)], PAGE).len() as u64;
    let expected = sent.len() as u64 * (head + u64::from(PAGE)) + marker(0).len() as u64;
    eventually(|| total.load(Ordering::Relaxed) >= expected);
    side.transport.close_link(peer.link);
    reader.join().unwrap();
    assert_eq!(total.load(Ordering::Relaxed), expected, "whole frames, and nothing of the rest");
}

#[test]
fn a_writer_whose_reader_goes_or_speaks_goes_down() {
    for speaks in [false, true] {
        let (side, _peer, mut lane, _pool, _source) = stalled();
        if speaks {
            lane.write_all(b"!").unwrap();
        } else {
            drop(lane);
        }
        let mut flushed = 0;
        side.until(|event| {
            let done = matches!(event, Event::WriteDone { status: CompletionStatus::Flushed, .. });
            flushed += usize::from(done);
            matches!(event, Event::LaneDown { .. }).then_some(())
        });
        assert!(flushed > 0);
    }
}

#[test]
fn a_shutdown_ends_everything_in_bounded_time() {
    let (side, _peer, _lane, pool, source) = stalled();
    let start = Instant::now();
    side.transport.shutdown();
    assert!(start.elapsed() < GUARD);
    let ends = ends(&side);
    assert!(ends.contains(&CompletionStatus::Flushed));
    side.lane_down();
    side.expect(|event| matches!(event, Event::LinkDown { .. }).then_some(()));
    drop(source);
    assert_eq!(pool.pins(), 0);
    side.transport.shutdown();
    side.nothing_waits();
}

/// Open descriptors, and threads, of this process.
fn census() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// Descriptors and threads belong to the process, so the rounds run in one of their own.
#[test]
fn fifty_rounds_leave_no_descriptor_and_no_thread_behind() {
    const ALONE: &str = "SEALIFT_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name =
            concat!(module_path!(), "::fifty_rounds_leave_no_descriptor_and_no_thread_behind");
        let name = name.split_once("::").unwrap().1;
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--test-threads=1"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let before = census();
    {
        let (a, b, _, _) = linked(TcpConfig::default(), listening());
        let standing = census();
        for _ in 0..50 {
            let at_a = a.transport.connect(&b.address(), GUARD).unwrap();
            let (_, at_b) = (a.link_up(), b.link_up());
            join((&a, at_a), (&b, at_b), LANE, true);
            join((&b, at_b), (&a, at_a), LANE, false);
            a.transport.close_link(at_a);
            for side in [&a, &b] {
                for _ in 0..3 {
                    side.expect(|event| {
                        matches!(event, Event::LaneDown { .. } | Event::LinkDown { .. })
                            .then_some(())
                    });
                }
            }
        }
        eventually(|| census() == standing);
    }
    eventually(|| census() == before);
}
