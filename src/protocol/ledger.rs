//! The page ledger: who may touch each page of one pool, and under which generation.
//!
//! Every operation takes a list of pages and is all or nothing: it checks the whole list first.

use std::collections::{HashSet, VecDeque};
use std::fmt;

use super::ids::{Generation, PageIndex};

/// What a page is at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// Nobody's: it may be granted.
    Free,
    /// Leased to a transfer: a peer may be writing it.
    Granted,
    /// Written; digests are being compared; nobody writes any more.
    Verifying,
    /// Readable by its owner.
    Sealed,
    /// Of a failed transfer whose writes may still land: neither readable nor grantable. `[I3]`
    Quarantined,
    /// Being zeroed before it is free. `[I15]`
    Scrubbing,
}

impl PageState {
    const COUNT: usize = 6;
}

impl fmt::Display for PageState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PageState::Free => "free",
            PageState::Granted => "granted",
            PageState::Verifying => "verifying",
            PageState::Sealed => "sealed",
            PageState::Quarantined => "quarantined",
            PageState::Scrubbing => "scrubbing",
        })
    }
}

/// Why the ledger refused. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum LedgerError {
    /// No pages were named.
    #[error("no pages were asked for")]
    Empty,
    /// A page that the pool doesn't have.
    #[error("{page} of a pool of {page_count}")]
    OutOfRange {
        /// The page.
        page: PageIndex,
        /// Pages in the pool.
        page_count: u32,
    },
    /// A page was named twice.
    #[error("{page} is named twice")]
    Repeated {
        /// The page.
        page: PageIndex,
    },
    /// Fewer pages are free than asked for.
    #[error("{asked} pages asked for, {free} of {page_count} are free")]
    NotEnough {
        /// Asked for.
        asked: usize,
        /// Free now.
        free: usize,
        /// In the pool.
        page_count: usize,
    },
    /// The page is in another state than the operation needs.
    #[error("{page} is {state}, not {wanted}")]
    State {
        /// The page.
        page: PageIndex,
        /// What it is.
        state: PageState,
        /// What it should be.
        wanted: PageState,
    },
    /// The page was granted again since.
    #[error("{page} is at {found}, not at {wanted}")]
    Generation {
        /// The page.
        page: PageIndex,
        /// Its generation.
        found: Generation,
        /// The caller's.
        wanted: Generation,
    },
    /// Too many pages are quarantined: new grants are refused until some are free again.
    #[error("{quarantined} pages are quarantined, the budget is {budget}")]
    QuarantineFull {
        /// Quarantined now.
        quarantined: usize,
        /// The budget.
        budget: usize,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Page {
    state: PageState,
    generation: Generation,
    guards: u32,
    /// Released while guarded: free once the last guard is gone; no new guards.
    leaving: bool,
    /// In the free list (perhaps stale there, if it was claimed since).
    listed: bool,
}

/// How many pages are in each state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct LedgerCounts {
    /// Grantable.
    pub free: usize,
    /// Leased.
    pub granted: usize,
    /// Being verified.
    pub verifying: usize,
    /// Readable.
    pub sealed: usize,
    /// Held back.
    pub quarantined: usize,
    /// Being zeroed.
    pub scrubbing: usize,
}

/// The ledger of one pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ledger {
    pages: Vec<Page>,
    free: VecDeque<PageIndex>,
    counts: [usize; PageState::COUNT],
    last_generation: u64,
    quarantine_budget: usize,
    scrub_on_release: bool,
}

impl Ledger {
    /// All pages free. Past `quarantine_budget` quarantined pages, nothing is granted.
    pub fn new(page_count: u32, quarantine_budget: usize, scrub_on_release: bool) -> Ledger {
        let page = Page {
            state: PageState::Free,
            generation: Generation(0),
            guards: 0,
            leaving: false,
            listed: true,
        };
        let mut counts = [0; PageState::COUNT];
        counts[PageState::Free as usize] = page_count as usize;
        Ledger {
            pages: vec![page; page_count as usize],
            free: (0..page_count).map(PageIndex).collect(),
            counts,
            last_generation: 0,
            quarantine_budget,
            scrub_on_release,
        }
    }

    /// How many pages are in each state.
    pub fn counts(&self) -> LedgerCounts {
        let of = |state: PageState| self.counts[state as usize];
        LedgerCounts {
            free: of(PageState::Free),
            granted: of(PageState::Granted),
            verifying: of(PageState::Verifying),
            sealed: of(PageState::Sealed),
            quarantined: of(PageState::Quarantined),
            scrubbing: of(PageState::Scrubbing),
        }
    }

    /// Quarantined pages past which nothing is granted.
    pub fn quarantine_budget(&self) -> usize {
        self.quarantine_budget
    }

    /// State and generation of one page; `None` if the pool hasn't got it.
    pub fn page(&self, page: PageIndex) -> Option<(PageState, Generation)> {
        self.pages.get(page.0 as usize).map(|p| (p.state, p.generation))
    }

    /// The pool allocates: leases any `count` free pages under one fresh generation.
    pub fn reserve(&mut self, count: usize) -> Result<(Vec<PageIndex>, Generation), LedgerError> {
        self.check_grantable(count)?;
        let free = self.counts[PageState::Free as usize];
        if count > free {
            let page_count = self.pages.len();
            return Err(LedgerError::NotEnough { asked: count, free, page_count });
        }
        let mut pages = Vec::with_capacity(count);
        while pages.len() < count {
            let Some(page) = self.free.pop_front() else { break };
            self.pages[page.0 as usize].listed = false;
            if self.pages[page.0 as usize].state == PageState::Free {
                pages.push(page);
            }
        }
        debug_assert_eq!(pages.len(), count, "every free page is listed");
        Ok((pages.clone(), self.grant(&pages)))
    }

    /// The engine allocates: leases exactly `pages` under one fresh generation, or says which of
    /// them isn't free and why.
    pub fn claim(&mut self, pages: &[PageIndex]) -> Result<Generation, LedgerError> {
        self.check_grantable(pages.len())?;
        self.check_list(pages)?;
        self.check_state(pages, PageState::Free, None)?;
        Ok(self.grant(pages))
    }

    fn check_grantable(&self, count: usize) -> Result<(), LedgerError> {
        if count == 0 {
            return Err(LedgerError::Empty);
        }
        let (quarantined, budget) =
            (self.counts[PageState::Quarantined as usize], self.quarantine_budget);
        if quarantined > budget {
            return Err(LedgerError::QuarantineFull { quarantined, budget });
        }
        Ok(())
    }

    fn grant(&mut self, pages: &[PageIndex]) -> Generation {
        let generation = self.next_generation();
        for &page in pages {
            self.set_state(page, PageState::Granted);
            self.pages[page.0 as usize].generation = generation;
        }
        generation
    }

    fn next_generation(&mut self) -> Generation {
        self.last_generation += 1;
        Generation(self.last_generation)
    }

    /// Ends writing: a compare-and-set on every page's state and generation. `[I1]`
    pub fn begin_verify(
        &mut self,
        pages: &[PageIndex],
        generation: Generation,
    ) -> Result<(), LedgerError> {
        self.advance(pages, generation, PageState::Granted, PageState::Verifying)
    }

    /// Makes verified pages readable.
    pub fn seal(&mut self, pages: &[PageIndex], generation: Generation) -> Result<(), LedgerError> {
        self.advance(pages, generation, PageState::Verifying, PageState::Sealed)
    }

    fn advance(
        &mut self,
        pages: &[PageIndex],
        generation: Generation,
        from: PageState,
        to: PageState,
    ) -> Result<(), LedgerError> {
        self.check_range(pages)?;
        self.check_state(pages, from, Some(generation))?;
        pages.iter().for_each(|&page| self.set_state(page, to));
        Ok(())
    }

    /// Holds back the pages of a failed transfer, granted or verifying, until its writes are
    /// known to have ended. `[I3]`
    pub fn quarantine(
        &mut self,
        pages: &[PageIndex],
        generation: Generation,
    ) -> Result<(), LedgerError> {
        let from = match pages.first().and_then(|&page| self.page(page)) {
            Some((PageState::Verifying, _)) => PageState::Verifying,
            _ => PageState::Granted,
        };
        self.advance(pages, generation, from, PageState::Quarantined)
    }

    /// Gives back pages of a lease that nobody was told of (granted), of a failed transfer whose
    /// writes are proven to have ended (quarantined), or of a reader that is done (sealed). The
    /// generation changes at once. Pages under a read guard become free when it is dropped.
    ///
    /// Returns the pages that must be zeroed and then [`Ledger::scrubbed`] before they are free.
    pub fn release(
        &mut self,
        pages: &[PageIndex],
        generation: Generation,
    ) -> Result<Vec<PageIndex>, LedgerError> {
        self.check_range(pages)?;
        let wanted = match pages.first().and_then(|&page| self.page(page)) {
            Some((state @ (PageState::Granted | PageState::Quarantined), _)) => state,
            _ => PageState::Sealed,
        };
        self.check_state(pages, wanted, Some(generation))?;
        if let Some(&page) = pages.iter().find(|page| self.pages[page.0 as usize].leaving) {
            return Err(LedgerError::Repeated { page });
        }
        let mut to_scrub = Vec::new();
        for &page in pages {
            match self.pages[page.0 as usize].guards {
                0 => self.leave(page, &mut to_scrub),
                _ => self.pages[page.0 as usize].leaving = true,
            }
        }
        Ok(to_scrub)
    }

    fn leave(&mut self, page: PageIndex, to_scrub: &mut Vec<PageIndex>) {
        let generation = self.next_generation();
        let scrub = self.scrub_on_release;
        let entry = &mut self.pages[page.0 as usize];
        entry.generation = generation;
        entry.leaving = false;
        if scrub {
            self.set_state(page, PageState::Scrubbing);
            to_scrub.push(page);
        } else {
            self.free_page(page);
        }
    }

    fn free_page(&mut self, page: PageIndex) {
        self.set_state(page, PageState::Free);
        let entry = &mut self.pages[page.0 as usize];
        if !std::mem::replace(&mut entry.listed, true) {
            self.free.push_back(page);
        }
    }

    /// Frees pages that were zeroed.
    pub fn scrubbed(&mut self, pages: &[PageIndex]) -> Result<(), LedgerError> {
        self.check_range(pages)?;
        self.check_state(pages, PageState::Scrubbing, None)?;
        pages.iter().for_each(|&page| self.free_page(page));
        Ok(())
    }

    /// Checks that every (page, generation) is readable now.
    pub fn check(&self, pages: &[PageIndex], generation: Generation) -> Result<(), LedgerError> {
        self.check_range(pages)?;
        self.check_state(pages, PageState::Sealed, Some(generation))?;
        match pages.iter().find(|page| self.pages[page.0 as usize].leaving) {
            Some(&page) => {
                Err(LedgerError::State { page, state: PageState::Free, wanted: PageState::Sealed })
            }
            None => Ok(()),
        }
    }

    /// Takes a read guard: until [`Ledger::unguard`], the pages stay sealed at this generation,
    /// whoever releases them. `[I18]`
    pub fn guard(
        &mut self,
        pages: &[PageIndex],
        generation: Generation,
    ) -> Result<(), LedgerError> {
        self.check(pages, generation)?;
        pages.iter().for_each(|page| self.pages[page.0 as usize].guards += 1);
        Ok(())
    }

    /// Ends a read guard. Returns the pages that must be zeroed, as [`Ledger::release`] does.
    pub fn unguard(
        &mut self,
        pages: &[PageIndex],
        generation: Generation,
    ) -> Result<Vec<PageIndex>, LedgerError> {
        self.check_range(pages)?;
        self.check_state(pages, PageState::Sealed, Some(generation))?;
        let mut to_scrub = Vec::new();
        for &page in pages {
            let entry = &mut self.pages[page.0 as usize];
            debug_assert!(entry.guards > 0, "one unguard per guard");
            entry.guards = entry.guards.saturating_sub(1);
            if entry.guards == 0 && entry.leaving {
                self.leave(page, &mut to_scrub);
            }
        }
        Ok(to_scrub)
    }

    fn set_state(&mut self, page: PageIndex, state: PageState) {
        let entry = &mut self.pages[page.0 as usize];
        self.counts[entry.state as usize] -= 1;
        self.counts[state as usize] += 1;
        entry.state = state;
    }

    fn check_range(&self, pages: &[PageIndex]) -> Result<(), LedgerError> {
        let page_count = self.pages.len() as u32;
        match pages.iter().find(|page| page.0 >= page_count) {
            Some(&page) => Err(LedgerError::OutOfRange { page, page_count }),
            None => Ok(()),
        }
    }

    fn check_list(&self, pages: &[PageIndex]) -> Result<(), LedgerError> {
        self.check_range(pages)?;
        let mut seen = HashSet::with_capacity(pages.len());
        match pages.iter().find(|&&page| !seen.insert(page)) {
            Some(&page) => Err(LedgerError::Repeated { page }),
            None => Ok(()),
        }
    }

    fn check_state(
        &self,
        pages: &[PageIndex],
        wanted: PageState,
        generation: Option<Generation>,
    ) -> Result<(), LedgerError> {
        for &page in pages {
            let entry = &self.pages[page.0 as usize];
            if let Some(wanted) = generation.filter(|&wanted| wanted != entry.generation) {
                return Err(LedgerError::Generation { page, found: entry.generation, wanted });
            }
            if entry.state != wanted {
                return Err(LedgerError::State { page, state: entry.state, wanted });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
