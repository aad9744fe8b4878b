//! The addresses that all clients together map are bounded. Alone in its process, because while it
//! fills them nothing else can be mapped.

use dma::{MapError, Memory, MemoryCache, MemoryLimits};

#[test]
fn sparse_file_of_absurd_size_is_error() {
    let sparse = |size: u64| {
        let fd = rustix::fs::memfd_create("sparse", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, size).unwrap();
        fd
    };
    let absurd = i64::MAX as u64 & !4095;
    assert!(matches!(
        Memory::from_fd(sparse(absurd), 1 << 40, true),
        Err(MapError::AddressSpaceFull { .. })
    ));
    // Many clients, each with as much as it may have, and each only once.
    let limits = MemoryLimits {
        bytes: 2 << 40,
        ..MemoryLimits::DEFAULT
    };
    let mut all = Vec::new();
    let refused = (0..1000).find_map(|_| {
        let mut client = MemoryCache::with_limits(limits);
        let taken = client.import(sparse(2 << 40), 4096, true);
        let more = client.import(sparse(4096), 4096, true);
        let refused = taken.map(|memory| all.push(memory)).err();
        let wanted = MapError::TooManyBytes { limit: 2 << 40 };
        assert!(refused.is_some() || more.err() == Some(wanted));
        refused
    });
    // There is room for everything else, and for other clients when these have gone.
    assert!(matches!(refused, Some(MapError::AddressSpaceFull { .. })));
    drop(vec![1u8; 1 << 30]);
    drop(all);
    // A thread of its own undoes the mappings.
    let again = (0..30_000).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(1));
        Memory::from_fd(sparse(2 << 40), 1, true).is_ok()
    });
    assert!(again);
}
