//! The bench's own comparison of every byte, after the time was taken and whatever the digests said.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, bail};
use sealift::engine::ReadGuard;
use sealift::memory::HostRegion;
use sealift::protocol::PageIndex;

use super::stop::Stop;
use super::workload::{End, MARKER, Workload};

/// The first byte that isn't what it must be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "WRONG BYTE: round {round}, {what}, plane {plane}, page {page} of the destination pool, byte \
     {offset}: {found:#04x} instead of {expected:#04x}"
)]
pub(super) struct Mismatch {
    round: u64,
    what: String,
    plane: u16,
    page: u32,
    offset: usize,
    expected: u8,
    found: u8,
}

/// Compares all pages of one request with what the source was made from; the bytes compared.
pub(super) fn request(
    workload: &Workload,
    round: u64,
    request: u16,
    guard: &ReadGuard,
    stop: &Stop,
) -> Result<u64> {
    let source = workload.order(round, End::Source);
    let source = workload.of_request(&source, request);
    let landed = workload.order(round, End::Destination);
    let landed = workload.of_request(&landed, request);
    let len = workload.plane_bytes as usize;
    let wanted = Expected { workload, round, what: format!("request {request}") };
    over_blocks(workload.planes, workload.pages, 2 * workload.plane_bytes, |plane, page, both| {
        stop.check()?;
        let (found, expected) = both.split_at_mut(len);
        guard.copy(0, plane, page as usize, 0, found);
        workload.content(plane, source[page as usize], expected);
        wanted.compare(plane, landed[page as usize], found, expected)
    })?;
    Ok(workload.request_bytes())
}

/// Compares the pages of nobody with the marker: a write that went astray would be here.
pub(super) fn unused(
    workload: &Workload,
    round: u64,
    requests: u16,
    region: &HostRegion,
    stop: &Stop,
) -> Result<()> {
    let order = workload.order(round, End::Destination);
    let unused = workload.unused(&order, requests);
    let expected = vec![MARKER; workload.plane_bytes as usize];
    let wanted = Expected { workload, round, what: "a page that nobody was granted".into() };
    let count = u32::try_from(unused.len())?;
    over_blocks(workload.planes, count, workload.plane_bytes, |plane, index, found| {
        stop.check()?;
        let page = unused[index as usize];
        region.read_at(workload.offset(plane, page), found)?;
        wanted.compare(plane, page, found, &expected)
    })
}

struct Expected<'a> {
    workload: &'a Workload,
    round: u64,
    what: String,
}

impl Expected<'_> {
    fn compare(&self, plane: u16, page: PageIndex, found: &[u8], expected: &[u8]) -> Result<()> {
        debug_assert_eq!(found.len(), self.workload.plane_bytes as usize);
        if found == expected {
            return Ok(());
        }
        let differs = found.iter().zip(expected).position(|(a, b)| a != b);
        let offset = differs.unwrap_or(found.len().min(expected.len()));
        bail!(Mismatch {
            round: self.round,
            what: self.what.clone(),
            plane,
            page: page.0,
            offset,
            expected: expected.get(offset).copied().unwrap_or(0),
            found: found.get(offset).copied().unwrap_or(0),
        })
    }
}

/// Calls `each` for every page of every plane, from several threads, each with a buffer of its own.
/// The error is the one of the lowest plane and page that failed.
pub(super) fn over_blocks(
    planes: u16,
    pages: u32,
    buffer_bytes: u32,
    each: impl Fn(u16, u32, &mut [u8]) -> Result<()> + Sync,
) -> Result<()> {
    let total = u64::from(planes) * u64::from(pages);
    let next = AtomicU64::new(0);
    let failed: Mutex<Option<(u64, anyhow::Error)>> = Mutex::new(None);
    let work = || {
        let mut buffer = vec![0; buffer_bytes as usize];
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= total {
                return;
            }
            let (plane, page) = (index / u64::from(pages), index % u64::from(pages));
            if let Err(why) = each(plane as u16, page as u32, &mut buffer) {
                // Blocks are handed out in order: all lower ones are done or under way.
                next.store(total, Ordering::Relaxed);
                let mut first = failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                if first.as_ref().is_none_or(|(lowest, _)| index < *lowest) {
                    *first = Some((index, why));
                }
                return;
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let failed = failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    failed.map_or(Ok(()), |(_, why)| Err(why))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// What a wrong byte ends a run with.
    pub(in super::super) fn a_mismatch() -> anyhow::Error {
        let workload = Workload::of_blocks(1, 4, 1, 0);
        let wanted = Expected { workload: &workload, round: 0, what: "request 0".into() };
        wanted.compare(0, PageIndex(0), &[1, 2, 3, 4], &[1, 2, 9, 4]).unwrap_err()
    }

    #[test]
    fn every_block_is_visited_once_and_the_first_failure_is_told() {
        let seen = Mutex::new(vec![0; 15]);
        over_blocks(3, 5, 1, |plane, page, _| {
            seen.lock().unwrap()[usize::from(plane) * 5 + page as usize] += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(*seen.lock().unwrap(), vec![1; 15]);
        let why = over_blocks(3, 5, 1, |plane, page, _| {
            anyhow::ensure!(plane < 1 || page < 2, "{plane} {page}");
            Ok(())
        });
        assert_eq!(why.unwrap_err().to_string(), "1 2");
    }

    #[test]
    fn a_wrong_byte_is_found_with_its_place() {
        let workload = Workload::of_blocks(64, 48, 1, 9);
        let region = workload.region().unwrap();
        region.fill(0, region.len(), MARKER).unwrap();
        let stop = Stop::default();
        unused(&workload, 3, 1, &region, &stop).unwrap();
        let order = workload.order(3, End::Destination);
        let page = workload.unused(&order, 1)[2];
        region.write_at(workload.offset(0, page) + 17, &[0]).unwrap();
        let why = unused(&workload, 3, 1, &region, &stop).unwrap_err();
        let wrong = why.downcast_ref::<Mismatch>().unwrap();
        assert_eq!((wrong.page, wrong.offset, wrong.found), (page.0, 17, 0));
    }
}
