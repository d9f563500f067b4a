//! The other end of a plain `sealift bench`: this program again, which dies with its parent.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// What `serve` says before its address, in the first line of its output.
pub(super) const LISTENING: &str = "listening on ";

/// How long starting, and ending, may take.
const SOON: Duration = Duration::from_secs(10);

/// A `serve` of ours. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Serve {
    child: Child,
    pub(super) address: String,
}

impl Serve {
    /// Starts it on loopback.
    pub(super) fn start() -> Result<Serve> {
        let program = std::env::current_exe().context("finding this program")?;
        let mut child = Command::new(program)
            .args(["bench", "serve", "--listen", "127.0.0.1:0", "--until-stdin-closes"])
            // This end decided already that the memory is there.
            .args(["--memory-limit", &(1u64 << 40).to_string()])
            // The pipe closes when this process ends, however it does.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C on the terminal is this end's to handle: it says what was moved.
            .process_group(0)
            .spawn()
            .context("starting the other end")?;
        let output = child.stdout.take();
        let mut serve = Serve { child, address: String::new() };
        let (sender, first_line) = mpsc::channel();
        std::thread::spawn(move || {
            let line = output.and_then(|output| BufReader::new(output).lines().next());
            // Nobody listens if it took too long.
            let _ = sender.send(line);
        });
        let line = first_line.recv_timeout(SOON).context("the other end says nothing")?;
        let line = line.context("the other end ended at once")??;
        let address = line.split_once(LISTENING).context("the other end says no address")?.1;
        serve.address = address.trim().to_owned();
        Ok(serve)
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let until = Instant::now() + SOON;
        while Instant::now() < until {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // It doesn't end by itself. A failure means that it just did.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends this process once standard input does.
pub(super) fn end_with_stdin() {
    std::thread::spawn(|| {
        let mut stdin = std::io::stdin().lock();
        let _ = std::io::copy(&mut stdin, &mut std::io::sink());
        std::process::exit(0);
    });
}
