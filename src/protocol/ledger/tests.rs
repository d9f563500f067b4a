use super::*;

fn ledger() -> Ledger {
    Ledger::new(8, 4, false)
}

fn pages(list: &[u32]) -> Vec<PageIndex> {
    list.iter().copied().map(PageIndex).collect()
}

#[test]
fn the_whole_life_of_a_page() {
    let mut ledger = ledger();
    let (leased, generation) = ledger.reserve(3).unwrap();
    assert_eq!(ledger.counts().granted, 3);
    ledger.begin_verify(&leased, generation).unwrap();
    ledger.seal(&leased, generation).unwrap();
    ledger.check(&leased, generation).unwrap();
    ledger.release(&leased, generation).unwrap();
    assert_eq!(ledger.counts(), Ledger::new(8, 4, false).counts());
    assert!(ledger.check(&leased, generation).is_err(), "released pages fail the check");
}

#[test]
fn every_grant_has_a_fresh_generation_and_release_changes_it() {
    let mut ledger = ledger();
    let list = pages(&[2]);
    let first = ledger.claim(&list).unwrap();
    ledger.release(&list, first).unwrap();
    let between = ledger.page(list[0]).unwrap().1;
    let second = ledger.claim(&list).unwrap();
    assert!(first < between && between < second);
    let stale = ledger.begin_verify(&list, first);
    assert!(matches!(stale, Err(LedgerError::Generation { wanted, .. }) if wanted == first));
}

#[test]
fn claim_names_the_page_and_its_state_and_changes_nothing() {
    let mut ledger = ledger();
    let held = pages(&[3]);
    let generation = ledger.claim(&held).unwrap();
    type Step = fn(&mut Ledger, &[PageIndex], Generation);
    let steps: [(PageState, Step); 3] = [
        (PageState::Granted, |_, _, _| {}),
        (PageState::Verifying, |l, p, g| l.begin_verify(p, g).unwrap()),
        (PageState::Quarantined, |l, p, g| l.quarantine(p, g).unwrap()),
    ];
    for (state, step) in steps {
        step(&mut ledger, &held, generation);
        let before = ledger.clone();
        let refused = ledger.claim(&pages(&[1, 3])).unwrap_err();
        let wanted = PageState::Free;
        assert_eq!(refused, LedgerError::State { page: PageIndex(3), state, wanted });
        assert_eq!(ledger, before);
    }
}

#[test]
fn lists_are_checked() {
    let mut ledger = ledger();
    assert_eq!(ledger.claim(&[]), Err(LedgerError::Empty));
    assert_eq!(ledger.reserve(0), Err(LedgerError::Empty));
    assert!(matches!(ledger.claim(&pages(&[8])), Err(LedgerError::OutOfRange { .. })));
    assert!(matches!(ledger.claim(&pages(&[1, 2, 1])), Err(LedgerError::Repeated { .. })));
    assert!(matches!(ledger.reserve(9), Err(LedgerError::NotEnough { asked: 9, free: 8, .. })));
}

#[test]
fn claimed_pages_are_never_reserved() {
    let mut ledger = ledger();
    for round in 0..20 {
        let claimed = pages(&[round % 8, (round + 3) % 8]);
        let generation = ledger.claim(&claimed).unwrap();
        let (reserved, of_reserved) = ledger.reserve(6).unwrap();
        assert!(reserved.iter().all(|page| !claimed.contains(page)));
        ledger.release(&reserved, of_reserved).unwrap();
        ledger.release(&claimed, generation).unwrap();
        assert_eq!(ledger.counts().free, 8);
    }
    assert!(ledger.free.len() <= 8, "the free list does not grow");
}

#[test]
fn quarantine_holds_pages_back_and_has_a_budget() {
    let mut ledger = ledger();
    let (held, generation) = ledger.reserve(5).unwrap();
    ledger.quarantine(&held, generation).unwrap();
    assert!(ledger.check(&held, generation).is_err());
    let full = ledger.reserve(1).unwrap_err();
    assert_eq!(full, LedgerError::QuarantineFull { quarantined: 5, budget: 4 });
    ledger.release(&held, generation).unwrap();
    assert!(ledger.reserve(8).is_ok());
}

#[test]
fn a_guard_outlives_the_release() {
    let mut ledger = ledger();
    let (held, generation) = ledger.reserve(2).unwrap();
    ledger.begin_verify(&held, generation).unwrap();
    ledger.seal(&held, generation).unwrap();
    ledger.guard(&held, generation).unwrap();
    ledger.guard(&held[..1], generation).unwrap();
    ledger.release(&held, generation).unwrap();
    assert_eq!(ledger.counts().sealed, 2, "guarded pages stay");
    assert!(ledger.guard(&held, generation).is_err(), "but get no new readers");
    assert!(ledger.claim(&held).is_err());
    assert!(ledger.release(&held, generation).is_err(), "and are released once");
    ledger.unguard(&held, generation).unwrap();
    assert_eq!(ledger.counts().sealed, 1);
    ledger.unguard(&held[..1], generation).unwrap();
    assert_eq!(ledger.counts().free, 8);
}

#[test]
fn scrubbing_comes_before_free() {
    let mut ledger = Ledger::new(2, 2, true);
    let (held, generation) = ledger.reserve(2).unwrap();
    let to_scrub = ledger.release(&held, generation).unwrap();
    assert_eq!(to_scrub, held);
    assert!(matches!(ledger.reserve(1), Err(LedgerError::NotEnough { free: 0, .. })));
    ledger.scrubbed(&to_scrub).unwrap();
    assert_eq!(ledger.counts().free, 2);
}
