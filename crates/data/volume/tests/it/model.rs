//! Random operations on every kind of volume, against a model: a byte vector.

use crate::common::{Guest, SubmitCall, Worker, bytes, disk, memory, sparse};
use dma::SegmentList;
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::Arc;
use testkit::huge::HugePages;
use volume::{
    Completion, Direct, FileOptions, FileVolume, IoErrorKind, MemVolume, Op, SliceVolume, Volume,
};

/// Size of the volumes in bytes.
const SIZE: u64 = 2 << 20;
/// Largest block that a disk of a test machine has.
const BLOCK: u64 = 4096;

/// A step of a test. Ranges are in blocks of the volume; `shape` chooses the guest's segments.
#[derive(Debug, Clone)]
struct Step {
    kind: u8,
    start: u64,
    blocks: u64,
    shape: Shape,
    seed: u8,
}

/// Layout of the guest's memory.
#[derive(Debug, Clone)]
struct Shape {
    /// Offset of each segment within a page.
    shift: u64,
    /// Lengths at which the data is cut.
    cuts: Vec<u64>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let shape = (
        prop_oneof![Just(0u64), Just(512), Just(4), 1..4096u64],
        vec(
            prop_oneof![1..5000u64, Just(4096), Just(512), Just(65536)],
            0..6,
        ),
    )
        .prop_map(|(shift, cuts)| Shape { shift, cuts });
    let step = (
        0..12u8,
        0..SIZE / BLOCK,
        prop_oneof![1..8u64, 1..120u64],
        shape,
        any::<u8>(),
    )
        .prop_map(|(kind, start, blocks, shape, seed)| Step {
            kind,
            start,
            blocks,
            shape,
            seed,
        });
    vec(step, 1..30)
}

/// Guest memory for `len` bytes in that shape: segments in descending order, with gaps, so that
/// none are merged.
fn list(guest: &Guest, shape: &Shape, len: u64) -> SegmentList {
    let mut pieces = Vec::new();
    let mut left = len;
    for &cut in &shape.cuts {
        let cut = cut.min(left);
        if cut > 0 {
            pieces.push(cut);
            left -= cut;
        }
    }
    if left > 0 {
        pieces.push(left);
    }
    let mut at = guest.memory.len() as u64;
    let pieces: Vec<(u64, u64)> = pieces
        .into_iter()
        .map(|len| {
            at = (at - len - 4096) / 4096 * 4096 - 4096;
            (at + shape.shift, len)
        })
        .collect();
    guest.list(&pieces)
}

fn pattern(seed: u8, len: u64) -> Vec<u8> {
    (0..len)
        .map(|index| (index as u8).wrapping_mul(31) ^ (index >> 8) as u8 ^ seed)
        .collect()
}

/// A request from start to end.
type Run = fn(&mut Worker, Op, u64, u64, SegmentList) -> Completion;

/// Runs the steps; afterwards the volume and the model have the same contents.
fn check(volume: &dyn Volume, unit: u64, steps: &[Step]) {
    let mut worker = Worker::new(volume);
    let mut model = vec![0u8; SIZE as usize];
    // Volumes are reused between cases.
    worker
        .without_data(
            Op::WriteZeroes {
                deallocate: true,
                fua: false,
            },
            0,
            SIZE,
        )
        .unwrap();
    for step in steps {
        let offset = step.start * BLOCK / unit * unit;
        let len = (step.blocks * unit).min(SIZE - offset);
        let range = offset as usize..(offset + len) as usize;
        let fua = step.seed & 1 == 1;
        let (way, run): (SubmitCall, Run) = match step.seed >> 2 & 3 {
            0 | 1 => (SubmitCall::Start, Worker::run),
            2 => (SubmitCall::Submit, Worker::run),
            _ => (SubmitCall::Submit, Worker::run_now),
        };
        worker.way = way;
        match step.kind {
            0..=4 => {
                let data = pattern(step.seed, len);
                let list = list(&worker.guest, &step.shape, len);
                assert_eq!(list.copy_from(0, &data), data.len());
                let completion = run(&mut worker, Op::Write { fua }, offset, len, list);
                assert_eq!(completion.result, Ok(()), "{step:?}");
                model[range].copy_from_slice(&data);
            }
            5..=8 => {
                let list = list(&worker.guest, &step.shape, len);
                list.fill(0xEE);
                let completion = run(&mut worker, Op::Read, offset, len, list);
                assert_eq!(completion.result, Ok(()), "{step:?}");
                assert!(bytes(&completion.data) == model[range], "{step:?}");
            }
            9 => {
                let op = Op::WriteZeroes {
                    deallocate: step.seed & 2 == 2,
                    fua,
                };
                assert_eq!(worker.without_data(op, offset, len), Ok(()), "{step:?}");
                model[range].fill(0);
            }
            10 => {
                if volume.info().deallocate {
                    assert_eq!(
                        worker.without_data(Op::Deallocate, offset, len),
                        Ok(()),
                        "{step:?}"
                    );
                    assert!(volume.info().zeroes_after_deallocate);
                    model[range].fill(0);
                }
            }
            _ => assert_eq!(worker.without_data(Op::Flush, 0, 0), Ok(())),
        }
    }
    assert!(worker.read(0, SIZE).unwrap() == model);
    assert_eq!(worker.io.in_flight(), 0);
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn run(volume: &dyn Volume) {
    let unit = u64::from(volume.info().block_size).max(1);
    let unit = if unit == 1 { 37 } else { unit };
    println!("{}: unit {unit}", volume.info().description);
    let mut runner = proptest::test_runner::TestRunner::new(config());
    let result = runner.run(&steps(), |steps| {
        check(volume, unit, &steps);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
fn direct_file_matches_model() {
    let directory = disk();
    let volume = FileVolume::open(sparse(&directory, SIZE), FileOptions::default()).unwrap();
    if !volume.is_direct() {
        testkit::skip("volume::model::direct_file_matches_model", "no direct I/O");
        return;
    }
    run(&volume);
}

#[test]
fn buffered_file_matches_model() {
    let directory = disk();
    let options = FileOptions {
        direct: Direct::Off,
        ..FileOptions::default()
    };
    run(&FileVolume::open(sparse(&directory, SIZE), options).unwrap());
}

#[test]
fn file_in_memory_matches_model() {
    let Some(directory) = memory() else { return };
    let volume = FileVolume::open(sparse(&directory, SIZE), FileOptions::default()).unwrap();
    assert!(
        !volume.is_direct(),
        "a file in memory has no use for direct I/O"
    );
    run(&volume);
}

#[test]
fn memory_volume_matches_model() {
    run(&MemVolume::new(SIZE).unwrap());
}

#[test]
fn slice_of_file_matches_model() {
    let directory = disk();
    let path = sparse(&directory, SIZE + (2 << 20));
    let file = FileVolume::open(&path, FileOptions::default()).unwrap();
    let slice = SliceVolume::new(Arc::new(file), 1 << 20, Some(SIZE)).unwrap();
    run(&slice);
    // The bytes around the slice have not been touched.
    let content = std::fs::read(&path).unwrap();
    assert!(content[..1 << 20].iter().all(|&byte| byte == 0));
    assert!(
        content[(1 << 20) + SIZE as usize..]
            .iter()
            .all(|&byte| byte == 0)
    );
}

#[test]
fn reserved_memory_matches_model() {
    let _pages = match HugePages::add(SIZE.div_ceil(2 << 20)) {
        Ok(pages) => pages,
        Err(why) => return testkit::skip("volume::huge", why),
    };
    run(&MemVolume::reserved(SIZE, None, false).unwrap());
}

#[test]
fn slice_of_memory_matches_model() {
    let whole = Arc::new(MemVolume::new(SIZE + (2 << 20)).unwrap());
    let slice = SliceVolume::new(whole.clone(), 1 << 20, Some(SIZE)).unwrap();
    run(&slice);
    let mut worker = Worker::new(&*whole);
    for offset in [0, SIZE + (1 << 20)] {
        let around = worker.read(offset, 1 << 20).unwrap();
        assert!(around.iter().all(|&byte| byte == 0));
    }
}

/// A request that is not allowed is refused by the short way too, and changes nothing.
#[test]
fn invalid_fast_path_request_is_refused() {
    let memory = memory();
    let file = memory.as_ref().map(|directory| {
        let path = sparse(directory, SIZE);
        Arc::new(FileVolume::open(path, FileOptions::default()).unwrap()) as Arc<dyn Volume>
    });
    let whole = Arc::new(MemVolume::new(SIZE).unwrap());
    let slice = SliceVolume::new(whole.clone(), 4096, Some(8192)).unwrap();
    let volumes = [Some(whole as Arc<dyn Volume>), file, Some(Arc::new(slice))];
    for volume in volumes.into_iter().flatten() {
        let size = volume.info().size;
        let mut worker = Worker::new(&*volume);
        assert!(worker.queue.is_immediate());
        let list = worker.guest.holding(0, &pattern(1, 4096));
        for offset in [size, size - 2048, u64::MAX - 4095, u64::MAX] {
            for op in [Op::Read, Op::Write { fua: false }] {
                let result = worker.queue.try_now(op, offset, list.view());
                let kind = result.expect("an answer").unwrap_err().kind;
                assert_eq!(kind, IoErrorKind::OutOfRange, "{op:?} at {offset}");
            }
        }
        let end = worker.read(size - 4096, 4096).unwrap();
        assert!(end.iter().all(|&byte| byte == 0));
    }
    let read_only = MemVolume::new(SIZE).unwrap().read_only();
    let mut worker = Worker::new(&read_only);
    let list = worker.guest.holding(0, &pattern(1, 4096));
    let refused = worker
        .queue
        .try_now(Op::Write { fua: false }, 0, list.view());
    assert_eq!(refused.unwrap().unwrap_err().kind, IoErrorKind::ReadOnly);
}
