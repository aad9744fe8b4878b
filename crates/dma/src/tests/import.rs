use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};

use crate::{DmaMap, MapError, Memory, MemoryCache, MemoryError, Prot, SharedPages};

fn dup(memory: &Memory) -> OwnedFd {
    memory.fd().try_clone_to_owned().unwrap()
}

#[test]
fn one_file_is_mapped_once() {
    let file = Memory::anonymous(8192).unwrap();
    let mut cache = MemoryCache::new();
    let one = cache.import(dup(&file), 4096, true).unwrap();
    let two = cache.import(dup(&file), 8192, true).unwrap();
    assert!(one.is_same(&two));
    let read_only = cache.import(dup(&file), 8192, false).unwrap();
    assert!(!read_only.is_same(&one));
    let other = cache
        .import(dup(&Memory::anonymous(8192).unwrap()), 4096, true)
        .unwrap();
    assert!(!other.is_same(&one));
    assert_eq!(
        cache.import(dup(&file), 8193, true).err(),
        Some(MapError::OutOfBacking {
            end: 8193,
            size: 8192
        })
    );
}

#[test]
fn the_cache_keeps_nothing_alive() {
    let file = Memory::anonymous(4096).unwrap();
    let mut cache = MemoryCache::new();
    let imported = cache.import(dup(&file), 4096, true).unwrap();
    let weak = std::sync::Arc::downgrade(&imported.0);
    drop(imported);
    assert_eq!(weak.strong_count(), 0);
    assert!(cache.import(dup(&file), 4096, true).is_ok());
}

#[test]
fn a_file_that_grew_is_mapped_again() {
    let file = Memory::anonymous(4096).unwrap();
    let mut cache = MemoryCache::new();
    let small = cache.import(dup(&file), 4096, true).unwrap();
    rustix::fs::ftruncate(file.fd(), 8192).unwrap();
    let large = cache.import(dup(&file), 8192, true).unwrap();
    assert_eq!((small.len(), large.len()), (4096, 8192));
    assert!(
        cache
            .import(dup(&file), 4096, true)
            .unwrap()
            .is_same(&large)
    );
}

/// A client that may only read a file must not get a writable mapping because another
/// descriptor had the right.
#[test]
fn the_cache_does_not_lend_write_access() {
    let file = Memory::anonymous(4096).unwrap();
    let mut cache = MemoryCache::new();
    let _writable = cache.import(dup(&file), 4096, true).unwrap();
    let path = format!(
        "/proc/self/fd/{}",
        std::os::fd::AsRawFd::as_raw_fd(&file.fd())
    );
    let open = |flags| rustix::fs::open(&path, flags, Mode::empty()).unwrap();
    assert_eq!(
        cache.import(open(OFlags::RDONLY), 4096, true).err(),
        Some(MapError::ReadOnly)
    );
    let read_only = cache.import(open(OFlags::RDONLY), 4096, false).unwrap();
    assert_eq!(read_only.write(0, &[1]), Err(MemoryError::ReadOnly));
    assert!(read_only.atomic_u32(0).is_none());
    assert!(!read_only.segments(0, 16).unwrap().is_writable());
    let mut map = DmaMap::new();
    assert_eq!(
        map.map(0, 4096, Some((read_only.clone(), 0)), Prot::RW),
        Err(MapError::ReadOnly)
    );
    assert_eq!(map.map(0, 4096, Some((read_only, 0)), Prot::RO), Ok(()));
    assert!(matches!(
        Memory::from_fd(open(OFlags::RDONLY), 1, true),
        Err(MapError::System { call: "mmap", .. })
    ));
}

#[test]
fn other_kinds_of_files_are_refused() {
    let open = |path: &str| rustix::fs::open(path, OFlags::RDONLY, Mode::empty()).unwrap();
    for path in ["/dev/zero", "/proc", "/"] {
        assert_eq!(
            Memory::from_fd(open(path), 0, false).err(),
            Some(MapError::WrongKind),
            "{path}"
        );
    }
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(
        Memory::from_fd(socket.into(), 0, false).err(),
        Some(MapError::WrongKind)
    );
    let (pipe, _other) = std::io::pipe().unwrap();
    assert_eq!(
        Memory::from_fd(pipe.into(), 0, false).err(),
        Some(MapError::WrongKind)
    );
    // Claims to be a regular file, of no size.
    assert_eq!(
        Memory::from_fd(open("/proc/version"), 1, false).err(),
        Some(MapError::OutOfBacking { end: 1, size: 0 })
    );
    assert_eq!(
        Memory::from_fd(open("/proc/version"), 0, false).err(),
        Some(MapError::Empty)
    );
    assert_eq!(Memory::anonymous(0).err(), Some(MapError::Empty));
}

#[test]
fn a_sparse_file_of_absurd_size_is_an_error() {
    let file = Memory::anonymous(4096).unwrap();
    rustix::fs::ftruncate(file.fd(), i64::MAX as u64 & !4095).unwrap();
    assert!(matches!(
        Memory::from_fd(dup(&file), 1 << 40, true),
        Err(MapError::System { call: "mmap", .. })
    ));
}

#[test]
fn host_access_is_bounded() {
    let memory = Memory::anonymous(5000).unwrap();
    assert_eq!(memory.len(), 5000);
    assert_eq!(memory.write(4999, &[1]), Ok(()));
    assert_eq!(memory.write(4999, &[1, 2]), Err(MemoryError::OutOfRange));
    assert_eq!(
        memory.read(usize::MAX, &mut [0; 2]),
        Err(MemoryError::OutOfRange)
    );
    assert!(memory.segment(5000, 0).is_some());
    assert!(memory.segment(4990, 11).is_none());
    assert!(memory.atomic_u32(2).is_none());
    assert!(memory.atomic_u32(4996).is_some());
    assert!(memory.atomic_u64(4996).is_none());
    assert!(memory.atomic_u64(usize::MAX - 7).is_none());
}

#[test]
fn shared_pages_are_seen_by_the_other_side_and_cannot_be_shrunk() {
    use std::sync::atomic::Ordering;
    let pages = SharedPages::new(100).unwrap();
    assert_eq!(pages.len(), rustix::param::page_size());
    let client = Memory::from_fd(
        pages.fd().try_clone_to_owned().unwrap(),
        pages.len() as u64,
        true,
    )
    .unwrap();
    client.atomic_u32(8).unwrap().store(77, Ordering::Release);
    assert_eq!(pages.cell(2).unwrap().load(Ordering::Acquire), 77);
    assert!(pages.cell(pages.len() / 4).is_none());
    assert!(pages.cell(usize::MAX).is_none());
    assert_eq!(
        rustix::fs::ftruncate(pages.fd(), 0),
        Err(rustix::io::Errno::PERM)
    );
}
