//! The pump: virtual time at the pace of real time.

use std::time::Instant;

use super::*;

fn wait_until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + 20 * SECOND;
    while !done() {
        assert!(Instant::now() < deadline, "it never happened");
        std::thread::sleep(MILLI);
    }
}

#[test]
fn things_happen_by_themselves_and_not_before_their_time() {
    let delay = Duration::from_millis(30);
    let slow = SimConfig { min_delay: delay, max_delay: delay, ..SimConfig::seeded(1) };
    let net = SimNet::new(slow);
    let (a, b) = (Node::new(&net, "a"), Node::new(&net, "b"));
    let _pump = net.spawn_pump();
    // The pump parks; virtual time goes on all the same.
    std::thread::sleep(delay);
    let start = Instant::now();
    let link = a.transport.connect("b", 20 * SECOND).unwrap();
    wait_until(|| !a.log.lock().unwrap().is_empty());
    assert!(start.elapsed() >= 2 * delay, "there and back");
    a.transport.send_control(link, b"hello").unwrap();
    let heard = || b.log.lock().unwrap().iter().any(|e| matches!(e, Event::Control { .. }));
    wait_until(heard);
}

#[test]
fn a_sink_may_call_the_transport() {
    let net = SimNet::new(SimConfig::seeded(1));
    let _b = Node::new(&net, "b");
    let heard = Arc::new(Mutex::new(Vec::new()));
    let slot: Arc<Mutex<Option<SimTransport>>> = Arc::default();
    let (own, log) = (Arc::clone(&slot), Arc::clone(&heard));
    let a = net.endpoint(
        "a",
        Arc::new(move |event| {
            if let (Event::LinkUp { link, .. }, Some(a)) = (&event, &*own.lock().unwrap()) {
                a.close_link(*link);
            }
            log.lock().unwrap().push(event);
        }),
    );
    *slot.lock().unwrap() = Some(a.clone());
    let _pump = net.spawn_pump();
    a.connect("b", SECOND).unwrap();
    wait_until(|| heard.lock().unwrap().iter().any(|e| matches!(e, Event::LinkDown { .. })));
    *slot.lock().unwrap() = None;
}

#[test]
fn a_dropped_pump_stops_and_another_goes_on() {
    let net = SimNet::new(SimConfig::seeded(1));
    let (a, b) = (Node::new(&net, "a"), Node::new(&net, "b"));
    drop(net.spawn_pump());
    let link = a.transport.connect("b", SECOND).unwrap();
    std::thread::sleep(5 * MILLI);
    assert!(a.take().is_empty() && b.take().is_empty());
    let before = net.now();
    std::thread::sleep(MILLI);
    assert_eq!(net.now(), before, "virtual time stands still");
    let _pump = net.spawn_pump();
    wait_until(|| !a.log.lock().unwrap().is_empty());
    a.transport.close_link(link);
}

#[test]
fn many_threads_may_post() {
    let bed = Bed::ready(SimConfig::seeded(1));
    let _pump = bed.net.spawn_pump();
    std::thread::scope(|scope| {
        for block in 0..8 {
            let bed = &bed;
            scope.spawn(move || {
                bed.write([L0, L1][block as usize % 2], u64::from(block), block..block + 1)
            });
        }
    });
    wait_until(|| bed.a.log.lock().unwrap().len() == 8);
    assert_eq!(bed.landed().len(), 8);
    assert!(bed.digests_agree());
    assert!(bed.completions().iter().all(|done| done.1 == OK));
}
