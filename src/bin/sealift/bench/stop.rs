//! Ctrl-C: a flag that every wait looks at.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGINT, SIGTERM};

/// How long any wait goes on without looking at the flag.
pub(super) const POLL: Duration = Duration::from_millis(100);

/// Somebody asked this process to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub(super) struct Interrupted {}

/// Whether somebody did. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Set by the first SIGINT or SIGTERM; the second ends the process at once.
    pub(super) fn on_signals() -> Result<Stop> {
        let stop = Stop::default();
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag unset, and only then sets it.
            signal_hook::flag::register_conditional_shutdown(signal, 130, stop.0.clone())
                .and_then(|_| signal_hook::flag::register(signal, stop.0.clone()))
                .context("catching signals")?;
        }
        Ok(stop)
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// An error if it is set.
    pub(super) fn check(&self) -> Result<()> {
        if self.is_set() {
            bail!(Interrupted::default());
        }
        Ok(())
    }
}
