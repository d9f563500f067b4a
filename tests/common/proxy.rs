//! A TCP proxy inside the process that spoils what passes: it knows control links from lanes by
//! their preamble, and writes from markers by their header.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use sealift::transport::LaneRole;
use sealift::transport::tcp::frame::{FIXED_LEN, Header, RANGE_LEN, parse_header};
use sealift::transport::tcp::preamble::{PREAMBLE_LEN, Preamble, REPLY_LEN};

/// Connections that one proxy carries in its life; more are a runaway test.
const MAX_CONNECTIONS: usize = 256;
/// How often a pump looks whether it is to end.
const TICK: Duration = Duration::from_millis(10);

/// What happens to one write.
#[derive(Clone, Copy, Debug)]
pub enum Tamper {
    /// One bit of its payload is flipped.
    FlipBit,
    /// Its first two blocks change places.
    SwapBlocks { len: usize },
    /// Half of it passes, then both ends of its lane are reset.
    Reset,
}

#[derive(Default)]
struct Plan {
    hold_lanes: bool,
    hold_words: bool,
    tamper: Option<(Tamper, u64)>,
}

struct Shared {
    target: SocketAddr,
    plan: Mutex<Plan>,
    changed: Condvar,
    stop: AtomicBool,
    cuts: AtomicU64,
    tampered: AtomicUsize,
}

/// See the module. Dropping it cuts everything.
pub struct Proxy {
    shared: Arc<Shared>,
    address: String,
    acceptor: Option<JoinHandle<()>>,
}

impl Proxy {
    pub fn to(target: &str) -> Proxy {
        let shared = Arc::new(Shared {
            target: target.parse().unwrap(),
            plan: Mutex::default(),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            cuts: AtomicU64::new(0),
            tampered: AtomicUsize::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let seen = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || accept(&listener, &seen));
        Proxy { shared, address, acceptor: Some(acceptor) }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn hold_lanes(&self, hold: bool) {
        self.change(|plan| plan.hold_lanes = hold);
    }

    pub fn hold_words(&self, hold: bool) {
        self.change(|plan| plan.hold_words = hold);
    }

    /// Spoils one write, after so many others.
    pub fn tamper(&self, tamper: Tamper, after: u64) {
        self.change(|plan| plan.tamper = Some((tamper, after)));
    }

    pub fn tampered(&self) -> usize {
        self.shared.tampered.load(Ordering::SeqCst)
    }

    /// Resets every connection that there is now.
    pub fn cut(&self) {
        self.shared.cuts.fetch_add(1, Ordering::SeqCst);
        self.shared.changed.notify_all();
    }

    fn change(&self, change: impl FnOnce(&mut Plan)) {
        change(&mut self.shared.plan.lock().unwrap());
        self.shared.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.changed.notify_all();
        // Wakes the acceptor.
        let _ = TcpStream::connect(&self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut threads = Vec::new();
    for client in listener.incoming().take(MAX_CONNECTIONS) {
        if shared.stop.load(Ordering::SeqCst) {
            break;
        }
        let (Ok(client), shared) = (client, Arc::clone(shared)) else { continue };
        // An end that goes away is what these tests are about: the connection ends, no more.
        threads.push(std::thread::spawn(move || drop(Connection::serve(&shared, client))));
    }
    threads.into_iter().for_each(|thread| drop(thread.join()));
}

struct Connection<'a> {
    shared: &'a Shared,
    client: TcpStream,
    server: TcpStream,
    cuts: u64,
    over: AtomicBool,
}

impl Connection<'_> {
    fn serve(shared: &Shared, mut client: TcpStream) -> io::Result<()> {
        let cuts = shared.cuts.load(Ordering::SeqCst);
        client.set_read_timeout(Some(super::check::GUARD))?;
        let mut preamble = [0; PREAMBLE_LEN];
        client.read_exact(&mut preamble)?;
        let mut server = TcpStream::connect(shared.target)?;
        server.write_all(&preamble)?;
        for stream in [&client, &server] {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(TICK))?;
        }
        let kind = Preamble::decode(&preamble);
        let read_by_dialler = matches!(kind, Ok(Preamble::Lane { dialler: LaneRole::Reader, .. }));
        let is_control = matches!(kind, Ok(Preamble::Control));
        let connection = Connection { shared, client, server, cuts, over: AtomicBool::new(false) };
        std::thread::scope(|scope| {
            scope.spawn(|| connection.end(connection.upwards(is_control)));
            match read_by_dialler {
                true => connection.end(connection.frames()),
                false => connection.end(connection.downwards()),
            }
        });
        for stream in [&connection.client, &connection.server] {
            // The last handle closes with a reset, not with a polite end of stream.
            socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO))?;
        }
        Ok(())
    }

    fn end(&self, _: io::Result<()>) {
        self.over.store(true, Ordering::SeqCst);
        self.shared.changed.notify_all();
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
            || self.shared.stop.load(Ordering::SeqCst)
            || self.shared.cuts.load(Ordering::SeqCst) != self.cuts
    }

    fn check(&self) -> io::Result<()> {
        if self.is_over() { Err(ErrorKind::ConnectionReset.into()) } else { Ok(()) }
    }

    /// Waits while the plan says so.
    fn pass(&self, holds: impl Fn(&Plan) -> bool) -> io::Result<()> {
        let mut plan = self.shared.plan.lock().unwrap();
        while holds(&plan) {
            self.check()?;
            plan = self.shared.changed.wait_timeout(plan, TICK).unwrap().0;
        }
        self.check()
    }

    fn some(&self, mut from: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.check()?;
            match from.read(buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => return Ok(count),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn all(&self, from: &TcpStream, buffer: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            filled += self.some(from, &mut buffer[filled..])?;
        }
        Ok(())
    }

    fn upwards(&self, is_control: bool) -> io::Result<()> {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let count = self.some(&self.client, &mut buffer)?;
            self.pass(|plan| plan.hold_words && is_control)?;
            (&self.server).write_all(&buffer[..count])?;
        }
    }

    fn downwards(&self) -> io::Result<()> {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let count = self.some(&self.server, &mut buffer)?;
            (&self.client).write_all(&buffer[..count])?;
        }
    }

    /// A lane that the dialler reads: frame by frame.
    fn frames(&self) -> io::Result<()> {
        let mut reply = [0; REPLY_LEN];
        self.all(&self.server, &mut reply)?;
        (&self.client).write_all(&reply)?;
        loop {
            let mut frame = vec![0; FIXED_LEN];
            self.all(&self.server, &mut frame)?;
            let mut start = FIXED_LEN;
            if frame[0] == 1 {
                start += usize::from(u16::from_le_bytes([frame[2], frame[3]])) * RANGE_LEN;
                frame.resize(start, 0);
                self.all(&self.server, &mut frame[FIXED_LEN..])?;
            }
            let header = parse_header(&frame).map_err(|_| ErrorKind::InvalidData)?;
            let mut reset = false;
            if let Some((Header::Write { payload, .. }, _)) = header {
                frame.resize(start + payload as usize, 0);
                self.all(&self.server, &mut frame[start..])?;
                reset = self.spoil(&mut frame, start);
            }
            self.pass(|plan| plan.hold_lanes)?;
            if reset {
                (&self.client).write_all(&frame[..start + (frame.len() - start) / 2])?;
                return Err(ErrorKind::ConnectionReset.into());
            }
            (&self.client).write_all(&frame)?;
        }
    }

    /// Spoils the write whose payload begins at `start`, if it is its turn. `true` to reset.
    fn spoil(&self, frame: &mut [u8], start: usize) -> bool {
        let mut plan = self.shared.plan.lock().unwrap();
        let Some((tamper, after)) = &mut plan.tamper else { return false };
        if *after > 0 {
            *after -= 1;
            return false;
        }
        let tamper = *tamper;
        let payload = &mut frame[start..];
        match tamper {
            Tamper::SwapBlocks { len } if payload.len() < 2 * len => return false,
            Tamper::SwapBlocks { len } => {
                let (left, right) = payload.split_at_mut(len);
                left.swap_with_slice(&mut right[..len]);
            }
            Tamper::FlipBit => payload[payload.len() / 2] ^= 0x10,
            Tamper::Reset => {}
        }
        plan.tamper = None;
        self.shared.tampered.fetch_add(1, Ordering::SeqCst);
        matches!(tamper, Tamper::Reset)
    }
}
