//! What a pool's pages look like, and the fingerprint that both sides compare field by field.

use super::wire::{Text, wire_struct};
use super::{Extent, PlaneIndex};

/// The shape of one pool. Where its bytes are isn't part of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PoolLayout {
    /// What the pool holds: `kv`, `swa`, `aux`. Components match by it.
    pub name: String,
    /// Element type, as the engine names it: `bf16`, `fp8_e4m3`.
    pub dtype: String,
    /// Tokens that one page holds; 0 if the pool isn't paged by tokens.
    pub tokens_per_page: u32,
    /// Pages.
    pub page_count: u32,
    /// Bytes of a page in each plane.
    pub item_lens: Vec<u32>,
}

wire_struct! {
    /// What two pools must share so that pages of one can be pages of the other.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub struct Fingerprint {
        /// [`PoolLayout::name`].
        pub name: Text,
        /// [`PoolLayout::dtype`].
        pub dtype: Text,
        /// [`PoolLayout::tokens_per_page`].
        pub tokens_per_page: u32,
        /// Page lengths of the planes in order: (planes, bytes).
        pub item_lens: Vec<(u16, u32)>,
    }
}

impl PoolLayout {
    /// The fingerprint.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut item_lens: Vec<(u16, u32)> = Vec::new();
        for &len in &self.item_lens {
            match item_lens.last_mut() {
                Some((count, last)) if *last == len && *count < u16::MAX => *count += 1,
                _ => item_lens.push((1, len)),
            }
        }
        Fingerprint {
            name: Text::new(&self.name),
            dtype: Text::new(&self.dtype),
            tokens_per_page: self.tokens_per_page,
            item_lens,
        }
    }

    /// Extents that cover every byte of a page: one per run of planes with equal page lengths.
    pub fn whole_page(&self) -> Vec<Extent> {
        let mut first = 0;
        let mut extents = Vec::new();
        for (count, len) in self.fingerprint().item_lens {
            extents.push(Extent::whole(PlaneIndex(first), count, len));
            first += count;
        }
        extents
    }

    /// Bytes of one page over all planes.
    pub fn page_bytes(&self) -> u64 {
        self.item_lens.iter().map(|&len| u64::from(len)).sum()
    }
}

impl Fingerprint {
    /// The first field that differs: its name, its value here and there. Page lengths count only
    /// if `whole_pages`: parts of pages are compared extent by extent.
    pub fn difference(&self, other: &Fingerprint, whole_pages: bool) -> Option<(Text, Text, Text)> {
        let field = |name: &str, a: String, b: String| {
            (a != b).then(|| (Text::new(name), Text::new(a), Text::new(b)))
        };
        field("name", self.name.to_string(), other.name.to_string())
            .or_else(|| field("dtype", self.dtype.to_string(), other.dtype.to_string()))
            .or_else(|| {
                let (a, b) = (self.tokens_per_page, other.tokens_per_page);
                field("tokens_per_page", a.to_string(), b.to_string())
            })
            .or_else(|| {
                let lens = |f: &Fingerprint| {
                    let runs = f.item_lens.iter().map(|(n, len)| format!("{n}x{len}"));
                    runs.collect::<Vec<_>>().join("+")
                };
                whole_pages.then(|| field("item_lens", lens(self), lens(other)))?
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> PoolLayout {
        PoolLayout {
            name: "kv".into(),
            dtype: "bf16".into(),
            tokens_per_page: 16,
            page_count: 8,
            item_lens: vec![64, 64, 64, 32],
        }
    }

    #[test]
    fn a_difference_names_the_field_and_both_values() {
        let ours = layout().fingerprint();
        type Edit = fn(&mut PoolLayout);
        let cases: [(&str, Edit); 4] = [
            ("name", |l| l.name = "swa".into()),
            ("dtype", |l| l.dtype = "fp8".into()),
            ("tokens_per_page", |l| l.tokens_per_page = 32),
            ("item_lens", |l| l.item_lens[3] = 64),
        ];
        for (field, edit) in cases {
            let mut other = layout();
            edit(&mut other);
            let (name, a, b) = ours.difference(&other.fingerprint(), true).unwrap();
            assert_eq!(name.as_str(), field);
            assert_ne!(a, b);
        }
        let mut more_pages = layout();
        more_pages.page_count = 9;
        assert_eq!(ours.difference(&more_pages.fingerprint(), true), None);
    }

    #[test]
    fn whole_page_extents_cover_every_plane_once() {
        let extents = layout().whole_page();
        assert_eq!(extents.len(), 2);
        let bytes: u64 = extents.iter().map(|e| e.block_len() * u64::from(e.plane_count)).sum();
        assert_eq!(bytes, layout().page_bytes());
        extents.iter().for_each(|e| e.check(&layout().item_lens).unwrap());
    }
}
