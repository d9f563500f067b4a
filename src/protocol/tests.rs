//! Random schedules of a real sender and a real receiver over a network that loses, doubles and
//! reorders control messages, and lanes that break with writes in flight.
//!
//! The network is verbs-like: nothing but a fence keeps a write that left from landing, and a
//! local failure of a write proves nothing. Every page remembers who wrote it last.

mod world;

use world::{Faults, World};

fn run(name: &str, faults: Faults, schedules: u64) {
    let mut sealed = 0;
    let mut failed = 0;
    let mut resumed = 0;
    for seed in 0..schedules {
        let mut world = World::new(seed, faults);
        world.run();
        sealed += world.sealed;
        failed += world.failed;
        resumed += world.resumed;
    }
    println!("{name}: {schedules} schedules, {sealed} sealed, {failed} failed, {resumed} resumed");
    assert!(sealed > 0, "good outcomes are reached");
    assert_eq!(failed > 0, faults.any(), "and bad ones where something fails");
    // An abort may cost its lanes too, and so make others resume.
    assert!(resumed > 0 || !faults.lanes, "and resumed ones where lanes break");
}

const NONE: Faults = Faults { messages: false, lanes: false, aborts: false, death: false };

#[test]
fn an_orderly_network_seals_everything() {
    run("orderly", NONE, 400);
}

#[test]
fn lost_doubled_and_reordered_messages() {
    run("messages", Faults { messages: true, ..NONE }, 1500);
}

#[test]
fn lanes_that_break_with_writes_in_flight() {
    run("lanes", Faults { lanes: true, ..NONE }, 1500);
}

#[test]
fn aborts_at_any_moment() {
    run("aborts", Faults { aborts: true, ..NONE }, 1500);
}

#[test]
fn everything_at_once() {
    run("everything", Faults { messages: true, lanes: true, aborts: true, death: false }, 4000);
}

#[test]
fn a_sender_that_dies() {
    run("death", Faults { messages: true, lanes: true, aborts: true, death: true }, 4000);
}
