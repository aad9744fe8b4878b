//! Guest memory that is mapped and unmapped under queues, buffers and commands.

use crate::common::*;
use dma::Prot;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use volume::{Effect, Fault, OpKind};

fn read(h: &Host) -> Command {
    h.rw(NvmOpcode::READ, 1, 0, 1, DATA)
}

#[test]
fn doorbell_buffers_work_after_remap() {
    let mut h = Host::ready();
    // The buffers in a window of their own.
    let window = 0x100_0000_0000;
    h.c.dma_map(window, 0x4000, Some((h.low.clone(), SHADOW)), Prot::RW)
        .unwrap();
    assert_eq!(h.configure_shadow(window, window + 0x1000), Status::SUCCESS);
    h.ring = Ring::Shadow;
    let command = read(&h);
    for _ in 0..70 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
    h.c.dma_unmap(window, 0x4000).unwrap();
    assert!(h.c.dma_quiesced());
    assert!(!h.c.shadowed());
    let before = h.read(SHADOW, 0x2000);
    // Registers go on.
    h.ring = Ring::Register;
    for _ in 0..70 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
    h.c.arm();
    assert_eq!(h.read(SHADOW, 0x2000), before, "not touched while unmapped");
    h.c.dma_map(window, 0x4000, Some((h.low.clone(), SHADOW)), Prot::RW)
        .unwrap();
    assert!(h.c.shadowed());
    h.run();
    h.ring = Ring::Shadow;
    h.c.arm();
    for _ in 0..70 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
}

#[test]
fn unmap_waits_for_commands_in_flight() {
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let window = 0x100_0000_0000;
    h.c.dma_map(window, 0x4000, Some((h.high.clone(), 0)), Prot::RW)
        .unwrap();
    let command = h.rw(NvmOpcode::READ, 1, 0, 1, window);
    h.submit(1, command);
    h.run_held(&faults, 1);
    h.c.dma_unmap(window, 0x4000).unwrap();
    assert!(!h.c.dma_quiesced(), "a command may still write there");
    // New commands do not find it, and do not delay the answer.
    h.submit(1, command);
    h.run_held(&faults, 1);
    assert_eq!(
        plain(h.reap(1).unwrap().status()),
        Status::DATA_TRANSFER_ERROR
    );
    assert!(!h.c.dma_quiesced());
    faults.clear();
    faults.release();
    h.run();
    assert!(h.c.dma_quiesced());
    assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
    assert_eq!(h.c.dma_unmap(window, 0x4000), Ok(0), "it is gone");
}

#[test]
fn queue_with_unmapped_ring_stalls_and_resumes() {
    let mut h = Host::ready();
    let window = 0x100_0000_0000;
    let map = |h: &mut Host, at: u64| {
        let memory = h.low.clone();
        h.c.dma_map(
            window + at,
            0x1000,
            Some((memory, RINGS + 0x8000 + at)),
            Prot::RW,
        )
        .unwrap();
    };
    map(&mut h, 0);
    map(&mut h, 0x1000);
    h.create_cq_in(window);
    h.pairs
        .insert(2, Pair::new(RINGS + 0x8000, RINGS + 0x9000, 16));
    let command = read(&h);
    assert_eq!(h.command(2, command).status(), Status::SUCCESS);
    for (gone, stands) in [(0, 0x1000), (0x1000, 0)] {
        h.c.dma_unmap(window + gone, 0x1000).unwrap();
        assert!(h.c.dma_quiesced());
        for _ in 0..3 {
            h.submit(2, command);
        }
        h.run();
        assert!(h.reap(2).is_none(), "without the ring at {gone:#x}");
        let io = read(&h);
        assert_eq!(h.io(io), Status::SUCCESS, "others do not care");
        map(&mut h, gone);
        h.run();
        let done = h.reap_all(2);
        assert_eq!(
            done.len(),
            3,
            "after {gone:#x} came back ({stands:#x} stood)"
        );
        assert!(done.iter().all(|d| d.status().is_success()));
    }
    // All windows away: even the admin queue stands still.
    h.c.dma_unmap_all();
    let low = h.low.clone();
    h.submit(0, Command::new(AdminOpcode::KEEP_ALIVE.0, 0, 0));
    h.run();
    assert!(h.reap(0).is_none());
    h.c.dma_map(LOW, LOW_SIZE, Some((low, 0)), Prot::RW)
        .unwrap();
    h.run();
    assert!(h.reap(0).is_some());
}

#[test]
fn transfer_to_unbacked_or_read_only_window_fails() {
    let mut h = Host::ready();
    let (bare, ro) = (0x100_0000_0000, 0x200_0000_0000);
    h.c.dma_map(bare, 0x10000, None, Prot::RW).unwrap();
    h.c.dma_map(ro, 0x10000, Some((h.high.clone(), 0)), Prot::RO)
        .unwrap();
    let to = |h: &mut Host, opcode, iova| {
        let command = h.rw(opcode, 1, 0, 1, iova);
        plain(h.io(command))
    };
    assert_eq!(
        to(&mut h, NvmOpcode::READ, bare),
        Status::DATA_TRANSFER_ERROR
    );
    assert_eq!(to(&mut h, NvmOpcode::READ, ro), Status::DATA_TRANSFER_ERROR);
    assert_eq!(to(&mut h, NvmOpcode::WRITE, ro), Status::SUCCESS);
    assert_eq!(
        plain(h.create_cq_status(5, ro)),
        Status::DATA_TRANSFER_ERROR
    );
    assert_eq!(
        plain(h.configure_shadow(ro, ro + 0x1000)),
        Status::INVALID_FIELD
    );
}
