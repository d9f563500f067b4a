//! Pools and leases: pages by number, never by pointer.

use std::sync::Arc;

use super::shared::{PoolEntry, Shared};
use super::{Engine, PoolCounts};
use crate::memory::{Busy, PlaneMemory, PoolMemory, PoolMemoryError, RegisterError};
use crate::protocol::receiver::LeaseComponent;
use crate::protocol::{Generation, Ledger, LedgerError, PageIndex, PageState, PoolId, PoolLayout};

/// Why a pool can't be registered or deregistered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The planes don't make a pool.
    #[error(transparent)]
    Memory(#[from] PoolMemoryError),
    /// The memory can't be registered.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The layout says one thing, the planes another.
    #[error("layout and planes differ: {0}")]
    Layout(String),
    /// Pages of another pool lie in the same bytes.
    #[error("the pool shares bytes with pool {0:?}")]
    Shared(String),
    /// Too many pools.
    #[error("no more than 65,535 pools")]
    TooMany,
    /// Transfers or readers still use it: try again when they are over.
    #[error("the pool is busy: {0}")]
    Busy(String),
}

impl From<Busy> for PoolError {
    fn from(busy: Busy) -> Self {
        PoolError::Busy(busy.to_string())
    }
}

/// How a pool is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PoolOptions {
    /// Quarantined pages past which no new grants are made. Default: half of the pool.
    pub quarantine_budget: Option<u32>,
    /// Zero pages when they are released, before they can be granted again. `[I15]`
    pub zero_on_release: bool,
}

/// A registered pool. Cheap to clone; the pool lives until [`Engine::unregister_pool`].
#[derive(Clone, Debug)]
pub struct Pool {
    pub(super) shared: Arc<Shared>,
    pub(super) id: PoolId,
    pub(super) layout: Arc<PoolLayout>,
}

impl Engine {
    /// Registers the pages of a pool: `planes[k]` holds plane `k` of `layout`. Memory that isn't
    /// mapped, and overlaps that contradict, are errors. Sessions that begin afterwards announce it.
    pub fn register_pool(
        &self,
        layout: PoolLayout,
        planes: Vec<PlaneMemory>,
        options: PoolOptions,
    ) -> Result<Pool, PoolError> {
        let lens: Vec<u32> = planes.iter().map(|plane| plane.item_len).collect();
        if lens != layout.item_lens {
            let what = format!("page lengths {:?} and {lens:?}", layout.item_lens);
            return Err(PoolError::Layout(what));
        }
        let memory = PoolMemory::new(planes, layout.page_count)?;
        let memory = Arc::new(memory.registered(&self.shared.registry)?);
        let mut pools = self.shared.pools();
        if let Some(other) = pools.entries.values().find(|e| e.memory.shares_bytes(&memory)) {
            return Err(PoolError::Shared(other.layout.name.clone()));
        }
        let id = PoolId(pools.last_id.checked_add(1).ok_or(PoolError::TooMany)?);
        pools.last_id = id.0;
        let budget = options.quarantine_budget.unwrap_or(layout.page_count / 2) as usize;
        let ledger = Ledger::new(layout.page_count, budget, options.zero_on_release);
        pools.ledgers.insert(id, ledger);
        pools.entries.insert(id, PoolEntry { layout: layout.clone(), memory });
        drop(pools);
        Ok(Pool { shared: self.shared.clone(), id, layout: Arc::new(layout) })
    }

    /// Deregisters a pool, unless any of its pages is leased, sealed, quarantined or being sent.
    pub fn unregister_pool(&self, pool: &Pool) -> Result<(), PoolError> {
        let mut pools = self.shared.pools();
        let Some(ledger) = pools.ledgers.get(&pool.id) else { return Ok(()) };
        let counts = ledger.counts();
        if counts.free != pool.layout.page_count as usize {
            return Err(PoolError::Busy(format!("{counts:?}")));
        }
        if let Some(entry) = pools.entries.get(&pool.id) {
            // Placements are made under this lock, so none can be made meanwhile.
            entry.memory.check_idle()?;
        }
        pools.ledgers.remove(&pool.id);
        pools.entries.remove(&pool.id);
        Ok(())
    }
}

impl Pool {
    /// Its layout.
    pub fn layout(&self) -> &PoolLayout {
        &self.layout
    }

    /// How many of its pages are in which state.
    pub fn counts(&self) -> PoolCounts {
        let pools = self.shared.pools();
        pools.ledgers.get(&self.id).map(Ledger::counts).unwrap_or_default()
    }

    /// State and generation of one page; `None` if there is no such page.
    pub fn page(&self, page: PageIndex) -> Option<(PageState, Generation)> {
        self.shared.pools().ledgers.get(&self.id)?.page(page)
    }

    /// Checks that all of `pages` are readable at `generation` now. Proves nothing for later: see
    /// [`super::SealedPages::read`].
    pub fn check(&self, pages: &[PageIndex], generation: Generation) -> Result<(), LedgerError> {
        self.with_ledger(|ledger| ledger.check(pages, generation))
    }

    /// The pool allocates: leases any `count` free pages.
    pub fn reserve(&self, count: usize) -> Result<Lease, LedgerError> {
        let (pages, generation) = self.with_ledger(|ledger| ledger.reserve(count))?;
        Ok(self.lease(pages, generation))
    }

    /// The engine's own allocator decides: leases exactly `pages`, or says which of them isn't
    /// free, and why.
    pub fn claim(&self, pages: &[PageIndex]) -> Result<Lease, LedgerError> {
        let generation = self.with_ledger(|ledger| ledger.claim(pages))?;
        Ok(self.lease(pages.to_vec(), generation))
    }

    fn lease(&self, pages: Vec<PageIndex>, generation: Generation) -> Lease {
        let component =
            LeaseComponent { pool: self.id, layout: (*self.layout).clone(), pages, generation };
        Lease { shared: self.shared.clone(), components: vec![component], joined_own: true }
    }

    fn with_ledger<T>(
        &self,
        act: impl FnOnce(&mut Ledger) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        let mut pools = self.shared.pools();
        act(pools.ledgers.get_mut(&self.id).ok_or(LedgerError::Empty)?)
    }
}

/// Pages held for one receive, in logical order. Dropping it unused gives them back at once: no
/// peer has been told of them.
#[derive(Debug)]
#[must_use = "dropping a lease gives its pages back"]
pub struct Lease {
    shared: Arc<Shared>,
    components: Vec<LeaseComponent>,
    /// No lease of another engine was joined to it: such a lease is refused when it is used.
    joined_own: bool,
}

impl Lease {
    /// Adds the pages of another pool of the same engine (state, aux rows) as further components.
    pub fn join(mut self, mut other: Lease) -> Lease {
        if Arc::ptr_eq(&self.shared, &other.shared) {
            self.components.append(&mut other.components);
        } else {
            // `other` keeps its pages, and gives them back to its own engine as it is dropped.
            self.joined_own = false;
        }
        self
    }

    /// The pages of one component.
    pub fn pages(&self, component: usize) -> &[PageIndex] {
        self.components.get(component).map_or(&[], |component| &component.pages)
    }

    /// Whether all of it was leased from pools of this engine.
    pub(super) fn is_of(&self, shared: &Arc<Shared>) -> bool {
        self.joined_own && Arc::ptr_eq(&self.shared, shared)
    }

    /// The components, in order.
    pub(super) fn components(&self) -> &[LeaseComponent] {
        &self.components
    }

    /// Hands the pages on to a transfer.
    pub(super) fn into_components(mut self) -> Vec<LeaseComponent> {
        std::mem::take(&mut self.components)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        release(&self.shared, &self.components);
    }
}

/// Gives pages back, zeroing those that want it.
pub(super) fn release(shared: &Shared, components: &[LeaseComponent]) {
    for component in components {
        let LeaseComponent { pool, pages, generation, .. } = component;
        let scrub = shared.pools().ledgers.get_mut(pool).map(|l| l.release(pages, *generation));
        match scrub {
            Some(Ok(scrub)) => shared.scrub(*pool, &scrub),
            Some(Err(why)) => shared.fault(format!("pages could not be released: {why}")),
            None => {}
        }
    }
}
