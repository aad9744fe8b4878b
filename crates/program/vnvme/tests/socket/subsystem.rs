//! Disks of one subsystem: two guests on one namespace, fenced by reservations that survive the
//! process.
//!
//! `VNVME_FENCING_LOOPS` is the number of times that two guests fence each other (200),
//! `VNVME_CUTS` the number of power cuts below their reservations (10).

use crate::common::*;
use control::{Client, ClientError};
use fuse_disk::Random;
use nvme::{Command, NvmOpcode, Status};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Command as Program;
use std::time::Duration;

/// Where the keys of reservation commands lie.
const AT_KEYS: u64 = 0x20_0000;
/// Where Reservation Report writes.
const AT_REPORT: u64 = 0x30_0000;
/// Where the data of writes lie that are not waited for.
const AT_LATE: u64 = 0x40_0000;

/// Two disks, `a` and `b`, on two workers.
fn config(test_dir: &TestDir, disk: &str) -> String {
    let kept = format!(
        "reservations = {:?}\n",
        text(&test_dir.path("reservations"))
    );
    config_with(test_dir, disk, &kept)
}

/// Makes a configuration of two disks with more lines for the namespace.
fn config_with(test_dir: &TestDir, disk: &str, lines: &str) -> String {
    let mut config = String::from("[process]\nworkers = 2\n");
    for (name, cntlid) in [("a", 1), ("b", 2)] {
        config += &format!(
            "[[controller]]\nname = \"{name}\"\nsocket = {:?}\nsubsystem = \"s\"\n\
             cntlid = {cntlid}\n[[controller.namespace]]\nvolume = {disk:?}\n{lines}",
            text(&test_dir.path(name)),
        );
    }
    let file = test_dir.path("vnvme.toml");
    fs::write(&file, config).unwrap();
    text(&file)
}

pub fn reserve(host: &mut Host, opcode: NvmOpcode, cdw10: u32, keys: [u64; 2]) -> Status {
    let bytes = keys.map(u64::to_le_bytes);
    host.ram
        .write_all_at(bytes.as_flattened(), AT_KEYS)
        .unwrap();
    let mut command = Command::new(opcode.0, 0, 1);
    command.cdw10 = cdw10.into();
    command.set_prps(RAM_BASE + AT_KEYS, 0);
    host.run(1, command).status().without_flags()
}

/// Key 0 to `key`, and with PTPL.
pub fn register(host: &mut Host, key: u64) -> Status {
    reserve(host, NvmOpcode::RESERVATION_REGISTER, 3 << 30, [0, key])
}

/// Key 0 to `key`.
pub fn register_key(host: &mut Host, key: u64) -> Status {
    reserve(host, NvmOpcode::RESERVATION_REGISTER, 0, [0, key])
}

pub fn write(host: &mut Host, byte: u8) -> Status {
    host.write_with(1, 0, &[byte; 4096], false).without_flags()
}

fn up(test_dir: &TestDir) -> (Host, Host) {
    (Host::up(&test_dir.path("a")), Host::up(&test_dir.path("b")))
}

#[test]
fn reservation_fence_survives_kill() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let control = text(&test_dir.path("control"));
    let file = config(&test_dir, &disk);
    let args = ["serve", "--control", &control, "--config", &file];
    let daemon = Daemon::spawn(&args);
    daemon.wait_listening(&test_dir.path("b"));
    let (mut a, mut b) = up(&test_dir);
    let (one, two) = (a.identify_controller(), b.identify_controller());
    assert_eq!((one.cntlid.get(), two.cntlid.get()), (1, 2));
    assert_eq!((one.subnqn, one.sn), (two.subnqn, two.sn));
    let (one, two) = (a.identify_namespace(1), b.identify_namespace(1));
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!((one.nguid, one.eui64), (two.nguid, two.eui64));
    assert!(one.nmic.shrns() && one.rescap.ptpls());
    // The disks share the blocks.
    assert_eq!(write(&mut a, 1), Status::SUCCESS);
    assert_eq!(b.read(1, 0, 4096), [1; 4096]);
    assert_eq!(register(&mut a, 0xa), Status::SUCCESS);
    assert_eq!(register(&mut b, 0xb), Status::SUCCESS);
    let acquire = NvmOpcode::RESERVATION_ACQUIRE;
    assert_eq!(reserve(&mut b, acquire, 1 << 8, [0xb, 0]), Status::SUCCESS);
    assert_eq!(write(&mut a, 2), Status::RESERVATION_CONFLICT);
    assert_eq!(write(&mut b, 2), Status::SUCCESS);
    let fence = 1 << 8 | 2;
    assert_eq!(reserve(&mut a, acquire, fence, [0xa, 0xb]), Status::SUCCESS);
    assert_eq!(write(&mut b, 3), Status::RESERVATION_CONFLICT);
    assert_eq!(write(&mut a, 3), Status::SUCCESS);
    // A guest that reconnects is the same host.
    drop(b);
    let mut b = Host::up(&test_dir.path("b"));
    assert_eq!(write(&mut b, 4), Status::RESERVATION_CONFLICT);
    assert_eq!(b.read(1, 0, 4096), [3; 4096]);
    drop((a, b));
    daemon.signal(Signal::KILL);
    daemon.wait();
    let daemon = Daemon::spawn(&args);
    daemon.wait_listening(&test_dir.path("b"));
    let (mut a, mut b) = up(&test_dir);
    assert_eq!(write(&mut b, 5), Status::RESERVATION_CONFLICT);
    assert_eq!(write(&mut a, 5), Status::SUCCESS);
    let clear = NvmOpcode::RESERVATION_RELEASE;
    assert_eq!(
        reserve(&mut a, clear, 1 << 8 | 1, [0xa, 0]),
        Status::SUCCESS
    );
    assert_eq!(write(&mut b, 6), Status::SUCCESS);
    drop((a, b));
    daemon.end();
    // The file is of this namespace, and no other.
    let other = test_dir.disk("other.raw", 1 << 20);
    let file = config(&test_dir, &other);
    let ended = Daemon::spawn(&["serve", "--control", &control, "--config", &file]).wait();
    assert_eq!(ended.status.code(), Some(1));
    let last = ended.log.last().unwrap();
    assert!(last.contains("belongs to another namespace"), "{last}");
}

/// Two guests fence each other in turn, each while the other one is writing. Once that command has
/// completed, no write of the fenced guest reaches the disk: neither later ones nor those in
/// flight.
#[test]
fn reservation_fence_holds_across_connections() {
    const LATE: usize = 4;
    let loops = std::env::var("VNVME_FENCING_LOOPS");
    let loops = loops.map_or(200, |loops| loops.parse::<u64>().unwrap());
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let file = config_with(&test_dir, &disk, "");
    let daemon = Daemon::spawn(&["serve", "--config", &file]);
    daemon.wait_listening(&test_dir.path("b"));
    let (a, b) = up(&test_dir);
    let mut hosts = [a, b];
    let (acquire, release) = (
        NvmOpcode::RESERVATION_ACQUIRE,
        NvmOpcode::RESERVATION_RELEASE,
    );
    let (mut executed, mut refused, mut in_flight) = (0u64, 0u64, 0u64);
    for turn in 0..loops {
        let [first, second] = &mut hosts;
        let (fencing, fenced) = match turn % 2 {
            0 => (first, second),
            _ => (second, first),
        };
        let (key, victim) = (2 * turn + 1, 2 * turn + 2);
        let rtype = (turn % 6 + 1) as u32;
        let (late, mine) = ((turn % 100) as u8 + 1, (turn % 100) as u8 + 101);
        assert_eq!(register_key(fencing, key), Status::SUCCESS, "turn {turn}");
        assert_eq!(register_key(fenced, victim), Status::SUCCESS, "turn {turn}");
        let held = reserve(fenced, acquire, rtype << 8, [victim, 0]);
        assert_eq!(held, Status::SUCCESS, "turn {turn}");
        fenced.ram.write_all_at(&[late; 4096], AT_LATE).unwrap();
        for _ in 0..LATE {
            let write = fenced.transfer(NvmOpcode::WRITE, 1, 0, 4096, AT_LATE);
            fenced.submit(1, write);
        }
        // All registrants hold reservations of the last two types: 0 stands for the other
        // registrants.
        let whom = if rtype > 4 { 0 } else { victim };
        let keys = [key, whom].map(u64::to_le_bytes);
        fencing
            .ram
            .write_all_at(keys.as_flattened(), AT_KEYS)
            .unwrap();
        let mut fence = Command::new(acquire.0, 0, 1);
        fence.cdw10 = (2 | rtype << 8).into();
        fence.set_prps(RAM_BASE + AT_KEYS, 0);
        let cid = fencing.submit(1, fence);
        let mut ended = Vec::new();
        ended.extend(fenced.try_completion(1));
        in_flight += (LATE - ended.len()) as u64;
        let done = fencing.completion(1);
        assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
        // Whatever was to come has come.
        assert_eq!(write(fencing, mine), Status::SUCCESS, "turn {turn}");
        while ended.len() < LATE {
            ended.push(fenced.completion(1));
        }
        for completion in ended {
            match completion.status().without_flags() {
                Status::SUCCESS => executed += 1,
                Status::RESERVATION_CONFLICT => refused += 1,
                other => panic!("turn {turn}: {other}"),
            }
        }
        assert_eq!(
            write(fenced, late),
            Status::RESERVATION_CONFLICT,
            "turn {turn}"
        );
        assert!(fencing.read(1, 0, 4096) == [mine; 4096], "turn {turn}");
        let read = fenced.transfer(NvmOpcode::READ, 1, 0, 4096, AT_LATE);
        let read = fenced.run(1, read).status().without_flags();
        let expected = match rtype % 2 {
            0 => Status::RESERVATION_CONFLICT,
            _ => Status::SUCCESS,
        };
        assert_eq!(read, expected, "turn {turn}");
        let clear = reserve(fencing, release, 1, [key, 0]);
        assert_eq!(clear, Status::SUCCESS, "turn {turn}");
        assert_eq!(write(fenced, late), Status::SUCCESS, "turn {turn}");
    }
    println!(
        "{loops} fences over two connections: {in_flight} writes of the fenced one were not over \
         when it was fenced, {executed} were executed before the fence completed, {refused} \
         refused; none came later"
    );
    assert!(in_flight > 0);
    drop(hosts);
    daemon.end();
}

#[test]
fn subsystem_disks_cannot_change_under_daemon() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let control = text(&test_dir.path("control"));
    let file = config(&test_dir, &disk);
    let allow = text(test_dir.path("x").parent().unwrap());
    let daemon = Daemon::spawn(&[
        "daemon",
        "--control",
        &control,
        "--allow",
        &allow,
        "--config",
        &file,
    ]);
    let client = Client::new(vec![test_dir.path("control")]).unwrap();
    eventually("it answers", || client.disks().is_ok());
    let refused = |result: Result<(), ClientError>| {
        let error = result.expect_err("it is refused").to_string();
        assert!(error.contains("is in a subsystem"), "{error}");
    };
    let json = |text: &str| -> serde_json::Map<String, serde_json::Value> {
        serde_json::from_str(text).unwrap()
    };
    let namespace = json(r#"{"volume": "mem://1M"}"#);
    refused(client.attach("a", &namespace).map(|_| ()));
    refused(client.detach("a", 1));
    let socket = text(&test_dir.path("c"));
    let third = json(&format!(
        r#"{{"socket": "{socket}", "subsystem": "s", "cntlid": 3,
            "namespace": [{{"volume": "{disk}"}}]}}"#
    ));
    let add = client.add(control::api::DiskKind::Controller, third);
    refused(add.map(|_| ()));
    // The removal of a disk leaves the other disks their shared namespace.
    let mut b = Host::up(&test_dir.path("b"));
    client.remove("a", false).unwrap();
    assert_eq!(write(&mut b, 1), Status::SUCCESS);
    drop(b);
    daemon.end();
}

/// Runs `vnvme` with these words: returns its output, or its error.
pub fn vnvme(control: &str, words: &[&str]) -> Result<String, String> {
    let output = Program::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(words)
        .env("VNVME_CONTROL", control)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stderr))
    }
}

/// Paths are changed by hand, and by a configuration that is read again.
#[test]
fn ana_states_change_under_load() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let control = text(&test_dir.path("control"));
    let lines = "ana-group = 2\n[[controller.namespace]]\nvolume = \"mem://1M\"\n";
    let file = config_with(&test_dir, &disk, lines);
    let allow = text(test_dir.path("x").parent().unwrap());
    let args = ["daemon", "--control", &control, "--allow", &allow];
    let daemon = Daemon::spawn(&[&args[..], &["--config", &file]].concat());
    daemon.wait_listening(&test_dir.path("b"));
    let json = |words: &[&str]| -> serde_json::Value {
        let said = vnvme(&control, &[words, &["--json"]].concat()).unwrap();
        serde_json::from_str(&said).unwrap()
    };
    let states = || {
        let told = json(&["ana"]);
        let told = told.as_array().unwrap().iter().map(|one| {
            let nsids = one["nsids"].as_array().unwrap().len();
            assert_eq!((&one["subsystem"], nsids), (&"s".into(), 1));
            let text = |key: &str| one[key].as_str().unwrap().to_owned();
            format!("{} {} {}", text("disk"), one["group"], text("state"))
        });
        told.collect::<Vec<_>>().join(", ")
    };
    let all = "a 1 optimized, a 2 optimized, b 1 optimized, b 2 optimized";
    assert_eq!(states(), all);
    let (mut a, mut b) = up(&test_dir);
    let one = a.identify_namespace(1).unwrap();
    let two = a.identify_namespace(2).unwrap();
    assert_eq!((one.anagrpid.get(), two.anagrpid.get()), (2, 1));
    assert_eq!(write(&mut a, 1), Status::SUCCESS);
    let told = json(&["ana", "a", "--set", "inaccessible", "--group", "2"]);
    assert_eq!(told[0]["state"], "inaccessible", "{told}");
    assert_eq!(told.as_array().unwrap().len(), 1);
    assert_eq!(write(&mut a, 2), Status::ANA_INACCESSIBLE);
    assert_eq!(a.read(2, 0, 4096), [0; 4096], "of another group");
    assert_eq!(write(&mut b, 3), Status::SUCCESS);
    let told = json(&["ana", "a", "--set", "persistent-loss"]);
    assert_eq!(told.as_array().unwrap().len(), 2, "{told}");
    assert_eq!(write(&mut a, 2), Status::ANA_PERSISTENT_LOSS);
    let told = json(&["show", "a"]);
    assert_eq!(told["namespaces"][0]["ana_group"], 2, "{told}");
    assert_eq!(told["namespaces"][0]["ana_state"], "persistent-loss");
    let shown = vnvme(&control, &["show", "a"]).unwrap();
    let line = "namespace 2 in ANA group 1: persistent-loss";
    assert!(shown.contains(line), "{shown}");
    let saved = vnvme(&control, &["save"]).unwrap();
    assert_eq!(saved.matches("ana-state = \"persistent-loss\"").count(), 2);
    // A file that has not changed leaves the states as they were set.
    vnvme(&control, &["reload"]).unwrap();
    assert_eq!(
        states(),
        all.replace(
            "a 1 optimized, a 2 optimized",
            "a 1 persistent-loss, a 2 persistent-loss"
        )
    );
    vnvme(&control, &["ana", "a", "--set", "optimized"]).unwrap();
    assert_eq!(states(), all);
    assert_eq!(write(&mut a, 4), Status::SUCCESS);
    let other = fs::read_to_string(&file).unwrap();
    let other = other.replacen("ana-group = 2", "ana-group = 2\nana-state = \"change\"", 1);
    fs::write(&file, other).unwrap();
    vnvme(&control, &["reload"]).unwrap();
    assert_eq!(states(), all.replacen("a 2 optimized", "a 2 change", 1));
    assert_eq!(write(&mut a, 5), Status::ANA_TRANSITION);
    let plain = vnvme(&control, &["ana", "a", "--set", "non-optimized"]).unwrap();
    assert!(plain.contains("SUBSYSTEM") && plain.contains("non-optimized"));
    assert_eq!(write(&mut a, 6), Status::SUCCESS);
    assert_eq!(b.read(1, 0, 4096), [6; 4096]);
    for (words, why) in [
        (&["ana", "c"][..], "no disk is called \"c\""),
        (&["ana", "a", "--group", "3"], "its groups are 1, 2"),
        (&["ana", "a", "--group", "33"], "32"),
        (&["ana", "--set", "optimized"], "NAME"),
        (&["ana", "a", "--set", "sideways"], "persistent-loss"),
    ] {
        let said = vnvme(&control, words).unwrap_err();
        assert!(said.contains(why), "{words:?}: {said}");
    }
    vnvme(
        &control,
        &[
            "add",
            "controller",
            "mem://1M",
            &format!("socket={}", text(&test_dir.path("alone"))),
        ],
    )
    .unwrap();
    let said = vnvme(&control, &["ana", "alone", "--set", "change"]).unwrap_err();
    assert!(said.contains("\"alone\" is in no subsystem"), "{said}");
    drop((a, b));
    daemon.end();
}

/// The registrants' keys, by their controllers, as Reservation Report has them.
fn keys(host: &mut Host) -> Vec<(u16, u64)> {
    let mut command = Command::new(NvmOpcode::RESERVATION_REPORT.0, 0, 1);
    command.cdw10 = (4096 / 4 - 1).into();
    command.cdw11 = 1.into(); // the extended data structure
    command.set_prps(RAM_BASE + AT_REPORT, 0);
    assert_eq!(host.run(1, command).status(), Status::SUCCESS);
    let mut report = [0; 4096];
    host.ram.read_exact_at(&mut report, AT_REPORT).unwrap();
    let registrants = report[64..].chunks_exact(64).take(report[5].into());
    let mut keys: Vec<(u16, u64)> = registrants
        .map(|one| {
            let key = one[8..16].try_into().unwrap();
            (
                u16::from_le_bytes([one[0], one[1]]),
                u64::from_le_bytes(key),
            )
        })
        .collect();
    keys.sort_unstable();
    keys
}

/// The process is killed and the power is cut while hosts register with PTPL. Completed
/// registrations are there afterwards, and the process starts with the file that it finds.
#[test]
fn reservation_survives_power_loss() {
    let said = std::env::var("VNVME_CUTS").ok();
    let cuts = said.map_or(10, |said| said.parse::<u64>().unwrap());
    let test_dir = TestDir::new();
    let test = "subsystem::reservation_survives_power_loss";
    let Some(below) = breaking(test, &test_dir, 32 << 10) else {
        return;
    };
    let disk = test_dir.disk("disk.raw", 1 << 20);
    // The failing disk's file system makes no files, so a file of another process is copied there.
    let made = Daemon::spawn(&["serve", "--config", &config(&test_dir, &disk)]);
    made.wait_listening(&test_dir.path("b"));
    made.end();
    let file = fs::File::options().write(true).open(below.path()).unwrap();
    let bytes = fs::read(test_dir.path("reservations")).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let kept = format!("reservations = {:?}\n", text(&below.path()));
    let config = config_with(&test_dir, &disk, &kept);
    let mut random = Random::new(0x907e);
    // Keys of each controller: the completed one, and the one in flight at a cut.
    let mut answered = [0u64, 0];
    let mut doubtful = [None, None];
    let (mut all, mut in_doubt) = (0, 0);
    for cut in 0..=cuts {
        let daemon = Daemon::spawn(&["serve", "--config", &config]);
        daemon.wait_listening(&test_dir.path("b"));
        let (a, b) = up(&test_dir);
        let mut hosts = [a, b];
        let found = keys(&mut hosts[0]);
        for (at, cntlid) in [1, 2].into_iter().enumerate() {
            let key = found.iter().find(|(of, _)| *of == cntlid);
            let key = key.map_or(0, |(_, key)| *key);
            let doubtful = doubtful[at].take();
            let is_newer = Some(key) == doubtful;
            assert!(
                key == answered[at] || is_newer,
                "cut {cut}: {key:#x}, and neither {:#x} nor {doubtful:x?}",
                answered[at]
            );
            in_doubt += u64::from(is_newer);
            answered[at] = key;
        }
        if cut == cuts {
            drop(hosts);
            daemon.end();
            break;
        }
        below.cut_after(random.below(30), Random::new(random.number()));
        loop {
            let at = random.below(2) as usize;
            let key = 1 + random.below(u64::MAX - 1);
            let replace = NvmOpcode::RESERVATION_REGISTER;
            // Replace, whatever the key was (IEKEY), and with PTPL.
            let cdw10 = 3 << 30 | 1 << 3 | 2;
            if !reserve(&mut hosts[at], replace, cdw10, [0, key]).is_success() {
                doubtful[at] = Some(key);
                break;
            }
            answered[at] = key;
            all += 1;
        }
        let is_cut = below.wait_cut(Duration::from_secs(20)).is_some();
        assert!(is_cut, "a command failed with the power on");
        daemon.signal(Signal::KILL);
        daemon.wait();
        drop(hosts);
        below.power_on();
    }
    eprintln!("{cuts} cuts, {all} registrations answered, {in_doubt} found that were under way");
}
