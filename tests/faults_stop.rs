//! SIGSTOP of either side in the middle of a transfer, and SIGCONT after the survivor has reused
//! what it got back: real processes, real signals.

use std::time::Duration;

mod common_faults;

use common_faults::child::{self, Child};
use common_faults::node::Node;
use common_faults::receiver_survives::receive_fresh;
use common_faults::{End, FRESH, Fault, HANG, PAGES, eventually, memory};
use common_faults::{receiver_survives, sender_survives};

#[test]
fn role_entry() {
    child::serve();
}

#[test]
fn a_stopped_sender_ends_a_receive_by_its_deadline_and_writes_nothing_later() {
    receiver_survives::check(Fault::Stop, End::Deadline);
}

#[test]
fn a_stopped_sender_is_given_up_by_liveness_and_writes_nothing_later() {
    receiver_survives::check(Fault::Stop, End::Liveness);
}

#[test]
fn a_stopped_receiver_ends_a_send_by_its_deadline_and_gets_nothing_later() {
    sender_survives::check(Fault::Stop, End::Deadline);
}

#[test]
fn a_stopped_receiver_is_given_up_by_liveness_and_gets_nothing_later() {
    sender_survives::check(Fault::Stop, End::Liveness);
}

/// When it wakes, the end of the old session and the dial for a new one are there at once, in
/// whichever order.
#[test]
fn a_stopped_peer_can_be_dialled_before_it_wakes() {
    let spec = End::Liveness.spec();
    let survivor = Node::start(&spec);
    let mut sender = Child::start(&spec);
    receive_fresh(&survivor, &mut sender, 1);
    sender.signal(libc::SIGSTOP);
    eventually("the stopped peer is given up", || survivor.engine.peers().is_empty());
    let address = sender.address.clone();
    let peer = std::thread::scope(|scope| {
        let dial = scope.spawn(|| survivor.connect(&address));
        // Long enough for the connection to stand; it also stands if this is too short.
        std::thread::sleep(Duration::from_millis(100));
        sender.signal(libc::SIGCONT);
        dial.join().unwrap()
    });
    sender.must(&format!("send 2 {PAGES} {}", HANG.as_millis()));
    survivor.fill(0);
    let sealed = survivor.receive(&peer, 2, PAGES, HANG).wait().unwrap();
    assert!(memory::is_all(&survivor.region, FRESH));
    sealed.release();
}
