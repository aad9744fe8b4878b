//! Format NVM that changes the block size, in the sandbox: what of it the next process finds,
//! however the one before has ended.

use crate::common::*;
use crate::keeper;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::os::unix::fs::FileExt;

const SIZE: u64 = 16 << 20;

/// A place with a disk full of data, and what to serve of it.
fn disk() -> (Place, String) {
    let place = Place::new();
    let disk = place.disk("disk.raw", SIZE);
    let full = std::fs::File::options().write(true).open(&disk).unwrap();
    full.write_all_at(&vec![0x5a; SIZE as usize], 0).unwrap();
    let url = format!("{disk}?format-file={}", text(&place.path("format")));
    (place, url)
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

fn content(place: &Place) -> Vec<u8> {
    place.bytes("disk.raw", 0, SIZE as usize)
}

#[test]
fn a_format_stays_in_the_next_process() {
    let (place, url) = disk();
    for (lbaf, size) in [(1, 4096), (0, 512), (1, 4096)] {
        let daemon = Daemon::serve(&place, &[&url]);
        let mut host = Host::up(&place.socket());
        assert_ne!(block(&mut host), size);
        assert_eq!(format(&mut host, lbaf), Status::SUCCESS);
        assert_eq!(block(&mut host), size);
        assert!(content(&place).iter().all(|byte| *byte == 0));
        drop(host);
        let ended = daemon.end();
        let bad = |line: &&String| line.contains("ERROR");
        assert_eq!(ended.log.iter().find(bad), None);
        // And where the process was killed.
        for kills in [true, false] {
            let daemon = Daemon::serve(&place, &[&url]);
            let mut host = Host::up(&place.socket());
            assert_eq!(block(&mut host), size);
            let data = pattern(size, 8192);
            let last = SIZE / size - 8192 / size;
            assert_eq!(write(&mut host, last, &data), Status::SUCCESS);
            assert_eq!(&content(&place)[(SIZE - 8192) as usize..], data);
            let beyond = write(&mut host, last + 1, &data);
            assert_eq!(beyond, Status::LBA_OUT_OF_RANGE);
            drop(host);
            match kills {
                true => daemon.kill(),
                false => drop(daemon.end()),
            }
        }
    }
}

/// The process is killed while it formats, and the host does not notice.
#[test]
fn a_format_is_answered_once_though_its_process_was_killed() {
    let (place, url) = disk();
    let socket = text(&place.socket());
    let args = ["serve", "--socket", &socket, "--keeper", "process", &url];
    let daemon = keeper::start(&place, &args);
    let mut host = Host::up(&place.socket());
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
        assert!(content(&place).iter().all(|byte| *byte == 0), "{round}");
        let data = pattern(round.into(), SIZE as usize / 64);
        for part in 0..64 {
            let slba = part * data.len() as u64 / size;
            assert_eq!(write(&mut host, slba, &data), Status::SUCCESS);
        }
        keeper::kill_serving(&daemon);
        assert_eq!(block(&mut host), size, "{round}");
        assert_eq!(content(&place), data.repeat(64), "{round}");
    }
    drop(host);
    daemon.end();
}
