//! Random histories beside a naive model, with deaths of the process.

use crate::common::*;
use crate::uncorrectable::says;
use crate::uncorrectable::{UNREADABLE, copy, deallocate, die, mark, on, read};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use proptest::prelude::*;
use std::collections::BTreeSet;
use volume::{Effect, Fault, IoErrorKind, OpKind};

const BLOCKS: u64 = 96;

#[derive(Clone, Debug)]
enum Step {
    Mark(u64, u32),
    Write(u64, u32, u8),
    Zeroes(u64, u32),
    Deallocate(u64, u32),
    Copy(u64, Vec<(u64, u32)>),
    Read(u64, u32),
    Verify(u64, u32),
    /// The next request of this kind fails.
    Fault(OpKind),
    Ask(u64, u16),
    Format,
    Reset,
    Die,
}

fn range() -> impl Strategy<Value = (u64, u32)> {
    let blocks = prop_oneof![6 => 1..20u32, 1 => 20..=BLOCKS as u32];
    (0..BLOCKS, blocks).prop_map(|(slba, blocks)| (slba, blocks.min((BLOCKS - slba) as u32)))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => range().prop_map(|(s, n)| Step::Mark(s, n)),
        8 => (range(), any::<u8>()).prop_map(|((s, n), byte)| Step::Write(s, n, byte)),
        2 => range().prop_map(|(s, n)| Step::Zeroes(s, n)),
        2 => range().prop_map(|(s, n)| Step::Deallocate(s, n)),
        3 => (0..BLOCKS, prop::collection::vec(range(), 1..3)).prop_map(|(to, r)| Step::Copy(to, r)),
        6 => range().prop_map(|(s, n)| Step::Read(s, n)),
        2 => range().prop_map(|(s, n)| Step::Verify(s, n)),
        1 => Just(Step::Fault(OpKind::Write)),
        1 => Just(Step::Fault(OpKind::WriteZeroes)),
        1 => Just(Step::Fault(OpKind::Deallocate)),
        1 => Just(Step::Fault(OpKind::Read)),
        3 => (0..BLOCKS, 0..40u16).prop_map(|(s, n)| Step::Ask(s, n)),
        1 => Just(Step::Format),
        1 => Just(Step::Reset),
        3 => Just(Step::Die),
    ]
}

/// Which blocks are marked, and what is in the others; of blocks of which nothing is known, none.
struct Model {
    marked: BTreeSet<u64>,
    data: Vec<Option<u8>>,
}

impl Model {
    fn blocks((slba, blocks): (u64, u32)) -> std::ops::Range<u64> {
        slba..slba + u64::from(blocks)
    }

    fn any_marked(&self, range: (u64, u32)) -> bool {
        self.marked.range(Self::blocks(range)).next().is_some()
    }

    fn wrote(&mut self, range: (u64, u32), byte: u8) {
        for block in Self::blocks(range) {
            self.marked.remove(&block);
            self.data[block as usize] = Some(byte);
        }
    }

    /// Something may have been done to these blocks.
    fn forget(&mut self, range: (u64, u32)) {
        Self::blocks(range).for_each(|block| self.data[block as usize] = None);
    }

    /// The marked ranges of a range.
    fn ranges(&self, from: u64, to: u64) -> Vec<(u64, u32)> {
        let mut all: Vec<(u64, u32)> = Vec::new();
        for &block in self.marked.range(from..to) {
            match all.last_mut() {
                Some((start, count)) if *start + u64::from(*count) == block => *count += 1,
                _ => all.push((block, 1)),
            }
        }
        all
    }
}

fn reset(h: &mut Host) {
    h.disable();
    h.until(|h| !h.csts().rdy());
    h.write(ACQ, &[0; 32 * 16]);
    h.enable();
    h.create_pair(1, 64);
}

fn run(steps: Vec<Step>) {
    let (volume, faults) = faulty(BLOCKS * 512);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    let mut model = Model {
        marked: BTreeSet::new(),
        data: vec![Some(0); BLOCKS as usize],
    };
    // The next read of the volume does.
    let mut read_fails = false;
    for step in steps {
        match step {
            Step::Mark(slba, blocks) => {
                assert_eq!(mark(&mut h, slba, blocks), Status::SUCCESS);
                model.marked.extend(Model::blocks((slba, blocks)));
            }
            Step::Write(slba, blocks, byte) => {
                h.write(DATA, &vec![byte; blocks as usize * 512]);
                let command = on(&h, NvmOpcode::WRITE, 1, slba, blocks);
                if h.io(command).is_success() {
                    model.wrote((slba, blocks), byte)
                } else {
                    model.forget((slba, blocks))
                }
            }
            Step::Zeroes(slba, blocks) => {
                let command = on(&h, NvmOpcode::WRITE_ZEROES, 1, slba, blocks);
                if h.io(command).is_success() {
                    model.wrote((slba, blocks), 0)
                } else {
                    model.forget((slba, blocks))
                }
            }
            Step::Deallocate(slba, blocks) => {
                if deallocate(&mut h, slba, blocks).is_success() {
                    model.wrote((slba, blocks), 0)
                } else {
                    model.forget((slba, blocks))
                }
            }
            Step::Copy(to, ranges) => copied(&mut h, &mut model, to, &ranges),
            Step::Read(slba, blocks) => {
                let status = read(&mut h, slba, blocks);
                if status.is_success() {
                    assert!(!model.any_marked((slba, blocks)), "{slba} {blocks}");
                    let found = h.read(DATA, blocks as usize * 512);
                    for (block, found) in Model::blocks((slba, blocks)).zip(found.chunks(512)) {
                        if let Some(byte) = model.data[block as usize] {
                            assert!(found.iter().all(|b| *b == byte), "block {block}");
                        }
                    }
                } else {
                    // A read that was to fail, or one of what is marked.
                    assert_eq!(status, UNREADABLE);
                    let marked = model.any_marked((slba, blocks));
                    assert!(marked || std::mem::take(&mut read_fails), "{slba} {blocks}");
                }
            }
            Step::Verify(slba, blocks) => {
                let command = on(&h, NvmOpcode::VERIFY, 1, slba, blocks);
                let (marked, status) = (model.any_marked((slba, blocks)), h.io(command));
                assert!(!(status.is_success() && marked), "{slba} {blocks}");
                let fine = status.is_success() || marked;
                assert!(fine || std::mem::take(&mut read_fails), "{slba} {blocks}");
            }
            Step::Fault(kind) => {
                let error = match kind {
                    OpKind::Read => IoErrorKind::MediaRead,
                    _ => IoErrorKind::MediaWrite,
                };
                faults.clear();
                faults.add(Fault::nth(kind, 1, Effect::Fail(error.into())));
                read_fails = kind == OpKind::Read;
            }
            Step::Ask(slba, rl) => {
                let end = if rl == 0 {
                    BLOCKS
                } else {
                    slba + u64::from(rl)
                };
                if end <= BLOCKS {
                    let wanted = model.ranges(slba, end);
                    assert_eq!(says::status(&mut h, slba, rl, 4096), (wanted, true));
                }
            }
            Step::Format => {
                faults.clear();
                let format = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
                assert_eq!(h.admin(format).status(), Status::SUCCESS);
                model.wrote((0, BLOCKS as u32), 0);
            }
            Step::Reset => reset(&mut h),
            Step::Die => die(&mut h),
        }
    }
    faults.clear();
    die(&mut h);
    for slba in 0..BLOCKS {
        let wanted = if model.marked.contains(&slba) {
            UNREADABLE
        } else {
            Status::SUCCESS
        };
        assert_eq!(read(&mut h, slba, 1), wanted, "block {slba}");
    }
}

fn copied(h: &mut Host, model: &mut Model, to: u64, ranges: &[(u64, u32)]) {
    let all: u32 = ranges.iter().map(|(_, blocks)| blocks).sum();
    let (status, result) = copy(h, to, ranges);
    let status = plain(status);
    if status == Status::LBA_OUT_OF_RANGE || status == Status::OVERLAPPING_IO_RANGE {
        return;
    }
    let mut at = to;
    for (index, &(slba, blocks)) in ranges.iter().enumerate() {
        let done = status.is_success() || (index as u32) < result;
        if !done {
            if status == UNREADABLE && index as u32 == result {
                break;
            }
            // A part of it may have been written; but a range is one piece here.
            model.forget((at, blocks));
            break;
        }
        assert!(
            !model.any_marked((slba, blocks)),
            "copied what cannot be read"
        );
        for step in 0..u64::from(blocks) {
            model.marked.remove(&(at + step));
            model.data[(at + step) as usize] = model.data[(slba + step) as usize];
        }
        at += u64::from(blocks);
    }
    assert!(at <= to + u64::from(all));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        max_shrink_iters: 8,
        ..ProptestConfig::default()
    })]
    #[test]
    fn random_histories_match_model(steps in prop::collection::vec(step(), 1..60)) {
        run(steps);
    }
}
