//! The smallest real use: two processes, one transfer.
//!
//! `cargo run --example two_processes` starts itself a second time as the sender (prefill) and
//! receives (decode) sixteen pages from it.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use sealift::engine::{Engine, Pool, PoolOptions, Source};
use sealift::memory::{HostRegion, PlaneMemory};
use sealift::protocol::{Binding, Label, PageIndex, PoolLayout};

const LAYERS: usize = 2;
const PAGES: u32 = 64;
const PAGE_LEN: u32 = 32 * 1024;
const DEADLINE: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("prefill") => prefill(),
        _ => decode(),
    }
}

/// Registers a pool with one K and one V plane per layer.
fn pool(engine: &Engine) -> Result<(HostRegion, Pool), Box<dyn Error>> {
    let plane_len = PAGES as usize * PAGE_LEN as usize;
    let region = HostRegion::owned(2 * LAYERS * plane_len)?;
    let plane = |index: usize| PlaneMemory {
        region: region.clone(),
        offset: index * plane_len,
        stride: PAGE_LEN as usize,
        item_len: PAGE_LEN,
    };
    let layout = PoolLayout {
        name: "kv".into(),
        dtype: "bf16".into(),
        tokens_per_page: 16,
        page_count: PAGES,
        item_lens: vec![PAGE_LEN; 2 * LAYERS],
    };
    let planes = (0..2 * LAYERS).map(plane).collect();
    let pool = engine.register_pool(layout, planes, PoolOptions::default())?;
    Ok((region, pool))
}

fn prefill() -> Result<(), Box<dyn Error>> {
    let engine = Engine::builder().listen("127.0.0.1:0").build()?;
    let (region, pool) = pool(&engine)?;
    println!("{}", engine.listen_address().unwrap_or_default());

    // The request is known before its pages are: a grant that comes now waits.
    let request = engine.announce(Label::from(1), None, DEADLINE);
    region.fill(0, region.len(), 0x5a)?; // the forward pass
    let pages: Vec<PageIndex> = (0..16).map(PageIndex).collect();
    let send = request.admit(Binding::tokens(250), Source::pages(&pool, &pages));
    send.write_all();
    send.complete().wait()?;
    Ok(())
}

fn decode() -> Result<(), Box<dyn Error>> {
    let mut child =
        Command::new(std::env::current_exe()?).arg("prefill").stdout(Stdio::piped()).spawn()?;
    let mut address = String::new();
    BufReader::new(child.stdout.take().ok_or("no stdout")?).read_line(&mut address)?;

    let engine = Engine::builder().build()?;
    let (_region, pool) = pool(&engine)?;
    let peer = engine.connect(address.trim(), DEADLINE)?;
    let lease = pool.reserve(16)?;
    let sealed =
        engine.receive(&peer, Label::from(1), Binding::tokens(250), lease, DEADLINE).wait()?;

    // While the guard lives, nobody can get these pages, whatever else happens.
    let guard = sealed.read()?;
    let mut page = vec![0; PAGE_LEN as usize];
    guard.copy(0, 3, 15, 0, &mut page);
    assert!(page.iter().all(|byte| *byte == 0x5a));
    println!("sealed {} pages of {} from {}", guard.page_count(0), pool.layout().name, peer.name());
    child.wait()?;
    Ok(())
}
