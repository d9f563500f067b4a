//! What is moved: shapes, page numbers and contents. Both ends derive it from the same few numbers.

use anyhow::{Result, ensure};
use sealift::memory::{HostRegion, PlaneMemory};
use sealift::protocol::{Binding, Label, PageIndex, PoolLayout};
use serde::{Deserialize, Serialize};

use super::preset::Model;

/// What destination pages hold before a transfer.
pub(super) const MARKER: u8 = 0xA5;

/// The most pages that an engine grants at once, by default.
const MAX_PAGES: u32 = 4 << 20;

/// A shape, and how much of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Workload {
    /// A preset's name, or `blocks`.
    pub(super) name: String,
    /// Tokens of one request; blocks, if there are no tokens.
    pub(super) tokens: u32,
    /// 0 if there are no tokens.
    pub(super) tokens_per_page: u32,
    pub(super) planes: u16,
    /// Bytes of a page in one plane.
    pub(super) plane_bytes: u32,
    /// Pages of one request.
    pub(super) pages: u32,
    /// Requests at a time.
    pub(super) concurrency: u16,
    pub(super) seed: u64,
}

/// Which end's page numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Source,
    Destination,
}

impl Workload {
    pub(super) fn of_model(
        model: Model,
        tokens: u32,
        page_size: u32,
        concurrency: u16,
        seed: u64,
    ) -> Workload {
        Workload {
            name: model.name.to_owned(),
            tokens,
            tokens_per_page: page_size,
            planes: model.planes(),
            plane_bytes: model.plane_bytes_per_token().saturating_mul(page_size),
            pages: tokens.div_ceil(page_size),
            concurrency,
            seed,
        }
    }

    pub(super) fn of_blocks(blocks: u32, bytes: u32, concurrency: u16, seed: u64) -> Workload {
        Workload {
            name: "blocks".into(),
            tokens: blocks,
            tokens_per_page: 0,
            planes: 1,
            plane_bytes: bytes,
            pages: blocks,
            concurrency,
            seed,
        }
    }

    /// Whether the numbers are ones that this code is built for. They may come from a stranger.
    pub(super) fn check(&self) -> Result<()> {
        ensure!((1..=4096).contains(&self.planes), "{} planes, not 1 to 4096", self.planes);
        let bytes = self.plane_bytes;
        ensure!(
            (1..=64 << 20).contains(&bytes),
            "a page of {bytes} bytes in a plane, not 1 to 64 MiB"
        );
        ensure!((1..=256).contains(&self.concurrency), "concurrency {}", self.concurrency);
        let pages = u64::from(self.pages) * u64::from(self.concurrency);
        ensure!(
            self.pages > 0 && pages <= u64::from(MAX_PAGES),
            "{pages} pages at a time, not 1 to {MAX_PAGES}"
        );
        ensure!(self.name.len() <= 64, "a name of {} bytes", self.name.len());
        ensure!(self.checked_pool_bytes().is_some(), "more bytes than there are addresses");
        Ok(())
    }

    /// Pages in each end's pool: those of the requests, and a sixteenth more that stay unused. In
    /// the destination nobody may have touched them.
    pub(super) fn pool_pages(&self) -> u32 {
        let used = self.pages * u32::from(self.concurrency);
        used + used.div_ceil(16)
    }

    fn checked_pool_bytes(&self) -> Option<usize> {
        let pages = u64::from(self.pool_pages()).checked_mul(u64::from(self.plane_bytes))?;
        let bytes = pages.checked_mul(u64::from(self.planes))?;
        usize::try_from(bytes).ok().filter(|&bytes| isize::try_from(bytes).is_ok())
    }

    /// Bytes of each end's pool.
    pub(super) fn pool_bytes(&self) -> u64 {
        u64::from(self.pool_pages()) * self.page_bytes()
    }

    fn page_bytes(&self) -> u64 {
        u64::from(self.planes) * u64::from(self.plane_bytes)
    }

    /// In a few words.
    pub(super) fn describe(&self) -> String {
        let Workload { name, tokens, tokens_per_page, plane_bytes, .. } = self;
        if self.tokens_per_page == 0 {
            return format!("{tokens} blocks of {plane_bytes} bytes");
        }
        format!("{name}, {tokens} tokens, {tokens_per_page} a page")
    }

    /// Bytes of one request.
    pub(super) fn request_bytes(&self) -> u64 {
        u64::from(self.pages) * self.page_bytes()
    }

    pub(super) fn layout(&self) -> PoolLayout {
        PoolLayout {
            name: "kv".into(),
            dtype: "bf16".into(),
            tokens_per_page: self.tokens_per_page,
            page_count: self.pool_pages(),
            item_lens: vec![self.plane_bytes; usize::from(self.planes)],
        }
    }

    /// Bytes from the start of the region to a page of a plane.
    pub(super) fn offset(&self, plane: u16, page: PageIndex) -> usize {
        let before = usize::from(plane) * self.pool_pages() as usize + page.0 as usize;
        before * self.plane_bytes as usize
    }

    /// The planes of a region of [`Workload::pool_bytes`].
    pub(super) fn plane_memory(&self, region: &HostRegion) -> Vec<PlaneMemory> {
        let plane = |plane| PlaneMemory {
            region: region.clone(),
            offset: self.offset(plane, PageIndex(0)),
            stride: self.plane_bytes as usize,
            item_len: self.plane_bytes,
        };
        (0..self.planes).map(plane).collect()
    }

    /// All pages of one end's pool in this round's order: request `i` has the `i`th run of
    /// [`Workload::pages`] of them, and the rest is unused.
    pub(super) fn order(&self, round: u64, end: End) -> Vec<PageIndex> {
        let salt = match end {
            End::Source => 1,
            End::Destination => 2,
        };
        let mut random = SplitMix::of(&[self.seed, round, salt]);
        let mut pages: Vec<PageIndex> = (0..self.pool_pages()).map(PageIndex).collect();
        for last in (1..pages.len()).rev() {
            pages.swap(last, random.below(last as u64 + 1) as usize);
        }
        pages
    }

    /// The pages of one request within [`Workload::order`].
    pub(super) fn of_request<'a>(&self, order: &'a [PageIndex], request: u16) -> &'a [PageIndex] {
        let pages = self.pages as usize;
        let first = usize::from(request) * pages;
        &order[first..first + pages]
    }

    /// The pages of nobody, of a round of `requests`.
    pub(super) fn unused<'a>(&self, order: &'a [PageIndex], requests: u16) -> &'a [PageIndex] {
        &order[usize::from(requests) * self.pages as usize..]
    }

    /// What both ends know one request by.
    pub(super) fn label(round: u64, request: u16) -> Label {
        Label::new(format!("bench-{round}-{request}")).unwrap_or_default()
    }

    /// What both ends bind it to.
    pub(super) fn binding(&self, round: u64, request: u16) -> Binding {
        let hash = SplitMix::of(&[self.seed, round, u64::from(request), 3]).next();
        Binding::hashed(u64::from(self.tokens), hash)
    }

    /// What a source page holds in one plane.
    pub(super) fn content(&self, plane: u16, page: PageIndex, out: &mut [u8]) {
        let mut random = SplitMix::of(&[self.seed, u64::from(plane), u64::from(page.0), 4]);
        let mut words = out.chunks_exact_mut(8);
        words.by_ref().for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
        let rest = words.into_remainder();
        rest.copy_from_slice(&random.next().to_le_bytes()[..rest.len()]);
    }

    /// The region of the source, filled; `stop` is asked now and then whether to go on.
    pub(super) fn source_region(&self, stop: &(dyn Fn() -> bool + Sync)) -> Result<HostRegion> {
        let region = self.region()?;
        let pages = self.pool_pages();
        super::verify::over_blocks(self.planes, pages, self.plane_bytes, |plane, page, block| {
            ensure!(!stop(), super::stop::Interrupted::default());
            let page = PageIndex(page);
            self.content(plane, page, block);
            Ok(region.write_at(self.offset(plane, page), block)?)
        })?;
        Ok(region)
    }

    /// A region for one end's pool.
    pub(super) fn region(&self) -> Result<HostRegion> {
        Ok(HostRegion::owned(usize::try_from(self.pool_bytes())?)?)
    }
}

/// Sebastiano Vigna's splitmix64: small, fast, and the same on every machine.
struct SplitMix(u64);

impl SplitMix {
    /// A generator whose numbers depend on all of `seeds`, and on their order.
    fn of(seeds: &[u64]) -> SplitMix {
        seeds.iter().fold(SplitMix(0), |mut mixed, &seed| {
            mixed.0 ^= seed;
            SplitMix(mixed.next())
        })
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `limit`, by multiplication: uniform enough for shuffling pages.
    fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix_is_the_published_one() {
        // The first numbers of the reference implementation from the seed 1234567.
        let mut random = SplitMix(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| random.next()).collect();
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn requests_of_a_round_share_no_page_and_orders_differ() {
        let workload = Workload::of_blocks(33, 24, 3, 7);
        let order = workload.order(0, End::Destination);
        let mut sorted: Vec<u32> = order.iter().map(|page| page.0).collect();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..workload.pool_pages()).collect::<Vec<_>>());
        assert_ne!(order, workload.order(0, End::Source));
        assert_ne!(order, workload.order(1, End::Destination));
        let used: usize = (0..3).map(|i| workload.of_request(&order, i).len()).sum();
        assert_eq!(used + workload.unused(&order, 3).len(), order.len());
    }

    #[test]
    fn contents_depend_on_plane_and_page_also_in_odd_lengths() {
        let workload = Workload::of_blocks(2, 13, 1, 7);
        let content = |plane, page| {
            let mut bytes = [0; 13];
            workload.content(plane, PageIndex(page), &mut bytes);
            bytes
        };
        assert_eq!(content(0, 0), content(0, 0));
        assert_ne!(content(0, 0), content(0, 1));
        assert_ne!(content(0, 0), content(1, 0));
    }

    #[test]
    fn numbers_from_a_stranger_are_checked() {
        let good = Workload::of_blocks(8, 64, 1, 0);
        good.check().unwrap();
        type Edit = fn(&mut Workload);
        let edits: [Edit; 5] = [
            |w| w.planes = 0,
            |w| w.plane_bytes = 0,
            |w| w.pages = 0,
            |w| w.pages = u32::MAX,
            |w| w.concurrency = 0,
        ];
        for edit in edits {
            let mut bad = good.clone();
            edit(&mut bad);
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
