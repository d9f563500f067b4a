//! Links and control frames.

use std::io::Read as _;
use std::time::Duration;

use super::rig::*;
use crate::transport::tcp::TcpConfig;
use crate::transport::{Event, LinkId, MAX_CONTROL_LEN, Transport, TransportError};

fn frame_of(side: &Side) -> (LinkId, Vec<u8>) {
    side.expect(|event| match event {
        Event::Control { link, frame } => Some((*link, frame.clone())),
        _ => None,
    })
}

fn link_down(side: &Side) -> (LinkId, String) {
    side.expect(|event| match event {
        Event::LinkDown { link, why } => Some((*link, why.clone())),
        _ => None,
    })
}

#[test]
fn frames_of_every_length_go_both_ways_in_order() {
    let (a, b, at_a, at_b) = linked(TcpConfig::default(), listening());
    let lens = [0, 1, 3, 4, 5, 4096, MAX_CONTROL_LEN - 1, MAX_CONTROL_LEN];
    for &len in &lens {
        a.transport.send_control(at_a, &vec![len as u8; len]).unwrap();
        b.transport.send_control(at_b, &vec![!len as u8; len]).unwrap();
    }
    for &len in &lens {
        assert_eq!(frame_of(&b), (at_b, vec![len as u8; len]));
        assert_eq!(frame_of(&a), (at_a, vec![!len as u8; len]));
    }
    let long = a.transport.send_control(at_a, &vec![0; MAX_CONTROL_LEN + 1]);
    assert_eq!(long, Err(TransportError::ControlTooLong { len: MAX_CONTROL_LEN + 1 }));
}

#[test]
fn a_closed_link_goes_down_once_on_both_sides_after_its_last_words() {
    let (a, b, at_a, at_b) = linked(TcpConfig::default(), listening());
    a.transport.send_control(at_a, b"last words").unwrap();
    a.transport.close_link(at_a);
    a.transport.close_link(at_a);
    assert_eq!(link_down(&a).0, at_a);
    assert_eq!(frame_of(&b).1, b"last words");
    assert_eq!(link_down(&b).0, at_b);
    assert_eq!(a.transport.send_control(at_a, b"x"), Err(TransportError::NoLink(at_a)));
    assert_eq!(b.transport.send_control(at_b, b"x"), Err(TransportError::NoLink(at_b)));
    // Another link comes up on the same transports, and nothing was reported twice.
    let again = a.transport.connect(&b.address(), GUARD).unwrap();
    assert_ne!(again, at_a);
    assert_eq!(a.link_up(), again);
    b.link_up();
}

#[test]
fn a_dial_that_fails_says_so_in_time() {
    let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = dead.local_addr().unwrap().to_string();
    let a = side(TcpConfig::default());
    let link = a.transport.connect(&address, Duration::from_millis(100)).unwrap();
    let (down, why) = link_down(&a);
    assert_eq!(down, link);
    assert!(why.contains("timed out"), "nobody answers the preamble: {why}");
    drop(dead);
    let link = a.transport.connect(&address, GUARD).unwrap();
    let (down, why) = link_down(&a);
    assert_eq!(down, link);
    assert!(why.contains("refused"), "{why}");
    for bad in ["nonsense", "host:0", "host:1-2", "host:99999", ":1"] {
        let refused = a.transport.connect(bad, GUARD);
        assert!(matches!(refused, Err(TransportError::Address { .. })), "{bad}: {refused:?}");
    }
}

#[test]
fn names_are_looked_up() {
    let b = side(listening());
    let a = side(TcpConfig::default());
    let port = b.address().rsplit_once(':').unwrap().1.to_owned();
    let link = a.transport.connect(&format!("localhost:{port}"), GUARD).unwrap();
    assert_eq!(a.link_up(), link);
    b.link_up();
    let link = a.transport.connect("no-such-host.invalid:1", GUARD).unwrap();
    assert_eq!(link_down(&a).0, link);
}

#[test]
fn a_peer_that_does_not_read_makes_the_queue_full_and_nothing_more() {
    let config = TcpConfig { control_queue_bytes: 256 * 1024, ..listening() };
    let b = side(config);
    let mut peer = ByHand::link(&b);
    let frame = vec![7; MAX_CONTROL_LEN];
    let mut sent = 0u64;
    let refused = loop {
        match b.transport.send_control(peer.link, &frame) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    let TransportError::Congested { queued } = refused else { panic!("{refused:?}") };
    assert!(queued <= 256 * 1024);
    // What was taken arrives, all of it, once the peer reads.
    let mut bytes = vec![0; 4 + MAX_CONTROL_LEN];
    for _ in 0..sent {
        peer.control.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes[..4], (MAX_CONTROL_LEN as u32).to_le_bytes());
    }
    eventually(|| b.transport.send_control(peer.link, &frame).is_ok());
    b.nothing_waits();
}

#[test]
fn links_past_the_limit_are_refused_on_both_ends() {
    let (a, b, _, _) = linked(
        TcpConfig { max_links: 2, ..TcpConfig::default() },
        TcpConfig { max_links: 1, ..listening() },
    );
    let second = a.transport.connect(&b.address(), GUARD).unwrap();
    let (down, why) = link_down(&a);
    assert_eq!(down, second);
    assert!(why.contains("no more links"), "{why}");
    assert_eq!(b.transport.counters().links_refused, 1);
    let a_full = side(TcpConfig { max_links: 1, ..TcpConfig::default() });
    a_full.transport.connect(&b.address(), GUARD).unwrap();
    let refused = a_full.transport.connect(&b.address(), GUARD);
    assert!(matches!(refused, Err(TransportError::System { .. })), "{refused:?}");
}
