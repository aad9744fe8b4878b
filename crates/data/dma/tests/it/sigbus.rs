//! Memory files that shrink while we use them.
#![allow(unsafe_code)] // A fault outside of this crate, on purpose.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::Ordering;

use dma::{
    Access, Cells, DmaError, DmaMap, MapError, Memory, MemoryCache, MemoryError, Prot, Ring,
    SegmentList,
};
use rustix::fs::MemfdFlags;

const LEN: u64 = 64 * 1024;

/// A map on a file of `LEN` bytes, full of ones, and the guest's descriptor of that file.
fn victim() -> (DmaMap, Memory, std::os::fd::OwnedFd) {
    let memory = Memory::anonymous(LEN as usize).unwrap();
    memory.write(0, &[1; LEN as usize]).unwrap();
    let fd = memory.fd().try_clone_to_owned().unwrap();
    let mut map = DmaMap::new();
    map.map(0, LEN, Some((memory.clone(), 0)), Prot::RW)
        .unwrap();
    (map, memory, fd)
}

#[test]
fn read_of_shrunk_file_is_error() {
    let (map, memory, fd) = victim();
    let healthy = Memory::anonymous(4096).unwrap();
    let before = dma::sigbus::faults();
    let mut buf = [0; 100];
    map.read(0x8000, &mut buf).unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    assert!(!memory.is_poisoned());
    // What is left of it is still there.
    assert_eq!(map.read(0, &mut buf), Ok(()));
    assert_eq!(map.read(0x8000, &mut buf), Err(DmaError::Poisoned));
    assert!(memory.is_poisoned() && map.is_poisoned());
    assert!(dma::sigbus::faults() > before);
    assert_eq!(map.read(0, &mut buf), Err(DmaError::Poisoned));
    assert_eq!(map.write(0, &buf), Err(DmaError::Poisoned));
    let mut list = SegmentList::new();
    assert_eq!(
        map.segments(0, 16, Access::Read, &mut list),
        Err(DmaError::Poisoned)
    );
    assert_eq!(memory.read(0, &mut buf), Err(MemoryError::Poisoned));
    let mut other = DmaMap::new();
    assert_eq!(
        other.map(0, 4096, Some((memory, 0)), Prot::RW),
        Err(MapError::Poisoned)
    );
    assert!(!healthy.is_poisoned());
    assert_eq!(healthy.write(0, &[1]), Ok(()));
}

#[test]
fn write_to_shrunk_file_is_error() {
    let (map, memory, fd) = victim();
    rustix::fs::ftruncate(&fd, 0).unwrap();
    assert_eq!(map.write(0x2000, &[7; 5000]), Err(DmaError::Poisoned));
    assert!(memory.is_poisoned());
}

#[test]
fn lists_rings_and_cells_survive_shrunk_file() {
    let (map, memory, fd) = victim();
    let mut list = SegmentList::new();
    map.segments(0, LEN, Access::Write, &mut list).unwrap();
    let ring = Ring::resolve(&map, 0x4000, 64, 64, Access::Write).unwrap();
    let cells = Cells::resolve(&map, 0x6000, 16, Access::Write).unwrap();
    rustix::fs::ftruncate(&fd, 0).unwrap();
    assert_eq!(ring.load64(3), [0; 64]);
    assert!(ring.is_poisoned() && cells.is_poisoned());
    ring.store_cqe(0, [1; 16]);
    assert_eq!(cells.get(0).unwrap().load(Ordering::Relaxed), 0);
    assert_eq!(list.fill(9), LEN);
    assert_eq!(list.copy_from(100, &[1; 5000]), 5000);
    assert!(memory.is_poisoned());
    // It is private memory now: the guest's file is not touched, nor is anybody else's.
    rustix::fs::ftruncate(&fd, LEN).unwrap();
    let mut byte = [0xFF];
    rustix::io::pread(&fd, &mut byte, 200).unwrap();
    assert_eq!(byte, [0]);
}

/// Lines are evicted by an instruction that faults as a load does.
#[test]
fn cache_lines_of_shrunk_file_may_be_evicted() {
    let (map, memory, fd) = victim();
    let ring = |iova| Ring::resolve(&map, iova, 64, 64, Access::Read).unwrap();
    let (whole, cut) = (ring(0), ring(4096));
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    let Some(lines) = dma::lines::Evict::of_processor() else {
        // Nothing to be called here.
        return;
    };
    // Of the ring itself only, whatever is asked for.
    whole.evict(60, 100, lines);
    whole.evict(64, 1, lines);
    whole.evict(u32::MAX, 1, lines);
    cut.evict(3, 0, lines);
    assert!(!memory.is_poisoned());
    assert_eq!(whole.load64(60), [1; 64]);
    cut.evict(3, 1, lines);
    assert!(memory.is_poisoned());
}

#[test]
fn threads_fault_concurrently() {
    let (map, memory, fd) = victim();
    drop(map);
    let barrier = std::sync::Barrier::new(5);
    std::thread::scope(|scope| {
        for i in 0..4 {
            let (memory, barrier) = (&memory, &barrier);
            scope.spawn(move || {
                barrier.wait();
                let mut buf = [0; 4096];
                while memory.read(i * 16384, &mut buf).is_ok() {
                    std::hint::spin_loop();
                }
            });
        }
        barrier.wait();
        rustix::fs::ftruncate(&fd, 0).unwrap();
    });
    assert!(memory.is_poisoned());
}

#[test]
fn poisoned_mapping_is_not_imported_again() {
    let file = Memory::anonymous(8192).unwrap();
    let dup = || file.fd().try_clone_to_owned().unwrap();
    let mut cache = MemoryCache::new();
    let first = cache.import(dup(), 8192, true).unwrap();
    rustix::fs::ftruncate(file.fd(), 4096).unwrap();
    assert_eq!(first.write(4096, &[1]), Err(MemoryError::Poisoned));
    assert!(matches!(
        cache.import(dup(), 8192, true),
        Err(MapError::OutOfBacking {
            end: 8192,
            size: 4096
        })
    ));
    rustix::fs::ftruncate(file.fd(), 8192).unwrap();
    let second = cache.import(dup(), 8192, true).unwrap();
    assert!(!second.is_same(&first));
    assert_eq!(second.write(4096, &[1]), Ok(()));
    assert!(first.is_poisoned() && !second.is_poisoned());
}

/// Huge pages that do not exist fault in the same way, in a mapping that can only be replaced
/// as a whole. Where the kernel has none of them configured, that is; where it has, nothing
/// faults until the file shrinks.
#[test]
fn huge_pages_fault_like_others() {
    const HUGE: usize = 2 << 20;
    // Another test may count the free pages.
    let _pages = testkit::huge::HugePages::add(0);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let fd = match rustix::fs::memfd_create("huge", flags) {
        Ok(fd) => fd,
        Err(error) => return testkit::skip("dma::sigbus::huge_pages_fault_like_others", error),
    };
    rustix::fs::ftruncate(&fd, 2 * HUGE as u64).unwrap();
    let guest = fd.try_clone().unwrap();
    let memory = Memory::from_fd(fd, 2 * HUGE as u64, true).unwrap();
    if memory.write(HUGE + 5, &[1]).is_ok() {
        rustix::fs::ftruncate(&guest, 0).unwrap();
        assert_eq!(memory.write(HUGE + 5, &[1]), Err(MemoryError::Poisoned));
    }
    assert!(memory.is_poisoned());
    assert_eq!(memory.write(0, &[1]), Err(MemoryError::Poisoned));
}

/// What the child of the next test does, selected by an environment variable.
const CHILD: &str = "DMA_SIGBUS_CHILD";

#[test]
fn unrelated_bus_errors_kill() {
    match std::env::var(CHILD).as_deref() {
        Ok("fault") => fault_elsewhere(),
        Ok("signal") => {
            let _memory = Memory::anonymous(4096).unwrap();
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::BUS)
                .unwrap();
            std::thread::sleep(std::time::Duration::from_secs(10));
        }
        _ => {
            for how in ["fault", "signal"] {
                let status = Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "sigbus::unrelated_bus_errors_kill"])
                    .env(CHILD, how)
                    .stdout(std::process::Stdio::null())
                    .stderr(std::process::Stdio::null())
                    .status()
                    .unwrap();
                assert_eq!(status.signal(), Some(libc::SIGBUS), "{how}: {status}");
            }
        }
    }
}

/// Faults in a mapping that is not this crate's, at an address that was.
fn fault_elsewhere() {
    let memory = Memory::anonymous(4096).unwrap();
    let place = memory.segment(0, 1).unwrap().as_ptr();
    drop(memory);
    let fd = rustix::fs::memfd_create("elsewhere", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    let prot = rustix::mm::ProtFlags::READ;
    let shared = rustix::mm::MapFlags::SHARED;
    // The memory is unmapped by another thread, a moment later.
    let ptr = (0..30_000).find_map(|_| {
        // SAFETY: a new mapping, at this address only if it is free.
        let ptr = unsafe { rustix::mm::mmap(place.cast(), 4096, prot, shared, &fd, 0) }.unwrap();
        if ptr == place.cast() {
            return Some(ptr);
        }
        // SAFETY: just mapped.
        unsafe { rustix::mm::munmap(ptr, 4096) }.unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1));
        None
    });
    let ptr = ptr.unwrap();
    rustix::fs::ftruncate(&fd, 0).unwrap();
    // SAFETY: mapped; the fault is the point of the test.
    let byte = unsafe { ptr.cast::<u8>().read_volatile() };
    println!("survived, read {byte}");
}
