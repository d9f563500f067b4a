//! The `sealift` command, run as a user runs it.
#![cfg(feature = "cli")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const SEALIFT: &str = env!("CARGO_BIN_EXE_sealift");

fn bench(args: &[&str]) -> Command {
    let mut command = Command::new(SEALIFT);
    command.arg("bench").args(args).stdin(Stdio::null());
    command
}

fn output(args: &[&str]) -> Output {
    let mut child =
        bench(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    // Read while it runs: a full pipe would hold it.
    let reader = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).map(|_| bytes)
        })
    };
    let stdout = reader(Box::new(child.stdout.take().unwrap()));
    let stderr = reader(Box::new(child.stderr.take().unwrap()));
    let status = wait(&mut child, Duration::from_secs(120));
    let bytes =
        |thread: std::thread::JoinHandle<std::io::Result<Vec<u8>>>| thread.join().unwrap().unwrap();
    Output { status, stdout: bytes(stdout), stderr: bytes(stderr) }
}

fn wait(child: &mut Child, limit: Duration) -> std::process::ExitStatus {
    let until = Instant::now() + limit;
    while Instant::now() < until {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    panic!("still running after {limit:?}");
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(args: &[&str]) -> Value {
    let output = output(args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    // The whole of it: nothing else is on standard output.
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Whether a process of this id runs, other than as a zombie that nobody has reaped.
fn runs(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    !stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'))
}

fn children_of(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let list = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        found.extend(list.split_whitespace().filter_map(|id| id.parse::<u32>().ok()));
    }
    found
}

#[test]
fn a_bench_moves_and_verifies_every_byte() {
    let report = json(&["--tokens", "1024", "--requests", "2", "--json"]);
    // 1024 tokens of 128 KiB, twice.
    let bytes = 2 * 1024 * 128 * 1024u64;
    assert_eq!(report["status"], "ok");
    assert_eq!(report["bytes_verified"], bytes);
    assert_eq!(report["bytes_sealed"], bytes);
    assert_eq!(report["requests_sealed"], 2);
    assert_eq!(report["requests_failed"], 0);
    assert_eq!(report["pages_quarantined"], 0);
    assert_eq!(report["integrity"], true);
    assert_eq!(report["raw"]["bytes"], bytes);
    for rate in [&report["gb_per_s"], &report["raw"]["gb_per_s"], &report["p50_ms"]] {
        assert!(rate.as_f64().unwrap() > 0.0, "{report}");
    }
}

#[test]
fn concurrent_requests_of_odd_shape_without_digests() {
    let args = ["--blocks", "77", "--block-bytes", "4099", "--requests", "5", "--concurrency", "3"];
    let rest = ["--integrity", "off", "--raw", "off", "--lanes", "3", "--seed", "9", "--json"];
    let report = json(&[&args[..], &rest[..]].concat());
    assert_eq!(report["bytes_verified"], 5 * 77 * 4099);
    assert_eq!(report["integrity"], false);
    assert_eq!(report["raw"], Value::Null);
}

#[test]
fn the_table_ends_with_the_verdict() {
    let output = output(&["--preset", "deepseek-v3", "--tokens", "100", "--requests", "1"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let out = text(&output.stdout);
    assert!(out.trim_end().ends_with("\nverified: all bytes"), "{out}");
    // 7 pages of 61 planes of 16 tokens of 576 elements of 2 bytes.
    assert!(out.contains("7,870,464"), "{out}");
    assert!(text(&output.stderr).contains("transport: tcp (chosen by auto"));
}

#[test]
fn what_can_not_be_had_is_an_error_that_says_so() {
    let cases: [(&[&str], i32, &str); 7] = [
        (&["--preset", "gpt-5"], 1, "llama-3.1-8b"),
        (&["--transport", "verbs"], 1, "verbs is not available in this build"),
        (&["--transport", "shm"], 1, "shm is not available in this build"),
        (&["--tokens", "4000000000"], 1, "pages at a time"),
        (&["run", "--peer", "nowhere"], 1, "\"nowhere\" is not a HOST:PORT"),
        (&["run", "--peer", "127.0.0.1:1"], 1, "connecting to the bench at 127.0.0.1:1"),
        (&["serve", "--listen", "192.0.2.1:7777"], 1, "listening on 192.0.2.1:7777"),
    ];
    for (args, code, says) in cases {
        let output = output(args);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(says), "{args:?}: {error}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn presets_are_listed_with_their_bytes_per_token() {
    let out = text(&output(&["--list-presets"]).stdout);
    for says in ["llama-3.1-70b", "327,680", "deepseek-v3", "70,272", "glm-4.5-air"] {
        assert!(out.contains(says), "{out}");
    }
}

/// A bench that runs for minutes, and moves already.
fn long_bench() -> Child {
    let args = ["--tokens", "512", "--requests", "100000", "--raw", "off"];
    let mut child =
        bench(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    std::thread::sleep(Duration::from_secs(3));
    assert!(child.try_wait().unwrap().is_none(), "it still runs");
    child
}

#[test]
fn an_interrupted_bench_says_what_was_moved() {
    let mut child = long_bench();
    let serve = children_of(child.id());
    assert_eq!(serve.len(), 1, "one other end");
    signal(&child, "-INT");
    let status = wait(&mut child, Duration::from_secs(10));
    let mut error = String::new();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert_eq!(status.code(), Some(130), "{error}");
    assert!(
        error.contains("of 100000 requests sealed") && error.contains("interrupted"),
        "{error}"
    );
    assert!(!error.contains("sealed (0 bytes)"), "{error}");
    assert!(!runs(serve[0]), "the other end is gone");
}

#[test]
fn the_other_end_dies_with_a_killed_parent() {
    let mut child = long_bench();
    let serve = children_of(child.id());
    assert_eq!(serve.len(), 1, "one other end");
    child.kill().unwrap();
    child.wait().unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while runs(serve[0]) {
        assert!(Instant::now() < until, "the other end outlives its parent");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A `serve` of its own, and where it listens.
fn serve(args: &[&str]) -> (Child, String) {
    let all = [&["serve", "--listen", "127.0.0.1:0"], args].concat();
    let mut child =
        bench(&all).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().rsplit(' ').next().unwrap().to_owned();
    (child, address)
}

#[test]
fn one_serve_has_many_clients_and_ends_with_a_tally() {
    let (mut serving, address) = serve(&[]);
    let client = |seed: &'static str| {
        let address = address.clone();
        std::thread::spawn(move || {
            let args = ["run", "--peer", &address, "--tokens", "64", "--requests", "3"];
            json(&[&args[..], &["--json", "--seed", seed]].concat())
        })
    };
    let clients: Vec<_> = ["1", "2", "3"].map(client).into();
    for client in clients {
        assert_eq!(client.join().unwrap()["bytes_verified"], 3 * 64 * 128 * 1024);
    }
    signal(&serving, "-INT");
    let status = wait(&mut serving, Duration::from_secs(10));
    let mut error = String::new();
    serving.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert_eq!(status.code(), Some(130), "{error}");
    assert!(error.contains("75,497,472 bytes; 9 requests finished, 0 aborted"), "{error}");
}

#[test]
fn a_serve_that_dies_ends_its_client_with_a_cause() {
    let (mut serving, address) = serve(&[]);
    let args = ["run", "--peer", &address, "--tokens", "512", "--requests", "100000"];
    let mut client =
        bench(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
    std::thread::sleep(Duration::from_secs(2));
    serving.kill().unwrap();
    serving.wait().unwrap();
    let status = wait(&mut client, Duration::from_secs(30));
    let mut error = String::new();
    client.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert_eq!(status.code(), Some(1), "{error}");
    assert!(error.contains("requests sealed"), "{error}");
}

#[test]
fn a_serve_keeps_its_memory_limit() {
    let (mut serving, address) = serve(&["--memory-limit", "8"]);
    let output = output(&["run", "--peer", &address, "--tokens", "1024"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(error.contains("above the limit (--memory-limit)"), "{error}");
    serving.kill().unwrap();
    serving.wait().unwrap();
}

#[test]
fn a_sweep_is_drawn_as_an_svg() {
    let file = std::env::temp_dir().join(format!("sealift-sweep-{}.svg", std::process::id()));
    let args = ["--plot", file.to_str().unwrap(), "--requests", "1", "--json"];
    let report = json(&args);
    let points = report["points"].as_array().unwrap();
    assert_eq!(points.len(), 9);
    for point in points {
        // On and off.
        assert_eq!(point["bytes_verified"], 2 * 256 * 1024 * 1024);
    }
    let svg = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
    assert_eq!(svg.matches("<svg ").count(), 1);
    assert!(svg.matches("<polyline").count() >= 3, "a line for each of the three");
    for says in ["block size", "GB/s", "integrity on", "integrity off", "raw TCP stream", "32 KiB"]
    {
        assert!(svg.contains(says), "{says}");
    }
}
