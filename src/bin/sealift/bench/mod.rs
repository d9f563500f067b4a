//! `sealift bench`: moves a realistic workload between two processes, compares every byte, and says
//! how fast it was, beside a raw TCP stream between the same two.
//!
//! `run` is decode: it reserves pages and receives. `serve` is prefill: it owns the source and sends.
//! Alone, `bench` runs and starts a `serve` of its own.

mod args;
mod child;
mod measure;
mod plot;
mod preset;
mod raw;
mod report;
mod run;
mod serve;
mod session;
mod side;
mod stop;
mod sweep;
mod verify;
mod workload;

use anyhow::Result;

pub(crate) use args::BenchArgs;
use args::SideCommand;

/// Runs the subcommand.
pub(crate) fn main(args: BenchArgs) -> Result<()> {
    match args.side {
        Some(SideCommand::Serve(args)) => serve::serve(&args),
        Some(SideCommand::Run(args)) => run::run(&args.load, Some(&args.peer)),
        None => run::run(&args.load, None),
    }
}

/// 130 after Ctrl-C, 2 if a byte was wrong, 1 for every other failure.
pub(crate) fn exit_code(why: &anyhow::Error) -> u8 {
    match () {
        () if why.downcast_ref::<stop::Interrupted>().is_some() => 130,
        () if why.downcast_ref::<verify::Mismatch>().is_some() => 2,
        () => 1,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn exit_codes_survive_what_is_said_around_them() {
        let interrupted = Err::<(), _>(stop::Interrupted::default()).context("1 of 2 sealed");
        assert_eq!(exit_code(&interrupted.unwrap_err()), 130);
        let wrong = verify::tests::a_mismatch().context("round 1").context("1 of 2 sealed");
        assert_eq!(exit_code(&wrong), 2);
        assert_eq!(exit_code(&anyhow!("refused").context("1 of 2 sealed")), 1);
    }
}
