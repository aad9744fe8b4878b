//! The driver against our controller in one process: every size, every kind of
//! command, both block sizes.

use crate::common::*;
use controller::ControllerConfig;
use dma::{MapError, Memory};
use driver::{
    AsyncQueue, CommandError, Device, Event, MemorySource, Op, Options, QueueOptions, Request,
    SubmitRefusal,
};
use nvme::Status;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use volume::{Effect, Fault, FaultVolume, IoErrorKind, OpKind, Volume};

const MIB: u64 = 1 << 20;

#[test]
fn random_io_of_every_kind_matches_array() {
    for (block, mdts, sgl, depth, seed) in [
        (512, 1, true, 1, 1),
        (512, 8, true, 32, 2),
        (4096, 5, false, 40, 3),
        (4096, 8, true, 7, 4),
        (512, 2, false, 40, 5),
    ] {
        let config = ControllerConfig {
            mdts,
            ..ControllerConfig::default()
        };
        let transport = local(config, vec![namespace(1, memory(8 * MIB), block)]);
        let device = open(
            &transport,
            Options {
                sgl,
                ..Options::default()
            },
        );
        assert_eq!(device.limits().max_transfer, (4096 << mdts).min(MIB));
        let mut queue = device
            .queue(
                1,
                QueueOptions {
                    depth: depth as u32,
                    ..Default::default()
                },
            )
            .unwrap();
        let mut model = Exerciser::new(8 * MIB, block.into(), 3 * MIB, seed);
        model.run(&device, &mut queue, 3000, depth);
        model.verify(&mut queue);
        let counters = queue.counters();
        assert_eq!((counters.stale, counters.retried), (0, 0));
        assert_eq!(counters.commands, counters.completions);
    }
}

#[test]
fn sizes_from_one_block_to_beyond_mdts_work() {
    let config = ControllerConfig {
        mdts: 2,
        ..ControllerConfig::default()
    };
    for (block, sgl) in [(512u64, false), (512, true), (4096, false), (4096, true)] {
        let transport = local(
            config.clone(),
            vec![namespace(1, memory(4 * MIB), block as u32)],
        );
        let device = open(
            &transport,
            Options {
                sgl,
                ..Options::default()
            },
        );
        let mut queue = device.queue(1, QueueOptions::default()).unwrap();
        let largest = 5 * (16 << 10) / block + 3;
        // Every offset in a page that a dword may have is too much: those around its borders.
        for odd in [0, 4, 512, 4092] {
            let arena = device.allocate(128 << 10).unwrap();
            drop(arena);
            let memory = dma::Memory::anonymous(1 << 20).unwrap();
            let arena = device.register(&memory).unwrap();
            for blocks in 1..=largest {
                let bytes = blocks * block;
                let pattern: Vec<u8> = (0..bytes)
                    .map(|i| (i * 7 + blocks + i / 251) as u8)
                    .collect();
                let piece = driver::DmaBuffer::of(&arena, odd, bytes).unwrap();
                piece.write(0, &pattern).unwrap();
                let lba = blocks % 11;
                let write = Request {
                    op: Op::Write { fua: false },
                    lba,
                    blocks,
                    buffer: Some(piece),
                    user_data: 1,
                };
                let done = queue.execute(write).unwrap();
                done.result.unwrap();
                let piece = done.buffer.unwrap();
                piece.fill(0).unwrap();
                let read = Request {
                    op: Op::Read,
                    lba,
                    blocks,
                    buffer: Some(piece),
                    user_data: 1,
                };
                let done = queue.execute(read).unwrap();
                done.result.unwrap();
                assert!(
                    done.buffer.unwrap().to_vec().unwrap() == pattern,
                    "{blocks} blocks of {block} at {odd}"
                );
            }
        }
    }
}

#[test]
fn prp_lists_of_several_pages_transfer_data() {
    // 8 MiB in one command: 2,048 pages, so a list of five pages, chained.
    let config = ControllerConfig {
        mdts: 11,
        ..ControllerConfig::default()
    };
    let transport = local(config, vec![namespace(1, memory(16 * MIB), 512)]);
    let device = open(
        &transport,
        Options {
            max_transfer: 8 * MIB,
            sgl: false,
            ..Options::default()
        },
    );
    let mut queue = device
        .queue(
            1,
            QueueOptions {
                depth: 2,
                ..Default::default()
            },
        )
        .unwrap();
    assert_eq!(queue.max_blocks() as u64 * 512, 8 * MIB);
    let mut model = Exerciser::new(16 * MIB, 512, 9 * MIB, 99);
    model.run(&device, &mut queue, 60, 4);
    model.verify(&mut queue);
}

#[test]
fn refused_request_returns_buffer() {
    let device = open(&disk(MIB, 512), Options::default());
    let mut queue = device
        .queue(
            1,
            QueueOptions {
                depth: 2,
                ..Default::default()
            },
        )
        .unwrap();
    let buffer = device.allocate(512).unwrap();
    let mut refuse = |lba, blocks, buffer, why| {
        let request = Request {
            op: Op::Read,
            lba,
            blocks,
            buffer: Some(buffer),
            user_data: 0,
        };
        let refused = queue.submit(request).unwrap_err();
        assert_eq!(refused.why, why);
        refused.buffer.unwrap()
    };
    let buffer = refuse(0, 0, buffer, SubmitRefusal::Range);
    let buffer = refuse(u64::MAX, 1, buffer, SubmitRefusal::Range);
    let buffer = refuse(0, u64::MAX, buffer, SubmitRefusal::Range);
    let buffer = refuse(0, 2, buffer, SubmitRefusal::Buffer);
    queue.submit_read(0, 1, buffer, 1).unwrap();
    queue
        .submit_read(1, 1, device.allocate(512).unwrap(), 2)
        .unwrap();
    let full = queue
        .submit_read(2, 1, device.allocate(512).unwrap(), 3)
        .unwrap_err();
    assert_eq!(full.why, SubmitRefusal::Full);
    assert_eq!(drain(&mut queue).len(), 2);
    // Refused commands complete with the controller's status.
    queue
        .submit_read(2048, 1, device.allocate(512).unwrap(), 4)
        .unwrap();
    let done = drain(&mut queue).remove(0);
    match done.result {
        Err(CommandError::Status(status)) => assert!(status.is(Status::LBA_OUT_OF_RANGE)),
        other => panic!("{other:?}"),
    }
    assert!(done.buffer.is_some());
}

#[test]
fn queues_of_several_threads_are_independent() {
    for mapped_doorbells in [false, true] {
        let volume = memory(32 * MIB);
        let config = ControllerConfig {
            mapped_doorbells,
            ..ControllerConfig::default()
        };
        let made = move || Ok::<_, ()>(host(config, vec![namespace(1, volume, 512)]));
        let transport = in_process::spawn(made).unwrap();
        let device = open(&transport, Options::default());
        std::thread::scope(|scope| {
            for worker in 0..4u64 {
                let device = device.clone();
                scope.spawn(move || {
                    let mut queue = device
                        .queue(
                            1,
                            QueueOptions {
                                depth: 16,
                                ..Default::default()
                            },
                        )
                        .unwrap();
                    let base = worker * 16384;
                    let mut random = Random(worker + 1);
                    for round in 0..60u64 {
                        let blocks = 1 + random.below(300);
                        let lba = base + random.below(16384 - blocks);
                        let bytes: Vec<u8> = (0..blocks * 512)
                            .map(|i| (i ^ round ^ worker << 6) as u8)
                            .collect();
                        queue.write(lba, &bytes, false).unwrap();
                        let mut back = vec![0; bytes.len()];
                        queue.read(lba, &mut back).unwrap();
                        assert!(back == bytes);
                    }
                    assert_eq!(queue.counters().stale, 0);
                });
            }
        });
        assert_eq!(device.resets(), 0);
    }
}

#[test]
fn dropped_queue_leaves_nothing() {
    let device = open(
        &disk(MIB, 512),
        Options {
            io_queues: 2,
            ..Options::default()
        },
    );
    // Far more than there are queue numbers.
    for round in 0..20 {
        let mut a = device.queue(1, QueueOptions::default()).unwrap();
        let b = device.queue(1, QueueOptions::default()).unwrap();
        assert!(device.queue(1, QueueOptions::default()).is_err());
        for i in 0..round {
            a.submit_write(i, 1, device.allocate(512).unwrap(), false, i)
                .unwrap();
        }
        a.ring();
        drop((a, b));
    }
    assert_eq!(device.resets(), 0);
    let counters = device.mapper().counters();
    assert!(counters.mappings < 8, "{counters:?}");
}

#[test]
fn sleeping_thread_is_woken() {
    let made = || {
        Ok::<_, ()>(host(
            ControllerConfig::default(),
            vec![namespace(1, slow(), 512)],
        ))
    };
    let transport = in_process::spawn(made).unwrap();
    let device = open(&transport, Options::default());
    let options = QueueOptions {
        poll_window: Duration::from_micros(20),
        ..Default::default()
    };
    let mut queue = device.queue(1, options).unwrap();
    for i in 0..5 {
        queue
            .submit_read(0, 1, device.allocate(512).unwrap(), i)
            .unwrap();
        let mut got = 0;
        let start = Instant::now();
        while got == 0 {
            got += queue
                .wait(Duration::from_secs(60), |done| done.result.unwrap())
                .unwrap();
            assert!(start.elapsed() < LIMIT);
        }
    }
    assert!(queue.counters().sleeps > 0, "{:?}", queue.counters());
}

/// Every request takes five milliseconds.
fn slow() -> Arc<dyn Volume> {
    let latency = Duration::from_millis(5);
    let options = volume::NullOptions {
        size: MIB,
        latency,
        ..Default::default()
    };
    Arc::new(volume::NullVolume::new(options).unwrap())
}

#[test]
fn futures_complete_or_are_dropped() {
    let device = open(&disk(MIB, 512), Options::default());
    let queue = AsyncQueue::new(device.queue(1, QueueOptions::default()).unwrap());
    let request = |op, lba, buffer| Request {
        op,
        lba,
        blocks: 8,
        buffer: Some(buffer),
        user_data: 0,
    };
    let done = queue.block_on(async {
        let buffer = device.allocate(4096).unwrap();
        buffer.fill(0x5C).unwrap();
        let done = queue
            .request(request(Op::Write { fua: false }, 3, buffer))
            .unwrap()
            .await;
        done.result.unwrap();
        let forgotten = queue
            .request(request(Op::Read, 50, device.allocate(4096).unwrap()))
            .unwrap();
        drop(forgotten);
        let buffer = done.buffer.unwrap();
        buffer.fill(0).unwrap();
        queue.request(request(Op::Read, 3, buffer)).unwrap().await
    });
    done.result.unwrap();
    assert!(
        done.buffer
            .unwrap()
            .to_vec()
            .unwrap()
            .iter()
            .all(|&b| b == 0x5C)
    );
    while queue.in_flight() > 0 {
        queue.drive();
    }
}

#[test]
fn media_errors_are_reported() {
    let faulty = FaultVolume::new(memory(MIB));
    let faults = faulty.faults();
    let transport = local(
        ControllerConfig::default(),
        vec![namespace(1, Arc::new(faulty), 512)],
    );
    let device = open(&transport, Options::default());
    let mut queue = device.queue(1, QueueOptions::default()).unwrap();
    faults.add(Fault::nth(
        OpKind::Read,
        0,
        Effect::Fail(IoErrorKind::MediaRead.into()),
    ));
    let request = || Request {
        op: Op::Read,
        lba: 0,
        blocks: 1,
        buffer: device.allocate(512).ok(),
        user_data: 1,
    };
    let done = queue.execute(request()).unwrap();
    match done.result {
        Err(CommandError::Status(status)) => assert!(status.is(Status::UNRECOVERED_READ_ERROR)),
        other => panic!("{other:?}"),
    }
    assert!(queue.execute(request()).unwrap().result.is_ok());
}

#[test]
fn device_reports_identity_health_and_namespaces() {
    let namespaces = vec![
        namespace(1, memory(MIB), 512),
        namespace(7, memory(2 * MIB), 4096),
    ];
    let transport = local(ControllerConfig::default(), namespaces);
    let device = open(&transport, Options::default());
    let ids: Vec<_> = device
        .namespaces()
        .iter()
        .map(|n| (n.nsid, n.block_size(), n.bytes()))
        .collect();
    assert_eq!(ids, [(1, 512, MIB), (7, 4096, 2 * MIB)]);
    assert!(device.namespace(2).is_err() && device.queue(2, QueueOptions::default()).is_err());
    assert_eq!(
        device.identify().mn.as_str(),
        Some("vnvme virtual NVMe disk")
    );
    assert!(device.health().unwrap().ctemp.get() > 0);
    assert_eq!(device.service().unwrap(), Vec::<Event>::new());
    let limits = device.limits();
    assert!(
        limits.compare
            && limits.write_zeroes
            && limits.dataset_management
            && limits.doorbell_buffers
    );
}

#[test]
fn closed_device_fails_everything_and_hangs_nothing() {
    let device = open(&disk(MIB, 512), Options::default());
    let mut queue = device.queue(1, QueueOptions::default()).unwrap();
    queue
        .submit_read(0, 1, device.allocate(512).unwrap(), 1)
        .unwrap();
    device.close();
    let done = drain(&mut queue);
    assert_eq!(done.len(), 1);
    assert!(device.is_gone() && device.health().is_err());
    let refused = queue.submit_read(0, 1, device.allocate(512).unwrap(), 1);
    assert_eq!(refused.unwrap_err().why, SubmitRefusal::Gone);
}

#[test]
fn device_memory_comes_from_source() {
    let transport = || {
        local(
            ControllerConfig::default(),
            vec![namespace(1, memory(MIB), 512)],
        )
    };
    let made = Arc::new(Mutex::new(Vec::new()));
    let source = {
        let made = made.clone();
        MemorySource::new(move |len| {
            let memory = Memory::anonymous(len)?;
            made.lock().unwrap().push(memory.clone());
            Ok(memory)
        })
    };
    let options = Options {
        memory: source,
        ..Options::default()
    };
    let device = open(&transport(), options);
    let buffer = device.allocate(4096).unwrap();
    let (of, at) = buffer.memory().unwrap();
    of.write(at, b"mine").unwrap();
    let made = made.lock().unwrap();
    assert_eq!(made.len(), 1, "one chunk does for all this");
    let mut found = [0; 4];
    made[0].read(at, &mut found).unwrap();
    assert_eq!(&found, b"mine");
    drop(made);

    let short = MemorySource::new(|len| Memory::anonymous(len / 2));
    let gone = MemorySource::new(|_| Err(MapError::Empty));
    let read_only = MemorySource::new(|len| {
        let memory = Memory::anonymous(len)?;
        Memory::from_fd(memory.fd().try_clone_to_owned().unwrap(), len as u64, false)
    });
    for source in [short, gone, read_only] {
        let options = Options {
            memory: source,
            ..Options::default()
        };
        let refused = Device::open(transport(), options);
        assert!(matches!(refused, Err(driver::Error::Map(_))), "{refused:?}");
    }
}
