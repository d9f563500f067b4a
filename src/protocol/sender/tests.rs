use super::*;
use crate::protocol::ids::Generation;
use crate::protocol::label::{Binding, Label};
use crate::protocol::{BlockIndex, GrantComponent, PageIndex, PoolLayout};

/// Nobody can ask for the last word on its transfers: peers that come and go leave nothing behind.
#[test]
fn a_lost_peer_leaves_nothing_behind() {
    let peer = Incarnation(7);
    let layout = PoolLayout {
        name: "kv".into(),
        dtype: "bf16".into(),
        tokens_per_page: 16,
        page_count: 4,
        item_lens: vec![64],
    };
    let binding = Binding::tokens(16);
    let source = SourceComponent {
        layout: layout.fingerprint(),
        page_count: 1,
        extents: layout.whole_page(),
        whole_pages: true,
    };
    let granted = GrantComponent {
        layout: layout.fingerprint(),
        pages: vec![PageIndex(2)],
        extents: layout.whole_page(),
        whole_pages: true,
    };
    let (now, later) = (Time(0), Time(1_000_000_000));
    let lane = LaneId { index: 0, epoch: 1 };
    let mut sender = Sender::new(SenderSettings::default());
    let mut actions = Vec::new();
    sender.on_lane_up(now, peer, lane, &mut actions);
    let announced = Announced::new(OfferId(1));
    sender.announce(&announced, Label::from(1), None, later, &mut actions);
    let admitted = announced.admit();
    sender.admit(now, &admitted, binding, vec![source], &mut actions);
    let id = TransferId { receiver: peer, counter: 1 };
    let grant = Grant {
        id,
        label: Label::from(1),
        binding,
        generation: Generation(1),
        deadline_ms: 1000,
        integrity: true,
        oldest_live: 1,
        components: vec![granted],
    };
    sender.on_message(now, peer, Message::Grant { grant }, &mut actions);
    let all = BlockRange { first: BlockIndex(0), count: 1 };
    sender.write(now, OfferId(1), &[all], &mut actions);
    let posted = |action: &SenderAction| match action {
        SenderAction::Post { ticket, .. } => Some(*ticket),
        _ => None,
    };
    let ticket = actions.iter().find_map(posted).expect("the block was posted");

    let cause = Cause::PeerLost { why: "killed".into() };
    sender.on_peer_lost(now, peer, &cause, &mut actions);
    assert_eq!(sender.live_offers(), 1, "the write still reads the source");
    sender.on_lane_down(now, peer, lane, &mut actions);
    sender.on_write_done(now, id, lane, ticket, WriteEnd::Failed, &mut actions);

    assert!(actions.contains(&SenderAction::SourceFree { offer: OfferId(1) }));
    let Sender { offers, transfers, pending, tombstones, low_water, lanes, loads, .. } = &sender;
    assert!(offers.is_empty() && transfers.is_empty() && pending.is_empty());
    assert!(tombstones.is_empty() && low_water.is_empty());
    assert!(lanes.is_empty() && loads.is_empty());
}
