//! Strangers: garbage, silence, wrong secrets.

use std::io::Write as _;
use std::net::TcpStream;
use std::time::Duration;

use super::rig::*;
use crate::transport::tcp::TcpConfig;
use crate::transport::tcp::preamble::{PREAMBLE_LEN, Preamble, Reply, Secret};
use crate::transport::{Event, LaneRole, LinkId, MAX_CONTROL_LEN, Transport};

fn knock(address: &str, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(GUARD)).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

#[test]
fn garbage_is_dropped_and_counted() {
    let b = side(listening());
    let mut version = Preamble::Control.encode();
    version[4] = 9;
    let mut browser = b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n".to_vec();
    browser.resize(PREAMBLE_LEN, b'\n');
    for bytes in [&[0; PREAMBLE_LEN][..], &version, &browser] {
        assert!(is_closed(&mut knock(&b.address(), bytes)));
    }
    // Closed in the middle of a preamble.
    drop(knock(&b.address(), &version[..20]));
    eventually(|| b.transport.counters().garbage_preambles == 4);
    let peer = ByHand::link(&b);
    let mut long = (MAX_CONTROL_LEN as u32 + 1).to_le_bytes().to_vec();
    long.extend([0; 100]);
    (&peer.control).write_all(&long).unwrap();
    b.expect(|event| matches!(event, Event::LinkDown { .. }).then_some(()));
    assert_eq!(b.transport.counters().control_malformed, 1);
    b.nothing_waits();
}

#[test]
fn silent_connections_are_bounded_and_disturb_nobody() {
    let config = TcpConfig { max_half_open: 4, ..listening() };
    let (a, b, at_a, _) = linked(TcpConfig::default(), config);
    let mut silent: Vec<TcpStream> = (0..40).map(|_| knock(&b.address(), b"SLFT")).collect();
    // The oldest went first, all but the last four.
    for stream in &mut silent[..36] {
        assert!(is_closed(stream));
    }
    eventually(|| b.transport.counters().half_open_evicted == 36);
    a.transport.send_control(at_a, b"still here").unwrap();
    b.expect(|event| matches!(event, Event::Control { .. }).then_some(()));
    // And a newcomer that speaks gets in.
    a.transport.connect(&b.address(), GUARD).unwrap();
    a.link_up();
    b.link_up();
    drop(silent);
}

#[test]
fn silence_has_a_deadline() {
    let b = side(TcpConfig { handshake_timeout: Duration::from_millis(50), ..listening() });
    let mut silent = knock(&b.address(), b"SL");
    assert!(is_closed(&mut silent));
    eventually(|| b.transport.counters().half_open_expired == 1);
}

#[test]
fn only_the_right_secret_opens_a_lane_and_only_once() {
    let b = side(listening());
    let peer = ByHand::link(&b);
    let right = peer.expected(&b, LANE, LaneRole::Reader);
    let Preamble::Lane { link, lane, dialler, secret } = right else { unreachable!() };
    let wrong = Secret::new().unwrap();
    let forged = [
        Preamble::Lane { link, lane, dialler, secret: wrong },
        Preamble::Lane { link, lane, dialler: LaneRole::Reader, secret },
        Preamble::Lane { link: LinkId(link.0 + 1), lane, dialler, secret },
    ];
    for (tries, preamble) in forged.iter().enumerate() {
        let mut stream = dial(&peer.address, preamble);
        assert!(matches!(reply(&mut stream), Some(Reply::Refused)));
        assert_eq!(b.transport.counters().lanes_refused, tries as u64 + 1);
    }
    b.nothing_waits();
    let mut stream = dial(&peer.address, &right);
    assert!(matches!(reply(&mut stream), Some(Reply::Welcome(_))));
    b.lane_up();
    let mut second = dial(&peer.address, &right);
    assert!(matches!(reply(&mut second), Some(Reply::Refused)));
    b.nothing_waits();
}

#[test]
fn whoever_answers_a_dialled_lane_must_know_its_secret() {
    // The listener is played by hand, and answers with zeros.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let a = side(TcpConfig::default());
    let link = a.transport.connect(&listener.local_addr().unwrap().to_string(), GUARD).unwrap();
    let (mut control, _) = listener.accept().unwrap();
    control.write_all(&Reply::LINK.encode()).unwrap();
    assert_eq!(a.link_up(), link);
    let params = a.transport.prepare_lane(link, LANE, LaneRole::Writer).unwrap();
    let mut theirs = params.clone();
    theirs[6] = 1;
    a.transport.start_lane(link, LANE, LaneRole::Writer, &theirs, GUARD).unwrap();
    let (mut lane, _) = listener.accept().unwrap();
    lane.write_all(&Reply::LINK.encode()).unwrap();
    assert!(a.lane_down().contains("secret"));
}
