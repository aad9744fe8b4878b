//! Operations by chance, against a model.

use crate::volume::*;

/// One operation of the model's.
#[derive(Debug, Clone)]
struct Step {
    kind: u8,
    start: u64,
    blocks: u64,
    cuts: Vec<u64>,
    seed: u8,
}

const SIZE: u64 = 256 << 10;
const UNIT: u64 = 512;

fn steps() -> impl Strategy<Value = Vec<Step>> {
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

/// Guest memory for `len` bytes, in pieces that are not merged.
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

fn check(volume: &dyn Volume, steps: &[Step]) {
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

/// A server that closes or lies now and then, in all ways by turns.
fn unreliable(every: usize) -> Setup {
    let ways = [
        Answer::Close,
        Answer::CloseWithin,
        Answer::WrongCookie,
        Answer::Garbage,
    ];
    let turn = AtomicUsize::new(0);
    Setup {
        size: SIZE as usize,
        blocks: [512, 4096, 16 << 10],
        structured: every.is_multiple_of(2),
        answer: Box::new(move |number, _| {
            if (number + 1).is_multiple_of(every) {
                ways[turn.fetch_add(1, Ordering::SeqCst) % ways.len()]
            } else {
                Answer::Right
            }
        }),
        ..Setup::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn volume_matches_byte_vector(steps in steps(), structured in any::<bool>()) {
        let server = Server::new(Setup { structured, size: SIZE as usize, ..Setup::default() });
        check(&open(&server, options()), &steps);
    }

    /// In every wrapper.
    #[test]
    fn wrapped_volume_matches_byte_vector(steps in steps(), wrapper in 0..4) {
        let server = Server::new(Setup { size: SIZE as usize, ..Setup::default() });
        let volume: Arc<dyn Volume> = Arc::new(open(&server, options()));
        let limits = IoLimits {
            iops: Rates { total: 50_000, ..Rates::default() },
            burst: Duration::ZERO,
            ..IoLimits::default()
        };
        let volume: Arc<dyn Volume> = match wrapper {
            0 => Arc::new(SliceVolume::new(volume, 4096, Some(SIZE - 8192)).unwrap()),
            1 => Arc::new(LimitVolume::new(volume, limits)),
            2 => Arc::new(FairVolume::new(volume, FairGroup::new(2), 7)),
            _ => Arc::new(FaultVolume::new(volume)),
        };
        check(&*volume, &steps);
    }
}

proptest! {
    // Each connection takes its time.
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    /// However often the connection breaks.
    #[test]
    fn volume_on_unreliable_server_matches_byte_vector(steps in steps(), every in 9..40usize) {
        let server = Server::new(unreliable(every));
        check(&open(&server, options()), &steps);
    }
}
