//! Looks names up without making the caller wait: one helper thread, started at the first name.

use std::net::ToSocketAddrs as _;
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender, TrySendError};

use super::shared::{Command, Shared};
use crate::transport::{LinkId, TransportError};

/// Names that may wait; a name server that hangs must not fill the memory.
const MAX_WAITING: usize = 256;

struct Job {
    shared: Arc<Shared>,
    link: LinkId,
    host: String,
    port: u16,
}

/// The way to the helper thread. It ends when this is dropped or closed, after the look-up that it
/// is in; nobody waits for that.
#[derive(Default)]
pub(super) struct Resolver(Mutex<Option<Sender<Job>>>);

impl Resolver {
    /// Has a name looked up; [`Command::Resolved`] follows.
    pub(super) fn submit(
        &self,
        shared: &Arc<Shared>,
        link: LinkId,
        host: &str,
        port: u16,
    ) -> Result<(), TransportError> {
        let failed = |why: String| TransportError::System { what: "looking a name up", why };
        let mut sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if sender.is_none() {
            let (jobs, waiting) = crossbeam_channel::bounded(MAX_WAITING);
            std::thread::Builder::new()
                .name("sealift-names".to_owned())
                .spawn(move || run(&waiting))
                .map_err(|error| failed(error.to_string()))?;
            *sender = Some(jobs);
        }
        let job = Job { shared: Arc::clone(shared), link, host: host.to_owned(), port };
        match sender.as_ref().map(|jobs| jobs.try_send(job)) {
            Some(Err(TrySendError::Full(_))) => Err(failed("too many names wait".to_owned())),
            Some(Err(TrySendError::Disconnected(_))) => {
                *sender = None;
                Err(failed("the helper thread is gone".to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Lets the helper thread end.
    pub(super) fn close(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

fn run(jobs: &Receiver<Job>) {
    while let Ok(Job { shared, link, host, port }) = jobs.recv() {
        let found = (host.as_str(), port).to_socket_addrs();
        let addresses =
            found.map(Iterator::collect).map_err(|error| format!("looking {host} up: {error}"));
        shared.to_link(link, Command::Resolved { link, addresses });
    }
}
