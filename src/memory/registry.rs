//! Which memory an engine may use: checked when it is registered, kept apart, counted.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::region::HostRegion;

/// Why memory isn't registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// No bytes.
    #[error("a registration needs at least one byte")]
    Empty,
    /// It shares some bytes, not all, with a live registration.
    #[error("{asked:#x?} overlaps the registered {registered:#x?} in part")]
    Overlap {
        /// The addresses asked for.
        asked: Range<usize>,
        /// The addresses of the registration in the way.
        registered: Range<usize>,
    },
}

#[derive(Debug)]
struct Entry {
    end: usize,
    count: usize,
}

/// Live registrations by their first address. No two overlap.
#[derive(Debug, Default)]
struct Table(Mutex<BTreeMap<usize, Entry>>);

impl Table {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory that one engine may use.
#[derive(Clone, Debug, Default)]
pub struct Registry(Arc<Table>);

impl Registry {
    /// Registers all of `region`.
    pub fn register(&self, region: &HostRegion) -> Result<Registration, RegisterError> {
        let asked = region.base_addr()..region.base_addr() + region.len();
        let mut table = self.0.lock();
        if let Some((&start, entry)) = table.range_mut(..asked.end).next_back() {
            if start == asked.start && entry.end == asked.end {
                entry.count += 1;
                return Ok(Registration { region: region.clone(), table: self.0.clone() });
            }
            if entry.end > asked.start {
                return Err(RegisterError::Overlap { asked, registered: start..entry.end });
            }
        }
        table.insert(asked.start, Entry { end: asked.end, count: 1 });
        Ok(Registration { region: region.clone(), table: self.0.clone() })
    }
}

/// A region that is registered, until this is dropped.
#[derive(Debug)]
pub struct Registration {
    region: HostRegion,
    table: Arc<Table>,
}

impl Registration {
    /// The memory.
    pub fn region(&self) -> &HostRegion {
        &self.region
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut table = self.table.lock();
        let Some(entry) = table.get_mut(&self.region.base_addr()) else { return };
        entry.count -= 1;
        if entry.count == 0 {
            table.remove(&self.region.base_addr());
        }
    }
}
