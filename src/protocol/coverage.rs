//! Do the parts of an assembly cover its lease exactly: every byte of every page once?

use std::collections::BTreeSet;
use std::ops::Range;

use super::extent::Extent;
use super::ids::PlaneIndex;

/// Some extents of some logical pages of one lease component.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Slice {
    /// Which component of the lease.
    pub component: usize,
    /// Logical pages.
    pub pages: Range<u32>,
    /// What of each page.
    pub extents: Vec<Extent>,
}

/// Why slices don't cover a lease exactly.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum CoverageError {
    /// A byte that no sender is asked for.
    #[error("component {component}, logical page {page}, {plane}: byte {byte} is in no grant")]
    Gap {
        /// Lease component.
        component: usize,
        /// Logical page.
        page: u32,
        /// Plane.
        plane: PlaneIndex,
        /// Byte in the page.
        byte: u64,
    },
    /// A byte that two grants claim.
    #[error("component {component}, logical page {page}, {plane}: byte {byte} is in two grants")]
    Overlap {
        /// Lease component.
        component: usize,
        /// Logical page.
        page: u32,
        /// Plane.
        plane: PlaneIndex,
        /// Byte in the page.
        byte: u64,
    },
    /// A slice outside the lease.
    #[error("a grant names component {component}, pages {first}..{end}, outside the lease")]
    OutsideLease {
        /// Lease component.
        component: usize,
        /// First logical page.
        first: u32,
        /// One past the last.
        end: u32,
    },
}

/// Checks that `slices` cover each component, of (logical pages, page length per plane), exactly.
pub fn check_exact(components: &[(u32, &[u32])], slices: &[&Slice]) -> Result<(), CoverageError> {
    for slice in slices {
        let (first, end) = (slice.pages.start, slice.pages.end);
        let page_count = components.get(slice.component).map_or(0, |(pages, _)| *pages);
        if first >= end || end > page_count {
            return Err(CoverageError::OutsideLease { component: slice.component, first, end });
        }
    }
    for (component, &(page_count, item_lens)) in components.iter().enumerate() {
        let own: Vec<&Slice> =
            slices.iter().copied().filter(|slice| slice.component == component).collect();
        let mut cuts: BTreeSet<u32> = own.iter().map(|slice| slice.pages.start).collect();
        cuts.extend(own.iter().map(|slice| slice.pages.end));
        cuts.insert(0);
        // Between two cuts every page is covered by the same slices, so one page stands for all.
        for &page in cuts.iter().filter(|&&page| page < page_count) {
            let covering = own.iter().filter(|slice| slice.pages.contains(&page));
            let extents: Vec<&Extent> = covering.flat_map(|slice| &slice.extents).collect();
            for (plane, &item_len) in item_lens.iter().enumerate() {
                let plane = PlaneIndex(plane as u16);
                check_plane(&extents, plane, u64::from(item_len)).map_err(|fault| {
                    let (byte, overlap) = fault;
                    match overlap {
                        true => CoverageError::Overlap { component, page, plane, byte },
                        false => CoverageError::Gap { component, page, plane, byte },
                    }
                })?;
            }
        }
    }
    Ok(())
}

fn check_plane(extents: &[&Extent], plane: PlaneIndex, item_len: u64) -> Result<(), (u64, bool)> {
    let here = |extent: &&&Extent| {
        (u32::from(extent.first_plane.0)..extent.end_plane()).contains(&u32::from(plane.0))
    };
    let mut pieces: Vec<(u64, u64)> =
        extents.iter().filter(here).flat_map(|extent| extent.pieces()).collect();
    pieces.sort_unstable();
    let mut covered = 0;
    for (offset, len) in pieces {
        if offset != covered {
            return Err((offset.min(covered), offset < covered));
        }
        covered += len;
    }
    if covered == item_len { Ok(()) } else { Err((covered, false)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(pages: Range<u32>, extents: Vec<Extent>) -> Slice {
        Slice { component: 0, pages, extents }
    }

    fn heads(offset: u32, piece_len: u32) -> Extent {
        Extent { offset, piece_len, piece_count: 4, piece_stride: 16, ..whole() }
    }

    fn whole() -> Extent {
        Extent::whole(PlaneIndex(0), 2, 64)
    }

    fn check(slices: &[Slice]) -> Result<(), CoverageError> {
        check_exact(&[(6, &[64, 64])], &slices.iter().collect::<Vec<_>>())
    }

    #[test]
    fn halves_of_heads_by_page_ranges_and_planes_can_be_exact() {
        check(&[slice(0..6, vec![whole()])]).unwrap();
        check(&[slice(0..6, vec![heads(0, 8)]), slice(0..6, vec![heads(8, 8)])]).unwrap();
        check(&[slice(0..2, vec![whole()]), slice(2..6, vec![whole()])]).unwrap();
        let plane = |p| Extent::whole(PlaneIndex(p), 1, 64);
        check(&[slice(0..6, vec![plane(0)]), slice(0..6, vec![plane(1)])]).unwrap();
    }

    #[test]
    fn gaps_and_overlaps_are_named() {
        let gap = check(&[slice(0..5, vec![whole()])]).unwrap_err();
        assert!(matches!(gap, CoverageError::Gap { page: 5, byte: 0, .. }));
        let gap = check(&[slice(0..6, vec![heads(0, 8)]), slice(0..6, vec![heads(8, 7)])]);
        assert!(matches!(gap, Err(CoverageError::Gap { byte: 15, .. })), "{gap:?}");
        let twice = check(&[slice(0..6, vec![whole()]), slice(3..4, vec![heads(0, 8)])]);
        assert!(matches!(twice, Err(CoverageError::Overlap { page: 3, .. })), "{twice:?}");
        let outside = check(&[slice(0..7, vec![whole()])]);
        assert!(matches!(outside, Err(CoverageError::OutsideLease { end: 7, .. })));
        assert!(check(&[]).is_err());
    }
}
