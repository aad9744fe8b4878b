//! What a successor refuses to go on with, in words.

use crate::common::*;
use controller::{
    Controller, ControllerConfig, DoorbellPage, NamespaceConfig, RestoreError, RetainedObjects,
};
use dma::{Memory, Prot};
use state_memory::StateMemory;
use std::num::NonZeroU32;
use std::os::fd::AsFd;
use std::sync::Arc;
use volume::{Io, IoOptions};

/// Has nothing.
struct Nothing;

impl RetainedObjects for Nothing {
    fn memory(&mut self, _: NonZeroU32, _: u64, _: bool) -> Option<Memory> {
        None
    }

    fn receiver(&mut self, _: NonZeroU32) -> Option<Arc<dyn controller::IrqSink>> {
        None
    }
}

fn restore(
    h: &Host,
    config: ControllerConfig,
    namespaces: Vec<NamespaceConfig>,
    kept: &mut dyn RetainedObjects,
) -> Result<(), RestoreError> {
    let io = Io::new(IoOptions::default());
    let page = h.c.doorbell_page().as_fd().try_clone_to_owned().unwrap();
    let page = DoorbellPage::from_fd(page).unwrap();
    let state = StateMemory::open(h.state.fd().try_clone_to_owned().unwrap())?;
    Controller::restore(3, config, namespaces, &io, page, state, kept).map(|_| ())
}

fn refusal(change: impl FnOnce(&mut ControllerConfig, &mut Vec<NamespaceConfig>)) -> String {
    let h = Host::ready();
    let mut config = h.c.config().clone();
    let mut namespaces: Vec<_> = h.c.namespaces().cloned().collect();
    change(&mut config, &mut namespaces);
    let refused = restore(&h, config, namespaces, &mut h.keeper());
    refused.unwrap_err().to_string()
}

#[test]
fn changed_disk_is_refused_with_difference() {
    let serial = refusal(|config, _| config.serial = "another".into());
    assert_eq!(
        serial,
        "the guest was shown a disk with serial number \"vnvme0\", but \"another\" is configured"
    );
    assert!(refusal(|config, _| config.io_queues = 3).contains("number of I/O queues 64"));
    assert!(refusal(|config, _| config.mdts = 5).contains("MDTS 8, but 5 is configured"));
    assert!(refusal(|config, _| config.queue_entries = 64).contains("entries of queues"));
    assert!(refusal(|config, _| config.mapped_doorbells = true).contains("mapped doorbells"));
    assert!(refusal(|_, all| all[0].block_size = 4096).contains("block size 512"));
    assert!(refusal(|_, all| all[0].nguid = [7; 16]).contains("NGUID"));
    let buffer = refusal(|config, _| config.cmb_size = Some(4096));
    assert!(buffer.contains("controller memory buffer None, but Some(4096) is configured"));
}

#[test]
fn missing_restart_state_is_named() {
    let h = Host::ready();
    let restore = |h: &Host, kept: &mut dyn RetainedObjects| {
        let namespaces = h.c.namespaces().cloned().collect();
        restore(h, h.c.config().clone(), namespaces, kept)
    };
    restore(&h, &mut h.keeper()).unwrap();
    let memory = restore(&h, &mut Nothing).unwrap_err();
    assert_eq!(
        memory.to_string(),
        "restart state: a file of guest memory is missing"
    );
    // A receiver that has no number.
    let mut h = Host::ready();
    h.c.set_msix(1, Some(Arc::new(Count::default())));
    let receiver = restore(&h, &mut h.keeper()).unwrap_err();
    assert_eq!(
        receiver.to_string(),
        "restart state: a receiver of interrupts is missing"
    );
    // The controller memory buffer.
    let config = ControllerConfig {
        cmb_size: Some(4096),
        ..Default::default()
    };
    let h = Host::with(config, vec![ns(1, mem(1 << 20), 512)]);
    restore(&h, &mut h.keeper()).unwrap();
    let mut keeper = h.keeper();
    keeper.buffer = None;
    let buffer = restore(&h, &mut keeper).unwrap_err();
    assert_eq!(
        buffer.to_string(),
        "restart state: the controller memory buffer is missing"
    );
    // Another file: not sealed, or of another size.
    keeper.buffer = Some(h.low.fd().try_clone_to_owned().unwrap());
    let buffer = restore(&h, &mut keeper).unwrap_err().to_string();
    assert!(buffer.starts_with("controller memory buffer: not a memory file"));
    // Memory that has none.
    let mut h = Host::ready();
    let other = Memory::anonymous(4096).unwrap();
    let number = |n: u32| NonZeroU32::new(n).unwrap();
    assert!(h.c.needs_kept(number(1)) && h.c.needs_kept(number(2)) && !h.c.needs_kept(number(3)));
    assert!(h.c.needs_kept(number(101)));
    h.c.dma_map(1 << 50, 4096, Some((other, 0)), Prot::RW)
        .unwrap();
    let memory = restore(&h, &mut h.keeper()).unwrap_err();
    assert_eq!(
        memory.to_string(),
        "restart state: a file of guest memory is missing"
    );
    h.c.dma_unmap(1 << 50, 4096).unwrap();
    assert!(
        restore(&h, &mut h.keeper()).is_err(),
        "its unmap is not answered"
    );
    assert!(h.c.dma_quiesced());
    restore(&h, &mut h.keeper()).unwrap();
}

#[test]
fn unreadable_restart_state_is_refused() {
    let h = Host::ready();
    let restore = |h: &Host| {
        let namespaces = h.c.namespaces().cloned().collect();
        restore(h, h.c.config().clone(), namespaces, &mut h.keeper()).map_err(|e| e.to_string())
    };
    let saved = h.c.saved().unwrap();
    h.state.control().commit(&[0xff; 40]).unwrap();
    assert!(restore(&h).unwrap_err().contains("cannot be read"));
    h.state.control().withdraw();
    let nothing = "the previous process has left no state";
    assert_eq!(restore(&h), Err(nothing.to_owned()));
    h.state.control().commit(&saved).unwrap();
    restore(&h).unwrap();
    // The version is the first field of the map.
    let mut newer = saved.clone();
    assert_eq!(newer[1..3], [0, 1]);
    newer[2] = 23;
    h.state.control().commit(&newer).unwrap();
    let newer = restore(&h).unwrap_err();
    assert!(
        newer.contains("version 23, this program reads 1 at most"),
        "{newer}"
    );
}

#[test]
fn fields_of_newer_version_are_skipped() {
    let h = Host::ready();
    let mut saved = h.c.saved().unwrap();
    // One more field in the map, at its end.
    assert!((0xa1..0xb7).contains(&saved[0]), "a short map");
    saved[0] += 1;
    saved.extend([0x18, 200, 0x63, b'n', b'e', b'w']);
    h.state.control().commit(&saved).unwrap();
    let namespaces = h.c.namespaces().cloned().collect();
    restore(&h, h.c.config().clone(), namespaces, &mut h.keeper()).unwrap();
}
