//! Disks of a subsystem survive a kill and an upgrade of the process that serves them, with their
//! reservations and ANA states.

use crate::common::*;
use crate::failure_domains::Domain;
use crate::keeper::{kill_serving, start};
use crate::subsystem::{register, register_key, reserve, vnvme, write};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::fs;
use std::os::unix::fs::FileExt;

/// Where Reservation Report and Get Log Page write.
const AT_REPORT: u64 = 0x30_0000;
/// Where the data of commands in flight lie.
const AT_FLIGHT: u64 = 0x40_0000;

/// Two disks, `a` and `b`, of one subsystem, on two workers. The namespaces are a file, with these
/// lines in its table, and a slow one.
fn disks(test_dir: &TestDir, file: &str, lines: &str) -> String {
    let mut config = String::from("[process]\nworkers = 2\n");
    for (name, cntlid) in [("a", 1), ("b", 2)] {
        let socket = text(&test_dir.path(&format!("{name}.sock")));
        config += &format!(
            "[[controller]]\nname = \"{name}\"\nsocket = \"{socket}\"\nsubsystem = \"s\"\n\
             cntlid = {cntlid}\n[[controller.namespace]]\nvolume = {file:?}\n{lines}\
             [[controller.namespace]]\nvolume = \"null://1G?latency=400ms&read-zeroes=on\"\n\
             ana-group = 2\n"
        );
    }
    config
}

fn domain(lines: impl FnOnce(&TestDir) -> String, variables: &[(&str, &str)]) -> Domain {
    let test_dir = TestDir::new();
    let file = test_dir.disk("disk.raw", 1 << 20);
    let lines = lines(&test_dir);
    let disks = disks(&test_dir, &file, &lines);
    Domain::start_in(test_dir, &disks, &[], variables)
}

fn with_file(test_dir: &TestDir) -> String {
    let path = text(&test_dir.path("reservations"));
    format!("reservations = {path:?}\n")
}

/// Returns Reservation Report: generation, type, PTPL, holders and registrants.
fn report(host: &mut Host) -> Vec<u8> {
    let mut command = Command::new(NvmOpcode::RESERVATION_REPORT.0, 0, 1);
    command.cdw10 = (512 / 4 - 1).into();
    command.cdw11 = 1.into(); // the extended data structure
    command.set_prps(RAM_BASE + AT_REPORT, 0);
    host.ram.write_all_at(&[0; 512], AT_REPORT).unwrap();
    assert_eq!(host.run(1, command).status(), Status::SUCCESS);
    let mut report = vec![0; 512];
    host.ram.read_exact_at(&mut report, AT_REPORT).unwrap();
    report
}

/// Returns a log page.
fn log(host: &mut Host, lid: u8, len: usize) -> Vec<u8> {
    let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 0xffff_ffff);
    command.cdw10 = (u32::from(lid) | (len as u32 / 4 - 1) << 16).into();
    command.set_prps(RAM_BASE + AT_REPORT, 0);
    assert_eq!(host.run(0, command).status(), Status::SUCCESS);
    let mut page = vec![0; len];
    host.ram.read_exact_at(&mut page, AT_REPORT).unwrap();
    page
}

/// Submits slow reads, which are in flight when this returns.
fn submit_reads(host: &mut Host) -> Vec<u16> {
    let reads = (0..16).map(|lba| {
        let read = host.transfer(NvmOpcode::READ, 2, lba, 4096, AT_FLIGHT);
        host.submit(1, read)
    });
    reads.collect()
}

/// Takes the completions of these commands, each of which comes once.
fn complete(host: &mut Host, mut waiting: Vec<u16>) {
    while !waiting.is_empty() {
        let completion = host.completion(1);
        let place = waiting.iter().position(|cid| *cid == completion.cid.get());
        waiting.remove(place.expect("a second answer"));
        assert_eq!(completion.status(), Status::SUCCESS);
    }
}

fn disks_survive(lines: impl FnOnce(&TestDir) -> String, ptpl: bool) {
    let domain = domain(lines, &[]);
    let control = text(&domain.test_dir.path("control"));
    let (mut a, mut b) = (domain.host("a"), domain.host("b"));
    let registered = if ptpl {
        [register(&mut a, 0xa), register(&mut b, 0xb)]
    } else {
        [register_key(&mut a, 0xa), register_key(&mut b, 0xb)]
    };
    assert_eq!(registered, [Status::SUCCESS; 2]);
    let acquire = NvmOpcode::RESERVATION_ACQUIRE;
    assert_eq!(reserve(&mut a, acquire, 1 << 8, [0xa, 0]), Status::SUCCESS);
    let reported = report(&mut b);
    assert_eq!(reported, report(&mut a));
    vnvme(
        &control,
        &["ana", "b", "--set", "non-optimized", "--group", "1"],
    )
    .unwrap();
    let states = vnvme(&control, &["ana", "--json"]).unwrap();
    let ana = log(&mut b, 0xc, 80);
    for round in 0..4 {
        let data = pattern(round + 1, 4096);
        a.write(1, 8 * round, &data);
        let (of_a, of_b) = (submit_reads(&mut a), submit_reads(&mut b));
        if round % 2 == 0 {
            domain.kill();
        } else {
            vnvme(&control, &["upgrade"]).unwrap();
        }
        complete(&mut a, of_a);
        complete(&mut b, of_b);
        for name in ["a", "b"] {
            assert_eq!(domain.error(name), None, "round {round}");
        }
        assert_eq!(
            write(&mut b, 9),
            Status::RESERVATION_CONFLICT,
            "round {round}"
        );
        for written in 0..=round {
            let data = pattern(written + 1, 4096);
            assert!(b.read(1, 8 * written, 4096) == data, "round {round}");
            assert!(a.read(1, 8 * written, 4096) == data, "round {round}");
        }
        assert_eq!(report(&mut b), reported, "round {round}");
        assert_eq!(vnvme(&control, &["ana", "--json"]).unwrap(), states);
        assert_eq!(log(&mut b, 0xc, 80), ana, "round {round}");
        assert!(a.try_completion(1).is_none() && b.try_completion(1).is_none());
    }
    // The reservation can be preempted, as before.
    let preempt = 1 << 8 | 1;
    assert_eq!(
        reserve(&mut b, acquire, preempt, [0xb, 0xa]),
        Status::SUCCESS
    );
    assert_eq!(write(&mut a, 9), Status::RESERVATION_CONFLICT);
    assert_eq!(write(&mut b, 9), Status::SUCCESS);
    drop((a, b));
    let ended = domain.daemon.end();
    let errors = ended.log.iter().filter(|line| line.contains("ERROR"));
    assert_eq!(errors.collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn subsystem_disks_survive_kill_and_upgrade() {
    disks_survive(|_| String::new(), false);
}

#[test]
fn subsystem_disks_with_reservation_file_survive_kill_and_upgrade() {
    disks_survive(with_file, true);
}

/// A killed process is no loss of power.
#[test]
fn reservation_without_ptpl_in_file_survives_kill_and_upgrade() {
    disks_survive(with_file, false);
}

/// The process dies inside a reservation command: it has taken effect or not, and is answered once
/// with its effect.
#[test]
fn reservation_command_survives_death_at_crash_point() {
    for point in ["executed", "stored", "answered"] {
        let variables = TestDir::new();
        let path = variables.path("crash");
        // The process dies in the fourth operation.
        let count = 4;
        let line = format!("controller.reservation.{point}:{count}\n");
        fs::write(&path, line).unwrap();
        let domain = domain(|_| String::new(), &[("VNVME_CRASH", &text(&path))]);
        let (mut a, mut b) = (domain.host("a"), domain.host("b"));
        assert_eq!(register_key(&mut a, 0xa), Status::SUCCESS);
        assert_eq!(register_key(&mut b, 0xb), Status::SUCCESS);
        let acquire = NvmOpcode::RESERVATION_ACQUIRE;
        assert_eq!(reserve(&mut a, acquire, 1 << 8, [0xa, 0]), Status::SUCCESS);
        let event = b.submit(0, Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0));
        // A second execution would be a conflict: nobody has the key any more.
        let fence = 1 << 8 | 2;
        assert_eq!(
            reserve(&mut a, acquire, fence, [0xa, 0xb]),
            Status::SUCCESS,
            "{point}"
        );
        eventually("another process serves", || {
            domain.daemon.count("this one goes on") == 1
        });
        assert_eq!(write(&mut b, 1), Status::RESERVATION_CONFLICT, "{point}");
        assert_eq!(write(&mut a, 1), Status::SUCCESS, "{point}");
        let report = report(&mut a);
        let generation = u32::from_le_bytes(report[..4].try_into().unwrap());
        assert_eq!((generation, report[4], report[5]), (3, 1, 1), "{point}");
        // The preempted host is told once.
        let told = b.completion(0);
        assert_eq!(told.cid.get(), event, "{point}");
        let page = log(&mut b, 0x80, 64);
        assert_eq!(
            (page[8], page[9]),
            (1, 0),
            "registration preempted, {point}"
        );
        assert_eq!(log(&mut b, 0x80, 64), [0; 64], "{point}");
        assert!(a.try_completion(1).is_none() && b.try_completion(0).is_none());
        drop((a, b));
        domain.daemon.end();
    }
}

/// A new file would release all reservations.
#[test]
fn missing_reservation_file_makes_disks_unavailable_after_kill() {
    let domain = domain(with_file, &[]);
    let (mut a, mut b) = (domain.host("a"), domain.host("b"));
    assert_eq!(register_key(&mut a, 0xa), Status::SUCCESS);
    let acquire = NvmOpcode::RESERVATION_ACQUIRE;
    assert_eq!(reserve(&mut a, acquire, 1 << 8, [0xa, 0]), Status::SUCCESS);
    let (path, hidden) = (
        domain.test_dir.path("reservations"),
        domain.test_dir.path("hidden"),
    );
    fs::rename(&path, &hidden).unwrap();
    domain.kill();
    for name in ["a", "b"] {
        let why = domain.error(name).unwrap_or_default();
        assert!(why.contains("reservations"), "{name}: {why}");
    }
    assert!(!path.exists());
    fs::rename(&hidden, &path).unwrap();
    assert_eq!(write(&mut b, 1), Status::RESERVATION_CONFLICT);
    assert_eq!(write(&mut a, 1), Status::SUCCESS);
    drop((a, b));
    domain.daemon.end();
}

/// A disk that is unavailable for a while has its reservations in memory, and no other disk waits
/// for it.
#[test]
fn reservations_in_memory_wait_for_unavailable_volume() {
    reservations_wait(domain(|_| String::new(), &[]));
}

/// The reservations of a namespace stay with the keeper while another volume of the disk is
/// missing: the namespace was opened, and was not served.
#[test]
fn reservations_in_memory_wait_for_other_volume_of_disk() {
    let test_dir = TestDir::new();
    let file = test_dir.disk("disk.raw", 1 << 20);
    let second = format!("[[controller.namespace]]\nvolume = {file:?}\n");
    let disks = disks(&test_dir, "null://1M", &second);
    reservations_wait(Domain::start_in(test_dir, &disks, &[], &[]));
}

/// Moves `disk.raw` away while processes are killed, and checks the reservation on namespace 1 when
/// the file is back.
fn reservations_wait(domain: Domain) {
    let (mut a, mut b) = (domain.host("a"), domain.host("b"));
    assert_eq!(register_key(&mut a, 0xa), Status::SUCCESS);
    let acquire = NvmOpcode::RESERVATION_ACQUIRE;
    assert_eq!(reserve(&mut a, acquire, 1 << 8, [0xa, 0]), Status::SUCCESS);
    let (path, hidden) = (
        domain.test_dir.path("disk.raw"),
        domain.test_dir.path("hidden"),
    );
    fs::rename(&path, &hidden).unwrap();
    for _ in 0..2 {
        domain.kill();
        assert!(domain.error("a").is_some() && domain.error("b").is_some());
    }
    fs::rename(&hidden, &path).unwrap();
    assert_eq!(write(&mut b, 1), Status::RESERVATION_CONFLICT);
    assert_eq!(write(&mut a, 1), Status::SUCCESS);
    drop((a, b));
    domain.daemon.end();
}

/// Changes of shared zones have no order among the records of several controllers.
#[test]
fn subsystem_disks_with_zones_end_with_their_process() {
    let test_dir = TestDir::new();
    let config = test_dir.path("vnvme.toml");
    fs::write(
        &config,
        disks(&test_dir, "null://1M", "zone-size = \"64K\"\n"),
    )
    .unwrap();
    let config = text(&config);
    let args = ["serve", "--config", &config, "--keeper", "process"];
    let daemon = start(&test_dir, &args);
    eventually("it is said", || {
        let why = "will not outlive its process: it shares a namespace with zones";
        daemon.count(why) == 2
    });
    kill_serving(&daemon);
    eventually("the next one serves", || daemon.count("listening") >= 4);
    let mut a = Host::up(&test_dir.path("a.sock"));
    assert_eq!(write(&mut a, 2), Status::SUCCESS);
    drop(a);
    daemon.end();
}
