//! The smallest whole transfer.
use std::time::Duration;

use sealift::engine::{Engine, Pool, PoolOptions, Source};
use sealift::memory::{HostRegion, PlaneMemory};
use sealift::protocol::{Binding, Label, PageIndex, PoolLayout};

const ITEM: u32 = 32 * 1024;
const PLANES: usize = 4;
const PAGES: u32 = 64;
const TEN: Duration = Duration::from_secs(10);

fn pool(engine: &Engine) -> (HostRegion, Pool) {
    let region = HostRegion::owned(PLANES * PAGES as usize * ITEM as usize).unwrap();
    let layout = PoolLayout {
        name: "kv".into(),
        dtype: "bf16".into(),
        tokens_per_page: 16,
        page_count: PAGES,
        item_lens: vec![ITEM; PLANES],
    };
    let plane = |k: usize| PlaneMemory {
        region: region.clone(),
        offset: k * PAGES as usize * ITEM as usize,
        stride: ITEM as usize,
        item_len: ITEM,
    };
    let planes = (0..PLANES).map(plane).collect();
    let pool = engine.register_pool(layout, planes, PoolOptions::default()).unwrap();
    (region, pool)
}

#[test]
fn pages_move_and_are_sealed() {
    let prefill = Engine::builder().listen("127.0.0.1:0").build().unwrap();
    let decode = Engine::builder().build().unwrap();
    let (source, sending) = pool(&prefill);
    let (_target, receiving) = pool(&decode);
    source.fill(0, source.len(), 7).unwrap();
    let peer = decode.connect(&prefill.listen_address().unwrap(), TEN).unwrap();

    let label = Label::from(1);
    let pages: Vec<PageIndex> = (0..32).rev().map(PageIndex).collect();
    let send =
        prefill.send(label.clone(), Binding::tokens(500), Source::pages(&sending, &pages), TEN);
    send.write_all();
    let sent = send.complete();
    let lease = receiving.reserve(32).unwrap();
    let receive = decode.receive(&peer, label, Binding::tokens(500), lease, TEN);
    let sealed = receive.wait().unwrap();
    sent.wait().unwrap();
    assert!(sent.wait_source_free(TEN));
    let guard = sealed.read().unwrap();
    let mut page = vec![0; ITEM as usize];
    for plane in 0..PLANES as u16 {
        for index in 0..32 {
            guard.copy(0, plane, index, 0, &mut page);
            assert!(page.iter().all(|byte| *byte == 7));
        }
    }
    drop((guard, sealed));
    assert_eq!(receiving.counts().free, PAGES as usize);
}
