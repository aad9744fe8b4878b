//! Namespaces that controllers share: what one host marks, no other one reads.

use crate::common::*;
use crate::uncorrectable::world::*;
use crate::uncorrectable::{UNREADABLE, says};
use nvme::cmd::reservation::Rtype;
use nvme::feature::{AsyncEventConfig, Fid};
use nvme::log::AnaState;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::time::Duration;
use volume::{Effect, Fault, OpKind};

fn marking(w: &World, who: usize, slba: u64, blocks: u32) -> Command {
    w.hosts[who].rw(NvmOpcode::WRITE_UNCORRECTABLE, 1, slba, blocks, 0)
}

fn read(w: &mut World, who: usize, slba: u64) -> Status {
    let command = w.rw(who, NvmOpcode::READ, slba, 0);
    w.command(who, command)
}

#[test]
fn marked_block_is_unreadable_for_every_host() {
    let mut w = World::of(&[1, 2, 3]);
    for round in 0..3 {
        for who in 0..3 {
            assert_eq!(w.write(who, 7, 1), Status::SUCCESS);
            let command = marking(&w, who, 6, 3);
            assert_eq!(w.command(who, command), Status::SUCCESS);
            for other in 0..3 {
                assert_eq!(read(&mut w, other, 7), UNREADABLE, "{round} {who} {other}");
            }
            // Any of them can heal it.
            let healer = (who + round) % 3;
            for block in 6..9 {
                assert_eq!(w.write(healer, block, 2), Status::SUCCESS);
            }
            for other in 0..3 {
                assert_eq!(read(&mut w, other, 7), Status::SUCCESS);
            }
        }
    }
}

/// A controller with a worker that does not run is waited for: it might read the blocks.
#[test]
fn write_uncorrectable_waits_for_every_controller() {
    let mut w = World::of(&[1, 2]);
    let command = marking(&w, 0, 6, 1);
    w.begin(0, command);
    for _ in 0..50 {
        w.hosts[0].c.drain_messages();
        w.hosts[0].round();
    }
    assert!(w.hosts[0].reap(1).is_none());
    w.round();
    w.round();
    assert_eq!(w.hosts[0].reap(1).unwrap().status(), Status::SUCCESS);
    // A removed controller is waited for no more.
    let command = marking(&w, 0, 8, 1);
    w.begin(0, command);
    for _ in 0..50 {
        w.hosts[0].round();
    }
    assert!(w.hosts[0].reap(1).is_none());
    drop(w.hosts.pop());
    w.rounds(2);
    assert_eq!(w.hosts[0].reap(1).unwrap().status(), Status::SUCCESS);
}

/// All controllers use the fast path again after the last mark is cleared.
#[test]
fn cleared_marks_restore_fast_path() {
    let mut w = World::of(&[1, 2]);
    let general = |w: &mut World| {
        crash::disarm();
        for who in 0..2 {
            assert_eq!(w.write(who, 20, 1), Status::SUCCESS);
        }
        let passed = crash::passed();
        let submitted = passed
            .iter()
            .filter(|p| *p.0 == "controller.submit.submitted");
        submitted.map(|p| p.1).sum::<u64>()
    };
    assert_eq!(general(&mut w), 0);
    let command = marking(&w, 0, 6, 1);
    assert_eq!(w.command(0, command), Status::SUCCESS);
    assert_eq!(general(&mut w), 2);
    assert_eq!(w.write(1, 6, 1), Status::SUCCESS);
    w.rounds(2);
    assert_eq!(general(&mut w), 0);
}

#[test]
fn fenced_host_cannot_mark_blocks() {
    let mut w = World::of(&[1, 2]);
    assert_eq!(w.register(0, 1), Status::SUCCESS);
    let rtype = Rtype::WRITE_EXCLUSIVE;
    assert_eq!(w.acquire(0, rtype, 1), Status::SUCCESS);
    let command = marking(&w, 1, 6, 1);
    assert_eq!(plain(w.command(1, command)), Status::RESERVATION_CONFLICT);
    assert_eq!(read(&mut w, 0, 6), Status::SUCCESS);
    let command = marking(&w, 0, 6, 1);
    assert_eq!(w.command(0, command), Status::SUCCESS);
    assert_eq!(read(&mut w, 1, 6), UNREADABLE);
}

#[test]
fn inaccessible_path_cannot_mark_blocks() {
    let mut w = World::of(&[1, 2]);
    let _ = w.subsystem.set_ana_state(2, 1, AnaState::INACCESSIBLE);
    w.rounds(3);
    let command = marking(&w, 1, 6, 1);
    let refused = plain(w.command(1, command));
    assert_eq!(refused, Status::ANA_INACCESSIBLE);
    let mut ask = Command::new(AdminOpcode::GET_LBA_STATUS.0, 0, 1);
    ask.cdw12 = 1.into();
    ask.cdw13 = 0x1100_0000.into();
    ask.set_prps(PAGE, 0);
    let refused = plain(w.admin(1, ask).status());
    assert_eq!(refused, Status::ANA_INACCESSIBLE);
    let command = marking(&w, 0, 6, 1);
    assert_eq!(w.command(0, command), Status::SUCCESS);
    let _ = w.subsystem.set_ana_state(2, 1, AnaState::OPTIMIZED);
    w.rounds(3);
    assert_eq!(read(&mut w, 1, 6), UNREADABLE);
}

/// Each host has a log page and alerts of its own.
#[test]
fn every_host_is_alerted() {
    let mut w = World::of(&[1, 2]);
    let mut wanted = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    wanted.cdw10 = u32::from(Fid::ASYNC_EVENT_CONFIG.0).into();
    wanted.cdw11 = AsyncEventConfig::new().with_lsian(true).into_bits().into();
    assert_eq!(w.admin(1, wanted).status(), Status::SUCCESS);
    let ask = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
    w.hosts[1].submit(0, ask);
    let command = marking(&w, 0, 6, 2);
    assert_eq!(w.command(0, command), Status::SUCCESS);
    w.hosts[1].now += Duration::from_secs(60);
    w.rounds(3);
    assert_eq!(w.hosts[1].reap(0).unwrap().dw0.get(), 0x000e_0502);
    for host in &mut w.hosts {
        assert_eq!(says::status(host, 0, 0, 4096), (vec![(6, 2)], true));
    }
}

/// A host's controller is reset while it waits for another one; nothing hangs.
#[test]
fn reset_ends_waiting_write_uncorrectable() {
    let mut w = World::of(&[1, 2]);
    let command = marking(&w, 0, 6, 1);
    w.begin(0, command);
    for _ in 0..5 {
        w.hosts[0].round();
    }
    w.hosts[0].disable();
    w.hosts[0].until(|h| !h.csts().rdy());
    w.rounds(5);
    assert_eq!(read(&mut w, 1, 6), UNREADABLE, "as it may be");
    assert_eq!(w.write(1, 6, 1), Status::SUCCESS);
    assert_eq!(read(&mut w, 1, 6), Status::SUCCESS);
}

/// A controller is reset while its volume has a write that clears a mark.
#[test]
fn write_of_reset_controller_clears_mark() {
    let (volume, faults) = faulty(1 << 20);
    let mut w = World::with(&volume, &[1, 2], None);
    let command = marking(&w, 1, 6, 1);
    assert_eq!(w.command(1, command), Status::SUCCESS);
    faults.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    let write = w.rw(0, NvmOpcode::WRITE, 6, 9);
    w.begin(0, write);
    for _ in 0..5 {
        w.round();
    }
    w.hosts[0].disable();
    w.rounds(5);
    faults.release();
    w.hosts[0].until(|h| !h.csts().rdy());
    w.rounds(5);
    let after = read(&mut w, 1, 6);
    assert!(after.is_success() || after == UNREADABLE);
    assert_eq!(w.write(1, 6, 1), Status::SUCCESS);
    assert_eq!(read(&mut w, 1, 6), Status::SUCCESS);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Mark,
    Write,
    Zeroes,
    Deallocate,
    Format,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => Just(Step::Mark),
        4 => Just(Step::Write),
        2 => Just(Step::Zeroes),
        2 => Just(Step::Deallocate),
        1 => Just(Step::Format),
    ]
}

/// Number of blocks that the histories use.
const BLOCKS: u64 = 64;

fn run(steps: Vec<(Step, usize, u64, u32)>) {
    let mut w = World::of(&[1, 2, 3]);
    let mut model = BTreeSet::new();
    for (step, who, slba, blocks) in steps {
        let blocks = blocks.min((BLOCKS - slba) as u32);
        let range = slba..slba + u64::from(blocks);
        let status = match step {
            Step::Mark => {
                let command = marking(&w, who, slba, blocks);
                w.command(who, command)
            }
            Step::Write | Step::Zeroes => {
                let opcode = match step {
                    Step::Write => NvmOpcode::WRITE,
                    _ => NvmOpcode::WRITE_ZEROES,
                };
                let host = &w.hosts[who];
                let mut command = host.rw(opcode, 1, slba, blocks, DATA);
                host.prps(&mut command, DATA, u64::from(blocks) * 512, PAGE);
                w.command(who, command)
            }
            Step::Deallocate => {
                let mut entry = [0; 16];
                entry[4..8].copy_from_slice(&blocks.to_le_bytes());
                entry[8..].copy_from_slice(&slba.to_le_bytes());
                w.hosts[who].write(DATA, &entry);
                let mut command = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, 1);
                command.set_prps(DATA, 0);
                command.cdw11 = 4.into();
                w.command(who, command)
            }
            Step::Format => {
                let format = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
                w.admin(who, format).status()
            }
        };
        assert_eq!(status, Status::SUCCESS, "{step:?}");
        match step {
            Step::Mark => model.extend(range),
            Step::Format => model.clear(),
            _ => model.retain(|block| !range.contains(block)),
        }
        let mut ranges: Vec<(u64, u32)> = Vec::new();
        for &block in &model {
            match ranges.last_mut() {
                Some((start, count)) if *start + u64::from(*count) == block => *count += 1,
                _ => ranges.push((block, 1)),
            }
        }
        for other in 0..3 {
            let wanted = if model.contains(&slba) {
                UNREADABLE
            } else {
                Status::SUCCESS
            };
            assert_eq!(read(&mut w, other, slba), wanted, "{step:?} {other}");
            assert_eq!(says::status(&mut w.hosts[other], 0, 0, 4096).0, ranges);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 60,
        max_shrink_iters: 8,
        ..ProptestConfig::default()
    })]
    #[test]
    fn random_histories_of_three_hosts_match_model(
        steps in prop::collection::vec((step(), 0..3usize, 0..BLOCKS, 1..40u32), 1..40),
    ) {
        run(steps);
    }
}
