//! Clients that come, go, and come at once.

use std::os::unix::fs::FileExt;

use dma::Memory;
use nvme::{NvmOpcode, Status};
use rustix::fs::fstat;
use vfio_user::client::{Client, ClientError};

use crate::common::*;
use crate::keeper::{kill_serving, start};

#[test]
fn second_client_is_refused_while_first_is_served() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://4M"]);
    let mut first = Host::up(&test_dir.socket());
    let data = pattern(1, 4096);
    first.write(1, 8, &data);
    for _ in 0..3 {
        let second = Client::connect(test_dir.socket(), WAIT_TIMEOUT);
        assert!(
            matches!(second, Err(ClientError::NotTaken)),
            "{:?}",
            second.err()
        );
    }
    daemon.wait_log(|line| line.contains("second client") && line.contains("refused"));
    assert!(first.read(1, 8, 4096) == data, "the first is not disturbed");
    // The second client may connect when the first has disconnected.
    drop(first);
    let mut second = Host::up(&test_dir.socket());
    assert!(second.read(1, 8, 4096) == data);
    drop(second);
    daemon.end();
}

#[test]
fn client_lost_with_commands_in_flight_leaves_disk_usable() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 32 << 20);
    let slow = "null://1G?latency=300ms";
    let daemon = Daemon::serve(&test_dir, &[&disk, slow]);
    let mut host = Host::up(&test_dir.socket());
    let safe = pattern(1, 64 << 10);
    host.write(1, 0, &safe);
    for round in 0..5 {
        // Writes to a file, and slow reads, into memory that is unmapped.
        for i in 0..40u64 {
            let write = host.transfer(NvmOpcode::WRITE, 1, 2048 + 128 * i, 64 << 10, 1 << 20);
            host.submit(1, write);
            if i % 4 == 0 {
                let read = host.transfer(NvmOpcode::READ, 2, i, 4096, 4 << 20);
                host.submit(1, read);
            }
        }
        drop(host);
        host = Host::up(&test_dir.socket());
        assert!(host.read(1, 0, safe.len()) == safe, "round {round}");
        host.write(1, 20_000, &pattern(round, 4096));
        assert!(host.read(1, 20_000, 4096) == pattern(round, 4096));
    }
    drop(host);
    daemon.end();
    assert!(test_dir.bytes("disk.raw", 0, safe.len()) == safe);
}

#[test]
fn controller_reset_with_commands_in_flight_completes() {
    let test_dir = TestDir::new();
    let slow = "null://1G?latency=200ms&read-zeroes=on";
    let daemon = Daemon::serve(&test_dir, &[slow]);
    let mut host = Host::up(&test_dir.socket());
    for _ in 0..20 {
        let read = host.transfer(NvmOpcode::READ, 1, 0, 4096, 4 << 20);
        host.submit(1, read);
    }
    host.client.reset().unwrap();
    // Data that was read by then is there; nothing arrives later.
    host.ram.write_all_at(&[0x55; 4096], 4 << 20).unwrap();
    // No completion of the old life may appear in the queues of the new one.
    host.enable();
    host.create_queues(1, None);
    assert_eq!(host.read(1, 0, 512).len(), 512);
    std::thread::sleep(std::time::Duration::from_millis(400));
    assert_eq!(host.try_completion(1).map(|c| c.cid.get()), None);
    let mut page = [0; 4096];
    host.ram.read_exact_at(&mut page, 4 << 20).unwrap();
    assert_eq!(page, [0x55; 4096]);
    drop(host);
    daemon.end();
}

#[test]
fn unmap_waits_for_commands_using_memory() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["null://1G?latency=300ms&read-zeroes=on"]);
    let mut host = Host::up(&test_dir.socket());
    let command = host.transfer(NvmOpcode::READ, 1, 0, 4096, 4 << 20);
    host.submit(1, command);
    host.client.dma_unmap(vfio_user::DmaUnmapping::All).unwrap();
    // The memory is the client's again: from now on nothing changes in it.
    host.ram.write_all_at(&[0x55; 4096], 4 << 20).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(500));
    let mut page = [0; 4096];
    host.ram.read_exact_at(&mut page, 4 << 20).unwrap();
    assert_eq!(page, [0x55; 4096]);
    // A new map, a new life.
    host.map_ram();
    host.enable();
    host.create_queues(1, None);
    assert_eq!(host.write_with(1, 0, &[1; 512], false), Status::SUCCESS);
    drop(host);
    daemon.end();
}

/// A VMM that was killed and is started again at once: whatever the first has left behind, the
/// second is served.
#[test]
fn next_client_need_not_wait_for_previous() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["null://1G?latency=2s", "mem://4M"]);
    for round in 0..4 {
        let mut host = Host::up(&test_dir.socket());
        if round % 2 == 0 {
            // More messages than are handled at a time.
            for i in 0..2000u64 {
                host.client
                    .region_write_posted(BAR0, 0x1000 + i % 16 * 8, &[0; 4])
                    .unwrap();
            }
        } else {
            // An unmap that is answered when a slow command is over.
            let command = host.transfer(NvmOpcode::READ, 1, 0, 4096, 4 << 20);
            host.submit(1, command);
            host.identify_controller();
            let all = [24u32, 2, 0, 0, 0, 0];
            let payload: Vec<u8> = all.iter().flat_map(|word| word.to_ne_bytes()).collect();
            host.client
                .send(vfio_user::wire::Command::DMA_UNMAP, 0, &[&payload], &[])
                .unwrap();
        }
        drop(host);
        let mut host = Host::up(&test_dir.socket());
        host.write(2, 0, &pattern(round, 4096));
        assert!(host.read(2, 0, 4096) == pattern(round, 4096));
    }
    daemon.end();
}

/// Maps the doorbell page; returns the number of its file.
fn map_page(host: &mut Host) -> u64 {
    host.map_doorbells();
    let mapping = host.client.region_info(BAR0).unwrap().mmap.unwrap();
    fstat(&mapping.fd).unwrap().st_ino
}

/// A client that has disconnected may keep the doorbell page mapped. It cannot ring the queues of
/// the next client, even if worker and process change meanwhile.
#[test]
fn a_former_client_cannot_ring_the_next_clients_doorbells() {
    let test_dir = TestDir::new();
    let socket = text(&test_dir.socket());
    let args = [
        "serve",
        "--socket",
        &socket,
        "--keeper",
        "process",
        "--doorbells",
        "mapped",
        "mem://4M",
    ];
    let daemon = start(&test_dir, &args);
    let (mut pages, mut files) = (Vec::<Memory>::new(), Vec::new());
    for round in 0..3 {
        let mut host = Host::up(&test_dir.socket());
        let file = map_page(&mut host);
        assert!(!files.contains(&file), "round {round}");
        files.push(file);
        for _ in 0..2 {
            let read = host.transfer(NvmOpcode::READ, 1, 0, 4096, 4 << 20);
            let (cid, doorbell, tail) = host.test_dir(1, read);
            for page in &pages {
                page.write(doorbell as usize, &tail.to_le_bytes()).unwrap();
            }
            // Meanwhile every queue is polled many times.
            for _ in 0..100 {
                host.identify_controller();
            }
            assert_eq!(host.try_completion(1).map(|c| c.cid.get()), None);
            host.ring(1, false, tail).unwrap();
            assert_eq!(host.completion(1).cid.get(), cid);
            kill_serving(&daemon);
            host.identify_controller();
            assert_eq!(map_page(&mut host), file, "round {round}");
        }
        pages.extend(host.mapped.take());
    }
    daemon.end();
}

#[test]
fn endless_clients_do_not_fill_log() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    for round in 1..=60u64 {
        drop(Host::attach(&test_dir.socket()));
        if round == 1 {
            daemon.wait_log(|line| line.contains("client disconnected"));
        }
    }
    let ended = daemon.end();
    let lines = ended.log.len();
    // Ten lines of each kind: connected, and disconnected.
    assert!(lines < 35, "{lines} lines: {:#?}", ended.log);
}
