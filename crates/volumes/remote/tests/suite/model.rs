//! Random operations, compared with a byte vector.

use super::{Limits, Setup, TestServer, pattern, setup};
use crate::common::{SubmitCall, Worker, bytes};
use dma::SegmentList;
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use volume::{
    FairGroup, FairVolume, FaultVolume, IoLimits, LimitVolume, Op, Rates, SliceVolume, Volume,
};

/// One random operation.
#[derive(Debug, Clone)]
pub struct Step {
    kind: u8,
    start: u64,
    blocks: u64,
    cuts: Vec<u64>,
    seed: u8,
}

/// Size in bytes of the volume for random operations.
pub const SIZE: u64 = 256 << 10;
const UNIT: u64 = 512;

pub fn steps() -> impl Strategy<Value = Vec<Step>> {
    let cuts = vec(prop_oneof![1..5000u64, Just(4096), Just(512)], 0..6);
    let blocks = prop_oneof![1..16u64, 1..400u64];
    let step = (0..12u8, 0..SIZE / UNIT, blocks, cuts, any::<u8>());
    let step = step.prop_map(|(kind, start, blocks, cuts, seed)| Step {
        kind,
        start,
        blocks,
        cuts,
        seed,
    });
    vec(step, 1..40)
}

/// Returns guest memory for `len` bytes, in pieces that are not merged.
fn list(worker: &Worker, cuts: &[u64], len: u64) -> SegmentList {
    let (mut pieces, mut at, mut left) = (Vec::new(), 4 << 20, len);
    for cut in cuts.iter().copied().chain([len]) {
        let cut = cut.min(left);
        if cut > 0 {
            pieces.push((at, cut));
            at += cut + 7;
            left -= cut;
        }
    }
    worker.guest.list(&pieces)
}

/// Runs the operations on the volume and on a byte vector, and compares them.
pub fn check(volume: &dyn Volume, steps: &[Step]) {
    let mut worker = Worker::new(volume);
    let size = volume.info().size;
    let mut model = vec![0u8; size as usize];
    for step in steps {
        let offset = (step.start * UNIT).min(size - UNIT);
        let len = (step.blocks * UNIT).min(size - offset);
        let range = offset as usize..(offset + len) as usize;
        worker.way = if step.seed & 2 == 0 {
            SubmitCall::Start
        } else {
            SubmitCall::Submit
        };
        let fua = step.seed & 1 == 1;
        match step.kind {
            0..=4 => {
                let data = pattern(step.seed, len);
                let list = list(&worker, &step.cuts, len);
                assert_eq!(list.copy_from(0, &data), data.len());
                let done = worker.run(Op::Write { fua }, offset, len, list);
                assert_eq!(done.result, Ok(()), "{step:?}");
                model[range].copy_from_slice(&data);
            }
            5..=8 => {
                let list = list(&worker, &step.cuts, len);
                list.fill(0xee);
                let done = worker.run(Op::Read, offset, len, list);
                assert_eq!(done.result, Ok(()), "{step:?}");
                assert!(bytes(&done.data) == model[range], "{step:?}");
            }
            9 | 10 => {
                let deallocate = step.kind == 9;
                let zeroes = Op::WriteZeroes { deallocate, fua };
                worker.without_data(zeroes, offset, len).unwrap();
                model[range].fill(0);
            }
            _ => worker.without_data(Op::Flush, 0, 0).unwrap(),
        }
    }
    assert!(worker.read(0, size).unwrap() == model);
}

/// Compares the volume in a wrapper, the number of which is `wrapper`, with a byte vector.
pub fn check_wrapped<T: TestServer>(steps: &[Step], wrapper: i32, variant: usize)
where
    T::Volume: 'static,
{
    let server = T::start(Setup {
        size: SIZE as usize,
        variant,
        ..setup::<T>(|_, _| T::RIGHT)
    });
    let volume: Arc<dyn Volume> = Arc::new(server.open(Limits::default()));
    let limits = IoLimits {
        iops: Rates {
            total: 50_000,
            ..Rates::default()
        },
        burst: Duration::ZERO,
        ..IoLimits::default()
    };
    let volume: Arc<dyn Volume> = match wrapper {
        0 => Arc::new(SliceVolume::new(volume, 4096, Some(SIZE - 8192)).unwrap()),
        1 => Arc::new(LimitVolume::new(volume, limits)),
        2 => Arc::new(FairVolume::new(volume, FairGroup::new(2), 7)),
        _ => Arc::new(FaultVolume::new(volume)),
    };
    check(&*volume, steps);
}

/// Compares the volume on a server that fails at each `every`th request with a byte vector.
pub fn check_unreliable<T: TestServer>(steps: &[Step], every: usize) {
    let variant = every % 2;
    let turn = AtomicUsize::new(0);
    let answer = move |number: usize, read| {
        let faults = T::faults(variant, read).into_iter();
        let faults: Vec<_> = faults.filter(|fault| *fault != T::NEVER).collect();
        if (number + 1).is_multiple_of(every) {
            faults[turn.fetch_add(1, Ordering::SeqCst) % faults.len()]
        } else {
            T::RIGHT
        }
    };
    let server = T::start(Setup {
        size: SIZE as usize,
        max_data: 16 << 10,
        variant,
        ..setup::<T>(answer)
    });
    check(&server.open(Limits::default()), steps);
}
