//! What an error says to a person: for every cause there is.

use sealift::protocol::{
    Cause, Class, ComponentIndex, Generation, Incarnation, Label, LaneId, PageIndex, Phase,
    TransferError, TransferId,
};

fn every_cause() -> Vec<(Cause, Class, &'static str)> {
    use Class::{Fatal, Recompute, Retry};
    let (component, page) = (ComponentIndex(1), PageIndex(7));
    let sibling = TransferId { receiver: Incarnation(0xab), counter: 4 };
    let lane = LaneId { index: 1, epoch: 9 };
    let texts = |field: &str| (field.into(), "here".into(), "there".into());
    let (field, granted, offered) = texts("token_count");
    let binding = Cause::BindingMismatch { field, granted, offered };
    let (field, granted, offered) = texts("dtype");
    let layout = Cause::LayoutMismatch { component, field, granted, offered };
    vec![
        (Cause::Refused { why: "too long".into() }, Recompute, "refused by the sender: too long"),
        (
            Cause::AbortedBySender { why: "preempted".into() },
            Recompute,
            "aborted by the sender: preempted",
        ),
        (
            Cause::AbortedByReceiver { why: "gone".into() },
            Recompute,
            "aborted by the receiver: gone",
        ),
        (Cause::DeadlineExceeded {}, Retry, "the deadline passed"),
        (Cause::PeerLost { why: "silent".into() }, Retry, "the peer is lost: silent"),
        (
            Cause::IncompleteCoverage { granted_bytes: 9, covered_bytes: 5 },
            Recompute,
            "incomplete coverage: 5 of 9 granted bytes",
        ),
        (
            Cause::ManifestMismatch { field: "bytes".into(), granted: 9, stated: 10 },
            Fatal,
            "the manifest's bytes is 10, the grant's is 9",
        ),
        (
            Cause::OutsideGrant { first_block: 8, block_count: 6 },
            Fatal,
            "a write at block 8 is outside the grant of 6 blocks",
        ),
        (Cause::DuplicateBlock { block: 3 }, Fatal, "block 3 was written twice"),
        (
            Cause::StaleGeneration { granted: Generation(5), stated: Generation(4) },
            Fatal,
            "a write states generation 4, the grant is generation 5",
        ),
        (
            Cause::DigestMismatch { component, page, wrong_pages: 2 },
            Retry,
            "the digest of 2 page(s) is wrong, first page 7 of component 1",
        ),
        (
            binding,
            Fatal,
            "grant and send are for different requests: token_count is here in the grant, there \
             in the send",
        ),
        (
            layout,
            Fatal,
            "the layouts of component 1 differ: dtype is here in the grant, there in the send",
        ),
        (
            Cause::PageCountMismatch { component, granted: 8, offered: 1 },
            Fatal,
            "component 1: 8 pages are granted, the sender has 1",
        ),
        (Cause::DuplicateLabel {}, Retry, "the label is in use"),
        (Cause::StaleTransfer {}, Retry, "the peer does not know this transfer (any more)"),
        (
            Cause::CapacityExceeded { what: "pages".into(), asked: 9, limit: 8 },
            Fatal,
            "pages: 9 asked for, 8 there",
        ),
        (Cause::LaneFailed { lane, why: "reset".into() }, Retry, "lane 1.9 failed: reset"),
        (
            Cause::QuarantineFull { quarantined: 4, budget: 3 },
            Retry,
            "4 pages are quarantined, the budget is 3",
        ),
        (Cause::EmptyTransfer {}, Fatal, "there is nothing to transfer"),
        (
            Cause::ProtocolViolation { why: "nonsense".into() },
            Fatal,
            "protocol violation: nonsense",
        ),
        (Cause::ShuttingDown {}, Retry, "the engine shuts down"),
        (Cause::SiblingFailed { sibling }, Retry, "sibling transfer 00000000000000ab-4 failed"),
        (Cause::Unsupported { what: "digests".into() }, Fatal, "the peer does not support digests"),
        (Cause::PageState { page, why: "it is free".into() }, Fatal, "page 7: it is free"),
        (
            Cause::IncompleteWrite { granted_bytes: 9, written_bytes: 5 },
            Recompute,
            "complete was called after 5 of 9 granted bytes were written",
        ),
    ]
}

#[test]
fn every_cause_says_what_happened_how_bad_it_is_and_what_to_do() {
    let causes = every_cause();
    let codes: Vec<u8> = causes.iter().map(|(cause, ..)| cause.code()).collect();
    let all: Vec<u8> = (1..=26).collect();
    assert_eq!(codes, all, "each cause once; a new one belongs in this table");
    for (cause, class, text) in causes {
        assert_eq!(cause.to_string(), text);
        assert_eq!(cause.class(), class, "{text}");
        assert!(cause.remedy().len() > 10, "{text}: {:?} is no remedy", cause.remedy());
        let error = TransferError {
            transfer: Some(TransferId { receiver: Incarnation(0x12), counter: 3 }),
            label: Label::new("req-1").unwrap(),
            peer: Some(Incarnation(0x34)),
            phase: Phase::Writing,
            bytes_done: 5,
            bytes_total: 9,
            cause: cause.clone(),
        };
        let remedy = cause.remedy();
        assert_eq!(
            error.to_string(),
            format!(
                "transfer 0000000000000012-3 label \"req-1\" with peer 0000000000000034: {text}; \
                 phase writing, 5 of 9 bytes done; {class}: {remedy}"
            )
        );
        let early = TransferError { transfer: None, peer: None, ..error };
        let start = "transfer (not opened) label \"req-1\" with no peer yet: ";
        assert!(early.to_string().starts_with(start), "{early}");
    }
}
