//! The incident that sealift exists for, step by step, and what stops it at each step.
//!
//! A cluster advertised 1,048,576 tokens of context over a prefill pool of 681,280. A longer
//! prompt was "rejected", went on as a one-token placeholder, prefill wrote ONE page and reported
//! "transfer complete"; decode read stale pages of other tenants. Here decode grants the pages of a
//! 700,000-token prompt over memory that holds another tenant's marker, and a prefill that wrote
//! one page tries every way to have it accepted. Token and page counts are the real ones; a page
//! is 8 bytes, so that it fits.
//!
//! `cargo run --example incident_replay`

use std::error::Error;
use std::time::Duration;

use sealift::engine::{Engine, Lease, Peer, Pool, PoolOptions, Source};
use sealift::memory::{HostRegion, PlaneMemory};
use sealift::protocol::{Binding, Label, PageIndex, PoolLayout, TransferError};

const PAGE_TOKENS: u32 = 16;
const PAGE_LEN: u32 = 8;
const PREFILL_TOKENS: u32 = 681_280;
const CONTEXT_TOKENS: u32 = 1_048_576;
const PROMPT_TOKENS: u32 = 700_000;
const MARKER: u8 = 0xEE;
const DEADLINE: Duration = Duration::from_secs(10);

type Outcome = Result<(), Box<dyn Error>>;

fn pool(engine: &Engine, tokens: u32) -> Result<(HostRegion, Pool), Box<dyn Error>> {
    let page_count = tokens / PAGE_TOKENS;
    let region = HostRegion::owned(page_count as usize * PAGE_LEN as usize)?;
    let (stride, item_len) = (PAGE_LEN as usize, PAGE_LEN);
    let plane = PlaneMemory { region: region.clone(), offset: 0, stride, item_len };
    let layout = PoolLayout {
        name: "kv".into(),
        dtype: "bf16".into(),
        tokens_per_page: PAGE_TOKENS,
        page_count,
        item_lens: vec![item_len],
    };
    let pool = engine.register_pool(layout, vec![plane], PoolOptions::default())?;
    Ok((region, pool))
}

struct Cluster {
    prefill: Engine,
    prefill_pool: Pool,
    decode: Engine,
    decode_pool: Pool,
    decode_memory: HostRegion,
    peer: Peer,
}

impl Cluster {
    fn start() -> Result<Cluster, Box<dyn Error>> {
        let prefill = Engine::builder().listen("127.0.0.1:0").name("prefill").build()?;
        let (_, prefill_pool) = pool(&prefill, PREFILL_TOKENS)?;
        let decode = Engine::builder().name("decode").build()?;
        let (decode_memory, decode_pool) = pool(&decode, CONTEXT_TOKENS)?;
        decode_memory.fill(0, decode_memory.len(), MARKER)?; // another tenant's text
        let peer = decode.connect(&prefill.listen_address().unwrap_or_default(), DEADLINE)?;
        Ok(Cluster { prefill, prefill_pool, decode, decode_pool, decode_memory, peer })
    }

    fn lease(&self, tokens: u32) -> Result<Lease, Box<dyn Error>> {
        Ok(self.decode_pool.reserve(tokens.div_ceil(PAGE_TOKENS) as usize)?)
    }

    fn one_page(&self) -> Source {
        Source::pages(&self.prefill_pool, &[PageIndex(0)])
    }

    /// Decode asks; whatever comes must be a failure, and no marker may become readable.
    fn must_fail(&self, step: &str, tokens: u32, label: u64) -> Outcome {
        let lease = self.lease(tokens)?;
        let binding = Binding::tokens(tokens.into());
        let receive = self.decode.receive(&self.peer, Label::from(label), binding, lease, DEADLINE);
        match receive.wait() {
            Ok(_) => Err(format!("{step}: stale pages were sealed").into()),
            Err(why) => {
                self.report(step, &why);
                self.pages_come_back(step)
            }
        }
    }

    fn report(&self, step: &str, why: &TransferError) {
        println!("{step}\n    stopped: {why}\n");
    }

    fn pages_come_back(&self, step: &str) -> Outcome {
        let until = std::time::Instant::now() + DEADLINE;
        while self.decode_pool.counts().free < (CONTEXT_TOKENS / PAGE_TOKENS) as usize {
            if std::time::Instant::now() > until {
                return Err(
                    format!("{step}: pages are missing: {:?}", self.decode_pool.counts()).into()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

fn main() -> Outcome {
    let cluster = Cluster::start()?;
    println!(
        "decode: {CONTEXT_TOKENS} tokens; prefill: {PREFILL_TOKENS}; the prompt: {PROMPT_TOKENS}\n"
    );

    cluster.must_fail(
        "1. The prompt is larger than prefill's pool: refused at open.",
        PROMPT_TOKENS,
        1,
    )?;

    // The rest happens even where a prompt fits: the placeholder has one page instead of many.
    let tokens = 680_000;
    let request = cluster.prefill.announce(Label::from(2), None, DEADLINE);
    request.refuse("prompt too long");
    // A refused request has no `complete`: `request.refuse(..).complete()` does not compile.
    cluster.must_fail("2. Prefill rejects the request: decode hears it at once.", tokens, 2)?;

    let placeholder =
        cluster.prefill.send(Label::from(3), Binding::tokens(1), cluster.one_page(), DEADLINE);
    placeholder.write_all();
    let placeholder = placeholder.complete();
    cluster.must_fail(
        "3. The one-token placeholder completes: it is another request.",
        tokens,
        3,
    )?;
    placeholder.abort("the placeholder's grant never comes");

    let liar = cluster.prefill.send(
        Label::from(4),
        Binding::tokens(tokens.into()),
        cluster.one_page(),
        DEADLINE,
    );
    liar.write_all();
    let liar = liar.complete();
    cluster.must_fail("4. It claims the right token count, with one page.", tokens, 4)?;
    if let Err(why) = liar.wait() {
        cluster.report("   ... and prefill hears it too.", &why);
    }

    let pages: Vec<PageIndex> = (0..tokens.div_ceil(PAGE_TOKENS)).map(PageIndex).collect();
    let short = cluster.prefill.send(
        Label::from(5),
        Binding::tokens(tokens.into()),
        Source::pages(&cluster.prefill_pool, &pages),
        DEADLINE,
    );
    short.write(0, 0..1);
    let short = short.complete();
    cluster.must_fail("5. It offers every page, writes one, and says complete.", tokens, 5)?;
    if let Err(why) = short.wait() {
        cluster.report("   ... and prefill hears it too.", &why);
    }

    marker_is_where_it_was(&cluster)?;
    println!("the other tenant's marker was never readable through the API");
    Ok(())
}

/// No page was sealed, so no guard could be had. What lies in the pool is the marker still, except
/// for the one page that step 5 may have written into pages that were granted for it.
fn marker_is_where_it_was(cluster: &Cluster) -> Outcome {
    let mut bytes = vec![0; cluster.decode_memory.len()];
    cluster.decode_memory.read_at(0, &mut bytes)?;
    let changed = bytes.iter().filter(|byte| **byte != MARKER).count();
    assert!(changed <= PAGE_LEN as usize, "{changed} bytes changed");
    let generation = cluster.decode_pool.page(PageIndex(0)).map(|(_, generation)| generation);
    let readable = cluster.decode_pool.check(&[PageIndex(0)], generation.unwrap_or_default());
    assert!(readable.is_err(), "no page may be readable");
    Ok(())
}
