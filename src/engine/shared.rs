//! What handles and the core thread share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_channel::Sender;

use super::command::{Command, Input};
use super::{EngineConfig, Health};
use crate::memory::{PoolMemory, Registry};
use crate::protocol::receiver::Ledgers;
use crate::protocol::{Hello, Incarnation, PageIndex, PoolId, PoolLayout};
use crate::transport::Transport;

/// One registered pool.
#[derive(Clone, Debug)]
pub(crate) struct PoolEntry {
    pub(crate) layout: PoolLayout,
    pub(crate) memory: Arc<PoolMemory>,
}

/// Ledgers and pools, under one lock: a page's state and its memory change together.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    pub(crate) ledgers: Ledgers,
    pub(crate) entries: BTreeMap<PoolId, PoolEntry>,
    pub(crate) last_id: u16,
}

pub(crate) struct Shared {
    pub(crate) incarnation: Incarnation,
    pub(crate) config: EngineConfig,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) registry: Registry,
    pools: Mutex<Pools>,
    peers: Mutex<BTreeMap<Incarnation, Arc<Hello>>>,
    faults: Mutex<Vec<String>>,
    input: Sender<Input>,
    last_offer: AtomicU64,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("incarnation", &self.incarnation).finish_non_exhaustive()
    }
}

/// A panic under one of these locks leaves whole values behind: each change is one assignment or
/// an all-or-nothing ledger operation.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(
        incarnation: Incarnation,
        config: EngineConfig,
        transport: Arc<dyn Transport>,
        input: Sender<Input>,
    ) -> Shared {
        Shared {
            incarnation,
            config,
            transport,
            registry: Registry::default(),
            pools: Mutex::default(),
            peers: Mutex::default(),
            faults: Mutex::default(),
            input,
            last_offer: AtomicU64::new(0),
        }
    }

    /// Tells the core. If it is gone, dropping the command resolves what waits for it.
    pub(crate) fn command(&self, command: Command) {
        let _ = self.input.send(Input::Command(Box::new(command)));
    }

    pub(crate) fn pools(&self) -> MutexGuard<'_, Pools> {
        lock(&self.pools)
    }

    pub(crate) fn next_offer(&self) -> u64 {
        self.last_offer.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn peers(&self) -> Vec<(Incarnation, Arc<Hello>)> {
        lock(&self.peers).iter().map(|(id, hello)| (*id, hello.clone())).collect()
    }

    pub(crate) fn add_peer(&self, hello: Arc<Hello>) {
        lock(&self.peers).insert(hello.incarnation, hello);
    }

    pub(crate) fn remove_peer(&self, peer: Incarnation) {
        lock(&self.peers).remove(&peer);
    }

    pub(crate) fn fault(&self, why: String) {
        tracing::error!(%why, "engine fault");
        lock(&self.faults).push(why);
    }

    pub(crate) fn health(&self) -> Health {
        let mut faults = lock(&self.faults).clone();
        let pools = self.pools();
        for (id, entry) in &pools.entries {
            let Some(ledger) = pools.ledgers.get(id) else { continue };
            let (quarantined, budget) = (ledger.counts().quarantined, ledger.quarantine_budget());
            if quarantined > budget {
                let name = &entry.layout.name;
                faults
                    .push(format!("pool {name}: {quarantined} pages quarantined, budget {budget}"));
            }
        }
        Health { faults }
    }

    /// Zeroes pages that were released, then frees them. `[I15]`
    pub(crate) fn scrub(&self, pool: PoolId, pages: &[PageIndex]) {
        if pages.is_empty() {
            return;
        }
        let memory = self.pools().entries.get(&pool).map(|entry| entry.memory.clone());
        if let Some(memory) = memory {
            for &page in pages {
                (0..memory.item_lens().len())
                    .for_each(|plane| memory.fill_page(plane as u16, page, 0));
            }
        }
        if let Some(ledger) = self.pools().ledgers.get_mut(&pool) {
            let freed = ledger.scrubbed(pages);
            debug_assert!(freed.is_ok(), "scrubbed pages can be freed: {freed:?}");
        }
    }
}
