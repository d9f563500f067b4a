//! What the kernel says is mapped in this process: `/proc/self/maps`.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

/// Why a range can't be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Nothing is mapped at this address.
    NotMapped(usize),
    /// What is mapped at this address isn't both readable and writable.
    Protected { address: usize, protection: String },
    /// The list can't be read.
    Unreadable(String),
}

/// Checks that every byte of `range` is mapped readable and writable at this moment. Touches none
/// of it, so a wrong address is an error and never a crash.
pub(super) fn check(range: Range<usize>) -> Result<(), Fault> {
    let unreadable = |why: io::Error| Fault::Unreadable(why.to_string());
    let maps = File::open("/proc/self/maps").map_err(unreadable)?;
    // A few system calls instead of one for each 8 KiB of a list that may have 65,530 lines.
    check_in(BufReader::with_capacity(256 * 1024, maps), range)
}

/// The list is ordered and no two of its ranges overlap, even if mappings change meanwhile: the
/// kernel documents both. A range that stays mapped while the list is read is in it.
fn check_in(maps: impl BufRead, range: Range<usize>) -> Result<(), Fault> {
    let mut next = range.start;
    for line in maps.split(b'\n') {
        let line = line.map_err(|why| Fault::Unreadable(why.to_string()))?;
        let Some((mapped, protection)) = parse(&line) else {
            let line = String::from_utf8_lossy(&line);
            return Err(Fault::Unreadable(format!("not a mapping: {line:?}")));
        };
        if mapped.end <= next {
            continue;
        }
        if mapped.start > next {
            break;
        }
        if !protection.starts_with("rw") {
            return Err(Fault::Protected { address: next, protection });
        }
        next = mapped.end;
        if next >= range.end {
            return Ok(());
        }
    }
    Err(Fault::NotMapped(next))
}

/// `55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0   [heap]`; the path may be any bytes.
fn parse(line: &[u8]) -> Option<(Range<usize>, String)> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mut text = || std::str::from_utf8(fields.next()?).ok();
    let (start, end) = text()?.split_once('-')?;
    let address = |hex| usize::from_str_radix(hex, 16).ok();
    Some((address(start)?..address(end)?, text()?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &[u8] = b"1000-3000 rw-p 00000000 00:00 0\n\
        3000-4000 rw-s 00000000 00:05 12                         /memfd:\xff pool (deleted)\n\
        4000-5000 r--p 00000000 08:01 99                         /usr/lib/x.so\n\
        6000-7000 rw-p 00000000 00:00 0                          [heap]\n\
        8000-9000 -w-p 00000000 00:00 0\n\
        ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0  [vsyscall]\n";

    fn check_text(range: Range<usize>) -> Result<(), Fault> {
        check_in(MAPS, range)
    }

    #[test]
    fn a_range_may_span_mappings_that_touch() {
        assert_eq!(check_text(0x1000..0x4000), Ok(()));
        assert_eq!(check_text(0x2fff..0x3001), Ok(()));
        assert_eq!(check_text(0x6abc..0x7000), Ok(()));
    }

    #[test]
    fn the_first_bad_address_is_named() {
        assert_eq!(check_text(0x0..0x1001), Err(Fault::NotMapped(0)));
        assert_eq!(check_text(0x6000..0x7001), Err(Fault::NotMapped(0x7000)));
        assert_eq!(check_text(0x5800..0x6800), Err(Fault::NotMapped(0x5800)));
        assert_eq!(check_text(usize::MAX - 1..usize::MAX), Err(Fault::NotMapped(usize::MAX - 1)));
        let read_only = Fault::Protected { address: 0x4000, protection: "r--p".into() };
        assert_eq!(check_text(0x2000..0x7000), Err(read_only));
        let write_only = Fault::Protected { address: 0x8010, protection: "-w-p".into() };
        assert_eq!(check_text(0x8010..0x8020), Err(write_only));
    }

    #[test]
    fn a_list_of_another_form_is_refused() {
        for text in ["", "\n", "1000 rw-p", "1000-zz rw-p", "1000-3000"] {
            let found = check_in(text.as_bytes(), 0x1000..0x2000);
            assert!(found.is_err(), "{text:?}: {found:?}");
        }
    }
}
