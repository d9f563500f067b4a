//! What a process says of itself, and quantiles.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time that all threads of this process have used, in the kernel too.
pub(super) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Bytes of this process that are in memory; 0 where the system doesn't say.
pub(super) fn resident_bytes() -> u64 {
    kib_of("/proc/self/status", "VmRSS:").unwrap_or(0)
}

/// Bytes that new processes can use without swapping; `None` where the system doesn't say.
pub(super) fn available_bytes() -> Option<u64> {
    kib_of("/proc/meminfo", "MemAvailable:")
}

/// The bytes of a line such as `VmRSS:  1234 kB`.
fn kib_of(file: &str, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The smallest value that at least `share` of all values don't exceed.
pub(super) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// Gigabytes (10^9) per second.
pub(super) fn rate(bytes: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { bytes as f64 / 1e9 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let values = [3.0, 1.0, 2.0, 4.0];
        assert_eq!(quantile(&values, 0.5), 2.0);
        assert_eq!(quantile(&values, 0.99), 4.0);
        assert_eq!(quantile(&values[..1], 0.5), 3.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn this_process_uses_memory_and_time() {
        assert!(resident_bytes() > 0);
        assert!(available_bytes().is_some_and(|bytes| bytes > 0));
        assert!(cpu_time() > Duration::ZERO);
    }
}
