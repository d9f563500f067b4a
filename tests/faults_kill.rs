//! `kill -9` of either side in the middle of a transfer: real processes, real signals.

use std::time::{Duration, Instant};

mod common_faults;

use common_faults::child::{self, Child};
use common_faults::node::{Node, Spec};
use common_faults::receiver_survives::{has_landed, receive_fresh};
use common_faults::{
    End, FRESH, Fault, HANG, MIDWAY, OLD, PAGES, eventually, memory, receiver_survives,
    sender_survives,
};

#[test]
fn role_entry() {
    child::serve();
}

#[test]
fn a_killed_sender_ends_a_receive_by_its_deadline() {
    receiver_survives::check(Fault::Kill, End::Deadline);
}

#[test]
fn a_killed_sender_is_given_up_long_before_the_deadline() {
    receiver_survives::check(Fault::Kill, End::Liveness);
}

#[test]
fn a_killed_receiver_ends_a_send_by_its_deadline() {
    sender_survives::check(Fault::Kill, End::Deadline);
}

#[test]
fn a_killed_receiver_is_given_up_long_before_the_deadline() {
    sender_survives::check(Fault::Kill, End::Liveness);
}

/// A restarted peer listens where the old one did: nothing of the old session is in its way.
#[test]
fn a_peer_restarted_on_its_port_serves_the_next_transfer_within_two_seconds() {
    let spec = End::Deadline.spec();
    let survivor = Node::start(&spec);
    let mut sender = Child::start(&spec);
    sender.must(&format!("fill {OLD}"));
    let peer = survivor.connect(&sender.address);
    sender.must(&format!("send_slowly 1 {PAGES} {}", HANG.as_millis()));
    // Neither deadline nor liveness ends it: the old session still stands, broken, when the new
    // one begins.
    let old = survivor.receive(&peer, 1, PAGES, HANG);
    eventually("the transfer is under way", || has_landed(&survivor, MIDWAY));
    let same_port = Spec { listen: sender.address.clone(), ..spec };
    sender.kill();
    let killed = Instant::now();
    let mut restarted = Child::start(&same_port);
    assert_eq!(restarted.address, sender.address);
    restarted.must(&format!("fill {FRESH}"));
    let again = survivor.connect(&restarted.address);
    assert_ne!(again.incarnation(), peer.incarnation());
    restarted.must(&format!("send 2 {PAGES} {}", HANG.as_millis()));
    // Its lanes are down: giving it up is all that its pages wait for.
    drop(old);
    survivor.wait_all_free();
    let sealed = survivor.receive(&again, 2, PAGES, HANG).wait().unwrap();
    let took = killed.elapsed();
    println!("the next transfer was done {took:?} after the kill");
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert!(memory::is_all(&survivor.region, FRESH));
    sealed.release();
    assert_eq!(restarted.ask("outcome"), "ok");
    receive_fresh(&survivor, &mut restarted, 3);
}
