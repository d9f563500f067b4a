//! Numbers every block of a transfer, so that both ends and every frame name one by a `u32`.
//!
//! A **block** is one extent of one page in one plane. Blocks are numbered component by component,
//! extent by extent, plane by plane, page by page, so consecutive pages of a plane are a range.

use super::{BlockIndex, ComponentIndex, Extent, PlaneIndex};

/// What one component of a transfer holds: so many pages, and these extents of each.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ComponentShape {
    /// Logical pages of the transfer in this component.
    pub page_count: u32,
    /// Covered in each of the pages.
    pub extents: Vec<Extent>,
}

/// A run of consecutive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockRange {
    /// The first block.
    pub first: BlockIndex,
    /// How many; at least 1.
    pub count: u32,
}

impl BlockRange {
    /// One past the last block.
    pub fn end(&self) -> u64 {
        u64::from(self.first.0) + u64::from(self.count)
    }

    /// The blocks, in order. Empty if the range runs past `u32::MAX`.
    pub fn blocks(&self) -> impl Iterator<Item = BlockIndex> + use<> {
        let end = u32::try_from(self.end()).unwrap_or(self.first.0);
        (self.first.0..end).map(BlockIndex)
    }
}

/// Where a block lies, in terms that both ends share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockPlace {
    /// The component.
    pub component: ComponentIndex,
    /// Position among the component's extents.
    pub extent: u16,
    /// Planes from the extent's first plane: the ends may keep it in different planes.
    pub plane: u16,
    /// Logical page: position among the component's pages.
    pub page: u32,
    /// Bytes in the block.
    pub len: u64,
}

/// Why blocks can't be numbered or a range is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum BlockError {
    /// More blocks than a `u32` can name, or more bytes than a `u64`.
    #[error("the transfer has too many blocks to number")]
    TooMany,
    /// Nothing to transfer.
    #[error("the transfer has no blocks")]
    Empty,
    /// A range past the last block.
    #[error("blocks {first}..{end} lie outside the transfer's {count}")]
    OutOfRange {
        /// First block of the range.
        first: u32,
        /// One past its last.
        end: u64,
        /// Blocks in the transfer.
        count: u32,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Section {
    first: u32,
    component: u16,
    extent: u16,
    plane_count: u32,
    page_count: u32,
    block_len: u64,
}

impl Section {
    fn count(&self) -> u32 {
        self.plane_count * self.page_count
    }
}

/// The numbering of one transfer's blocks. Small: its size grows with extents, not with pages.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BlockMap {
    sections: Vec<Section>,
    page_counts: Vec<u32>,
    block_count: u32,
    byte_count: u64,
}

impl BlockMap {
    /// Numbers the blocks of these components.
    pub fn new(components: &[ComponentShape]) -> Result<BlockMap, BlockError> {
        let mut sections = Vec::new();
        let mut first = 0u32;
        let mut byte_count = 0u64;
        for (component, shape) in components.iter().enumerate() {
            for (index, extent) in shape.extents.iter().enumerate() {
                let section = Section {
                    first,
                    component: u16::try_from(component).map_err(|_| BlockError::TooMany)?,
                    extent: u16::try_from(index).map_err(|_| BlockError::TooMany)?,
                    plane_count: u32::from(extent.plane_count),
                    page_count: shape.page_count,
                    block_len: extent.block_len(),
                };
                let count = u64::from(section.plane_count) * u64::from(section.page_count);
                let bytes = count.checked_mul(section.block_len).ok_or(BlockError::TooMany)?;
                byte_count = byte_count.checked_add(bytes).ok_or(BlockError::TooMany)?;
                let count = u32::try_from(count).map_err(|_| BlockError::TooMany)?;
                first = first.checked_add(count).ok_or(BlockError::TooMany)?;
                if count > 0 {
                    sections.push(section);
                }
            }
        }
        if byte_count == 0 {
            return Err(BlockError::Empty);
        }
        let page_counts = components.iter().map(|shape| shape.page_count).collect();
        Ok(BlockMap { sections, page_counts, block_count: first, byte_count })
    }

    /// Blocks in the transfer.
    pub fn block_count(&self) -> u32 {
        self.block_count
    }

    /// Bytes in the transfer.
    pub fn byte_count(&self) -> u64 {
        self.byte_count
    }

    /// Logical pages of each component.
    pub fn page_counts(&self) -> &[u32] {
        &self.page_counts
    }

    /// Where `block` lies; `None` past the last block.
    pub fn locate(&self, block: BlockIndex) -> Option<BlockPlace> {
        if block.0 >= self.block_count {
            return None;
        }
        let index = self.sections.partition_point(|s| s.first <= block.0) - 1;
        let section = &self.sections[index];
        let offset = block.0 - section.first;
        Some(BlockPlace {
            component: ComponentIndex(section.component),
            extent: section.extent,
            plane: (offset / section.page_count) as u16,
            page: offset % section.page_count,
            len: section.block_len,
        })
    }

    /// Bytes in the blocks of `range`.
    pub fn range_len(&self, range: BlockRange) -> Result<u64, BlockError> {
        if range.end() > u64::from(self.block_count) {
            return Err(BlockError::OutOfRange {
                first: range.first.0,
                end: range.end(),
                count: self.block_count,
            });
        }
        let end = range.end() as u32;
        let start = self.sections.partition_point(|s| s.first <= range.first.0).saturating_sub(1);
        Ok(self.sections[start..]
            .iter()
            .take_while(|s| s.first < end)
            .map(|s| {
                let from = range.first.0.max(s.first);
                let to = end.min(s.first + s.count());
                u64::from(to.saturating_sub(from)) * s.block_len
            })
            .sum())
    }

    /// All blocks, as one range.
    pub fn all(&self) -> BlockRange {
        BlockRange { first: BlockIndex(0), count: self.block_count }
    }

    /// The blocks of logical pages `pages` of `component` in planes `planes` of a pool where the
    /// component's extents start at `first_planes`. What lies outside is left out.
    pub fn planes_of_pages(
        &self,
        component: ComponentIndex,
        first_planes: &[PlaneIndex],
        planes: std::ops::Range<u16>,
        pages: std::ops::Range<u32>,
    ) -> Vec<BlockRange> {
        let mut ranges: Vec<BlockRange> = Vec::new();
        for section in self.sections.iter().filter(|s| s.component == component.0) {
            let first_plane = first_planes.get(usize::from(section.extent)).map_or(0, |p| p.0);
            let start_plane = u32::from(planes.start.saturating_sub(first_plane));
            let end_plane = u32::from(planes.end.saturating_sub(first_plane));
            let count = pages.end.min(section.page_count).saturating_sub(pages.start);
            if count == 0 {
                continue;
            }
            for plane in start_plane..end_plane.min(section.plane_count) {
                let first = section.first + plane * section.page_count + pages.start;
                match ranges.last_mut() {
                    Some(last) if last.end() == u64::from(first) => last.count += count,
                    _ => ranges.push(BlockRange { first: BlockIndex(first), count }),
                }
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_components() -> BlockMap {
        let kv = ComponentShape {
            page_count: 5,
            extents: vec![Extent::whole(PlaneIndex(0), 3, 64), Extent::whole(PlaneIndex(3), 1, 16)],
        };
        let aux =
            ComponentShape { page_count: 1, extents: vec![Extent::whole(PlaneIndex(0), 2, 8)] };
        BlockMap::new(&[kv, aux]).unwrap()
    }

    fn pages_of(map: &BlockMap, component: u16, pages: std::ops::Range<u32>) -> Vec<BlockRange> {
        let firsts = [PlaneIndex(0), PlaneIndex(3)];
        map.planes_of_pages(ComponentIndex(component), &firsts, 0..u16::MAX, pages)
    }

    #[test]
    fn planes_count_in_the_pool_of_the_caller() {
        let map = two_components();
        let firsts = [PlaneIndex(10), PlaneIndex(13)];
        let ranges = map.planes_of_pages(ComponentIndex(0), &firsts, 12..14, 0..5);
        let blocks: Vec<_> = ranges.iter().flat_map(|r| r.blocks()).collect();
        let places: Vec<_> = blocks.iter().filter_map(|b| map.locate(*b)).collect();
        assert_eq!(places.len(), 10);
        assert!(places[..5].iter().all(|p| (p.extent, p.plane) == (0, 2)));
        assert!(places[5..].iter().all(|p| (p.extent, p.plane) == (1, 0)));
    }

    #[test]
    fn every_block_has_one_place_and_lengths_add_up() {
        let map = two_components();
        assert_eq!(map.block_count(), 5 * 3 + 5 + 2);
        let mut seen = std::collections::HashSet::new();
        let mut bytes = 0;
        for block in map.all().blocks() {
            let place = map.locate(block).unwrap();
            bytes += place.len;
            assert!(seen.insert((place.component, place.extent, place.plane, place.page)));
        }
        assert_eq!(bytes, map.byte_count());
        assert_eq!(map.locate(BlockIndex(map.block_count())), None);
        assert_eq!(map.range_len(map.all()).unwrap(), map.byte_count());
    }

    #[test]
    fn ranges_of_pages_are_exact() {
        let map = two_components();
        let blocks: Vec<_> = pages_of(&map, 0, 1..3).iter().flat_map(|r| r.blocks()).collect();
        assert_eq!(blocks.len(), 2 * 4);
        for block in blocks {
            let place = map.locate(block).unwrap();
            assert_eq!(place.component, ComponentIndex(0));
            assert!((1..3).contains(&place.page));
        }
        assert_eq!(pages_of(&map, 0, 0..5).len(), 1, "whole planes join up");
        assert!(pages_of(&map, 7, 0..5).is_empty());
    }

    #[test]
    fn a_range_past_the_end_is_refused() {
        let map = two_components();
        let range = BlockRange { first: BlockIndex(20), count: u32::MAX };
        assert!(matches!(map.range_len(range), Err(BlockError::OutOfRange { count: 22, .. })));
        assert!(matches!(BlockMap::new(&[]), Err(BlockError::Empty)));
    }
}
