//! Whether planes make a pool: in their regions, and no byte shared.

use super::region::HostRegion;

/// One plane: pages of `item_len` bytes, `stride` bytes apart, from byte `offset` of `region`.
#[derive(Clone, Debug)]
pub struct PlaneMemory {
    /// The memory.
    pub region: HostRegion,
    /// Bytes from the region's start to page 0.
    pub offset: usize,
    /// Bytes from page to page; at least `item_len`.
    pub stride: usize,
    /// Bytes of a page in this plane.
    pub item_len: u32,
}

/// Why planes don't make a pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolMemoryError {
    /// No planes, no pages or no bytes.
    #[error("a pool needs at least one plane, one page and one byte a page")]
    Empty,
    /// More planes than a `u16` counts.
    #[error("{0} planes exceed 65,535")]
    TooManyPlanes(usize),
    /// Pages of a plane overlap each other.
    #[error("plane {plane}: stride {stride} is less than the page length {item_len}")]
    Stride {
        /// Which plane.
        plane: usize,
        /// Its stride.
        stride: usize,
        /// Its page length.
        item_len: u32,
    },
    /// A plane runs past its region.
    #[error("plane {plane} needs {need} bytes of a region of {have}")]
    PastRegion {
        /// Which plane.
        plane: usize,
        /// Bytes from the region's start to the plane's end.
        need: u128,
        /// Bytes in the region.
        have: usize,
    },
    /// Pages of two planes share bytes.
    #[error("planes {0} and {1} share bytes")]
    PlanesOverlap(usize, usize),
}

impl PlaneMemory {
    /// Checks one plane by itself. `page_count` is at least 1.
    pub(super) fn check(&self, plane: usize, page_count: u32) -> Result<(), PoolMemoryError> {
        let PlaneMemory { stride, item_len, .. } = *self;
        if item_len == 0 {
            return Err(PoolMemoryError::Empty);
        }
        if (stride as u128) < u128::from(item_len) {
            return Err(PoolMemoryError::Stride { plane, stride, item_len });
        }
        // At most 2^64 + 2^96 + 2^32: this can't overflow.
        let pages = u128::from(page_count - 1) * stride as u128 + u128::from(item_len);
        let need = self.offset as u128 + pages;
        let have = self.region.len();
        if need > have as u128 {
            return Err(PoolMemoryError::PastRegion { plane, need, have });
        }
        Ok(())
    }
}

/// The addresses of one plane's pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lattice {
    /// Address of page 0.
    base: u128,
    /// Bytes from page to page; at least `item_len`.
    stride: u128,
    /// Bytes of a page; at least 1.
    item_len: u128,
    /// At least 1.
    page_count: u128,
}

impl Lattice {
    pub(super) fn new(plane: &PlaneMemory, page_count: u32) -> Lattice {
        Lattice {
            base: plane.region.base_addr() as u128 + plane.offset as u128,
            stride: plane.stride as u128,
            item_len: u128::from(plane.item_len),
            page_count: u128::from(page_count),
        }
    }

    /// One past the last byte of the last page.
    fn end(&self) -> u128 {
        self.base + (self.page_count - 1) * self.stride + self.item_len
    }

    /// Whether a page of `self` and one of `other` share a byte: exact if the strides are equal or
    /// the address ranges lie apart, and `true` otherwise.
    pub(super) fn shares_bytes(&self, other: &Lattice) -> bool {
        let (a, b) = if self.base <= other.base { (self, other) } else { (other, self) };
        if a.end() <= b.base {
            return false;
        }
        if a.stride != b.stride {
            return true;
        }
        // Seen from page q + k of `a`, page q of `b` starts `distance - k * stride` bytes further
        // on. They share a byte if that is less than the page length of `a` and, where negative,
        // more than minus that of `b`. No page is longer than the stride, so of all k only
        // `distance / stride` and the next can do that, if `a` has so many pages.
        let distance = b.base - a.base;
        let (k, rest) = (distance / a.stride, distance % a.stride);
        let starts_inside = k < a.page_count && rest < a.item_len;
        let ends_inside = k + 1 < a.page_count && a.stride - rest < b.item_len;
        starts_inside || ends_inside
    }
}

/// Checks that no two planes share a byte. Compares those whose address ranges meet, in the order
/// of their addresses: planes that lie apart cost a sort and no more.
pub(super) fn check_disjoint(lattices: &[Lattice]) -> Result<(), PoolMemoryError> {
    let mut order: Vec<usize> = (0..lattices.len()).collect();
    order.sort_by_key(|&plane| lattices[plane].base);
    for (position, &a) in order.iter().enumerate() {
        let end = lattices[a].end();
        for &b in order[position + 1..].iter().take_while(|&&b| lattices[b].base < end) {
            if lattices[a].shares_bytes(&lattices[b]) {
                return Err(PoolMemoryError::PlanesOverlap(a.min(b), a.max(b)));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn lattice(base: u128, stride: u128, item_len: u128, page_count: u128) -> Lattice {
        Lattice { base, stride, item_len, page_count }
    }

    fn bytes(l: &Lattice) -> impl Iterator<Item = u128> + '_ {
        let page = |p| l.base + p * l.stride..l.base + p * l.stride + l.item_len;
        (0..l.page_count).flat_map(page)
    }

    fn really_share(a: &Lattice, b: &Lattice) -> bool {
        let of_a: HashSet<u128> = bytes(a).collect();
        bytes(b).any(|byte| of_a.contains(&byte))
    }

    /// (base, page length as a part of the stride, pages)
    fn any_lattice(stride: u128) -> impl Strategy<Value = Lattice> {
        (0u128..60, 1..=stride, 1u128..6)
            .prop_map(move |(base, item_len, pages)| lattice(base, stride, item_len, pages))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn equal_strides_are_exact(
            (a, b) in (1u128..14).prop_flat_map(|s| (any_lattice(s), any_lattice(s)))
        ) {
            prop_assert_eq!(a.shares_bytes(&b), really_share(&a, &b));
            prop_assert_eq!(b.shares_bytes(&a), a.shares_bytes(&b));
        }

        #[test]
        fn other_strides_never_miss_a_shared_byte(
            a in (1u128..14).prop_flat_map(any_lattice),
            b in (1u128..14).prop_flat_map(any_lattice),
        ) {
            prop_assert!(a.shares_bytes(&b) || !really_share(&a, &b));
            prop_assert_eq!(b.shares_bytes(&a), a.shares_bytes(&b));
        }

        #[test]
        fn a_set_of_planes_is_refused_exactly_if_two_share(
            planes in (4u128..30).prop_flat_map(|s| {
                let plane = (0u128..60, 1..=s.min(4));
                prop::collection::vec(plane, 1..6)
                    .prop_map(move |p| p.iter().map(|&(b, l)| lattice(b, s, l, 3)).collect())
            })
        ) {
            let planes: Vec<Lattice> = planes;
            let pairs = || (0..planes.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
            let sharing: Vec<_> =
                pairs().filter(|&(a, b)| really_share(&planes[a], &planes[b])).collect();
            match check_disjoint(&planes) {
                Ok(()) => prop_assert!(sharing.is_empty(), "missed {:?}", sharing),
                Err(PoolMemoryError::PlanesOverlap(a, b)) => prop_assert!(sharing.contains(&(a, b))),
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let top = u128::from(u64::MAX);
        let a = lattice(top, top, u128::from(u32::MAX), u128::from(u32::MAX));
        let b = lattice(0, top, 1, u128::from(u32::MAX));
        assert!(a.shares_bytes(&b));
        assert!(!a.shares_bytes(&lattice(0, top, 1, 1)));
    }
}
