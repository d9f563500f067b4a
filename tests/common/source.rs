//! The memory of a test's pools: what it looks like before, and what may have changed after.

use std::sync::Arc;

use sealift::memory::{HostRegion, PlaneMemory, PoolMemory};
use sealift::protocol::{PageIndex, PoolLayout};

/// Bytes of a page in a plane: more than one digest leaf.
pub const ITEM: u32 = 8 * 1024;
/// Planes of a pool.
pub const PLANES: u16 = 2;
/// Pages of a pool.
pub const PAGES: u32 = 16;
/// Bytes between pages, which belong to none: whoever writes past a page is found out.
pub const GAP: usize = 64;
/// What destinations and gaps are filled with beforehand.
pub const MARK: u8 = 0xA5;

/// What a pool is like.
#[derive(Clone, Debug)]
pub struct Shape {
    pub layout: PoolLayout,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape::of(PAGES, PLANES, ITEM)
    }
}

impl Shape {
    pub fn of(pages: u32, planes: u16, item: u32) -> Shape {
        let layout = PoolLayout {
            name: "kv".into(),
            dtype: "bf16".into(),
            tokens_per_page: 16,
            page_count: pages,
            item_lens: vec![item; planes.into()],
        };
        Shape { layout }
    }

    fn stride(&self, plane: usize) -> usize {
        self.layout.item_lens[plane] as usize + GAP
    }

    fn base(&self, plane: usize) -> usize {
        (0..plane).map(|k| self.stride(k) * self.layout.page_count as usize).sum()
    }

    pub fn len(&self) -> usize {
        self.base(self.layout.item_lens.len())
    }

    /// Bytes from the region's start to a page.
    pub fn at(&self, plane: u16, page: u32) -> usize {
        self.base(plane.into()) + page as usize * self.stride(plane.into())
    }

    /// A region with every byte at [`MARK`], and the planes in it.
    pub fn make(&self) -> (HostRegion, Vec<PlaneMemory>) {
        let region = HostRegion::owned(self.len()).unwrap();
        region.fill(0, self.len(), MARK).unwrap();
        let plane = |k: usize| PlaneMemory {
            region: region.clone(),
            offset: self.base(k),
            stride: self.stride(k),
            item_len: self.layout.item_lens[k],
        };
        let planes = (0..self.layout.item_lens.len()).map(plane).collect();
        (region, planes)
    }

    /// Memory for a hand-driven sender, filled with the patterns of `seed`.
    pub fn memory(&self, seed: u8) -> Arc<PoolMemory> {
        let (region, planes) = self.make();
        self.fill(&region, seed);
        Arc::new(PoolMemory::new(planes, self.layout.page_count).unwrap())
    }

    /// Gives every page of every plane its own content.
    pub fn fill(&self, region: &HostRegion, seed: u8) {
        for (plane, &len) in self.layout.item_lens.iter().enumerate() {
            for page in 0..self.layout.page_count {
                let bytes = pattern(seed, plane as u16, page, len as usize);
                region.write_at(self.at(plane as u16, page), &bytes).unwrap();
            }
        }
    }

    /// Every byte that isn't of `pages` is still [`MARK`].
    pub fn assert_untouched_but(&self, region: &HostRegion, pages: &[PageIndex]) {
        let mut bytes = vec![0; self.len()];
        region.read_at(0, &mut bytes).unwrap();
        for (plane, &len) in self.layout.item_lens.iter().enumerate() {
            for page in pages {
                let at = self.at(plane as u16, page.0);
                bytes[at..at + len as usize].fill(MARK);
            }
        }
        let changed = bytes.iter().position(|&byte| byte != MARK);
        assert_eq!(changed, None, "a byte changed that nobody was to write");
    }
}

/// The content of one page of one plane: no two pages alike, and no two parts of a page.
pub fn pattern(seed: u8, plane: u16, page: u32, len: usize) -> Vec<u8> {
    let mut state = u64::from(seed) << 48 | u64::from(plane) << 32 | u64::from(page) | 1 << 63;
    let mut bytes = vec![0; len];
    for byte in &mut bytes {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = (state >> 56) as u8;
    }
    bytes
}
