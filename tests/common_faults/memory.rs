//! Memory that two processes can look at: one writes, and the other sees what a stopped or dead
//! process has in its pages.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use sealift::memory::HostRegion;

/// Shared memory by file, mapped here and, by its path, in a child.
pub(crate) struct SharedMemory {
    file: OwnedFd,
    region: HostRegion,
}

impl SharedMemory {
    pub(crate) fn new(len: usize) -> SharedMemory {
        // SAFETY: the name is a C string, and the call makes a new descriptor or fails.
        let raw = unsafe { libc::memfd_create(c"sealift-test".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(raw >= 0, "memfd: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(raw) };
        // SAFETY: sets the length of our own file.
        let sized = unsafe { libc::ftruncate(raw, len as libc::off_t) };
        assert_eq!(sized, 0, "ftruncate: {}", std::io::Error::last_os_error());
        let region = map(&file, len, 1);
        SharedMemory { file, region }
    }

    /// Where a child finds it, as long as this lives.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    pub(crate) fn region(&self) -> &HostRegion {
        &self.region
    }
}

/// Maps the memory behind [`SharedMemory::path`].
pub(crate) fn open(path: &str, len: usize) -> HostRegion {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    map(&OwnedFd::from(file), len, 1)
}

/// `times` windows, one after another, onto the same `len` bytes of anonymous shared memory: a
/// pool of any size that costs `len`, and that the kernel doesn't count as anonymous memory.
pub(crate) fn windows(len: usize, times: usize) -> HostRegion {
    let memory = SharedMemory::new(len);
    map(&memory.file, len, times)
}

fn map(file: &OwnedFd, len: usize, times: usize) -> HostRegion {
    let total = len * times;
    // SAFETY: reserves fresh addresses of the system's choice.
    let base = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), total, libc::PROT_NONE, flags, -1, 0)
    };
    assert_ne!(base, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    for window in 0..times {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: replaces a part of the reservation above, which is ours and unused.
        let mapped = unsafe {
            let at = base.byte_add(window * len);
            libc::mmap(at, len, protection, flags, file.as_raw_fd(), 0)
        };
        assert_ne!(mapped, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    }
    // SAFETY: the mapping is never taken back. Tests write to it only where no transfer is live;
    // where one process looks at what another receives, it only counts bytes.
    unsafe { HostRegion::borrowed(base.cast(), total) }.unwrap()
}

/// How many bytes of `region` are `byte`.
pub(crate) fn count(region: &HostRegion, byte: u8) -> usize {
    let mut buffer = vec![0; 1 << 20];
    let mut found = 0;
    for offset in (0..region.len()).step_by(buffer.len()) {
        let len = buffer.len().min(region.len() - offset);
        region.read_at(offset, &mut buffer[..len]).unwrap();
        found += buffer[..len].iter().filter(|&&other| other == byte).count();
    }
    found
}

/// Every byte of `region` is `byte`.
pub(crate) fn is_all(region: &HostRegion, byte: u8) -> bool {
    count(region, byte) == region.len()
}
