//! Disks of one subsystem: two guests on one namespace, fenced by reservations that outlast the
//! process.
//!
//! `VNVME_FENCING_LOOPS` says how often two guests fence each other (200).

use crate::common::*;
use control::{Client, ClientError};
use nvme::{Command, NvmOpcode, Status};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::FileExt;

/// Where the keys of reservation commands lie.
const AT_KEYS: u64 = 0x20_0000;
/// Where the data of writes lie that are not waited for.
const AT_LATE: u64 = 0x40_0000;

/// Two disks, `a` and `b`, on two workers.
fn config(place: &Place, disk: &str) -> String {
    let kept = format!("reservations = {:?}\n", text(&place.path("reservations")));
    config_with(place, disk, &kept)
}

/// The same, with more lines for the namespace.
fn config_with(place: &Place, disk: &str, lines: &str) -> String {
    let mut config = String::from("[process]\nworkers = 2\n");
    for (name, cntlid) in [("a", 1), ("b", 2)] {
        config += &format!(
            "[[controller]]\nname = \"{name}\"\nsocket = {:?}\nsubsystem = \"s\"\n\
             cntlid = {cntlid}\n[[controller.namespace]]\nvolume = {disk:?}\n{lines}",
            text(&place.path(name)),
        );
    }
    let file = place.path("vnvme.toml");
    fs::write(&file, config).unwrap();
    text(&file)
}

fn reserve(host: &mut Host, opcode: NvmOpcode, cdw10: u32, keys: [u64; 2]) -> Status {
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
fn register(host: &mut Host, key: u64) -> Status {
    reserve(host, NvmOpcode::RESERVATION_REGISTER, 3 << 30, [0, key])
}

/// Key 0 to `key`.
fn register_key(host: &mut Host, key: u64) -> Status {
    reserve(host, NvmOpcode::RESERVATION_REGISTER, 0, [0, key])
}

fn write(host: &mut Host, byte: u8) -> Status {
    host.write_with(1, 0, &[byte; 4096], false).without_flags()
}

fn up(place: &Place) -> (Host, Host) {
    (Host::up(&place.path("a")), Host::up(&place.path("b")))
}

#[test]
fn a_fence_holds_through_a_kill() {
    let place = Place::new();
    let disk = place.disk("disk.raw", 1 << 20);
    let control = text(&place.path("control"));
    let file = config(&place, &disk);
    let args = ["serve", "--control", &control, "--config", &file];
    let daemon = Daemon::spawn(&args);
    daemon.wait_listening(&place.path("b"));
    let (mut a, mut b) = up(&place);
    let (one, two) = (a.identify_controller(), b.identify_controller());
    assert_eq!((one.cntlid.get(), two.cntlid.get()), (1, 2));
    assert_eq!((one.subnqn, one.sn), (two.subnqn, two.sn));
    let (one, two) = (a.identify_namespace(1), b.identify_namespace(1));
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!((one.nguid, one.eui64), (two.nguid, two.eui64));
    assert!(one.nmic.shrns() && one.rescap.ptpls());
    // They share the blocks.
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
    // A guest that comes back is the same host.
    drop(b);
    let mut b = Host::up(&place.path("b"));
    assert_eq!(write(&mut b, 4), Status::RESERVATION_CONFLICT);
    assert_eq!(b.read(1, 0, 4096), [3; 4096]);
    drop((a, b));
    daemon.signal(Signal::KILL);
    daemon.wait();
    let daemon = Daemon::spawn(&args);
    daemon.wait_listening(&place.path("b"));
    let (mut a, mut b) = up(&place);
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
    let other = place.disk("other.raw", 1 << 20);
    let file = config(&place, &other);
    let ended = Daemon::spawn(&["serve", "--control", &control, "--config", &file]).wait();
    assert_eq!(ended.status.code(), Some(1));
    let last = ended.log.last().unwrap();
    assert!(last.contains("reservations of another namespace"), "{last}");
}

/// Each fences the other in turn, which is writing at that time. From the end of that command on
/// nothing of the other one reaches the disk: neither what it sends then, nor what it has sent.
#[test]
fn a_fence_holds_over_two_connections() {
    const LATE: usize = 4;
    let loops = std::env::var("VNVME_FENCING_LOOPS");
    let loops = loops.map_or(200, |loops| loops.parse::<u64>().unwrap());
    let place = Place::new();
    let disk = place.disk("disk.raw", 1 << 20);
    let file = config_with(&place, &disk, "");
    let daemon = Daemon::spawn(&["serve", "--config", &file]);
    daemon.wait_listening(&place.path("b"));
    let (a, b) = up(&place);
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
        // All registrants hold those of the last two types: 0 means the others.
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

/// It goes on with the keeper as without: the disk ends with its process, and what was fenced is
/// fenced in the next one.
#[test]
fn disks_of_a_subsystem_end_with_their_process() {
    let place = Place::new();
    let disk = place.disk("disk.raw", 1 << 20);
    let file = config(&place, &disk);
    let daemon = crate::keeper::start(&place, &["serve", "--config", &file, "--keeper", "process"]);
    let (mut a, mut b) = up(&place);
    eventually("it is said", || {
        daemon.count("will not outlive its process: it is in a subsystem") == 2
    });
    assert_eq!(register(&mut a, 0xa), Status::SUCCESS);
    let held = reserve(&mut a, NvmOpcode::RESERVATION_ACQUIRE, 1 << 8, [0xa, 0]);
    assert_eq!(held, Status::SUCCESS);
    assert_eq!(write(&mut b, 1), Status::RESERVATION_CONFLICT);
    assert_eq!(write(&mut a, 1), Status::SUCCESS);
    crate::keeper::kill_serving(&daemon);
    drop((a, b));
    eventually("the next one serves", || daemon.count("listening") >= 4);
    let (mut a, mut b) = up(&place);
    assert_eq!(write(&mut b, 2), Status::RESERVATION_CONFLICT);
    assert_eq!(write(&mut a, 2), Status::SUCCESS);
    drop((a, b));
    daemon.end();
}

#[test]
fn disks_of_a_subsystem_do_not_change_under_a_daemon() {
    let place = Place::new();
    let disk = place.disk("disk.raw", 1 << 20);
    let control = text(&place.path("control"));
    let file = config(&place, &disk);
    let allow = text(place.path("x").parent().unwrap());
    let daemon = Daemon::spawn(&[
        "daemon",
        "--control",
        &control,
        "--allow",
        &allow,
        "--config",
        &file,
    ]);
    let client = Client::new(vec![place.path("control")]).unwrap();
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
    let socket = text(&place.path("c"));
    let third = json(&format!(
        r#"{{"socket": "{socket}", "subsystem": "s", "cntlid": 3,
            "namespace": [{{"volume": "{disk}"}}]}}"#
    ));
    let add = client.add(control::api::DiskKind::Controller, third);
    refused(add.map(|_| ()));
    // One that is removed leaves the others what they share.
    let mut b = Host::up(&place.path("b"));
    client.remove("a", false).unwrap();
    assert_eq!(write(&mut b, 1), Status::SUCCESS);
    drop(b);
    daemon.end();
}
