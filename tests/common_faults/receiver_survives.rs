//! The sender is killed or stopped in the middle; this process receives.

use std::time::Instant;

use sealift::engine::Pool;
use sealift::protocol::{PageIndex, PageState};

use super::child::Child;
use super::node::{ITEM, Node, cause};
use super::{
    CANARY, End, FRESH, Fault, HANG, MIDWAY, OLD, PAGES, WATCH, eventually, memory, process,
};

/// The receive fails typed and in time; its pages come back once its lanes are closed, not before;
/// and what is put there then stays, whatever the sender does when it goes on.
pub(crate) fn check(fault: Fault, end: End) {
    let spec = end.spec();
    let survivor = Node::start(&spec);
    let mut sender = Child::start(&spec);
    // Opens the lanes: a transfer can use those that stand when it is accepted.
    receive_fresh(&survivor, &mut sender, 0);
    sender.must(&format!("fill {OLD}"));
    let peer = survivor.connect(&sender.address);
    sender.must(&format!("send_slowly 1 {PAGES} {}", HANG.as_millis()));
    let begun = Instant::now();
    let receiving = survivor.receive(&peer, 1, PAGES, end.deadline());
    eventually("the transfer is under way", || has_landed(&survivor, MIDWAY));
    let (_, generation) = survivor.pool.page(PageIndex(0)).unwrap();
    assert!(!has_landed(&survivor, PAGES - 1), "the last page is held back");
    assert_eq!(process::connections_to(sender.port()), 3, "one for control, two lanes");

    match fault {
        Fault::Kill => sender.kill(),
        Fault::Stop => sender.signal(libc::SIGSTOP),
    }
    let struck = Instant::now();
    let port = sender.port();
    let (error, seen) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&survivor.pool, port));
        let error = receiving.wait().unwrap_err();
        end.check(fault, &cause(&error), begun.elapsed(), struck.elapsed());
        (error, watcher.join().unwrap())
    });
    // What came over a lane that was fenced under a live transfer is taken back, so the count may
    // be 0 here.
    assert!(error.bytes_done < error.bytes_total, "{error}");
    println!("pages were {seen:?}, free {:?} after the fault", struck.elapsed());
    assert_eq!((seen.first(), seen.last()), (Some(&PageState::Granted), Some(&PageState::Free)));
    if (fault, end) == (Fault::Stop, End::Deadline) {
        // The lanes stand when the deadline passes: only a quarantine keeps the pages safe.
        assert_eq!(seen, [PageState::Granted, PageState::Quarantined, PageState::Free]);
    }

    let lease = survivor.pool.claim(&survivor.all_pages()).unwrap();
    let (_, again) = survivor.pool.page(PageIndex(0)).unwrap();
    assert!(again > generation, "{again:?} after {generation:?}");
    survivor.fill(CANARY);
    if fault == Fault::Stop {
        sender.signal(libc::SIGCONT);
        let outcome = sender.ask("outcome");
        assert!(["DeadlineExceeded", "PeerLost"].contains(&outcome.as_str()), "{outcome}");
    }
    let watched = Instant::now();
    while watched.elapsed() < WATCH {
        assert!(memory::is_all(&survivor.region, CANARY), "a released page was written");
    }
    drop(lease);

    if fault == Fault::Kill {
        sender = Child::start(&spec);
    }
    receive_fresh(&survivor, &mut sender, 2);
    sender.must("health");
    assert!(survivor.engine.health().is_ok(), "{:?}", survivor.engine.health());
}

/// A whole transfer from `sender`, compared byte by byte.
pub(crate) fn receive_fresh(survivor: &Node, sender: &mut Child, label: u64) {
    sender.must(&format!("fill {FRESH}"));
    let peer = survivor.connect(&sender.address);
    sender.must(&format!("send {label} {PAGES} {}", HANG.as_millis()));
    let sealed = survivor.receive(&peer, label, PAGES, HANG).wait().unwrap();
    assert!(memory::is_all(&survivor.region, FRESH));
    sealed.release();
    assert_eq!(sender.ask("outcome"), "ok");
    survivor.wait_all_free();
}

/// Pages are written in order, plane by plane within a page: has this one come?
pub(crate) fn has_landed(node: &Node, page: u32) -> bool {
    let mut byte = [0];
    node.region.read_at(page as usize * ITEM, &mut byte).unwrap();
    byte[0] == OLD
}

/// The states that the pool's pages go through until they are free. All of them change at once,
/// and when they are free no lane is open any more.
fn watch(pool: &Pool, port: u16) -> Vec<PageState> {
    let mut seen = Vec::new();
    let start = Instant::now();
    loop {
        let (state, _) = pool.page(PageIndex(0)).unwrap();
        let counts = pool.counts();
        if seen.last() != Some(&state) {
            seen.push(state);
        }
        if state == PageState::Free {
            assert_eq!(counts.free, PAGES as usize, "pages of one lease are released together");
            let open = process::connections_to(port);
            assert!(open <= 1, "pages came back while {open} connections to the sender are open");
            return seen;
        }
        assert!(start.elapsed() < HANG * 2, "the pages never came back: {seen:?}");
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
}
