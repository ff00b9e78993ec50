//! Counts the allocations of this process in a file that a test reads while the process runs.

use std::alloc::{GlobalAlloc, Layout, System};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The system's allocator, counted.
struct Counting;

/// Allocations and their bytes, where no file is wanted.
static HERE: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Where they are counted: [`HERE`], or in the file.
static COUNTS: AtomicPtr<[AtomicU64; 2]> = AtomicPtr::new((&raw const HERE).cast_mut());

fn count(bytes: usize) {
    // SAFETY: the pointer is that of a static, or of a mapping that is never removed. Only atomics are behind it.
    let [allocations, all] = unsafe { &*COUNTS.load(Ordering::Relaxed) };
    allocations.fetch_add(1, Ordering::Relaxed);
    all.fetch_add(bytes as u64, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged. Counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size.saturating_sub(layout.size()));
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(old, layout) }
    }
}

/// Counts in the file that `FIXTURE_ALLOCATIONS` names, from now on: two numbers of eight bytes, as the machine has them.
pub fn count_in_file() -> std::io::Result<()> {
    let Some(path) = std::env::var_os("FIXTURE_ALLOCATIONS") else { return Ok(()) };
    let file = std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
    file.set_len(16)?;
    // SAFETY: a shared mapping of a file of this length, at an address that the kernel chooses.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            16,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    COUNTS.store(mapped.cast(), Ordering::Relaxed);
    Ok(())
}
