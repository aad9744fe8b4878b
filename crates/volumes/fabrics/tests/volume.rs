//! The volume against a subsystem in this process: what it does, and what it makes of a controller
//! that lies, hangs and disappears.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "../../../data/volume/tests/it/common/mod.rs"]
mod common;
mod fake_target;
#[path = "volume/model.rs"]
mod model;
#[path = "volume/paths.rs"]
mod paths;
#[path = "volume/shared.rs"]
mod shared;
#[path = "../../remote/tests/suite/mod.rs"]
mod suite;

use common::{BOUND, Worker, bytes};
use fabrics::{FabricsOptions, FabricsVolume, HostIdentity, Policy, Subsystem};
use fake_target::{Answer, Setup, Target};
use nvme::identify::{Ascii, Nqn, Oncs};
use nvme::log::AnaState;
use nvme::log::discovery::{AddressFamily, DiscoveryRecord, SubsystemType, TransportType};
use nvme::{NvmOpcode, Status};
use remote::HostPort;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use suite::{BLOCK, WRITE, pattern, until};
use volume::{IoErrorKind, Op, OpenOptions, Registry, Volume};

/// With time-outs that no busy machine reaches; but where an association's end is not seen, that is
/// waited for.
fn options() -> FabricsOptions {
    FabricsOptions {
        kato: Duration::from_secs(20),
        ..FabricsOptions::new()
    }
}

fn subsystem(target: &Target) -> Subsystem {
    let url = target.url();
    Subsystem::parse(url.strip_prefix("nvme+tcp://").unwrap()).unwrap()
}

fn open(target: &Target, options: FabricsOptions) -> FabricsVolume {
    FabricsVolume::open(subsystem(target), options).unwrap()
}

fn serving(answer: impl Fn(usize, &nvme::Command) -> Answer + Send + Sync + 'static) -> Target {
    Target::new(Setup {
        answer: Box::new(answer),
        ..Setup::default()
    })
}

/// Waits until all paths are there.
fn connected(volume: &FabricsVolume, worker: &mut Worker) {
    let watch = volume.watch();
    until(worker, || watch.look().is_some_and(|reach| reach.connected));
}

#[test]
fn written_data_is_read_back() {
    for digests in [(false, false), (true, false), (false, true), (true, true)] {
        let target = Target::new(Setup::default());
        let options = FabricsOptions {
            header_digest: digests.0,
            data_digest: digests.1,
            ..options()
        };
        let volume = open(&target, options);
        let mut worker = Worker::new(&volume);
        for (offset, len) in [
            (0, 512),
            (4096, 4096),
            (65536, 1 << 20),
            (2 << 20, 70_144),
            (3 << 20, 8192),
            (3 << 20, 8704),
        ] {
            let data = pattern(len as u8, len);
            worker.write(offset, &data).unwrap();
            assert_eq!(
                worker.read(offset, len).unwrap(),
                data,
                "{offset} {len} {digests:?}"
            );
            let there = target.state.data.lock().unwrap();
            assert!(there[offset as usize..][..len as usize] == data[..]);
        }
        worker.without_data(Op::Flush, 0, 0).unwrap();
        assert_eq!(target.count(|s| &s.corrupt), 0);
        // What fits is in the capsule.
        let log = target.log();
        let writes = log
            .iter()
            .filter(|entry| entry.opcode == NvmOpcode::WRITE.0);
        writes.for_each(|entry| assert_eq!(entry.in_capsule, entry.len <= 8192, "{entry:?}"));
        assert!(log.iter().any(|entry| entry.opcode == NvmOpcode::FLUSH.0));
        drop(worker);
        drop(volume);
        let began = Instant::now();
        while target.count(|s| &s.shutdowns) == 0 {
            assert!(began.elapsed() < BOUND, "no shutdown in order");
        }
        // The Admin queue, and one I/O queue.
        assert_eq!(target.count(|s| &s.connections), 2);
    }
}

/// Without the answer in the data, with requests to transfer for pieces, and with short PDUs.
#[test]
fn volume_works_with_r2t_and_short_pdus() {
    let target = Target::new(Setup {
        success: false,
        r2t: 12 << 10,
        h2c_data: 4096,
        in_capsule: 0,
        mdts: 4,
        entries: 4,
        ..Setup::default()
    });
    for data_digest in [false, true] {
        let options = FabricsOptions {
            data_digest,
            header_digest: data_digest,
            ..options()
        };
        let volume = open(&target, options);
        let mut worker = Worker::new(&volume);
        let data = pattern(7, (1 << 20) + 512);
        worker.write(512, &data).unwrap();
        assert_eq!(worker.read(512, data.len() as u64).unwrap(), data);
    }
    assert_eq!(target.count(|s| &s.corrupt), 0);
    let log = target.log();
    assert!(
        log.iter()
            .all(|entry| entry.len <= 64 << 10 && !entry.in_capsule)
    );
}

#[test]
fn volume_info_matches_controller() {
    let target = Target::new(Setup::default());
    let volume = open(&target, options());
    let info = volume.info();
    assert_eq!((info.size, info.block_size), (4 << 20, 512));
    assert!(info.deallocate && info.write_zeroes && info.volatile_cache && !info.read_only);
    assert!(
        info.description.contains("test target, one path"),
        "{}",
        info.description
    );
    assert_eq!(volume.id(), [7; 16]);
    let mut worker = Worker::new(&volume);
    let refused = worker.read(256, 512).unwrap_err();
    assert_eq!(refused.kind, IoErrorKind::Invalid);
    let beyond = worker.read(4 << 20, 4096).unwrap_err();
    assert_eq!(beyond.kind, IoErrorKind::OutOfRange);
    let bare = Target::new(Setup {
        oncs: Oncs::new(),
        volatile_cache: false,
        read_only: true,
        ..Setup::default()
    });
    let volume = open(&bare, options());
    let info = volume.info();
    assert!(info.read_only && !info.deallocate && !info.volatile_cache && !info.write_zeroes);
    let mut worker = Worker::new(&volume);
    let refused = worker.write(0, &[1; 512]).unwrap_err();
    assert_eq!(refused.kind, IoErrorKind::ReadOnly);
    worker.without_data(Op::Flush, 0, 0).unwrap();
    assert_eq!(bare.count(|s| &s.requests), 0);
}

/// As far as a write is one command: MDTS of 1 is 8 KiB.
#[test]
fn atomic_write_unit_matches_controller() {
    for (atomic_z, mdts, unit) in [(0, 8, 512), (31, 8, 16 << 10), (31, 1, 8 << 10)] {
        let target = Target::new(Setup {
            atomic_z,
            mdts,
            ..Setup::default()
        });
        let volume = open(&target, options());
        assert_eq!(volume.atomic_writes().unit(), unit, "{atomic_z} {mdts}");
    }
}

#[test]
fn unsupported_operations_are_emulated_or_refused() {
    let target = Target::new(Setup {
        oncs: Oncs::new(),
        ..Setup::default()
    });
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[7; 8192]).unwrap();
    let zeroes = Op::WriteZeroes {
        deallocate: true,
        fua: true,
    };
    worker.without_data(zeroes, 4096, (4 << 20) - 4096).unwrap();
    assert_eq!(worker.read(0, 4096).unwrap(), [7; 4096]);
    assert_eq!(worker.read(4096, 65536).unwrap(), [0; 65536]);
    let refused = worker.without_data(Op::Deallocate, 0, 4096).unwrap_err();
    assert_eq!(refused.kind, IoErrorKind::Unsupported);
    let log = target.log();
    assert!(
        log.iter()
            .skip(1)
            .any(|entry| entry.fua && entry.opcode == NvmOpcode::WRITE.0)
    );
}

#[test]
fn every_operation_reaches_controller() {
    let target = Target::new(Setup::default());
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &pattern(1, 1 << 20)).unwrap();
    let zeroes = Op::WriteZeroes {
        deallocate: false,
        fua: true,
    };
    worker.without_data(zeroes, 4096, 8192).unwrap();
    worker.without_data(Op::Deallocate, 65536, 4096).unwrap();
    let list = worker.guest.holding(0, &[9; 4096]);
    let done = worker.run(Op::Write { fua: true }, 0, 4096, list);
    assert_eq!(done.result, Ok(()));
    let ops: Vec<_> = target
        .log()
        .iter()
        .map(|entry| (entry.opcode, entry.len, entry.fua))
        .collect();
    assert_eq!(
        ops,
        [
            (NvmOpcode::WRITE.0, 1 << 20, false),
            (NvmOpcode::WRITE_ZEROES.0, 8192, true),
            (NvmOpcode::DATASET_MANAGEMENT.0, 4096, false),
            (NvmOpcode::WRITE.0, 4096, true),
        ]
    );
    assert_eq!(worker.read(4096, 8192).unwrap(), [0; 8192]);
    assert_eq!(worker.read(65536, 4096).unwrap(), [0; 4096]);
    assert_eq!(worker.read(0, 4096).unwrap(), [9; 4096]);
}

#[test]
fn controller_error_fails_own_request_only() {
    let dnr = |status: Status| Answer::Status(status.with_dnr(true));
    let target = serving(move |number, _| match number {
        0 => dnr(Status::CAPACITY_EXCEEDED),
        1 => Answer::Status(Status::UNRECOVERED_READ_ERROR),
        2 => dnr(Status::NAMESPACE_WRITE_PROTECTED),
        3 => dnr(Status::INVALID_FIELD),
        // May be repeated, and succeeds then.
        4 | 5 => Answer::Status(Status::COMMAND_INTERRUPTED),
        // Never.
        7..=11 => Answer::Status(Status::INTERNAL_ERROR),
        _ => Answer::Right,
    });
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    let kind = |result: Result<(), volume::IoError>| result.unwrap_err().kind;
    assert_eq!(kind(worker.write(0, &[1; 4096])), IoErrorKind::NoSpace);
    assert_eq!(kind(worker.read(0, 4096).map(drop)), IoErrorKind::MediaRead);
    assert_eq!(kind(worker.write(0, &[1; 4096])), IoErrorKind::ReadOnly);
    assert_eq!(kind(worker.write(0, &[1; 4096])), IoErrorKind::Invalid);
    worker.write(0, &[2; 4096]).unwrap();
    assert_eq!(target.count(|s| &s.requests), 7);
    assert_eq!(kind(worker.write(0, &[3; 4096])), IoErrorKind::MediaWrite);
    assert_eq!(target.count(|s| &s.requests), 12);
    assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
    assert_eq!(target.count(|s| &s.connections), 2);
}

/// Whatever the controller does with one command of many, all of them succeed, by way of another
/// association.
#[test]
fn protocol_violation_costs_association_but_no_request() {
    let ways = [Answer::Flood, Answer::BadHeaderDigest];
    for answer in ways {
        for read in [true, false] {
            let target = serving(move |number, command| {
                let hit = (number >= 43 || !read)
                    && command.nvm_opcode()
                        == if read {
                            NvmOpcode::READ
                        } else {
                            NvmOpcode::WRITE
                        };
                match number {
                    3 if hit => answer,
                    43 if hit => answer,
                    _ => Answer::Right,
                }
            });
            let options = FabricsOptions {
                header_digest: answer == Answer::BadHeaderDigest,
                // Whether it has ended is not known of one that never stops.
                kato: Duration::from_secs(if answer == Answer::Flood { 2 } else { 60 }),
                ..options()
            };
            let volume = open(&target, options);
            let mut worker = Worker::new(&volume);
            let data = pattern(9, 40 * BLOCK);
            for at in 0..40 {
                let part = &data[(at * BLOCK) as usize..][..BLOCK as usize];
                let list = worker.guest.holding(at * BLOCK, part);
                assert!(worker.start(WRITE, at * BLOCK, BLOCK, list).1.is_none());
            }
            let done = worker.wait(40);
            assert!(
                done.iter().all(|done| done.result.is_ok()),
                "{answer:?} {read}"
            );
            drop(done);
            for at in 0..40 {
                let list = worker.guest.piece(at * BLOCK, BLOCK);
                list.fill(0xee);
                assert!(worker.start(Op::Read, at * BLOCK, BLOCK, list).1.is_none());
            }
            let mut done = worker.wait(40);
            done.sort_by_key(|done| done.tag);
            for (at, done) in done.iter().enumerate() {
                assert_eq!(done.result, Ok(()), "{answer:?} {read}");
                let part = &data[at * BLOCK as usize..][..BLOCK as usize];
                assert_eq!(bytes(&done.data), part, "{answer:?} {read} {at}");
            }
            let connections = target.count(|s| &s.connections);
            assert!(
                connections >= 4,
                "{answer:?} {read}: {connections} connections"
            );
        }
    }
}

/// A controller that asks for a byte at a time gets what it asks for, and takes no memory for it.
#[test]
fn endless_small_r2ts_are_tolerated() {
    let target = serving(|number, _| match number {
        0 => Answer::R2tFlood,
        _ => Answer::Right,
    });
    let impatient = FabricsOptions {
        timeout: Duration::from_secs(2),
        ..options()
    };
    let volume = open(&target, impatient);
    let mut worker = Worker::new(&volume);
    worker.write(0, &pattern(3, 256 << 10)).unwrap();
    assert_eq!(worker.read(0, 256 << 10).unwrap(), pattern(3, 256 << 10));
}

/// A digest that does not match costs the command another try, and no connection.
#[test]
fn data_with_wrong_digest_is_read_again() {
    let target = serving(|number, _| match number {
        1 | 2 => Answer::BadDataDigest,
        4.. => Answer::BadDataDigest,
        _ => Answer::Right,
    });
    let options = FabricsOptions {
        data_digest: true,
        ..options()
    };
    let volume = open(&target, options);
    let mut worker = Worker::new(&volume);
    let data = pattern(5, 128 << 10);
    worker.write(0, &data).unwrap();
    assert_eq!(worker.read(0, 128 << 10).unwrap(), data);
    assert_eq!(target.count(|s| &s.requests), 4);
    // Always.
    let error = worker.read(0, 4096).unwrap_err();
    assert_eq!(error.kind, IoErrorKind::MediaRead);
    assert_eq!(target.count(|s| &s.connections), 2);
}

#[test]
fn size_change_is_noticed_by_event() {
    let target = Target::new(Setup::default());
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    for size in [6 << 20, 2 << 20] {
        target.resize(size);
        let began = Instant::now();
        while volume.info().size != size as u64 {
            assert!(began.elapsed() < BOUND);
            std::thread::yield_now();
        }
        assert!(volume.refresh().unwrap());
        let end = size as u64;
        worker.read(end - 4096, 4096).unwrap();
        let error = worker.read(end, 4096).unwrap_err();
        assert_eq!(error.kind, IoErrorKind::OutOfRange);
    }
    assert_eq!(target.count(|s| &s.connections), 2);
}

/// A controller that takes commands and answers nothing is none.
#[test]
fn controller_without_answers_counts_as_lost() {
    let target = serving(|_, _| Answer::Never);
    let impatient = FabricsOptions {
        timeout: Duration::from_millis(200),
        reconnect_delay: Duration::from_secs(60),
        ..options()
    };
    let volume = open(&target, impatient);
    let mut worker = Worker::new(&volume);
    let list = worker.guest.piece(0, 4096);
    let (tag, _) = worker.start(Op::Read, 0, 4096, list);
    until(&mut worker, || target.count(|s| &s.requests) >= 3);
    worker.queue.cancel(tag);
    assert!(worker.wait(1)[0].result.is_err());
}

/// A listener that says nothing holds up nobody for longer than the time limit.
#[test]
fn silent_portal_times_out_at_open() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let named = Subsystem::parse(&format!("{address}/nqn.x/1")).unwrap();
    let error = FabricsVolume::open(named, options())
        .unwrap_err()
        .to_string();
    assert!(error.contains("no answer within the time limit"), "{error}");
}

#[test]
fn urls_open_volume_and_errors_name_portals() {
    let target = Target::new(Setup::default());
    let kinds = remote::volume_kinds(&fabrics::NvmeTcp, |_| (), None);
    let registry = kinds.fold(Registry::<()>::new(), Registry::with);
    let open = |url: &str| registry.open(url, OpenOptions::default());
    let url = target.url();
    let opened = open(&format!(
        "{url}?read-only=on&offset=1M&hdgst=on&policy=queue-depth"
    ));
    let info = opened.unwrap().volume.info();
    assert_eq!((info.size, info.read_only), (3 << 20, true));
    let error = |url: &str| open(url).map(|_| ()).unwrap_err().to_string();
    let text = error("nvme+tcp://127.0.0.1:1/nqn.x/1");
    assert!(
        text.contains("127.0.0.1:1: no controller can be reached"),
        "{text}"
    );
    let text = error(&url.replace("vnvme:test", "vnvme:other"));
    assert!(
        text.contains("there is no subsystem") && text.contains("vnvme:other"),
        "{text}"
    );
    let with = |option: &str| error(&format!("{url}?{option}"));
    assert!(with("queues=17").contains("from 1 to 16"));
    assert!(with("depth=0").contains("from 1 to 1024"));
    assert!(with("kato=10ms").contains("at least 1s"));
    assert!(with("timeout=1ms").contains("at least 100ms"));
    assert!(with("policy=random").contains("round-robin or queue-depth"));
    assert!(with("hostnqn=me").contains("begins with nqn."));
    assert!(with("colour=red").contains("nvme+tcp volumes have read-only, queues"));
    // What answers is another kind of server.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = listener.accept().unwrap();
        stream
            .write_all(&b"220 mail.example.org ESMTP\r\n".repeat(10))
            .unwrap();
    });
    let text = error(&format!("nvme+tcp://{address}/nqn.x/1"));
    assert!(text.contains("breaks the protocol"), "{text}");
}

#[test]
fn discovery_returns_paths_of_subsystems() {
    let target = Target::new(Setup::default());
    let record = |number: u16| DiscoveryRecord {
        trtype: TransportType::TCP,
        adrfam: AddressFamily::IPV4,
        subtype: SubsystemType::NVM,
        portid: number.into(),
        trsvcid: Ascii::new("4420").unwrap(),
        traddr: Ascii::new("10.0.0.1").unwrap(),
        subnqn: Nqn::new(&format!("nqn.x:{number}")).unwrap(),
        ..DiscoveryRecord::default()
    };
    let records: Vec<_> = (0..40).map(record).collect();
    *target.state.records.lock().unwrap() = records.clone();
    let address = target.address(0);
    let place = HostPort {
        host: address.ip().to_string(),
        port: address.port(),
    };
    let identity = HostIdentity::named("nqn.2014-08.org.x:host").unwrap();
    let found = fabrics::discover(place, &identity).unwrap();
    assert_eq!(found.generation, 1);
    assert_eq!(found.records, records);
}
