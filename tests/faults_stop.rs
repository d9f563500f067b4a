//! SIGSTOP of either side in the middle of a transfer, and SIGCONT after the survivor has reused
//! what it got back: real processes, real signals.

mod common_faults;

use common_faults::{End, Fault, child, receiver_survives, sender_survives};

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
