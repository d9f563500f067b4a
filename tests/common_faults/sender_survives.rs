//! The receiver is killed or stopped in the middle; this process sends.

use std::time::Instant;

use super::child::Child;
use super::memory::SharedMemory;
use super::node::{ITEM, Node, Spec, assert_midway, cause};
use super::{CANARY, End, FRESH, Fault, HANG, MIDWAY, NEW, OLD, PAGES, WATCH, eventually, memory};

/// The send fails typed and in time; its source is pinned until nothing reads it; and of what is
/// put there then, not a byte arrives, though the receiver goes on and its pages are looked at
/// from outside.
pub(crate) fn check(fault: Fault, end: End) {
    let spec = end.spec();
    let survivor = Node::start(&spec);
    let target = SharedMemory::new(spec.pool_bytes());
    let mut receiver = start(&spec, &target);
    // Opens the lanes: a transfer can use those that stand when it is accepted.
    send_fresh(&survivor, &mut receiver, &target, 0);
    survivor.fill(OLD);
    let begun = Instant::now();
    let sending = survivor.send_slowly(1, PAGES, end.deadline());
    receiver.must(&format!("receive 1 {PAGES} {}", HANG.as_millis()));
    eventually("the transfer is under way", || has_landed(&target, MIDWAY));

    match fault {
        Fault::Kill => receiver.kill(),
        Fault::Stop => receiver.signal(libc::SIGSTOP),
    }
    let struck = Instant::now();
    let sent = sending.wait();
    let error = sent.result.unwrap_err();
    end.check(fault, &cause(&error), sent.at - begun, sent.at - struck);
    assert_midway(&error);
    if (fault, end) == (Fault::Stop, End::Deadline) {
        assert!(sent.was_pinned, "a write to a stopped reader was half done, and read the source");
    }
    assert!(sent.completion.wait_source_free(HANG));
    println!("the source was free {:?} after the fault", struck.elapsed());
    survivor.fill(NEW);

    if fault == Fault::Stop {
        receiver.signal(libc::SIGCONT);
        let outcome = receiver.ask("outcome");
        assert!(["DeadlineExceeded", "PeerLost"].contains(&outcome.as_str()), "{outcome}");
        receiver.must("free");
        assert_eq!(memory::count(target.region(), NEW), 0, "new content of the source arrived");
        receiver.must(&format!("canary {CANARY}"));
        let watched = Instant::now();
        while watched.elapsed() < WATCH {
            assert!(memory::is_all(target.region(), CANARY), "a released page was written");
        }
        receiver.must("release");
        send_fresh(&survivor, &mut receiver, &target, 2);
    } else {
        let watched = Instant::now();
        while watched.elapsed() < WATCH {
            assert_eq!(memory::count(target.region(), NEW), 0, "a dead process was written to");
        }
        let target = SharedMemory::new(spec.pool_bytes());
        receiver = start(&spec, &target);
        send_fresh(&survivor, &mut receiver, &target, 2);
    }
    receiver.must("health");
    assert!(survivor.engine.health().is_ok(), "{:?}", survivor.engine.health());
}

fn start(spec: &Spec, memory: &SharedMemory) -> Child {
    Child::start(&Spec { memory: memory.path(), ..spec.clone() })
}

/// A whole transfer to `receiver`, compared byte by byte.
fn send_fresh(survivor: &Node, receiver: &mut Child, target: &SharedMemory, label: u64) {
    survivor.fill(FRESH);
    receiver.must(&format!("connect {}", survivor.address()));
    let sending = survivor.send(label, PAGES, HANG);
    receiver.must(&format!("receive {label} {PAGES} {}", HANG.as_millis()));
    assert_eq!(receiver.ask("outcome"), "ok");
    assert!(memory::is_all(target.region(), FRESH));
    let sent = sending.wait();
    sent.result.unwrap();
    assert!(sent.completion.wait_source_free(HANG));
    receiver.must("release");
    receiver.must("free");
}

fn has_landed(target: &SharedMemory, page: u32) -> bool {
    let mut byte = [0];
    target.region().read_at(page as usize * ITEM, &mut byte).unwrap();
    byte[0] == OLD
}
