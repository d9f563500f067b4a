//! What the kernel says of a process: threads, descriptors, memory, connections, processor time.

use std::time::Duration;

/// Signals a process of ours and, for SIGSTOP, waits until all of it stands still.
pub(crate) fn signal(pid: u32, signal: i32) {
    let pid = pid as libc::pid_t;
    // SAFETY: `pid` is a child that wasn't waited for, so the number is still its own.
    let sent = unsafe { libc::kill(pid, signal) };
    assert_eq!(sent, 0, "kill: {}", std::io::Error::last_os_error());
    if signal == libc::SIGSTOP {
        let mut status = 0;
        // SAFETY: waits for our own child to stop; a stop isn't an end, so nothing is reaped.
        let changed = unsafe { libc::waitpid(pid, &raw mut status, libc::WUNTRACED) };
        assert_eq!(changed, pid, "waitpid: {}", std::io::Error::last_os_error());
        assert!(libc::WIFSTOPPED(status), "it did not stop but end");
    }
}

/// Connections to `port` on loopback that some process holds open, in whatever TCP state: a
/// connection that the peer has closed still has bytes to read.
pub(crate) fn connections_to(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let remote = format!(":{port:04X}");
    let is_open = |line: &&str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        // A socket that no descriptor refers to has inode 0.
        words.get(2).is_some_and(|address| address.ends_with(&remote)) && words[9] != "0"
    };
    table.lines().skip(1).filter(is_open).count()
}

/// What must not grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) threads: usize,
    pub(crate) descriptors: usize,
    /// Anonymous memory in place. Pools of shared memory aren't in it.
    pub(crate) anonymous_kib: usize,
}

pub(crate) fn usage(pid: u32) -> Usage {
    let entries = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    Usage {
        threads: entries("task"),
        descriptors: entries("fd"),
        anonymous_kib: anonymous_kib(pid),
    }
}

pub(crate) fn anonymous_kib(pid: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Processor time of this process, all threads, user and system.
pub(crate) fn processor_time() -> Duration {
    // SAFETY: the all-zero pattern is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is ours, and of the type that the call fills.
    let got = unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    assert_eq!(got, 0, "getrusage: {}", std::io::Error::last_os_error());
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}
