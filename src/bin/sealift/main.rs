//! The `sealift` command.
//!
//! What may live here: subcommands, each in a module of its own, over the public API of the
//! library. What may not: anything that the library should offer.

mod bench;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Moves LLM KV-cache pages between inference nodes, and proves of every page who wrote it.
#[derive(Debug, Parser)]
#[command(name = "sealift", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Bench(Box<bench::BenchArgs>),
}

fn main() -> ExitCode {
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(why) => {
            // Nothing can be done if the terminal is gone.
            let _ = why.print();
            // Not clap's 2: that says that a byte was wrong.
            return ExitCode::from(u8::from(why.use_stderr()));
        }
    };
    let result = match command {
        Command::Bench(args) => bench::main(*args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("sealift: {why:#}");
            ExitCode::from(bench::exit_code(&why))
        }
    }
}
