//! The bench between two network namespaces joined by a veth pair: two hosts, as far as the kernel's
//! TCP is concerned. Needs root and `ip`; without them the test says what is missing, and returns.
#![cfg(feature = "cli")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SEALIFT: &str = env!("CARGO_BIN_EXE_sealift");
const PREFILL: &str = "10.203.7.1";
const DECODE: &str = "10.203.7.2";

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output().map_err(|why| format!("ip: {why}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("ip {}: {}", args.join(" "), said.trim()))
}

/// Two namespaces of this process, deleted when this is dropped.
struct Namespaces {
    prefill: String,
    decode: String,
}

impl Namespaces {
    fn make() -> Result<Namespaces, String> {
        let id = std::process::id();
        let made = Namespaces { prefill: format!("sl-p-{id}"), decode: format!("sl-d-{id}") };
        let (prefill, decode) = (&made.prefill, &made.decode);
        let (near, far) = (format!("slp{id}"), format!("sld{id}"));
        ip(&["netns", "add", prefill])?;
        ip(&["netns", "add", decode])?;
        ip(&["-n", prefill, "link", "add", &near, "type", "veth", "peer", "name", &far])?;
        ip(&["-n", prefill, "link", "set", &far, "netns", decode])?;
        for (space, link, address) in [(prefill, &near, PREFILL), (decode, &far, DECODE)] {
            ip(&["-n", space, "address", "add", &format!("{address}/24"), "dev", link])?;
            ip(&["-n", space, "link", "set", link, "up"])?;
        }
        Ok(made)
    }

    fn bench(&self, space: &str, args: &[&str]) -> Running {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", space, SEALIFT, "bench"]).args(args);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        Running(child.expect("ip netns exec starts"))
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        // With its namespace goes each end of the pair.
        for space in [&self.prefill, &self.decode] {
            let _ = ip(&["netns", "delete", space]);
        }
    }
}

/// A process that ends with the test: `ip netns exec` becomes the program, so the id is its own.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn two_hosts_move_and_verify_every_byte() {
    let spaces = match Namespaces::make() {
        Ok(spaces) => spaces,
        Err(missing) => return println!("SKIPPED: {missing}"),
    };
    let listen = format!("{PREFILL}:7777");
    let mut serve = spaces.bench(&spaces.prefill, &["serve", "--listen", &listen]);
    let mut line = String::new();
    BufReader::new(serve.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.trim_end().ends_with(&listen), "{line}");

    let args = ["run", "--peer", &listen, "--preset", "llama-3.1-8b", "--tokens", "8192"];
    let mut run = spaces.bench(&spaces.decode, &[&args[..], &["--requests", "2"]].concat());
    let mut stdout = run.0.stdout.take().unwrap();
    let report = std::thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map(|_| text)
    });
    let until = Instant::now() + Duration::from_secs(180);
    let status = loop {
        if let Some(status) = run.0.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < until, "the run takes too long");
        std::thread::sleep(Duration::from_millis(50));
    };
    let report = report.join().unwrap().unwrap();
    println!("{report}");
    assert!(status.success(), "{status}");
    assert!(report.trim_end().ends_with("verified: all bytes"), "{report}");
}
