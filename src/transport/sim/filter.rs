//! Which things a fault hits, and how often it did.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::LinkId;
use super::fault::{Fault, FaultKind};
use super::rng::Rng;
use crate::protocol::{LaneId, TransferId};

/// Which of the things that a fault could hit it does hit. What isn't named doesn't matter.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    from: Option<String>,
    to: Option<String>,
    link: Option<LinkId>,
    lane: Option<LaneId>,
    lane_index: Option<u16>,
    transfer: Option<TransferId>,
    marker: Option<bool>,
    skip: u64,
    times: Option<u64>,
    chance: Option<f64>,
}

impl Filter {
    /// Everything, every time.
    pub fn any() -> Filter {
        Filter::default()
    }

    /// Only what this endpoint sends, writes or calls.
    pub fn from(mut self, name: &str) -> Filter {
        self.from = Some(name.to_owned());
        self
    }

    /// Only what goes to this endpoint.
    pub fn to(mut self, name: &str) -> Filter {
        self.to = Some(name.to_owned());
        self
    }

    /// Only what goes through this link, as either end names it, either way.
    pub fn link(mut self, link: LinkId) -> Filter {
        self.link = Some(link);
        self
    }

    /// Only what goes through this lane.
    pub fn lane(mut self, lane: LaneId) -> Filter {
        self.lane = Some(lane);
        self
    }

    /// Only what goes through lanes of this index, whatever their epoch.
    pub fn lane_index(mut self, index: u16) -> Filter {
        self.lane_index = Some(index);
        self
    }

    /// Only writes and markers of this transfer.
    pub fn transfer(mut self, transfer: TransferId) -> Filter {
        self.transfer = Some(transfer);
        self
    }

    /// Only writes, no markers.
    pub fn writes(mut self) -> Filter {
        self.marker = Some(false);
        self
    }

    /// Only markers, no writes.
    pub fn markers(mut self) -> Filter {
        self.marker = Some(true);
        self
    }

    /// Not the first `count` of what matches.
    pub fn skip(mut self, count: u64) -> Filter {
        self.skip = count;
        self
    }

    /// At most so many.
    pub fn times(mut self, count: u64) -> Filter {
        self.times = Some(count);
        self
    }

    /// Only number `k` of what matches, counted from 0.
    pub fn nth(self, k: u64) -> Filter {
        self.skip(k).times(1)
    }

    /// Each of what matches with this probability.
    pub fn chance(mut self, probability: f64) -> Filter {
        self.chance = Some(probability);
        self
    }

    fn matches(&self, subject: &Subject) -> bool {
        fn allows<T: PartialEq>(wanted: &Option<T>, found: Option<T>) -> bool {
            wanted.is_none() || *wanted == found
        }
        let name_is = |wanted: &Option<String>, found: Option<&str>| {
            wanted.is_none() || wanted.as_deref() == found
        };
        name_is(&self.from, Some(&subject.from))
            && name_is(&self.to, subject.to.as_deref())
            && self.link.is_none_or(|link| subject.links.contains(&Some(link)))
            && allows(&self.lane, subject.lane)
            && allows(&self.lane_index, subject.lane.map(|lane| lane.index))
            && allows(&self.transfer, subject.transfer)
            && allows(&self.marker, subject.marker)
    }

    /// Whether it matches something between these two, whichever of them sends.
    pub(super) fn matches_either_way(&self, subject: &Subject) -> bool {
        let turned = || {
            let from = subject.to.clone()?;
            Some(Subject { from, to: Some(subject.from.clone()), ..subject.clone() })
        };
        self.matches(subject) || turned().is_some_and(|turned| self.matches(&turned))
    }

    /// Counts a match off; `true` if it is to be hit.
    fn takes(&mut self, rng: &mut Rng) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        if self.times == Some(0) || !rng.chance(self.chance.unwrap_or(1.0)) {
            return false;
        }
        self.times = self.times.map(|times| times - 1);
        true
    }

    fn is_spent(&self) -> bool {
        self.times == Some(0)
    }

    fn is_certain(&self) -> bool {
        self.chance.is_none_or(|chance| chance >= 1.0)
    }
}

/// Something that a fault may hit.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    pub(super) from: Arc<str>,
    pub(super) to: Option<Arc<str>>,
    pub(super) links: [Option<LinkId>; 2],
    pub(super) lane: Option<LaneId>,
    pub(super) transfer: Option<TransferId>,
    pub(super) marker: Option<bool>,
}

/// Names an injected fault, so that it can be taken back with [`super::SimNet::withdraw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FaultId(u64);

/// How often each kind of fault was applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimStats(BTreeMap<FaultKind, u64>);

impl SimStats {
    /// How often a fault of this kind was applied.
    pub fn count(&self, kind: FaultKind) -> u64 {
        self.0.get(&kind).copied().unwrap_or(0)
    }

    /// Every kind that was applied, and how often.
    pub fn iter(&self) -> impl Iterator<Item = (FaultKind, u64)> + '_ {
        self.0.iter().map(|(&kind, &count)| (kind, count))
    }

    pub(super) fn add(&mut self, kind: FaultKind) {
        *self.0.entry(kind).or_default() += 1;
    }
}

/// The faults injected now, and what they did.
#[derive(Debug, Default)]
pub(super) struct FaultBook {
    faults: BTreeMap<FaultId, (Fault, Filter)>,
    next: u64,
    pub(super) stats: SimStats,
}

impl FaultBook {
    pub(super) fn inject(&mut self, fault: Fault, filter: Filter) -> FaultId {
        let id = FaultId(self.next);
        self.next += 1;
        self.faults.insert(id, (fault, filter));
        id
    }

    pub(super) fn withdraw(&mut self, id: FaultId) -> bool {
        self.faults.remove(&id).is_some()
    }

    /// Takes back the faults of this kind that hit with certainty.
    pub(super) fn withdraw_certain(&mut self, kind: FaultKind) {
        self.faults.retain(|_, (fault, filter)| fault.kind() != kind || !filter.is_certain());
    }

    /// The fault of this kind that hits `subject`, if any: the first injected that does. Counts it,
    /// so ask only where it can be applied.
    pub(super) fn hit(
        &mut self,
        rng: &mut Rng,
        kind: FaultKind,
        subject: &Subject,
    ) -> Option<Fault> {
        for (&id, (fault, filter)) in &mut self.faults {
            if fault.kind() == kind && filter.matches(subject) && filter.takes(rng) {
                let (fault, spent) = (fault.clone(), filter.is_spent());
                if spent {
                    self.faults.remove(&id);
                }
                self.stats.add(kind);
                return Some(fault);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject() -> Subject {
        Subject {
            from: "a".into(),
            to: Some("b".into()),
            links: [Some(LinkId(1)), Some(LinkId(2))],
            lane: Some(LaneId { index: 3, epoch: 4 }),
            transfer: Some(TransferId::default()),
            marker: Some(false),
        }
    }

    #[test]
    fn every_criterion_counts() {
        let other = TransferId { counter: 9, ..TransferId::default() };
        let lane = LaneId { index: 3, epoch: 4 };
        let all = Filter::any().from("a").to("b").link(LinkId(2)).lane(lane).lane_index(3);
        assert!(all.transfer(TransferId::default()).writes().matches(&subject()));
        assert!(Filter::any().matches(&subject()));
        for wrong in [
            Filter::any().from("b"),
            Filter::any().to("a"),
            Filter::any().link(LinkId(3)),
            Filter::any().lane(LaneId { index: 3, epoch: 5 }),
            Filter::any().lane_index(4),
            Filter::any().transfer(other),
            Filter::any().markers(),
        ] {
            assert!(!wrong.matches(&subject()), "{wrong:?}");
        }
        assert!(Filter::any().from("b").matches_either_way(&subject()));
        assert!(!Filter::any().from("c").matches_either_way(&subject()));
    }

    #[test]
    fn the_kth_is_hit_and_no_other() {
        let mut book = FaultBook::default();
        let mut rng = Rng::new(0);
        book.inject(Fault::DropWrite, Filter::any().nth(2));
        let hits: Vec<bool> = (0..5)
            .map(|_| book.hit(&mut rng, FaultKind::DropWrite, &subject()).is_some())
            .collect();
        assert_eq!(hits, [false, false, true, false, false]);
        assert_eq!(book.stats.count(FaultKind::DropWrite), 1);
        assert!(book.faults.is_empty(), "a spent fault is forgotten");
    }
}
