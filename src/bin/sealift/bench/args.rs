//! What can be typed.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, Subcommand, ValueEnum};

use super::preset::Preset;
use super::side::Tuning;
use super::workload::Workload;

const EXAMPLES: &str = "\
Examples:
  sealift bench                                    both ends on this machine
  sealift bench --preset deepseek-v3 --json        another model, for a program to read
  sealift bench --blocks 10240 --block-bytes 32768 no model: 320 MiB in blocks of 32 KiB
  sealift bench --plot sweep.svg                   block sizes from 4 KiB to 1 MiB

Between two hosts:
  prefill$ sealift bench serve --listen 10.0.0.1:7777
  decode$  sealift bench run --peer 10.0.0.1:7777

Exit codes: 0 all bytes verified, 1 failed, 2 a byte was wrong, 130 interrupted.";

/// Move a realistic workload between two processes, and compare every byte.
///
/// Alone, it starts both ends on this machine. `serve` and `run` do it between two hosts.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(super) side: Option<SideCommand>,
    #[command(flatten)]
    pub(super) load: LoadArgs,
}

#[derive(Debug, Subcommand)]
pub(super) enum SideCommand {
    Serve(ServeArgs),
    Run(Box<RunArgs>),
}

/// The prefill end: owns the source, and sends to any number of clients until Ctrl-C.
///
/// The side port that it listens on is for the bench only: nobody is authenticated, and whoever
/// reaches it can make this process use memory (see --memory-limit). Bind it where only the other
/// end reaches it.
#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    /// Where clients find this end; port 0 lets the system choose. The first line of the output
    /// says what was bound.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7777")]
    pub(super) listen: String,
    /// Ports for the data, one per client at a time, where a firewall wants to know them.
    #[arg(long, value_name = "FIRST-LAST", value_parser = port_range)]
    pub(super) data_ports: Option<String>,
    /// MiB that the sources of all clients may take together.
    #[arg(long, value_name = "MIB", default_value_t = 16 * 1024)]
    pub(super) memory_limit: u64,
    /// End when standard input does: how the end that a plain `bench` starts dies with it.
    #[arg(long, hide = true)]
    pub(super) until_stdin_closes: bool,
}

/// The decode end: asks a `serve` for its pages, and compares every byte that comes.
#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// What the other end's `serve --listen` says.
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) peer: String,
    #[command(flatten)]
    pub(super) load: LoadArgs,
}

/// How bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Transport {
    /// Whatever is best here; says what it chose, and why.
    Auto,
    Tcp,
    Verbs,
    Shm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Switch {
    On,
    Off,
}

#[derive(Clone, Debug, Args)]
pub(super) struct LoadArgs {
    /// Whose KV cache the pages are shaped like.
    #[arg(long, value_enum, default_value_t = Preset::Llama31_8b)]
    pub(super) preset: Preset,
    /// Print the presets and end.
    #[arg(long)]
    pub(super) list_presets: bool,
    /// Tokens of each request.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) tokens: u32,
    /// Tokens of a page.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) page_size: u32,
    /// Instead of a preset: blocks of each request, in one plane. [default: 256 MiB of them]
    #[arg(long, value_name = "N", conflicts_with_all = ["preset", "tokens", "page_size"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) blocks: Option<u32>,
    /// Bytes of each of these blocks. [default: 32768]
    #[arg(long, value_name = "B", conflicts_with_all = ["preset", "tokens", "page_size"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64 << 20))]
    pub(super) block_bytes: Option<u32>,
    /// Requests, all in all.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) requests: u32,
    /// Requests at a time, each with pages of its own.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(super) concurrency: u16,
    /// How bytes travel. What is asked for is used, or it is an error.
    #[arg(long, value_enum, default_value_t = Transport::Auto)]
    pub(super) transport: Transport,
    /// Digests of every page, compared where they landed. Without, the bench still compares every
    /// byte itself, after the time is taken.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(super) integrity: Switch,
    /// Also measure one raw TCP stream of as many bytes between the same two processes: blocking
    /// calls of 256 KiB on one buffer that stays in the cache, as iperf does.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(super) raw: Switch,
    /// Decides page numbers and contents.
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// Seconds that one request may take.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub(super) timeout: u64,
    /// Print one JSON object, and nothing else, on standard output.
    #[arg(long)]
    pub(super) json: bool,
    /// Block sizes from 4 KiB to 1 MiB: integrity on, off and the raw stream, `--requests` each.
    #[arg(long, conflicts_with_all = ["preset", "tokens", "page_size", "blocks", "block_bytes"])]
    pub(super) sweep: bool,
    /// Sweep, and draw it as an SVG.
    #[arg(long, value_name = "FILE.svg")]
    #[arg(conflicts_with_all = ["preset", "tokens", "page_size", "blocks", "block_bytes"])]
    pub(super) plot: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Tuning, of both ends")]
    pub(super) tuning: Tuning,
}

impl LoadArgs {
    /// The workload that was asked for.
    pub(super) fn workload(&self) -> Result<Workload> {
        let concurrency = self.concurrency.min(u16::try_from(self.requests).unwrap_or(u16::MAX));
        let workload = if self.blocks.is_some() || self.block_bytes.is_some() {
            let bytes = self.block_bytes.unwrap_or(32 * 1024);
            let blocks = self.blocks.unwrap_or_else(|| ((256 << 20) / bytes).max(1));
            Workload::of_blocks(blocks, bytes, concurrency, self.seed)
        } else {
            let (model, tokens) = (self.preset.model(), self.tokens);
            Workload::of_model(model, tokens, self.page_size, concurrency, self.seed)
        };
        workload.check()?;
        Ok(workload)
    }

    pub(super) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Digests or not.
    pub(super) fn verified(&self) -> bool {
        self.integrity == Switch::On
    }

    /// What `auto` means here; and whatever this build doesn't have is an error.
    pub(super) fn check_transport(&self) -> Result<()> {
        match self.transport {
            Transport::Tcp => {}
            Transport::Auto => {
                eprintln!("transport: tcp (chosen by auto: the only one that this build has)");
            }
            Transport::Verbs => bail!("transport verbs is not available in this build; tcp is"),
            Transport::Shm => bail!("transport shm is not available in this build; tcp is"),
        }
        Ok(())
    }
}

fn port_range(text: &str) -> Result<String, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let port = |text: &str| text.parse::<u16>().map_err(|why| format!("{text:?}: {why}"));
    match (port(first)?, port(last)?) {
        (first, last) if first > last => Err(format!("{first} is above {last}")),
        _ => Ok(text.to_owned()),
    }
}
