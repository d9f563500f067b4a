//! Which memory an engine may use: checked when it is registered, kept apart, counted.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::maps::{self, Fault};
use super::region::HostRegion;

/// Why memory isn't registered. (A [`HostRegion`] can't be empty or overflow the address space.)
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// Some of it isn't memory of this process.
    #[error("nothing is mapped at {address:#x}, byte {offset} of the region")]
    NotMapped {
        /// The first address at fault.
        address: usize,
        /// Bytes from the region's start to it.
        offset: usize,
    },
    /// Some of it can't be read or can't be written.
    #[error("{address:#x}, byte {offset} of the region, is mapped {protection:?} and not \"rw\"")]
    Protected {
        /// The first address at fault.
        address: usize,
        /// Bytes from the region's start to it.
        offset: usize,
        /// As the kernel writes it: `r--p`, `---p`, ...
        protection: String,
    },
    /// It shares some bytes, not all, with a live registration.
    #[error("{asked:#x?} overlaps the registered {registered:#x?} in part")]
    Overlap {
        /// The addresses asked for.
        asked: Range<usize>,
        /// The addresses of the first registration in the way.
        registered: Range<usize>,
    },
    /// The kernel doesn't say what is mapped, so nothing can be checked.
    #[error("/proc/self/maps can't be read: {0}")]
    MapsUnreadable(String),
}

impl RegisterError {
    fn from_fault(fault: Fault, base: usize) -> RegisterError {
        match fault {
            Fault::NotMapped(address) => {
                RegisterError::NotMapped { address, offset: address - base }
            }
            Fault::Protected { address, protection } => {
                RegisterError::Protected { address, offset: address - base, protection }
            }
            Fault::Unreadable(why) => RegisterError::MapsUnreadable(why),
        }
    }
}

/// A live range and how often it is registered; the key it is under is its first address.
#[derive(Debug)]
struct Live {
    end: usize,
    count: usize,
}

/// Live ranges by first address. No two overlap.
#[derive(Debug, Default)]
struct Table(Mutex<BTreeMap<usize, Live>>);

impl Table {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Live>> {
        // Every change is one insertion, one removal or one count: a panic can't leave it half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the range, if it is registered already or overlaps nothing that is.
    fn add(&self, asked: &Range<usize>) -> Result<(), RegisterError> {
        let mut table = self.lock();
        let in_the_way = table.range(..asked.end).rev().map(|(&start, live)| start..live.end);
        // They lie apart and in order, so those that overlap come first.
        let first = in_the_way.take_while(|live| live.end > asked.start).last();
        match first {
            Some(live) if live != *asked => {
                Err(RegisterError::Overlap { asked: asked.clone(), registered: live })
            }
            _ => {
                table.entry(asked.start).or_insert(Live { end: asked.end, count: 0 }).count += 1;
                Ok(())
            }
        }
    }

    fn remove(&self, start: usize) {
        if let Entry::Occupied(mut live) = self.lock().entry(start) {
            live.get_mut().count -= 1;
            if live.get().count == 0 {
                live.remove();
            }
        }
    }
}

/// The memory that one engine may use. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Registry(Arc<Table>);

impl Registry {
    /// Registers all of `region`, until what this returns is dropped.
    ///
    /// The same range may be registered again, and then counts as often; one that overlaps another
    /// in part is refused. All of it must be mapped readable and writable now. That is a check of
    /// the caller's arithmetic: memory that is unmapped later breaks the contract of
    /// [`HostRegion::borrowed`], and no check can find that in time.
    pub fn register(&self, region: &HostRegion) -> Result<Registration, RegisterError> {
        let base = region.base_addr();
        let asked = base..base + region.len();
        maps::check(asked.clone()).map_err(|fault| RegisterError::from_fault(fault, base))?;
        self.0.add(&asked)?;
        Ok(Registration { region: region.clone(), table: Arc::clone(&self.0) })
    }

    /// Registered ranges that live now, each counted once.
    pub fn live_count(&self) -> usize {
        self.0.lock().len()
    }
}

/// Keeps a region registered, and its memory alive, until it is dropped.
///
/// There is no call that takes a registration away from under its users: [`super::PoolMemory`]
/// holds those of its planes, every [`super::Pin`] holds the pool, so the last user ends it. `[I4]`
/// To be told who still uses a pool, ask [`super::PoolMemory::deregister`].
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
        self.table.remove(self.region.base_addr());
    }
}

#[cfg(test)]
mod tests {
    use super::super::region::system_page_len;
    use super::*;

    /// A piece of `whole`, which outlives it in every test here.
    fn part(whole: &HostRegion, range: Range<usize>) -> HostRegion {
        assert!(range.end <= whole.len());
        let ptr = whole.ptr().as_ptr().wrapping_add(range.start);
        // SAFETY: inside `whole`, which outlives this; nothing here runs at the same time.
        unsafe { HostRegion::borrowed(ptr, range.len()) }.unwrap()
    }

    #[test]
    fn an_exact_duplicate_counts_and_the_last_drop_ends_it() {
        let registry = Registry::default();
        let region = HostRegion::owned(100).unwrap();
        let first = registry.register(&region).unwrap();
        let second = registry.register(&part(&region, 0..100)).unwrap();
        assert_eq!(registry.live_count(), 1);
        drop(first);
        assert_eq!(registry.live_count(), 1);
        let prefix = part(&region, 0..99);
        assert!(matches!(registry.register(&prefix), Err(RegisterError::Overlap { .. })));
        drop(second);
        assert_eq!(registry.live_count(), 0);
        assert!(registry.register(&prefix).is_ok());
    }

    #[test]
    fn every_kind_of_partial_overlap_is_refused_and_touching_is_not() {
        let whole = HostRegion::owned(100).unwrap();
        let base = whole.base_addr();
        for range in [0..41, 0..100, 40..41, 45..55, 40..59, 41..60, 59..100, 40..61, 39..60] {
            let registry = Registry::default();
            let _live = registry.register(&part(&whole, 40..60)).unwrap();
            let asked = base + range.start..base + range.end;
            assert_eq!(
                registry.register(&part(&whole, range)).unwrap_err(),
                RegisterError::Overlap { asked, registered: base + 40..base + 60 },
            );
            assert_eq!(registry.live_count(), 1);
        }
        let registry = Registry::default();
        let live: Vec<_> = [40..60, 0..40, 60..100]
            .map(|range| registry.register(&part(&whole, range)).unwrap())
            .into();
        assert_eq!(registry.live_count(), 3);
        let asked = base + 20..base + 70;
        let first = RegisterError::Overlap { asked, registered: base..base + 40 };
        assert_eq!(registry.register(&part(&whole, 20..70)).unwrap_err(), first);
        drop(live);
        assert_eq!(registry.live_count(), 0);
    }

    #[test]
    fn a_page_that_may_not_be_written_or_read_is_refused_by_its_address() {
        let system_page = system_page_len();
        let region = HostRegion::owned(3 * system_page).unwrap();
        let registry = Registry::default();
        let middle = region.ptr().as_ptr().wrapping_add(system_page).cast();
        let address = region.base_addr() + system_page;

        // SAFETY: changes the protection of a system page that only this test uses.
        assert_eq!(unsafe { libc::mprotect(middle, system_page, libc::PROT_READ) }, 0);
        let offset = system_page;
        let protection = "r--p".to_owned();
        let expected = RegisterError::Protected { address, offset, protection };
        assert_eq!(registry.register(&region).unwrap_err(), expected);

        // SAFETY: as above.
        assert_eq!(unsafe { libc::mprotect(middle, system_page, libc::PROT_NONE) }, 0);
        let error = registry.register(&region).unwrap_err();
        assert!(error.to_string().contains(&format!("{address:#x}")), "{error}");
        assert_eq!(registry.live_count(), 0);
    }

    #[test]
    fn a_wild_address_is_an_error_and_not_a_crash() {
        let registry = Registry::default();
        for (base, len) in [(0x10, 16), (usize::MAX - 100, 50), (1 << 46, 1 << 40)] {
            // SAFETY: not kept: the memory doesn't exist, and nothing below touches it.
            let wild = unsafe { HostRegion::borrowed(std::ptr::without_provenance_mut(base), len) }
                .unwrap();
            let error = registry.register(&wild).unwrap_err();
            assert_eq!(error, RegisterError::NotMapped { address: base, offset: 0 });
        }
    }
}
