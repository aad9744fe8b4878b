//! Queues: full ones, shared ones, the largest ones.

use crate::common::*;
use controller::ControllerConfig;
use dma::Prot;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};

fn read(h: &Host) -> Command {
    h.rw(NvmOpcode::READ, 1, 0, 1, DATA)
}

#[test]
fn full_cq_waits_for_head() {
    for ring in [Ring::Register, Ring::Mapped, Ring::Shadow] {
        let config = ControllerConfig {
            mapped_doorbells: ring == Ring::Mapped,
            ..Default::default()
        };
        let mut h = Host::with(config, vec![ns(1, mem(1 << 20), 512)]);
        h.enable();
        // Four completion entries, 64 submission entries.
        let (sq, cq) = (RINGS, RINGS + 0x1000);
        assert_eq!(h.create_cq(1, 4, cq, Some(1)), Status::SUCCESS);
        assert_eq!(h.create_sq(1, 1, 64, sq), Status::SUCCESS);
        if ring == Ring::Shadow {
            assert_eq!(h.use_shadow(), Status::SUCCESS);
        }
        let mut sent = Vec::new();
        h.pairs.insert(1, Pair::new(sq, cq, 64));
        for i in 0..40 {
            let command = h.rw(NvmOpcode::READ, 1, i % 64, 1, DATA);
            sent.push(h.push(1, command));
        }
        h.ring_sq(1);
        h.pairs.get_mut(&1).unwrap().cq.size = 4;
        h.run();
        assert_eq!(
            h.c.stats().queues[1].completions.get(),
            3,
            "one entry stays free"
        );
        // Asleep: the head must wake it, or be seen.
        let mut got = Vec::new();
        for _ in 0..1000 {
            assert!(!h.c.arm() && !h.c.recheck());
            let rung = h.c.stats().queues[1].mmio_doorbells.get();
            let Some(done) = h.reap(1) else { break };
            got.push(done.cid.get());
            if ring == Ring::Shadow && h.c.stats().queues[1].completions.get() < 40 {
                assert!(
                    h.c.stats().queues[1].mmio_doorbells.get() > rung,
                    "a full queue's head rings"
                );
            }
            h.run();
        }
        assert_eq!(got, sent, "{ring:?}: nothing lost, nothing twice, in order");
        let stats = h.c.stats();
        assert_eq!(
            (
                stats.queues[1].commands.get(),
                stats.queues[1].completions.get()
            ),
            (40, 40)
        );
        assert!(!h.csts().cfs());
    }
}

#[test]
fn several_sqs_share_one_cq() {
    let mut h = Host::ready();
    for qid in 2..=4u16 {
        let sq = RINGS + u64::from(qid) * RING_STEP;
        assert_eq!(h.create_sq(qid, 1, 16, sq), Status::SUCCESS);
        h.pairs.insert(qid, Pair::new(sq, 0, 16));
    }
    let mut sent = Vec::new();
    for _ in 0..8 {
        for qid in 1..=4 {
            let command = read(&h);
            sent.push((qid, h.submit(qid, command)));
        }
    }
    h.run();
    let mut got: Vec<_> = h
        .reap_all(1)
        .iter()
        .map(|c| (c.sqid.get(), c.cid.get()))
        .collect();
    got.sort();
    sent.sort();
    assert_eq!(got, sent);
    assert_eq!(
        plain(h.delete(AdminOpcode::DELETE_IO_CQ, 1)),
        Status::INVALID_QUEUE_DELETION
    );
    for qid in 1..=3 {
        assert_eq!(h.delete(AdminOpcode::DELETE_IO_SQ, qid), Status::SUCCESS);
        assert_eq!(
            plain(h.delete(AdminOpcode::DELETE_IO_CQ, 1)),
            Status::INVALID_QUEUE_DELETION
        );
    }
    let command = read(&h);
    h.submit(4, command);
    h.run();
    assert_eq!(h.reap_all(1).len(), 1);
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_SQ, 4), Status::SUCCESS);
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_CQ, 1), Status::SUCCESS);
}

#[test]
fn full_queue_is_deleted() {
    let mut h = Host::ready();
    h.create_cq(2, 2, RINGS + 0x9000, None);
    h.create_sq(2, 2, 16, RINGS + 0x8000);
    h.pairs
        .insert(2, Pair::new(RINGS + 0x8000, RINGS + 0x9000, 16));
    for _ in 0..8 {
        let command = read(&h);
        h.push(2, command);
    }
    h.ring_sq(2);
    h.run();
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_SQ, 2), Status::SUCCESS);
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_CQ, 2), Status::SUCCESS);
    h.create_pair(2, 16);
    let command = read(&h);
    assert_eq!(h.command(2, command).status(), Status::SUCCESS);
}

#[test]
fn queues_of_4096_entries_work_on_all_64_pairs() {
    for ring in [Ring::Register, Ring::Mapped, Ring::Shadow] {
        let config = ControllerConfig {
            mapped_doorbells: ring == Ring::Mapped,
            ..Default::default()
        };
        let mut h = Host::with(
            config,
            vec![ns(1, mem(1 << 20), 512), ns(2, null(1 << 30), 4096)],
        );
        h.enable();
        // Rings of 256 KiB and 64 KiB: they need a memory of their own.
        let rings = dma::Memory::anonymous(64 * 0x50000).unwrap();
        let base = 0x300_0000_0000;
        h.c.dma_map(base, 64 * 0x50000, Some((rings.clone(), 0)), Prot::RW)
            .unwrap();
        for q in 0..64u64 {
            let at = base + q * 0x50000;
            let create = |h: &mut Host, opcode: AdminOpcode, iova, cdw11: u32| {
                let mut command = Command::new(opcode.0, 0, 0);
                command.set_prps(iova, 0);
                command.cdw10 = (4095 << 16 | (q as u32 + 1)).into();
                command.cdw11 = cdw11.into();
                h.admin(command).status()
            };
            let qid = q as u32 + 1;
            assert_eq!(
                create(
                    &mut h,
                    AdminOpcode::CREATE_IO_CQ,
                    at + 0x40000,
                    3 | qid << 16
                ),
                Status::SUCCESS
            );
            assert_eq!(
                create(&mut h, AdminOpcode::CREATE_IO_SQ, at, 1 | qid << 16),
                Status::SUCCESS
            );
        }
        if ring == Ring::Shadow {
            assert_eq!(h.use_shadow(), Status::SUCCESS);
        }
        // Every queue is filled to the last entry, and wraps.
        let mut tails = [0u32; 64];
        for turn in 0..2u32 {
            for (q, tail) in tails.iter_mut().enumerate() {
                for i in 0..4095u32 {
                    let mut command = h.rw(NvmOpcode::READ, 1 + (i & 1), 0, 1, DATA);
                    command.cid = (i as u16).into();
                    let at = q * 0x50000 + *tail as usize * 64;
                    rings
                        .write(at, zerocopy::IntoBytes::as_bytes(&command))
                        .unwrap();
                    *tail = (*tail + 1) % 4096;
                }
                h.ring_value(q as u16 + 1, false, *tail);
            }
            h.run();
            for (q, tail) in tails.iter().enumerate() {
                let stats = h.c.stats();
                assert_eq!(
                    stats.queues[q + 1].completions.get(),
                    4095 * (u64::from(turn) + 1)
                );
                // All at once: the completion queue was filled to its last entry as well.
                h.ring_value(q as u16 + 1, true, *tail);
            }
        }
        assert!(!h.csts().cfs());
    }
}
