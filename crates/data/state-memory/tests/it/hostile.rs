//! A state memory that a hostile process wrote: nothing in it makes the next process panic.

use proptest::prelude::*;
use state_memory::{Layout, StateMemory};
use std::sync::atomic::Ordering;

const LAYOUT: Layout = Layout {
    queues: 3,
    shares: 2,
    commands: 10,
    windows: 8,
    descriptors: 8,
    session: 100,
};

/// Reads every part of a state memory.
fn read(state: &StateMemory) {
    let _ = state.control().read();
    if let Ok(windows) = state.windows() {
        windows.iter().count();
    }
    if let Ok(mut descriptors) = state.descriptors() {
        descriptors.iter().count();
        let _ = descriptors.add(state_memory::DescriptorKind::CLIENT, 0);
    }
    for share in 0..state.shares().min(100) {
        if let Some(records) = state.recorded(share)
            && let Some(row) = records.get(records.count().saturating_sub(1))
        {
            row[7].load(Ordering::Acquire);
        }
    }
    let mut bytes = vec![0; state.session().len().min(1000)];
    let _ = state.session().load(0, &mut bytes);
    if let Ok(hot) = state.hot() {
        hot.get(0);
    }
    let _ = state.control().commit(b"next");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_content_is_read_or_refused(
        header in prop::collection::vec((3..40_usize, prop_oneof![
            0..10_u64, 0..400_000_u64, any::<u64>(),
        ]), 0..6),
        rest in prop::collection::vec((512..70_000_usize, any::<u64>()), 0..40),
    ) {
        let state = StateMemory::create(LAYOUT).unwrap();
        for (word, value) in header.into_iter().chain(rest) {
            // Beyond the end nothing can be written.
            let _ = rustix::io::pwrite(state.fd(), &value.to_le_bytes(), word as u64 * 8);
        }
        if let Ok(state) = StateMemory::open(state.fd().try_clone_to_owned().unwrap()) {
            read(&state);
        }
    }
}
