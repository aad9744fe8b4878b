use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

use crate::{
    DmaMap, Import, MapError, Memory, MemoryCache, MemoryError, MemoryLimits, PendingImport, Prot,
    SharedPages,
};

fn dup(memory: &Memory) -> OwnedFd {
    memory.fd().try_clone_to_owned().unwrap()
}

#[test]
fn same_file_is_mapped_once() {
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
fn import_cache_keeps_nothing_alive() {
    let file = Memory::anonymous(4096).unwrap();
    let mut cache = MemoryCache::new();
    let imported = cache.import(dup(&file), 4096, true).unwrap();
    let weak = std::sync::Arc::downgrade(&imported.0);
    drop(imported);
    assert_eq!(weak.strong_count(), 0);
    assert!(cache.import(dup(&file), 4096, true).is_ok());
}

#[test]
fn grown_file_is_mapped_again() {
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
fn import_cache_grants_no_write_access() {
    let file = Memory::anonymous(4096).unwrap();
    let mut cache = MemoryCache::new();
    let _writable = cache.import(dup(&file), 4096, true).unwrap();
    let path = format!("/proc/self/fd/{}", file.fd().as_raw_fd());
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

/// Classification of files without calls to their file system: only memory files pass.
#[test]
fn files_other_than_memory_are_refused() {
    let open = |path: &str, flags| rustix::fs::open(path, flags, Mode::empty()).unwrap();
    let directory = std::env::temp_dir();
    let disk = OFlags::RDWR | OFlags::TMPFILE;
    let disk = rustix::fs::open(&directory, disk, Mode::RUSR | Mode::WUSR).unwrap();
    let on_disk = rustix::fs::fcntl_get_seals(&disk).is_err();
    rustix::fs::ftruncate(&disk, 8192).unwrap();
    let memory = Memory::anonymous(4096).unwrap();
    let name = format!("/proc/self/fd/{}", memory.fd().as_raw_fd());
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let (pipe, _other) = std::io::pipe().unwrap();
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let pidfd = rustix::process::pidfd_open(
        rustix::process::getpid(),
        rustix::process::PidfdFlags::empty(),
    );
    let mut wrong: Vec<(&str, OwnedFd)> = vec![
        ("/dev/zero", open("/dev/zero", OFlags::RDWR)),
        ("/proc", open("/proc", OFlags::RDONLY)),
        ("/", open("/", OFlags::RDONLY)),
        ("/proc/version", open("/proc/version", OFlags::RDONLY)),
        ("a memory file that is not open", open(&name, OFlags::PATH)),
        ("socket", socket.into()),
        ("pipe", pipe.into()),
        ("epoll", epoll),
        ("eventfd", eventfd),
        ("pidfd", pidfd.unwrap()),
    ];
    if let Ok(directory) = rustix::fs::open("/dev/shm", OFlags::RDONLY, Mode::empty()) {
        wrong.push(("a directory of tmpfs", directory));
    }
    if on_disk {
        wrong.push(("a disk's file", disk))
    } else {
        testkit::skip(
            "dma::import::files_other_than_memory_are_refused",
            "/tmp is in memory",
        )
    }
    let mut cache = MemoryCache::new();
    for (what, fd) in wrong {
        let again = fd.try_clone().unwrap();
        let refused = Memory::from_fd(fd, 1, false).err();
        assert_eq!(refused, Some(MapError::WrongKind), "{what}");
        let refused = cache.import(again, 1, false).err();
        assert_eq!(refused, Some(MapError::WrongKind), "{what}");
    }
    assert_eq!(Memory::anonymous(0).err(), Some(MapError::Empty));
    let empty = rustix::fs::memfd_create("empty", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(
        Memory::from_fd(empty, 0, false).err(),
        Some(MapError::Empty)
    );
}

#[test]
fn tmpfs_files_are_accepted_as_memory() {
    let flags = OFlags::RDWR | OFlags::TMPFILE;
    let Ok(file) = rustix::fs::open("/dev/shm", flags, Mode::RUSR | Mode::WUSR) else {
        return testkit::skip(
            "dma::import::tmpfs_files_are_accepted_as_memory",
            "no /dev/shm to write to",
        );
    };
    rustix::fs::ftruncate(&file, 8192).unwrap();
    let guest = file.try_clone().unwrap();
    let memory = Memory::from_fd(file, 8192, true).unwrap();
    memory.write(4096, b"here").unwrap();
    let mut bytes = [0; 4];
    rustix::io::pread(&guest, &mut bytes, 4096).unwrap();
    assert_eq!(&bytes, b"here");
}

/// Waker with a channel that receives each call.
struct Notifier(SyncSender<()>);

impl Wake for Notifier {
    fn wake(self: Arc<Self>) {
        let _ = self.0.try_send(());
    }
}

fn notifier() -> (Waker, Receiver<()>) {
    let (sender, receiver) = sync_channel(1);
    (Waker::from(Arc::new(Notifier(sender))), receiver)
}

/// Begins to import a file that is not mapped yet.
fn begin(cache: &mut MemoryCache, file: &Memory, waker: &Waker) -> PendingImport {
    match cache.begin(dup(file), 4096, true, waker) {
        Ok(Import::Pending(pending)) => pending,
        other => panic!("{other:?}"),
    }
}

#[test]
fn file_is_mapped_by_another_thread() {
    let file = Memory::anonymous(4096).unwrap();
    file.write(0, b"here").unwrap();
    let (waker, calls) = notifier();
    let mut cache = MemoryCache::new();
    let pending = begin(&mut cache, &file, &waker);
    calls.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(pending.is_done());
    let memory = cache.finish(&pending).unwrap().unwrap();
    assert!(cache.finish(&pending).is_none());
    let mut bytes = [0; 4];
    memory.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"here");
    let known = cache.begin(dup(&file), 4096, true, &waker);
    assert!(matches!(known, Ok(Import::Done(known)) if known.is_same(&memory)));
    // A failure of the mapping itself follows, others are there at once.
    let limits = MemoryLimits {
        mappings: 0,
        ..MemoryLimits::DEFAULT
    };
    let mut none = MemoryCache::with_limits(limits);
    let pending = begin(&mut none, &file, &waker);
    calls.recv_timeout(Duration::from_secs(60)).unwrap();
    let full = Some(MapError::TooManyMappings { limit: 0 });
    assert_eq!(none.finish(&pending).unwrap().err(), full);
    assert!(none.begin(dup(&file), 4097, true, &waker).is_err());
}

/// Number of this process's descriptors of a memory file.
fn owners(file: &Memory) -> usize {
    let inode = rustix::fs::fstat(file.fd()).unwrap().st_ino;
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let is_it = |path| rustix::fs::stat(path).is_ok_and(|stat| stat.st_ino == inode);
    open.filter(|entry| is_it(entry.path())).count()
}

#[test]
fn client_that_stalls_kernel_waits_for_others() {
    let file = Memory::anonymous(4096).unwrap();
    let (slow, mut other) = (MemoryCache::new(), MemoryCache::new());
    let before = owners(&file);
    slow.pace()
        .charge(Duration::from_secs(3600), Instant::now());
    // The next client of the same disk has the same budget.
    let mut slow = slow.next_client();
    let (slow_waker, _) = notifier();
    let waits = begin(&mut slow, &file, &slow_waker);
    let (waker, calls) = notifier();
    let pending = begin(&mut other, &Memory::anonymous(4096).unwrap(), &waker);
    calls.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(pending.is_done() && !waits.is_done());
    assert_eq!(owners(&file), before + 1);
    drop(waits);
    eventually(|| {
        // The file is closed because nobody waits for it, and not because its time has come.
        slow.pace()
            .charge(Duration::from_secs(3600), Instant::now());
        owners(&file) == before
    });
}

#[test]
fn client_file_count_is_limited() {
    let limits = MemoryLimits {
        mappings: 3,
        bytes: 16 << 10,
    };
    let mut cache = MemoryCache::with_limits(limits);
    let files: Vec<Memory> = (0..5).map(|_| Memory::anonymous(4096).unwrap()).collect();
    let import = |cache: &mut MemoryCache, i: usize| cache.import(dup(&files[i]), 4096, true);
    let mut held: Vec<Memory> = (0..3).map(|i| import(&mut cache, i).unwrap()).collect();
    let full = MapError::TooManyMappings { limit: 3 };
    assert_eq!(import(&mut cache, 3).err(), Some(full));
    // Another window on a file costs nothing, another client has its own account.
    assert!(import(&mut cache, 2).is_ok());
    assert!(import(&mut MemoryCache::with_limits(limits), 3).is_ok());
    held.pop();
    eventually(|| import(&mut cache, 3).is_ok());
    drop(held);
    let large = Memory::anonymous(12 << 10).unwrap();
    let mut held = None;
    eventually(|| {
        held = cache.import(dup(&large), 4096, true).ok();
        held.is_some()
    });
    // The former mappings are undone one by one: the large one may have found its room before the
    // last.
    let mut one = None;
    eventually(|| {
        one = import(&mut cache, 0).ok();
        one.is_some()
    });
    let two = import(&mut cache, 1);
    assert_eq!(two.err(), Some(MapError::TooManyBytes { limit: 16 << 10 }));
    drop(held);
}

/// Waits for a thread of [`sync::discard`].
fn eventually(holds: impl FnMut() -> bool) {
    let tries = std::iter::repeat_with(holds).take(30_000);
    let pause = || std::thread::sleep(std::time::Duration::from_millis(1));
    assert!(
        tries
            .inspect(|holds| if !holds {
                pause()
            })
            .any(|holds| holds)
    );
}

#[test]
fn memory_access_is_bounds_checked() {
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
fn shared_pages_are_visible_to_client_and_sealed() {
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
