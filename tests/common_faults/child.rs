//! A node in a process of its own, served over stdin and stdout.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use sealift::engine::{Lease, Peer, ReceiveHandle, SealedPages};

use super::node::{Node, Sending, Spec, cause};
use super::{HANG, memory, process};

const SPEC: &str = "SEALIFT_TEST_NODE";
/// Marks replies: the test harness writes to stdout too.
const MARK: &str = "node: ";

/// The other process. Killed when it is dropped, and by the kernel when this process dies.
pub(crate) struct Child {
    process: std::process::Child,
    stdin: Option<ChildStdin>,
    replies: Receiver<String>,
    reader: Option<JoinHandle<()>>,
    pub(crate) address: String,
}

impl Child {
    pub(crate) fn start(spec: &Spec) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "role_entry", "--nocapture", "--test-threads=1"])
            .env(SPEC, spec.to_line())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // SAFETY: `prctl` with these arguments is async-signal-safe and allocates nothing.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            })
        };
        let mut process = command.spawn().unwrap();
        let stdin = process.stdin.take();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let (sender, replies) = channel();
        let read = move || {
            for line in stdout.lines() {
                let Ok(line) = line else { return };
                if let Some(reply) = line.strip_prefix(MARK) {
                    // A test that has failed reads no more.
                    let _ = sender.send(reply.to_owned());
                }
            }
        };
        let reader = Some(std::thread::spawn(read));
        let mut child = Child { process, stdin, replies, reader, address: String::new() };
        child.address = child.reply();
        child
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.rsplit(':').next().unwrap().parse().unwrap()
    }

    /// Asks without waiting for the reply.
    pub(crate) fn tell(&mut self, command: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    pub(crate) fn reply(&mut self) -> String {
        self.replies.recv_timeout(HANG * 2).expect("the child replies")
    }

    pub(crate) fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.reply()
    }

    /// Asks for what can only go well.
    pub(crate) fn must(&mut self, command: &str) {
        let reply = self.ask(command);
        assert_eq!(reply, "ok", "the child on {command:?}");
    }

    pub(crate) fn signal(&self, signal: i32) {
        process::signal(self.pid(), signal);
    }

    /// `kill -9`, and gone when this returns.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// What `role_entry` does: nothing, unless this process is a child.
pub(crate) fn serve() {
    let Ok(spec) = std::env::var(SPEC) else { return };
    let mut served = Served::new(Node::start(&Spec::from_line(&spec)));
    // The harness may have begun a line.
    println!("\n{MARK}{}", served.node.address());
    for line in std::io::stdin().lines() {
        let Ok(line) = line else { break };
        let words: Vec<&str> = line.split(' ').collect();
        println!("{MARK}{}", served.act(&words));
    }
    std::process::exit(0);
}

struct Served {
    node: Node,
    peer: Option<Peer>,
    sending: Option<Sending>,
    receiving: Option<ReceiveHandle<SealedPages>>,
    sealed: Option<SealedPages>,
    lease: Option<Lease>,
}

fn number<T: std::str::FromStr>(word: &str) -> T {
    word.parse().ok().unwrap_or_else(|| panic!("not a number: {word}"))
}

impl Served {
    fn new(node: Node) -> Served {
        Served { node, peer: None, sending: None, receiving: None, sealed: None, lease: None }
    }

    fn act(&mut self, words: &[&str]) -> String {
        let node = &self.node;
        let millis = |word: &str| Duration::from_millis(number(word));
        match *words {
            ["fill", byte] => node.fill(number(byte)),
            ["connect", address] => self.peer = Some(node.connect(address)),
            ["send", label, pages, deadline] => {
                let sending = node.send(number(label), number(pages), millis(deadline));
                self.sending = Some(sending);
            }
            ["send_slowly", label, pages, deadline] => {
                let sending = node.send_slowly(number(label), number(pages), millis(deadline));
                self.sending = Some(sending);
            }
            ["receive", label, pages, deadline] => {
                let peer = self.peer.as_ref().unwrap();
                let (label, pages) = (number(label), number(pages));
                self.receiving = Some(node.receive(peer, label, pages, millis(deadline)));
            }
            ["outcome"] => return self.outcome(),
            ["check", byte] if memory::is_all(&node.region, number(byte)) => {}
            ["free"] => node.wait_all_free(),
            ["canary", byte] => {
                self.lease = Some(node.pool.claim(&node.all_pages()).unwrap());
                node.fill(number(byte));
            }
            ["release"] => (self.lease, self.sealed) = (None, None),
            ["health"] if node.engine.health().is_ok() => {}
            ["processor"] => return process::processor_time().as_micros().to_string(),
            _ => return format!("refused: {words:?}"),
        }
        "ok".into()
    }

    /// Waits for the end of the send or receive: `ok`, or the name of the cause.
    fn outcome(&mut self) -> String {
        let result = match (self.sending.take(), self.receiving.take()) {
            (Some(sending), None) => sending.wait().result,
            (None, Some(receiving)) => receiving.wait().map(|sealed| self.sealed = Some(sealed)),
            _ => return "refused: one transfer at a time".into(),
        };
        result.err().map_or("ok".into(), |error| cause(&error))
    }
}
