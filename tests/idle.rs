//! Waiting costs nothing: no thread spins, whatever is open.

use std::time::{Duration, Instant};

mod common_faults;

use common_faults::child::{self, Child};
use common_faults::node::Spec;
use common_faults::{HANG, PAGES};

const WATCH: Duration = Duration::from_secs(3);

#[test]
fn role_entry() {
    child::serve();
}

/// The acceptance's figure: less than 1 % of a core, for each side of an open session.
#[test]
fn an_open_session_costs_under_one_percent_of_a_core() {
    let spec = spec();
    let (mut listener, mut dialler) = (Child::start(&spec), Child::start(&spec));
    dialler.must(&format!("connect {}", listener.address));
    assert_idle("an open session", &mut [&mut listener, &mut dialler]);
}

#[test]
fn a_receive_whose_sender_never_comes_costs_under_one_percent_of_a_core() {
    let spec = spec();
    let (mut listener, mut receiver) = (Child::start(&spec), Child::start(&spec));
    receiver.must(&format!("connect {}", listener.address));
    receiver.must(&format!("receive 1 {PAGES} {}", HANG.as_millis()));
    assert_idle("a receive without a sender", &mut [&mut listener, &mut receiver]);
}

/// The default liveness: pings come as often as they do in service.
fn spec() -> Spec {
    Spec { liveness: Duration::from_secs(2), ..Spec::default() }
}

fn assert_idle(what: &str, children: &mut [&mut Child]) {
    let processor = |child: &mut &mut Child| -> Duration {
        Duration::from_micros(child.ask("processor").parse().unwrap())
    };
    let before: Vec<Duration> = children.iter_mut().map(processor).collect();
    let start = Instant::now();
    std::thread::sleep(WATCH);
    for (child, before) in children.iter_mut().zip(before) {
        let used = processor(child) - before;
        let share = used.as_secs_f64() / start.elapsed().as_secs_f64();
        println!("{what}: {used:?} of processor time, {:.3} % of a core", share * 100.0);
        assert!(share < 0.01, "{what}: {:.3} % of a core", share * 100.0);
    }
}
