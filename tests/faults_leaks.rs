//! An engine that outlives a thousand peers keeps no thread, descriptor or memory of them.

use std::time::{Duration, Instant};

mod common_faults;

use common_faults::child::{self, Child};
use common_faults::node::{Node, Spec};
use common_faults::process::{Usage, usage};
use common_faults::{HANG, eventually};

const ROUNDS: u64 = 1000;
/// After this many, whatever grows once has grown.
const WARM: u64 = 50;
const PAGES: u32 = 16;
/// Rounds between the transfers that are cut off in the middle: those last longer.
const CUT_EVERY: u64 = 4;

#[test]
fn role_entry() {
    child::serve();
}

/// Every round is a real process that connects, moves pages and is killed with `kill -9`, in turn
/// as sender and as receiver; every fourth in the middle of its transfer. (Light children make
/// that many real kills affordable.)
#[test]
fn threads_descriptors_and_memory_are_flat_over_a_thousand_killed_peers() {
    // Half of the rounds last as long as a broken link is waited for.
    let reconnect_grace = Duration::from_millis(40);
    let spec = Spec { pages: PAGES, reconnect_grace, ..Spec::default() };
    let survivor = Node::start(&spec);
    let start = Instant::now();
    let mut warm = None;
    for round in 1..=ROUNDS {
        play(&survivor, &spec, round);
        if round == WARM {
            warm = Some(settled(&survivor));
        }
    }
    let (warm, end) = (warm.unwrap(), settled(&survivor));
    println!("{ROUNDS} rounds in {:?}: {warm:?}, then {end:?}", start.elapsed());
    assert!(survivor.engine.health().is_ok(), "{:?}", survivor.engine.health());
    assert_eq!((end.threads, end.descriptors), (warm.threads, warm.descriptors));
    let grown = end.anonymous_kib.saturating_sub(warm.anonymous_kib);
    // Allocator noise, and not a session, a link or a page list of each of 950 peers.
    assert!(grown < 512, "{grown} KiB more after {} peers", ROUNDS - WARM);
}

fn play(survivor: &Node, spec: &Spec, round: u64) {
    let mut peer = Child::start(spec);
    let deadline = HANG.as_millis();
    let is_cut = round % CUT_EVERY < 2;
    let send = if is_cut { "send_slowly" } else { "send" };
    if round.is_multiple_of(2) {
        peer.must(&format!("{send} {round} {PAGES} {deadline}"));
        let from = survivor.connect(&peer.address);
        let receiving = survivor.receive(&from, round, PAGES, HANG);
        if is_cut {
            std::thread::sleep(Duration::from_millis(10));
            peer.kill();
            receiving.wait().unwrap_err();
        } else {
            receiving.wait().unwrap().release();
            peer.kill();
        }
    } else {
        peer.must(&format!("connect {}", survivor.address()));
        let sending = match is_cut {
            true => survivor.send_slowly(round, PAGES, HANG),
            false => survivor.send(round, PAGES, HANG),
        };
        peer.must(&format!("receive {round} {PAGES} {deadline}"));
        if is_cut {
            std::thread::sleep(Duration::from_millis(10));
            peer.kill();
            let sent = sending.wait();
            sent.result.unwrap_err();
            assert!(sent.completion.wait_source_free(HANG));
        } else {
            sending.wait().result.unwrap();
            peer.kill();
        }
    }
    survivor.wait_all_free();
}

/// What is in use once the last peer is given up.
fn settled(survivor: &Node) -> Usage {
    eventually("the last peer is given up", || survivor.engine.peers().is_empty());
    // Sockets are closed just before or just after.
    std::thread::sleep(Duration::from_millis(200));
    usage(std::process::id())
}
