//! Disks of one subsystem: two guests on one namespace, fenced by reservations that outlast the
//! process.

use crate::common::*;
use control::{Client, ClientError};
use nvme::{Command, NvmOpcode, Status};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::FileExt;

/// Where the keys of reservation commands lie.
const AT_KEYS: u64 = 0x20_0000;

/// Two disks, `a` and `b`, on two workers.
fn config(place: &Place, disk: &str) -> String {
    let mut config = String::from("[process]\nworkers = 2\n");
    for (name, cntlid) in [("a", 1), ("b", 2)] {
        config += &format!(
            "[[controller]]\nname = \"{name}\"\nsocket = \"{}\"\nsubsystem = \"s\"\n\
             cntlid = {cntlid}\n[[controller.namespace]]\nvolume = \"{disk}\"\n\
             reservations = \"{}\"\n",
            text(&place.path(name)),
            text(&place.path("reservations")),
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
