//! Once warm, reads and writes allocate nothing, however their doorbells come.

use crate::counting;

use crate::common::*;
use controller::ControllerConfig;
use nvme::{Command, NvmOpcode, Status};

/// Commands per batch, all of them submitted before one round.
const BATCH: u32 = 16;

/// Runs batches of the commands; returns the allocations of the last half.
fn run(h: &mut Host, commands: &[Command]) -> u64 {
    let mut done = Vec::with_capacity(1024);
    let mut cids = 0u16;
    let mut counted = 0;
    for batch in 0..400 {
        let start = counting::allocations();
        for i in 0..BATCH {
            let mut command = commands[i as usize % commands.len()];
            command.cid = cids.into();
            cids = cids.wrapping_add(1);
            let mut pair = h.pairs[&1];
            pair.sq
                .push(&*h, &test_host::Command::of(&command))
                .unwrap();
            h.pairs.insert(1, pair);
        }
        h.ring_sq(1);
        let mut left = BATCH;
        for _ in 0..4 {
            h.c.poll(h.now);
            h.c.poll_volumes(&mut done);
            for completion in done.drain(..) {
                h.c.complete(completion);
            }
            let mut pair = h.pairs[&1];
            while let Some(entry) = pair.cq.pop(&*h).unwrap() {
                assert_eq!(entry.status_bits(), 0, "status");
                left -= 1;
            }
            h.pairs.insert(1, pair);
            let head = h.pairs[&1].cq.head;
            h.ring_value(1, true, head);
        }
        assert_eq!(left, 0);
        h.c.arm();
        if batch >= 200 {
            counted += counting::allocations() - start;
        }
    }
    counted
}

#[test]
fn reads_and_writes_allocate_no_memory() {
    for ring in [Ring::Register, Ring::Mapped, Ring::Shadow] {
        for volume in [null(1 << 30), mem(8 << 20)] {
            let config = ControllerConfig {
                mapped_doorbells: ring == Ring::Mapped,
                ..Default::default()
            };
            let mut h = Host::with(config, vec![ns(1, volume, 512)]);
            h.enable();
            h.create_pair(1, 64);
            if ring == Ring::Shadow {
                assert_eq!(h.use_shadow(), Status::SUCCESS);
            }
            let mut commands = Vec::new();
            for (slba, len, at) in [(0, 4096, 0), (8, 4096, 512), (64, 65536, 0x10_0004)] {
                for opcode in [NvmOpcode::READ, NvmOpcode::WRITE] {
                    let mut command = h.rw(opcode, 1, slba, len as u32 / 512, 0);
                    h.prps(&mut command, DATA + at, len, DATA + 0x80_0000 + slba * 64);
                    commands.push(command);
                }
            }
            assert_eq!(run(&mut h, &commands), 0, "{ring:?}");
        }
    }
    // The counter counts.
    let before = counting::allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(counting::allocations() - before, 1);
}
