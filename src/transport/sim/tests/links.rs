//! Control connections and what can befall them.

use super::*;
use crate::transport::{MAX_CONTROL_LEN, TransportError};

fn bed() -> Bed {
    Bed::new(SimConfig::seeded(1))
}

fn send(bed: &Bed, frames: &[&str]) {
    for frame in frames {
        bed.a.transport.send_control(bed.la, frame.as_bytes()).unwrap();
    }
}

fn received(bed: &Bed) -> Vec<String> {
    drain(&bed.net);
    bed.b.frames().into_iter().map(|frame| String::from_utf8(frame).unwrap()).collect()
}

#[test]
fn frames_come_in_order_both_ways() {
    for seed in 0..50 {
        let bed = Bed::new(SimConfig::seeded(seed));
        send(&bed, &["1", "2", "3"]);
        bed.b.transport.send_control(bed.lb, b"back").unwrap();
        assert_eq!(received(&bed), ["1", "2", "3"]);
        assert_eq!(bed.a.frames(), [b"back"]);
    }
}

#[test]
fn a_listener_that_speaks_first_is_heard_after_link_up() {
    for seed in 0..50 {
        let net = SimNet::new(SimConfig::seeded(seed));
        let (a, b) = (Node::new(&net, "a"), Node::new(&net, "b"));
        a.transport.connect("b", SECOND).unwrap();
        let up = loop {
            net.step();
            if let Some(Event::LinkUp { link, .. }) = b.take().pop() {
                break link;
            }
        };
        b.transport.send_control(up, b"hello").unwrap();
        drain(&net);
        let heard = a.take();
        assert!(matches!(heard[..], [Event::LinkUp { .. }, Event::Control { .. }]), "{heard:?}");
    }
}

#[test]
fn a_dial_to_nobody_goes_down() {
    let net = SimNet::new(SimConfig::seeded(1));
    let a = Node::new(&net, "a");
    let link = a.transport.connect("b", SECOND).unwrap();
    drain(&net);
    assert!(matches!(&a.take()[..], [Event::LinkDown { link: l, .. }] if *l == link));
    assert_eq!(a.transport.send_control(link, b""), Err(TransportError::NoLink(link)));
    assert!(matches!(a.transport.connect("", SECOND), Err(TransportError::Address { .. })));
}

#[test]
fn a_dial_that_nobody_answers_ends_in_time_at_both_ends() {
    let net = SimNet::new(SimConfig::seeded(1));
    let (a, b) = (Node::new(&net, "a"), Node::new(&net, "b"));
    assert!(net.pause("b"));
    a.transport.connect("b", SECOND).unwrap();
    net.advance(SECOND - MILLI);
    assert!(a.take().is_empty());
    net.advance(2 * MILLI);
    assert!(matches!(a.take()[..], [Event::LinkDown { .. }]));
    net.resume("b");
    drain(&net);
    assert!(b.take().is_empty(), "it never heard of the link, and needs no news of its end");
}

#[test]
fn frames_are_dropped_doubled_and_overtaken() {
    let bed = bed();
    bed.net.inject(Fault::DropControl, Filter::any().from("a").nth(1));
    bed.net.inject(Fault::DropControl, Filter::any().from("b"));
    send(&bed, &["1", "2", "3"]);
    assert_eq!(received(&bed), ["1", "3"]);

    bed.net.inject(Fault::DuplicateControl, Filter::any().link(bed.lb).times(1));
    send(&bed, &["1", "2"]);
    assert_eq!(received(&bed), ["1", "1", "2"]);

    bed.net.inject(Fault::DelayControl(MILLI), Filter::any().to("b").times(1));
    send(&bed, &["1", "2", "3"]);
    assert_eq!(received(&bed), ["2", "3", "1"]);

    for kind in [FaultKind::DropControl, FaultKind::DuplicateControl, FaultKind::DelayControl] {
        assert_eq!(bed.count(kind), 1, "{kind:?}");
    }
}

#[test]
fn held_frames_keep_their_order_and_those_behind_them() {
    let bed = bed();
    send(&bed, &["1"]);
    bed.net.hold_control(Filter::any().from("a").skip(1).times(1));
    send(&bed, &["2", "3"]);
    assert_eq!(received(&bed), ["1"], "frames on the way are held too");
    bed.net.release_control();
    send(&bed, &["4"]);
    assert_eq!(received(&bed), ["2", "3", "4"]);
    assert_eq!(bed.count(FaultKind::HoldControl), 1);
}

#[test]
fn a_withdrawn_fault_hits_no_more() {
    let bed = bed();
    let fault = bed.net.inject(Fault::DropControl, Filter::any());
    send(&bed, &["1"]);
    assert!(bed.net.withdraw(fault));
    assert!(!bed.net.withdraw(fault));
    send(&bed, &["2"]);
    assert_eq!(received(&bed), ["2"]);
}

#[test]
fn too_long_and_too_many_are_refused() {
    let bed = Bed::new(SimConfig { control_queue_limit: 10, ..SimConfig::seeded(1) });
    let a = &bed.a.transport;
    let long = vec![0; MAX_CONTROL_LEN + 1];
    let len = long.len();
    assert_eq!(a.send_control(bed.la, &long), Err(TransportError::ControlTooLong { len }));
    send(&bed, &["123456"]);
    assert_eq!(a.send_control(bed.la, b"12345"), Err(TransportError::Congested { queued: 6 }));
    assert_eq!(received(&bed), ["123456"]);
    send(&bed, &["12345"]);
}

#[test]
fn what_was_sent_before_a_close_comes_and_both_ends_hear_once() {
    for seed in 0..50 {
        let bed = Bed::new(SimConfig::seeded(seed));
        send(&bed, &["last"]);
        bed.a.transport.close_link(bed.la);
        bed.a.transport.close_link(bed.la);
        assert_eq!(bed.a.transport.send_control(bed.la, b""), Err(TransportError::NoLink(bed.la)));
        drain(&bed.net);
        assert!(matches!(bed.a.take()[..], [Event::LinkDown { .. }]));
        assert!(matches!(bed.b.take()[..], [Event::Control { .. }, Event::LinkDown { .. }]));
    }
}

#[test]
fn a_link_of_another_endpoint_is_no_link() {
    let bed = bed();
    assert!(bed.a.transport.send_control(bed.lb, b"").is_err());
    bed.a.transport.close_link(bed.lb);
    drain(&bed.net);
    assert!(bed.b.take().is_empty());
}

#[test]
fn a_cut_loses_frames_and_both_ends_notice() {
    let bed = bed();
    send(&bed, &["lost"]);
    assert_eq!(bed.net.cut(&Filter::any().from("x")), 0);
    assert_eq!(bed.net.cut(&Filter::any().from("b").to("a")), 1);
    assert_eq!(bed.net.cut(&Filter::any()), 0, "it is cut already");
    drain(&bed.net);
    assert!(matches!(bed.a.take()[..], [Event::LinkDown { .. }]));
    assert!(matches!(bed.b.take()[..], [Event::LinkDown { .. }]));
    assert_eq!(bed.count(FaultKind::CutLink), 1);
}

#[test]
fn a_crash_is_silent_and_the_name_is_free() {
    let bed = bed();
    bed.b.transport.send_control(bed.lb, b"left before").unwrap();
    assert!(bed.net.crash("b"));
    assert!(!bed.net.crash("b"));
    assert!(bed.b.transport.send_control(bed.lb, b"").is_err());
    bed.b.transport.close_link(bed.lb);
    bed.b.transport.shutdown();
    send(&bed, &["into the void"]);
    drain(&bed.net);
    assert_eq!(bed.a.frames(), [b"left before"]);
    assert!(bed.b.take().is_empty());
    assert_eq!(bed.count(FaultKind::Crash), 1);

    let again = Node::new(&bed.net, "b");
    let link = bed.a.transport.connect("b", SECOND).unwrap();
    assert_ne!(link, bed.la);
    drain(&bed.net);
    assert!(matches!(bed.a.take()[..], [Event::LinkUp { .. }]));
    assert!(matches!(again.take()[..], [Event::LinkUp { .. }]));
    assert!(bed.b.take().is_empty());
}

#[test]
fn a_paused_endpoint_hears_nothing_until_it_resumes_in_order() {
    let bed = bed();
    assert!(bed.net.pause("b"));
    send(&bed, &["1", "2"]);
    assert_eq!(received(&bed), [""; 0]);
    send(&bed, &["3"]);
    assert!(bed.net.resume("b"));
    assert_eq!(received(&bed), ["1", "2", "3"]);
    assert_eq!(bed.count(FaultKind::Pause), 1);
    assert!(!bed.net.pause("nobody"));
}

#[test]
fn call_number_k_fails_and_does_nothing() {
    let bed = bed();
    let error = TransportError::System { what: "test", why: "asked for".into() };
    let fail = |call| Fault::FailCall(call, error.clone());
    bed.net.inject(fail(CallKind::SendControl), Filter::any().from("a").nth(1));
    bed.net.inject(fail(CallKind::Connect), Filter::any().to("b").times(1));
    bed.net.inject(fail(CallKind::PrepareLane), Filter::any().lane(L0).times(1));
    bed.net.inject(fail(CallKind::StartLane), Filter::any().lane_index(0).times(1));
    send(&bed, &["1"]);
    let (a, b) = (&bed.a.transport, &bed.b.transport);
    assert_eq!(a.send_control(bed.la, b"2"), Err(error.clone()));
    send(&bed, &["3"]);
    assert_eq!(received(&bed), ["1", "3"]);
    assert_eq!(a.connect("b", SECOND), Err(error.clone()));
    assert_eq!(b.prepare_lane(bed.lb, L0, LaneRole::Reader), Err(error.clone()));
    let of_b = b.prepare_lane(bed.lb, L0, LaneRole::Reader).unwrap();
    let of_a = a.prepare_lane(bed.la, L0, LaneRole::Writer).unwrap();
    let start = || a.start_lane(bed.la, L0, LaneRole::Writer, &of_b, SECOND);
    assert_eq!(start(), Err(error.clone()));
    start().unwrap();
    b.start_lane(bed.lb, L0, LaneRole::Reader, &of_a, SECOND).unwrap();
    drain(&bed.net);
    assert!(matches!(bed.a.take()[..], [Event::LaneUp { .. }]));
    for kind in [
        FaultKind::FailConnect,
        FaultKind::FailSendControl,
        FaultKind::FailPrepareLane,
        FaultKind::FailStartLane,
    ] {
        assert_eq!(bed.count(kind), 1, "{kind:?}");
    }
}

#[test]
fn a_shutdown_says_goodbye() {
    let bed = Bed::ready(SimConfig::seeded(1));
    bed.a.transport.shutdown();
    bed.a.transport.shutdown();
    drain(&bed.net);
    let down = |node: &Node| {
        node.take().iter().filter(|event| matches!(event, Event::LinkDown { .. })).count()
    };
    assert_eq!((down(&bed.a), down(&bed.b)), (1, 1));
    assert!(bed.a.transport.connect("b", SECOND).is_err());
    assert!(!bed.net.pause("a"), "the name is free");
}

#[test]
fn a_dial_to_one_that_shuts_down_is_ended() {
    let net = SimNet::new(SimConfig::seeded(1));
    let (a, b) = (Node::new(&net, "a"), Node::new(&net, "b"));
    a.transport.connect("b", SECOND).unwrap();
    b.transport.shutdown();
    drain(&net);
    assert!(matches!(a.take()[..], [Event::LinkDown { .. }]));
    assert!(b.take().is_empty());
    assert!(net.now() < crate::protocol::Time(0).after(SECOND), "no need to wait");
}
