//! Layout of the file, and the state that the next process finds in it.

use rustix::fs::fstat;
use state_memory::{DescriptorKind, KeptMemory, KeptWindow, Layout, StateError, StateMemory};
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;

const LAYOUT: Layout = Layout {
    queues: 5,
    shares: 2,
    commands: 100,
    windows: 6,
    descriptors: 4,
    session: 10_000,
};

/// Opens the same memory as the next process does.
fn again(state: &StateMemory) -> StateMemory {
    StateMemory::open(state.fd().try_clone_to_owned().unwrap()).unwrap()
}

/// Overwrites bytes of the file.
fn patch(state: &StateMemory, offset: u64, bytes: &[u8]) {
    rustix::io::pwrite(state.fd(), bytes, offset).unwrap();
}

fn window(iova: u64, number: u32) -> KeptWindow {
    KeptWindow {
        iova,
        len: 0x1000 * u64::from(number),
        read: number != 3,
        write: number != 2,
        memory: (number > 1).then_some(KeptMemory {
            number: NonZeroU32::new(number & 7),
            offset: u64::from(number) << 40,
        }),
    }
}

#[test]
fn unused_sections_take_no_memory() {
    let large = Layout {
        windows: 65_535,
        shares: 64,
        commands: 4096,
        ..LAYOUT
    };
    let state = StateMemory::create(large).unwrap();
    state.control().commit(&[1; 100]).unwrap();
    state.windows().unwrap();
    state.hot().unwrap();
    let stat = fstat(state.fd()).unwrap();
    assert!(stat.st_size > 20 << 20);
    assert!(stat.st_blocks * 512 <= 24 << 10, "{}", stat.st_blocks);
    // The next process's look at it takes no more than a page for each share.
    let next = again(&state);
    next.control().read().unwrap();
    assert_eq!(next.windows().unwrap().iter().count(), 0);
    assert!((0..next.shares()).all(|share| next.recorded(share).is_none()));
    let blocks = fstat(state.fd()).unwrap().st_blocks;
    assert!(blocks * 512 <= (24 + 64 * 4) << 10, "{blocks}");
}

#[test]
fn session_bytes_and_words_survive_reopen() {
    let state = StateMemory::create(LAYOUT).unwrap();
    let session = state.session();
    assert_eq!(session.len(), 10_000);
    session.store(9_990, b"0123456789").unwrap();
    assert_eq!(session.store(9_991, &[0; 10]), Err(StateError::OutOfRange));
    assert_eq!(
        session.load(usize::MAX, &mut [0]),
        Err(StateError::OutOfRange)
    );
    session.word(8).unwrap().store(77, Ordering::Release);
    assert!(session.word(9_996).is_none() && session.word(4).is_none());
    state.identity().store(0, b"disk").unwrap();
    let next = again(&state);
    let mut bytes = [0; 10];
    next.session().load(9_990, &mut bytes).unwrap();
    assert_eq!(&bytes, b"0123456789");
    assert_eq!(next.session().word(8).unwrap().load(Ordering::Acquire), 77);
    let mut bytes = [0; 4];
    next.identity().load(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"disk");
}

#[test]
fn last_commit_is_read() {
    let state = StateMemory::create(LAYOUT).unwrap();
    assert_eq!(again(&state).control().read(), Ok(None));
    for n in 1..5_u8 {
        state
            .control()
            .commit(&vec![n; 100 * usize::from(n)])
            .unwrap();
        let found = again(&state).control().read().unwrap().unwrap();
        assert_eq!(found, vec![n; 100 * usize::from(n)]);
        assert_eq!(again(&state).control().sequence(), u64::from(n));
    }
    let capacity = state.control().capacity();
    let largest = vec![9; capacity];
    state.control().commit(&largest).unwrap();
    let more = vec![9; capacity + 1];
    assert_eq!(state.control().commit(&more), Err(StateError::OutOfRange));
    assert_eq!(again(&state).control().read(), Ok(Some(largest)));
    state.control().commit(&[]).unwrap();
    assert_eq!(again(&state).control().read(), Ok(Some(Vec::new())));
    state.control().withdraw();
    assert_eq!(again(&state).control().read(), Ok(None));
}

#[test]
fn windows_are_added_and_removed() {
    let state = StateMemory::create(LAYOUT).unwrap();
    let mut windows = state.windows().unwrap();
    for number in 1..=6 {
        let iova = u64::from(number) * 0x10000;
        windows.add(&window(iova, number)).unwrap();
    }
    let full = windows.add(&window(0, 1));
    assert_eq!(full, Err(StateError::Full("window")));
    let number = |n: u32| NonZeroU32::new(n).unwrap();
    assert!(windows.needs(number(2)) && windows.needs(number(4)) && !windows.needs(number(1)));
    windows.remove(0x20000);
    windows.remove(0x20000);
    assert!(!windows.needs(number(2)) && windows.needs(number(4)));
    windows.remove_range(0x40001, 0x5ffff);
    windows.add(&window(0x70000, 4)).unwrap();
    let mut found: Vec<KeptWindow> = again(&state).windows().unwrap().iter().collect();
    found.sort_by_key(|window| window.iova);
    let wanted = [(1, 1), (3, 3), (4, 4), (6, 6), (7, 4)];
    let wanted = wanted.map(|(at, number)| window(at * 0x10000, number));
    assert_eq!(found, wanted);
    // The next process goes on with the places that are free.
    let mut windows = again(&state).windows().unwrap();
    windows.remove(0x40000);
    assert!(windows.needs(number(4)), "another window is on it");
    windows.add(&window(0x40000, 4)).unwrap();
    windows.add(&window(0x80000, 5)).unwrap();
    assert!(windows.add(&window(0x90000, 5)).is_err());
    windows.remove_range(0, u64::MAX);
    assert_eq!(again(&state).windows().unwrap().iter().count(), 0);
}

#[test]
fn descriptor_number_is_never_reused() {
    let state = StateMemory::create(LAYOUT).unwrap();
    let mut table = state.descriptors().unwrap();
    let first = table.add(DescriptorKind::CLIENT, 0).unwrap();
    let second = table.add(DescriptorKind::EVENTFD, 7).unwrap();
    table.set_detail(first, 99);
    let changed = again(&state).descriptors().unwrap();
    let details: Vec<u64> = changed.iter().map(|noted| noted.detail).collect();
    assert_eq!(details, [99, 7]);
    table.remove(first);
    let mut table = again(&state).descriptors().unwrap();
    let third = table.add(DescriptorKind::MEMORY, 1 << 50).unwrap();
    assert!(first < second && second < third);
    let mut found: Vec<_> = again(&state).descriptors().unwrap().iter().collect();
    found.sort_by_key(|descriptor| descriptor.number);
    let found = found.into_iter();
    let found: Vec<_> = found.map(|d| (d.number, d.kind, d.detail)).collect();
    let wanted = [
        (second, DescriptorKind::EVENTFD, 7),
        (third, DescriptorKind::MEMORY, 1 << 50),
    ];
    assert_eq!(found, wanted);
}

#[test]
fn records_and_hot_rows_are_separate_per_share() {
    let state = StateMemory::create(LAYOUT).unwrap();
    let hot = state.hot().unwrap();
    assert_eq!(hot.count(), 5);
    hot.get(4).unwrap()[0].store(11, Ordering::Release);
    let records = state.records(1).unwrap();
    assert!(records.count() >= 100);
    records.get(99).unwrap()[7].store(22, Ordering::Release);
    assert!(state.records(2).is_err());
    let next = again(&state);
    assert_eq!(next.shares(), 2);
    assert!(next.recorded(0).is_none(), "never written");
    let found = next.recorded(1).unwrap();
    assert_eq!(found.get(99).unwrap()[7].load(Ordering::Acquire), 22);
    assert!(next.recorded(2).is_none());
    let hot = next.hot().unwrap();
    assert_eq!(hot.get(4).unwrap()[0].load(Ordering::Acquire), 11);
}

#[test]
fn damaged_state_file_is_error() {
    let state = StateMemory::create(LAYOUT).unwrap();
    state.control().commit(b"state").unwrap();
    let open = || StateMemory::open(state.fd().try_clone_to_owned().unwrap());
    // A byte of the committed state, and the sequence before it.
    let control = 4096 * 5 + 64 + (128 << 10) + 16;
    patch(&state, control, b"X");
    let damaged = open().unwrap().control().read();
    assert!(
        matches!(damaged, Err(StateError::Damaged(_))),
        "{damaged:?}"
    );
    patch(&state, control, b"s");
    assert_eq!(
        open().unwrap().control().read(),
        Ok(Some(b"state".to_vec()))
    );
    patch(&state, 8, &9_u32.to_le_bytes());
    assert!(open().is_ok(), "a newer version that this one may read");
    patch(&state, 12, &2_u32.to_le_bytes());
    let newer = open().unwrap_err();
    let (version, reader) = (9, 2);
    assert_eq!(newer, StateError::TooNew { version, reader });
    patch(&state, 8, &0_u32.to_le_bytes());
    patch(&state, 12, &0_u32.to_le_bytes());
    assert_eq!(open().unwrap_err(), StateError::TooOld { version: 0 });
    patch(&state, 0, b"x");
    assert_eq!(open().unwrap_err(), StateError::Foreign);
}

#[test]
fn sections_of_newer_version_are_skipped() {
    let state = StateMemory::create(LAYOUT).unwrap();
    // An eighth section of an unknown kind.
    patch(&state, 16, &8_u64.to_le_bytes());
    let entry = [99_u64, 4096, 4096, 0].map(u64::to_le_bytes).concat();
    patch(&state, (4 + 7 * 4) * 8, &entry);
    again(&state).windows().unwrap();
    patch(&state, 16, &65_u64.to_le_bytes());
    let fd = state.fd().try_clone_to_owned().unwrap();
    let refused = StateMemory::open(fd).unwrap_err();
    assert_eq!(refused, StateError::Damaged("too many sections"));
}

#[test]
fn section_of_marks_is_committed_apart_from_control_state() {
    let state = StateMemory::create(LAYOUT).unwrap();
    let mut marks = state.marks().unwrap();
    assert_eq!(marks.read(), Ok(None));
    state.control().commit(b"control").unwrap();
    let largest = vec![7; marks.capacity()];
    for bytes in [&b"few"[..], &largest, b"fewer"] {
        marks.commit(bytes).unwrap();
        let next = again(&state);
        assert_eq!(next.marks().unwrap().read().unwrap().unwrap(), bytes);
        assert_eq!(next.control().read().unwrap().unwrap(), b"control");
    }
    let more = vec![7; marks.capacity() + 1];
    assert_eq!(marks.commit(&more), Err(StateError::OutOfRange));
    // A memory of an older version lists seven sections.
    patch(&state, 16, &7u64.to_le_bytes());
    assert!(again(&state).marks().is_none());
    assert_eq!(again(&state).control().read().unwrap().unwrap(), b"control");
}
