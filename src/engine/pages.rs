//! What a receive ends with: pages that may be read.

use std::sync::Arc;

use super::pool;
use super::shared::Shared;
use crate::memory::PoolMemory;
use crate::protocol::receiver::LeaseComponent;
use crate::protocol::{Generation, LedgerError, PageIndex, TransferId};

/// Sealed pages in the ledger: released once, when this is dropped. `[I9]`
///
/// Public in name only, as the bound of a public handle: its module is private.
#[derive(Debug)]
pub struct Held {
    shared: Arc<Shared>,
    components: Vec<LeaseComponent>,
    transfers: Vec<TransferId>,
}

impl Held {
    pub(crate) fn new(
        shared: Arc<Shared>,
        components: Vec<LeaseComponent>,
        transfers: Vec<TransferId>,
    ) -> Held {
        Held { shared, components, transfers }
    }

    fn guard(&self) -> Result<ReadGuard, LedgerError> {
        let mut pools = self.shared.pools();
        let mut memories = Vec::with_capacity(self.components.len());
        for (index, c) in self.components.iter().enumerate() {
            let guarded = pools
                .ledgers
                .get_mut(&c.pool)
                .ok_or(LedgerError::Empty)
                .and_then(|ledger| ledger.guard(&c.pages, c.generation));
            if let Err(why) = guarded {
                // All or nothing: take back the guards of the components before.
                for c in &self.components[..index] {
                    let ledger = pools.ledgers.get_mut(&c.pool);
                    ledger.map(|ledger| ledger.unguard(&c.pages, c.generation));
                }
                return Err(why);
            }
            memories.extend(pools.entries.get(&c.pool).map(|entry| entry.memory.clone()));
        }
        let components = self.components.clone();
        Ok(ReadGuard { shared: self.shared.clone(), components, memories })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        pool::release(&self.shared, &self.components);
    }
}

macro_rules! pages {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[must_use = "dropping the pages releases them"]
        pub struct $name(Held);

        impl From<Held> for $name {
            fn from(held: Held) -> Self {
                $name(held)
            }
        }

        impl $name {
            /// The physical pages of one component, in logical order.
            pub fn pages(&self, component: usize) -> &[PageIndex] {
                self.0.components.get(component).map_or(&[], |component| &component.pages)
            }

            /// The generation of one component's pages: what a later check compares with.
            pub fn generation(&self, component: usize) -> Option<Generation> {
                self.0.components.get(component).map(|component| component.generation)
            }

            /// The transfers that wrote them.
            pub fn transfers(&self) -> &[TransferId] {
                &self.0.transfers
            }

            /// Takes a read guard: until it is dropped the pages stay as they are, also if they
            /// are released meanwhile. One guard is enough for a whole decode step. `[I18]`
            pub fn read(&self) -> Result<ReadGuard, LedgerError> {
                self.0.guard()
            }

            /// Gives the pages back. The same as dropping them.
            pub fn release(self) {}
        }
    };
}

pages! {
    /// Pages of which every byte was written by this transfer, under this grant, and verified
    /// where it landed. `[I1]` Dropping it releases them.
    SealedPages
}
pages! {
    /// Pages that a transfer without digests wrote: all of them, but nobody compared the bytes.
    /// `[I12]` Dropping it releases them.
    UnverifiedPages
}

/// A use of sealed pages: while one lives they can't be granted again. Independent of the
/// [`SealedPages`] that it came from.
#[derive(Debug)]
pub struct ReadGuard {
    shared: Arc<Shared>,
    components: Vec<LeaseComponent>,
    memories: Vec<Arc<PoolMemory>>,
}

impl ReadGuard {
    /// Copies bytes of the `page`th logical page of a component into `out`.
    ///
    /// # Panics
    ///
    /// If there is no such component, page, plane or byte.
    pub fn copy(&self, component: usize, plane: u16, page: usize, offset: u64, out: &mut [u8]) {
        let physical = self.components[component].pages[page];
        self.memories[component].read(plane, physical, offset, out);
    }

    /// Logical pages of a component.
    pub fn page_count(&self, component: usize) -> usize {
        self.components.get(component).map_or(0, |component| component.pages.len())
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        self.memories.clear();
        for c in &self.components {
            let ended = {
                let mut pools = self.shared.pools();
                pools.ledgers.get_mut(&c.pool).map(|ledger| ledger.unguard(&c.pages, c.generation))
            };
            match ended {
                Some(Ok(scrub)) => self.shared.scrub(c.pool, &scrub),
                Some(Err(why)) => self.shared.fault(format!("a read guard could not end: {why}")),
                None => {}
            }
        }
    }
}
