//! Format NVM that changes the block size and metadata, in the sandbox: the next process finds the
//! format, however the one before has ended.

use crate::common::*;
use crate::keeper;
use nvme::feature::{Fid, HostBehavior};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::os::unix::fs::FileExt;
use zerocopy::IntoBytes;

const SIZE: u64 = 16 << 20;

/// Makes a place with a disk full of data, and its volume's URL.
fn disk() -> (TestDir, String) {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", SIZE);
    let full = std::fs::File::options().write(true).open(&disk).unwrap();
    full.write_all_at(&vec![0x5a; SIZE as usize], 0).unwrap();
    let url = format!("{disk}?format-file={}", text(&test_dir.path("format")));
    (test_dir, url)
}

fn format(host: &mut Host, lbaf: u32) -> Status {
    let mut command = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
    command.cdw10 = lbaf.into();
    host.run(0, command).status().without_flags()
}

/// Bytes of a block, as the host finds it.
fn block(host: &mut Host) -> u64 {
    let ns = host.identify_namespace(1).unwrap();
    let size = u64::from(ns.formatted().unwrap().block_size().unwrap());
    assert_eq!(ns.nsze.get() * size, SIZE);
    size
}

fn write(host: &mut Host, slba: u64, data: &[u8]) -> Status {
    let block = block(host);
    let at = 0x40_0000;
    host.ram.write_all_at(data, at).unwrap();
    let mut command = host.transfer(NvmOpcode::WRITE, 1, slba, data.len(), at);
    command.cdw12 = (data.len() as u32 / block as u32 - 1).into();
    host.run(1, command).status().without_flags()
}

fn content(test_dir: &TestDir) -> Vec<u8> {
    test_dir.bytes("disk.raw", 0, SIZE as usize)
}

/// All of it, at once: byte by byte takes seconds without optimisation.
fn is_zero(test_dir: &TestDir) -> bool {
    content(test_dir) == vec![0; SIZE as usize]
}

#[test]
fn format_survives_process() {
    let (test_dir, url) = disk();
    for (lbaf, size) in [(1, 4096), (0, 512), (1, 4096)] {
        let daemon = Daemon::serve(&test_dir, &[&url]);
        let mut host = Host::up(&test_dir.socket());
        assert_ne!(block(&mut host), size);
        assert_eq!(format(&mut host, lbaf), Status::SUCCESS);
        assert_eq!(block(&mut host), size);
        assert!(is_zero(&test_dir));
        drop(host);
        let ended = daemon.end();
        let bad = |line: &&String| line.contains("ERROR");
        assert_eq!(ended.log.iter().find(bad), None);
        // And where the process was killed.
        for kills in [true, false] {
            let daemon = Daemon::serve(&test_dir, &[&url]);
            let mut host = Host::up(&test_dir.socket());
            assert_eq!(block(&mut host), size);
            let data = pattern(size, 8192);
            let last = SIZE / size - 8192 / size;
            assert_eq!(write(&mut host, last, &data), Status::SUCCESS);
            assert_eq!(&content(&test_dir)[(SIZE - 8192) as usize..], data);
            let beyond = write(&mut host, last + 1, &data);
            assert_eq!(beyond, Status::LBA_OUT_OF_RANGE);
            drop(host);
            if kills {
                daemon.kill()
            } else {
                drop(daemon.end())
            }
        }
    }
}

/// The process is killed while it formats, and the host does not notice.
#[test]
fn format_across_kill_is_answered_once() {
    let (test_dir, url) = disk();
    let socket = text(&test_dir.socket());
    let args = ["serve", "--socket", &socket, "--keeper", "process", &url];
    let daemon = keeper::start(&test_dir, &args);
    let mut host = Host::up(&test_dir.socket());
    for round in 0..12u32 {
        let lbaf = 1 - round % 2;
        let mut command = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
        command.cdw10 = lbaf.into();
        let cid = host.submit(0, command);
        std::thread::sleep(std::time::Duration::from_micros(u64::from(round) * 400));
        keeper::kill_serving(&daemon);
        let done = host.completion(0);
        assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
        let size = block(&mut host);
        assert_eq!(size, 512 << (3 * lbaf), "{round}");
        assert!(is_zero(&test_dir), "{round}");
        let data = pattern(round.into(), SIZE as usize / 64);
        for part in 0..64 {
            let slba = part * data.len() as u64 / size;
            assert_eq!(write(&mut host, slba, &data), Status::SUCCESS);
        }
        keeper::kill_serving(&daemon);
        assert_eq!(block(&mut host), size, "{round}");
        assert_eq!(content(&test_dir), data.repeat(64), "{round}");
    }
    drop(host);
    daemon.end();
}

// ---- with metadata

/// PRINFO: PRACT, and checks of the guard and of the reference tag.
const PRACT: u32 = 1 << 29 | 1 << 28;
const REFERENCE: u32 = 1 << 26;

/// Formats with metadata of only the tuple, or none: dword 10, bytes of a block and of its
/// metadata, and type of protection.
const FORMATS: [(u32, u64, u64, u32); 6] = [
    (2 | 1 << 5, 512, 8, 1),
    (10 | 2 << 5, 4096, 16, 2),
    (1, 4096, 0, 0),
    (5 | 3 << 5 | 1 << 4, 4096, 8, 3),
    (8 | 1 << 5 | 1 << 8, 4096, 16, 1),
    (0, 512, 0, 0),
];

/// A host that uses guards of more than 16 bits, too (LBAFEE).
fn up(test_dir: &TestDir) -> Host {
    let mut host = Host::up(&test_dir.socket());
    let says = HostBehavior {
        lbafee: 1,
        ..HostBehavior::default()
    };
    host.ram.write_all_at(says.as_bytes(), 0x40_0000).unwrap();
    let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    command.cdw10 = u32::from(Fid::HOST_BEHAVIOR_SUPPORT.0).into();
    command.set_prps(RAM_BASE + 0x40_0000, 0);
    assert_eq!(host.run(0, command).status(), Status::SUCCESS);
    host
}

fn with_metadata() -> (TestDir, String) {
    let (test_dir, url) = disk();
    let url = format!("{url}&metadata={}", text(&test_dir.path("metadata")));
    (test_dir, url)
}

/// The host finds this one of the formats, and the file of the metadata is of it.
fn has(test_dir: &TestDir, host: &mut Host, (cdw10, size, metadata, kind): (u32, u64, u64, u32)) {
    assert_eq!(block(host), size);
    let ns = host.identify_namespace(1).unwrap();
    assert_eq!(u32::from(ns.flbas.into_bits()), cdw10 & 0x1f);
    assert_eq!(u64::from(ns.formatted().unwrap().ms.get()), metadata);
    let dps = kind | (cdw10 >> 8 & 1) << 3;
    assert_eq!(u32::from(ns.dps.into_bits()), dps);
    let file = std::fs::metadata(test_dir.path("metadata")).unwrap().len();
    let table = match metadata {
        0 => 0,
        metadata => SIZE / size * 2 * (8 + metadata),
    };
    assert_eq!(file, (4096 + table).next_multiple_of(4096));
}

/// A command on blocks with tuples that the controller inserts, or checks and strips.
fn on(host: &mut Host, opcode: NvmOpcode, slba: u64, len: usize, kind: u32) -> Status {
    let size = block(host);
    let mut command = host.transfer(opcode, 1, slba, len, 0x40_0000);
    let prinfo = match kind {
        0 => 0,
        3 => PRACT,
        _ => PRACT | REFERENCE,
    };
    command.cdw12 = (((len as u64 / size) as u32 - 1) | prinfo).into();
    command.cdw14 = (slba as u32).into();
    host.run(1, command).status().without_flags()
}

fn put(host: &mut Host, slba: u64, data: &[u8], kind: u32) {
    host.ram.write_all_at(data, 0x40_0000).unwrap();
    let status = on(host, NvmOpcode::WRITE, slba, data.len(), kind);
    assert_eq!(status, Status::SUCCESS);
}

fn get(host: &mut Host, slba: u64, len: usize, kind: u32) -> Vec<u8> {
    host.ram.write_all_at(&vec![0xee; len], 0x40_0000).unwrap();
    let status = on(host, NvmOpcode::READ, slba, len, kind);
    assert_eq!(status, Status::SUCCESS);
    let mut data = vec![0; len];
    host.ram.read_exact_at(&mut data, 0x40_0000).unwrap();
    data
}

/// Another first byte of the last blocks, below.
fn damage(test_dir: &TestDir, byte: u8) {
    let file = std::fs::File::options()
        .write(true)
        .open(test_dir.path("disk.raw"));
    file.unwrap().write_all_at(&[byte], SIZE - 8192).unwrap();
}

#[test]
fn metadata_format_survives_process() {
    let (test_dir, url) = with_metadata();
    for format in FORMATS {
        let (cdw10, size, _, kind) = format;
        let daemon = Daemon::serve(&test_dir, &[&url]);
        let mut host = up(&test_dir);
        assert_eq!(self::format(&mut host, cdw10), Status::SUCCESS);
        has(&test_dir, &mut host, format);
        assert!(is_zero(&test_dir));
        assert_eq!(get(&mut host, 5, 8192, kind), vec![0; 8192]);
        let data = pattern(size, 8192);
        let last = SIZE / size - 8192 / size;
        put(&mut host, last, &data, kind);
        drop(host);
        daemon.kill();
        for _ in 0..2 {
            let daemon = Daemon::serve(&test_dir, &[&url]);
            let mut host = up(&test_dir);
            has(&test_dir, &mut host, format);
            assert_eq!(get(&mut host, last, 8192, kind), data);
            assert_eq!(get(&mut host, 5, 8192, kind), vec![0; 8192]);
            if kind > 0 {
                // Damage below is found.
                damage(&test_dir, !data[0]);
                let status = on(&mut host, NvmOpcode::READ, last, 8192, kind);
                assert_eq!(status, Status::GUARD_CHECK_ERROR);
                damage(&test_dir, data[0]);
            }
            drop(host);
            let ended = daemon.end();
            let bad = |line: &&String| line.contains("ERROR");
            assert_eq!(ended.log.iter().find(bad), None);
        }
    }
}

/// The process is killed while it formats, and the host does not notice.
#[test]
fn metadata_format_survives_kill() {
    let (test_dir, url) = with_metadata();
    let socket = text(&test_dir.socket());
    let args = ["serve", "--socket", &socket, "--keeper", "process", &url];
    let daemon = keeper::start(&test_dir, &args);
    let mut host = up(&test_dir);
    for round in 0..18u32 {
        let format = FORMATS[round as usize % FORMATS.len()];
        let (cdw10, size, _, kind) = format;
        let mut command = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
        command.cdw10 = cdw10.into();
        let cid = host.submit(0, command);
        std::thread::sleep(std::time::Duration::from_micros(u64::from(round) * 400));
        keeper::kill_serving(&daemon);
        let done = host.completion(0);
        assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
        has(&test_dir, &mut host, format);
        assert!(is_zero(&test_dir), "{round}");
        let data = pattern(round.into(), 1 << 16);
        let slbas = (0..SIZE / size).step_by(((1 << 20) / size) as usize);
        for slba in slbas.clone() {
            assert_eq!(get(&mut host, slba, data.len(), kind), vec![0; data.len()]);
            put(&mut host, slba, &data, kind);
        }
        keeper::kill_serving(&daemon);
        has(&test_dir, &mut host, format);
        for slba in slbas {
            assert_eq!(get(&mut host, slba, data.len(), kind), data, "{round}");
        }
    }
    drop(host);
    daemon.end();
}

/// Two disks of one subsystem, on two workers.
fn shared(test_dir: &TestDir, disk: &str) -> Vec<String> {
    let kept = text(&test_dir.path("format"));
    let mut config = String::from("[process]\nworkers = 2\n");
    for (name, cntlid) in [("a", 1), ("b", 2)] {
        config += &format!(
            "[[controller]]\nname = \"{name}\"\nsocket = {:?}\nsubsystem = \"s\"\n\
             cntlid = {cntlid}\n[[controller.namespace]]\nvolume = {disk:?}\n\
             format-file = {kept:?}\n",
            text(&test_dir.path(name)),
        );
    }
    let file = test_dir.path("vnvme.toml");
    std::fs::write(&file, config).unwrap();
    ["serve", "--config", &text(&file)].map(String::from).into()
}

/// A disk formats the namespace that another one writes to. Data written before is erased, and no
/// old write arrives later.
#[test]
fn format_in_subsystem_applies_to_other_disk() {
    const WRITES: u64 = 24;
    let (test_dir, url) = disk();
    let (disk, _) = url.split_once('?').unwrap();
    let args = shared(&test_dir, disk);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let up = |daemon: &Daemon| {
        daemon.wait_listening(&test_dir.path("b"));
        ["a", "b"].map(|name| Host::up(&test_dir.path(name)))
    };
    let mut daemon = Daemon::spawn(&args);
    let mut hosts = up(&daemon);
    let (mut refused, mut before, mut after) = (0, 0, 0);
    for round in 0..24u32 {
        let [first, second] = &mut hosts;
        let (formats, writes) = if round % 4 < 2 {
            (first, second)
        } else {
            (second, first)
        };
        let lbaf = (round + 1) % 2;
        let mut command = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
        command.cdw10 = lbaf.into();
        let size = 512 << (3 * lbaf);
        // A block each, of the block size at the time of the write.
        writes.ram.write_all_at(&[0xb7; 4096], 0x40_0000).unwrap();
        let mut cid = None;
        for slba in 0..WRITES {
            if slba == u64::from(round) % WRITES {
                cid = Some(formats.submit(0, command));
            }
            let mut one = writes.transfer(NvmOpcode::WRITE, 1, 2 * slba, 4096, 0x40_0000);
            one.cdw12 = 0.into();
            writes.submit(1, one);
        }
        let mut written = Vec::new();
        for _ in 0..WRITES {
            let done = writes.completion(1);
            match done.status().without_flags() {
                Status::SUCCESS => written.push(done.cid.get()),
                Status::FORMAT_IN_PROGRESS => refused += 1,
                status => panic!("{round}: {status}"),
            }
        }
        let done = formats.completion(0);
        assert_eq!(
            (Some(done.cid.get()), done.status()),
            (cid, Status::SUCCESS)
        );
        assert_eq!([block(formats), block(writes)], [size, size], "{round}");
        // The present data was written after the format: whole blocks of the new size.
        let content = content(&test_dir);
        let blocks = content.chunks(size as usize).zip(0u64..);
        let full = blocks.filter(|(block, at)| {
            let zero = block == &&vec![0; block.len()][..];
            let new = block == &&vec![0xb7; block.len()][..];
            let test_dir = at.is_multiple_of(2) && *at < 2 * WRITES;
            assert!(zero || new && test_dir, "{round}: {at}");
            new
        });
        let full = full.count();
        assert!(full <= written.len(), "{round}: {full}");
        after += full;
        before += written.len() - full;
        let data = pattern(round.into(), 8192);
        assert_eq!(write(writes, 4096 / size, &data), Status::SUCCESS);
        assert_eq!(test_dir.bytes("disk.raw", 4096, 8192), data, "{round}");
        if round % 6 == 5 {
            drop(hosts);
            daemon.kill();
            daemon = Daemon::spawn(&args);
            hosts = up(&daemon);
            let found = hosts.each_mut().map(block);
            assert_eq!(found, [size, size], "{round}");
        }
    }
    println!("{before} writes before a format, {after} after it, {refused} refused");
    assert!(before > 0);
    drop(hosts);
    daemon.end();
}
