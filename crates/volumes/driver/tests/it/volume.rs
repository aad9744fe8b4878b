//! A namespace as a volume: zero copy where the memory is known, bounced
//! where not, right either way.

use crate::common::*;
use controller::ControllerConfig;
use dma::{Buffer, Memory, SegmentList};
use driver::{NvmeVolume, Options, QueueOptions};
use std::sync::Arc;
use volume::{
    AtomicWrites, Completion, Info, Io, IoErrorKind, IoOptions, Op, OpenQueue, QueueState, Request,
    SliceVolume, Volume, VolumeError, VolumeQueue, Wake,
};

const MIB: u64 = 1 << 20;

fn volume(transport: &Arc<in_process::InProcess>) -> NvmeVolume {
    let device = open(transport, Options::default());
    NvmeVolume::new(
        device,
        1,
        QueueOptions {
            depth: 8,
            ..Default::default()
        },
        false,
        "test".into(),
    )
    .unwrap()
}

fn finish(queue: &mut dyn VolumeQueue, count: usize) -> Vec<Completion> {
    let mut done = Vec::new();
    for _ in 0..10_000_000 {
        queue.poll(&mut |completion| done.push(completion));
        if done.len() >= count {
            assert_eq!(queue.state(), QueueState::IDLE);
            return done;
        }
    }
    panic!("{} of {count} completed", done.len());
}

fn one(
    queue: &mut dyn VolumeQueue,
    op: Op,
    offset: u64,
    len: u64,
    data: SegmentList,
) -> Completion {
    match queue.submit(Request {
        tag: 5,
        op,
        offset,
        len,
        data,
    }) {
        Some(done) => done,
        None => finish(queue, 1).remove(0),
    }
}

#[test]
fn random_requests_in_any_memory_match_array() {
    let transport = disk(4 * MIB, 512);
    let volume = volume(&transport);
    let memory = Memory::anonymous(8 << 20).unwrap();
    let mut registration = None;
    let io = Io::new(IoOptions::default());
    let mut queue = volume.open(&io).unwrap();
    let mut disk = vec![0u8; 4 << 20];
    let mut random = Random(9);
    for round in 0..1500u64 {
        // Registered for a while, then not, while the queue lives.
        if round % 100 == 0 {
            registration = match registration.take() {
                None => Some(volume.register(&memory).unwrap()),
                Some(_) => None,
            };
        }
        let most = if random.below(10) == 0 { 4096 } else { 40 };
        let blocks = 1 + random.below(most);
        let len = (blocks * 512) as usize;
        let offset = (random.below(8192 - blocks) * 512) as usize;
        let mut bytes = vec![0u8; len];
        bytes
            .chunks_mut(8)
            .for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
        let place = match random.below(4) {
            0 => SegmentList::owned(Buffer::new(len)),
            1 => memory.segments(random.below(1024) as usize, len).unwrap(),
            _ => memory
                .segments(random.below(100) as usize * 512, len)
                .unwrap(),
        };
        if random.below(2) == 0 {
            assert_eq!(place.copy_from(0, &bytes), len);
            let op = Op::Write {
                fua: round % 7 == 0,
            };
            one(&mut *queue, op, offset as u64, len as u64, place)
                .result
                .unwrap();
            disk[offset..offset + len].copy_from_slice(&bytes);
        } else {
            place.fill(0xA5);
            let done = one(&mut *queue, Op::Read, offset as u64, len as u64, place);
            done.result.unwrap();
            assert_eq!(done.data.copy_to(0, &mut bytes), len);
            assert!(bytes == disk[offset..offset + len], "round {round}");
        }
        if round % 50 == 0 {
            let op = if round % 100 == 0 {
                Op::Deallocate
            } else {
                Op::WriteZeroes {
                    deallocate: false,
                    fua: false,
                }
            };
            one(
                &mut *queue,
                op,
                offset as u64,
                len as u64,
                SegmentList::new(),
            )
            .result
            .unwrap();
            disk[offset..offset + len].fill(0);
            one(&mut *queue, Op::Flush, 0, 0, SegmentList::new())
                .result
                .unwrap();
        }
    }
}

#[test]
fn scattered_guest_memory_needs_no_copy() {
    // Guest memory as a worker of ours sees it: pages of a memory file in any order.
    for (piece, sgl) in [(4096usize, false), (512, true)] {
        let transport = disk(MIB, 512);
        let device = open(
            &transport,
            Options {
                sgl,
                ..Options::default()
            },
        );
        let volume =
            NvmeVolume::new(device, 1, QueueOptions::default(), false, "test".into()).unwrap();
        let memory = Memory::anonymous(1 << 20).unwrap();
        let _registration = volume.register(&memory).unwrap();
        let io = Io::new(IoOptions::default());
        let mut queue = volume.open(&io).unwrap();
        let mut map = dma::DmaMap::new();
        let backing = Some((memory.clone(), 0));
        map.map(0, 1 << 20, backing, dma::Prot::RW).unwrap();
        let count = (1 << 20) / piece as u64;
        // A permutation, so that no two pieces are neighbours in both.
        let scattered = |len: u64| {
            let mut list = SegmentList::new();
            for i in 0..len.div_ceil(piece as u64) {
                let at = (i * 37) % count * piece as u64;
                let left = (len - i * piece as u64).min(piece as u64);
                let access = dma::Access::Write;
                map.segments(at, left, access, &mut list).unwrap();
            }
            list
        };
        for blocks in [1u64, 7, 8, 9, 16, 100, 127] {
            let len = blocks * 512;
            let list = scattered(len);
            let bytes: Vec<u8> = (0..len).map(|i| (i * 13 + blocks) as u8).collect();
            list.copy_from(0, &bytes);
            let done = one(&mut *queue, Op::Write { fua: false }, 0, len, list);
            done.result.unwrap();
            done.data.fill(0);
            let done = one(&mut *queue, Op::Read, 0, len, done.data);
            done.result.unwrap();
            let mut back = vec![0; bytes.len()];
            done.data.copy_to(0, &mut back);
            assert!(back == bytes, "{blocks} blocks in pieces of {piece}");
        }
        // Nothing was allocated for bouncing: the chunk of queue memory and the
        // registration are all there is.
        assert_eq!(volume.device().mapper().counters().mappings, 2);
    }
}

#[test]
fn more_requests_than_queue_depth_complete() {
    let transport = disk(MIB, 512);
    let volume = volume(&transport);
    let io = Io::new(IoOptions::default());
    let mut queue = volume.open(&io).unwrap();
    for tag in 0..200u64 {
        let data = SegmentList::owned(Buffer::from_slice(&[tag as u8; 512]));
        let write = Request::transfer(tag, Op::Write { fua: false }, tag * 512, data);
        assert!(queue.submit(write).is_none());
    }
    let flush = Request::flush(200);
    assert!(queue.submit(flush).is_none());
    let QueueState { in_flight, wake } = queue.state();
    assert_eq!((in_flight, wake), (201, Wake::Poll));
    let mut tags: Vec<u64> = finish(&mut *queue, 201)
        .into_iter()
        .map(|c| c.result.map(|()| c.tag).unwrap())
        .collect();
    tags.sort_unstable();
    assert!(tags.into_iter().eq(0..201));
    // Dropped with requests in flight: they end first.
    for tag in 0..20 {
        let data = SegmentList::owned(Buffer::new(512));
        assert!(
            queue
                .submit(Request::transfer(tag, Op::Read, 0, data))
                .is_none()
        );
    }
    drop(queue);
}

#[test]
fn invalid_requests_are_refused_and_errors_named() {
    let transport = disk(MIB, 4096);
    let volume = volume(&transport);
    let info = volume.info();
    assert_eq!(
        (info.size, info.block_size, info.read_only),
        (MIB, 4096, false)
    );
    assert_eq!(volume.id(), vec![1; 16]);
    assert!(!volume.refresh().unwrap());
    let io = Io::new(IoOptions::default());
    let mut queue = volume.open(&io).unwrap();
    let data = || SegmentList::owned(Buffer::new(4096));
    for (offset, len, kind) in [
        (MIB, 4096, IoErrorKind::OutOfRange),
        (512, 4096, IoErrorKind::Invalid),
    ] {
        let done = queue
            .submit(Request {
                tag: 1,
                op: Op::Read,
                offset,
                len,
                data: data(),
            })
            .unwrap();
        assert_eq!(done.result.unwrap_err().kind, kind);
        assert_eq!(done.data.len_bytes(), 4096, "the data comes back");
    }
    volume.device().close();
    let done = one(&mut *queue, Op::Read, 0, 4096, data());
    assert_eq!(done.result.unwrap_err().kind, IoErrorKind::Gone);
}

#[test]
fn controller_on_controller_serves_disk() {
    // What `vnvme serve nvme://...` does: the disk of the lower controller is
    // the volume of the upper one.
    let made = || {
        let namespaces = vec![namespace(1, memory(2 * MIB), 512)];
        Ok::<_, ()>(host(ControllerConfig::default(), namespaces))
    };
    let lower = in_process::spawn(made).unwrap();
    let volume = Arc::new(volume(&lower));
    let config = ControllerConfig {
        serial: "upper".into(),
        ..ControllerConfig::default()
    };
    let upper = local(config, vec![namespace(1, volume.clone(), 512)]);
    let device = open(&upper, Options::default());
    // What the host of the upper disk allocates is not known to the lower device: bounced.
    let mut queue = device
        .queue(
            1,
            QueueOptions {
                depth: 16,
                ..Default::default()
            },
        )
        .unwrap();
    let mut model = Exerciser::new(2 * MIB, 512, 300 << 10, 31);
    model.run(&device, &mut queue, 600, 16);
    model.verify(&mut queue);
    assert_eq!((device.resets(), volume.device().resets()), (0, 0));
}

/// A volume that promises something of its writes.
#[derive(Debug)]
struct Promising(Arc<dyn Volume>, AtomicWrites);

impl Volume for Promising {
    fn info(&self) -> Info {
        self.0.info()
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        self.0.open(io)
    }

    fn id(&self) -> Vec<u8> {
        self.0.id()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.0)
    }

    fn atomic_writes(&self) -> AtomicWrites {
        self.1
    }
}

/// The atomic write promise of a volume passes through a controller and its driver to the volume on
/// top of them, and no more than that, whatever the blocks, and with a slice below or above.
#[test]
fn atomic_write_promise_passes_through_controller() {
    let within = |bytes| AtomicWrites::within(bytes, 0, 0);
    let natural = AtomicWrites::naturally_aligned(512, 16 << 10);
    for (promise, block, begins, expected) in [
        (within(16 << 10), 512, 0, 16 << 10),
        (within(16 << 10), 4096, 0, 16 << 10),
        (within(16 << 10), 4096, MIB, 16 << 10),
        (within(16 << 10), 4096, 8 << 10, 8 << 10),
        // No more than a block, which every namespace promises.
        (within(16 << 10), 4096, 4 << 10, 4 << 10),
        (within(2048), 4096, 0, 4096),
        // Three blocks are no power of two, so four are no unit.
        (natural, 512, 0, 1024),
        (natural, 4096, 0, 8192),
        (natural, 4096, 4096, 4096),
        (AtomicWrites::NONE, 512, 0, 512),
    ] {
        let below: Arc<dyn Volume> = Arc::new(Promising(memory(4 * MIB), promise));
        let below = Arc::new(SliceVolume::new(below, begins, None).unwrap());
        let config = ControllerConfig::default();
        let transport = local(config, vec![namespace(1, below, block)]);
        let above = Arc::new(volume(&transport));
        let id = above.device().identify();
        // They would hold of every namespace, and across boundaries.
        assert_eq!(
            (id.awun_z.get(), id.awupf_z.get(), id.acwu_z.get()),
            (0, 0, 0)
        );
        assert_eq!(
            above.atomic_writes().unit(),
            expected,
            "{promise} {block} {begins}"
        );
        let slice = SliceVolume::new(above, 4096, None).unwrap();
        assert_eq!(slice.atomic_writes().unit(), expected.min(4096));
    }
}
