//! The memory of an engine is bounded by its windows, not by what it moves.

use std::time::{Duration, Instant};

mod common_faults;

use common_faults::child::{self, Child};
use common_faults::node::{ITEM, Node, PLANES, Spec};
use common_faults::{HANG, process};

const BYTES: usize = 4 << 30;
/// The pools are windows onto this much memory, so that the test runs on any machine. The engine
/// can't tell: it moves, lands and digests every one of the 4 GiB.
const WINDOW: usize = 64 << 20;
/// Two lanes of 4 MiB each: the default in-flight bound.
const IN_FLIGHT: usize = 8 << 20;
/// Ledger, grant, manifest and digests.
const PER_PAGE: usize = 128;

#[test]
fn role_entry() {
    child::serve();
}

/// Pools lie in shared memory, and the kernel counts anonymous memory apart: that is the engine.
#[test]
fn the_memory_of_both_engines_stays_flat_while_four_gibibytes_move() {
    let pages = (BYTES / (PLANES * ITEM)) as u32;
    let spec = Spec { pages, windows: BYTES / WINDOW, ..Spec::default() };
    let receiver = Node::start(&spec);
    let mut sender = Child::start(&spec);
    sender.must("fill 3");
    let peer = receiver.connect(&sender.address);
    let pids = [std::process::id(), sender.pid()];
    let deadline = HANG * 4;

    // A thousandth first: lanes, buffers and threads are there from then on.
    sender.must(&format!("send 1 {} {}", pages / 1024, deadline.as_millis()));
    receiver.receive(&peer, 1, pages / 1024, deadline).wait().unwrap().release();
    assert_eq!(sender.ask("outcome"), "ok");
    let before = pids.map(process::anonymous_kib);

    let start = Instant::now();
    sender.must(&format!("send 2 {pages} {}", deadline.as_millis()));
    let mut receiving = receiver.receive(&peer, 2, pages, deadline);
    let (mut peak, mut samples) = (before, 0);
    let sealed = loop {
        if let Some(result) = receiving.wait_for(Duration::from_millis(5)) {
            break result.unwrap();
        }
        let now = pids.map(process::anonymous_kib);
        peak = [peak[0].max(now[0]), peak[1].max(now[1])];
        samples += 1;
    };
    println!("{BYTES} bytes in {:?}, {samples} samples", start.elapsed());
    println!("anonymous KiB of receiver and sender: {before:?} before, {peak:?} at most");
    assert_eq!(sealed.pages(0).len(), pages as usize);
    assert!(samples > 20, "too few samples to say anything: {samples}");
    let limit = (IN_FLIGHT + PER_PAGE * pages as usize) / 1024;
    for (before, peak) in before.into_iter().zip(peak) {
        assert!(peak - before < limit, "{before} KiB, then {peak}: more than {limit} KiB on top");
    }
    sealed.release();
    assert_eq!(sender.ask("outcome"), "ok");
}
