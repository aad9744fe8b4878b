//! Memory of our own: sealed, opened again from its file, looked at by lines.

use dma::{MapError, Memory, Rows, SharedPages};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, send, socketpair};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[test]
fn shared_pages_are_reopened_from_file() {
    let first = SharedPages::named("state", 5000).unwrap();
    assert_eq!(first.len(), 8192);
    first.memory().write(4096, b"kept").unwrap();
    let fd = first.fd().try_clone_to_owned().unwrap();
    drop(first);
    let second = SharedPages::open(fd, 8192).unwrap();
    let mut found = [0; 4];
    second.memory().read(4096, &mut found).unwrap();
    assert_eq!(&found, b"kept");
}

#[test]
fn only_sealed_files_of_expected_size_are_opened() {
    let plain = Memory::anonymous(8192).unwrap();
    let fd = plain.fd().try_clone_to_owned().unwrap();
    assert_eq!(
        SharedPages::open(fd, 4096).unwrap_err(),
        MapError::WrongKind
    );
    let null = std::fs::File::open("/dev/null").unwrap();
    let refused = SharedPages::open(null.into(), 4096);
    assert_eq!(refused.unwrap_err(), MapError::WrongKind);
    let pages = SharedPages::named("state", 4096).unwrap();
    let fd = pages.fd().try_clone_to_owned().unwrap();
    let refused = SharedPages::open(fd, 4097).unwrap_err();
    assert!(matches!(refused, MapError::OutOfBacking { .. }));
    rustix::fs::ftruncate(pages.fd(), 0).unwrap_err();
}

#[test]
fn rows_are_cache_lines_of_pages() {
    let pages = SharedPages::named("state", 8192).unwrap();
    pages.allocate(0, 8192).unwrap();
    assert!(pages.allocate(4096, 4097).is_err());
    let rows = Rows::new(&pages, 4096, 64).unwrap();
    assert_eq!(rows.count(), 64);
    rows.get(1).unwrap()[2].store(0x1122, Ordering::Relaxed);
    let mut bytes = [0; 8];
    pages.memory().read(4096 + 64 + 16, &mut bytes).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes), 0x1122);
    assert!(rows.get(64).is_none());
    assert!(Rows::new(&pages, 4096, 65).is_none());
    assert!(Rows::new(&pages, 32, 1).is_none());
    assert!(Rows::new(&pages, 64, usize::MAX).is_none());
}

#[test]
fn bytes_are_received_into_memory_or_stay_in_socket() {
    let pages = SharedPages::named("state", 4096).unwrap();
    let memory = pages.memory();
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::NONBLOCK,
        None,
    )
    .unwrap();
    let none = memory.receive(ours.as_fd(), 0, 16, RecvFlags::empty());
    assert_eq!(none, Err(Errno::AGAIN));
    send(&theirs, b"0123456789", SendFlags::empty()).unwrap();
    let outside = memory.receive(ours.as_fd(), 4090, 10, RecvFlags::empty());
    assert_eq!(outside, Err(Errno::FAULT));
    let got = memory.receive(ours.as_fd(), 100, 10, RecvFlags::empty());
    assert_eq!(got, Ok(10));
    let mut bytes = [0; 10];
    memory.read(100, &mut bytes).unwrap();
    assert_eq!(&bytes, b"0123456789");
}

#[test]
fn memory_keeps_its_number() {
    let memory = Memory::anonymous(4096).unwrap();
    assert_eq!(memory.kept(), None);
    let number = NonZeroU32::new(7).unwrap();
    memory.clone().set_kept(number);
    assert_eq!(memory.kept(), Some(number));
}

#[test]
fn file_is_emptied_at_end() {
    let blocks = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_blocks;
    for empties in [false, true] {
        let pages = SharedPages::new(64 << 10).unwrap();
        if empties {
            pages.memory().empty_at_end();
        }
        pages.memory().write(0, &[1; 64 << 10]).unwrap();
        let fd = pages.fd().try_clone_to_owned().unwrap();
        let list = pages.memory().segments(0, 4096);
        drop(pages);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(blocks(&fd), 128, "it is in use");
        drop(list);
        let limit = Instant::now() + Duration::from_secs(60);
        while empties && blocks(&fd) > 0 {
            assert!(Instant::now() < limit, "pages are still there");
            std::thread::sleep(Duration::from_millis(1));
        }
        if !empties {
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(blocks(&fd), 128, "nobody said so");
        }
    }
}
