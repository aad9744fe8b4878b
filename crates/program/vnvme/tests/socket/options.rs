//! Options of the command line and the configuration file, and their effects.

use std::fs;

use nvme::{Command, NvmOpcode, Status};
use vfio_user::client::Client;

use crate::common::*;

/// The first LBA format in use, as a number of bytes.
fn block_size(host: &mut Host, nsid: u32) -> u64 {
    let namespace = host.identify_namespace(nsid).unwrap();
    let format = usize::from(namespace.flbas.into_bits() & 15);
    1 << namespace.lbaf[format].lbads
}

#[test]
fn read_only_disk_is_never_written() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let before = pattern(3, 4096);
    fs::OpenOptions::new()
        .write(true)
        .open(&disk)
        .and_then(|file| std::os::unix::fs::FileExt::write_all_at(&file, &before, 4096))
        .unwrap();
    let daemon = Daemon::serve(&test_dir, &["--read-only", &disk]);
    let mut host = Host::up(&test_dir.socket());
    assert!(host.read(1, 8, 4096) == before);
    let status = host.write_with(1, 8, &[0; 512], false);
    assert!(status.is(Status::NAMESPACE_WRITE_PROTECTED), "{status:?}");
    let mut zeroes = Command::new(NvmOpcode::WRITE_ZEROES.0, 0, 1);
    zeroes.set_slba(8);
    let status = host.run(1, zeroes).status();
    assert!(status.is(Status::NAMESPACE_WRITE_PROTECTED), "{status:?}");
    host.flush(1);
    drop(host);
    daemon.end();
    assert!(test_dir.bytes("disk.raw", 4096, 4096) == before);
}

#[test]
fn block_size_option_sets_4_kib_blocks() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let daemon = Daemon::serve(&test_dir, &["--block-size", "4096", &disk]);
    let mut host = Host::up(&test_dir.socket());
    assert_eq!(block_size(&mut host, 1), 4096);
    assert_eq!(host.identify_namespace(1).unwrap().nsze.get(), 256);
    host.block = 4096;
    let data = pattern(4, 8192);
    host.write(1, 254, &data);
    assert!(host.read(1, 254, 8192) == data);
    drop(host);
    daemon.end();
    assert!(test_dir.bytes("disk.raw", 254 * 4096, 8192) == data);
}

#[test]
fn several_volumes_become_namespaces() {
    let test_dir = TestDir::new();
    let [a, b] = ["a.raw", "b.raw"].map(|name| test_dir.disk(name, 1 << 20));
    let b = format!("{b}?nsid=5&block-size=4096");
    let daemon = Daemon::serve(&test_dir, &[&a, &b, "mem://2M?read-only=on", "null://1T"]);
    let mut host = Host::up(&test_dir.socket());
    let sizes: Vec<Option<u64>> = (1..=6)
        .map(|nsid| {
            host.identify_namespace(nsid)
                .ok()
                .map(|namespace| namespace.nsze.get())
                .filter(|size| *size > 0)
        })
        .collect();
    assert_eq!(
        sizes,
        [Some(2048), None, Some(4096), Some(1 << 31), Some(256), None]
    );
    host.write(1, 0, &pattern(1, 4096));
    host.block = 4096;
    host.write(5, 0, &pattern(2, 4096));
    // Without an NSID of their own, namespaces are numbered by position.
    host.block = 512;
    assert!(host.read(1, 0, 4096) == pattern(1, 4096));
    let status = host.write_with(3, 0, &[0; 512], false);
    assert!(status.is(Status::NAMESPACE_WRITE_PROTECTED), "{status:?}");
    host.write(4, 1 << 30, &[1; 512]);
    drop(host);
    daemon.end();
    assert!(test_dir.bytes("a.raw", 0, 4096) == pattern(1, 4096));
    assert!(test_dir.bytes("b.raw", 0, 4096) == pattern(2, 4096));
}

#[test]
fn identity_is_stable_or_configured() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let identity = |args: &[&str]| {
        let daemon = Daemon::serve(&test_dir, args);
        let mut host = Host::up(&test_dir.socket());
        let controller = host.identify_controller();
        let namespace = host.identify_namespace(1).unwrap();
        drop(host);
        daemon.end();
        let texts = [&controller.sn.0[..], &controller.mn.0, &controller.fr.0]
            .map(|field| String::from_utf8_lossy(field).trim_end().to_owned());
        (texts, namespace.nguid, namespace.eui64)
    };
    let first = identity(&[&disk]);
    assert_eq!(identity(&[&disk]), first);
    assert!(first.0.iter().all(|text| !text.is_empty()) && first.1 != [0; 16]);
    let volume = format!("{disk}?nguid=00112233445566778899aabbccddeeff&eui64=0011223344556677");
    let asked = identity(&[
        "--serial",
        "S1",
        "--model",
        "M 1",
        "--firmware",
        "F1",
        &volume,
    ]);
    assert_eq!(asked.0, ["S1", "M 1", "F1"]);
    assert_eq!(asked.1[..4], [0x00, 0x11, 0x22, 0x33]);
    assert_eq!(asked.2, [0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77]);
}

#[test]
fn configuration_serves_two_controllers() {
    let test_dir = TestDir::new();
    let [a, b] = ["a.raw", "b.raw"].map(|name| test_dir.disk(name, 4 << 20));
    let sockets = ["a.sock", "b.sock"].map(|name| test_dir.path(name));
    let config = test_dir.path("vnvme.toml");
    for extra in [&[][..], &["--workers", "2"]] {
        let content = format!(
            "[[controller]]\nsocket = \"{}\"\nserial = \"A\"\n[[controller.namespace]]\nvolume = \"{a}\"\n\
             [[controller]]\nsocket = \"{}\"\nserial = \"B\"\n[[controller.namespace]]\nvolume = \"{b}\"\n\
             block-size = 4096\n",
            text(&sockets[0]),
            text(&sockets[1]),
        );
        fs::write(&config, content).unwrap();
        let config = text(&config);
        let mut args = vec!["serve", "--config", &config];
        args.extend(extra);
        let daemon = Daemon::spawn(&args);
        sockets
            .iter()
            .for_each(|socket| daemon.wait_listening(socket));

        // Each from a thread of its own: they are served side by side.
        std::thread::scope(|scope| {
            for (seed, socket) in (0..).zip(&sockets) {
                scope.spawn(move || {
                    let mut host = Host::up(socket);
                    host.block = block_size(&mut host, 1) as usize;
                    assert_eq!(host.identify_controller().sn.0[0], b'A' + seed as u8);
                    for round in 0..50 {
                        let data = pattern(seed * 1000 + round, 16 << 10);
                        host.write(1, round, &data);
                        assert!(host.read(1, round, data.len()) == data);
                    }
                    let last = pattern(seed, 16 << 10);
                    host.write(1, 0, &last);
                });
            }
        });
        // The end of one client does not affect the other.
        let mut host = Host::up(&sockets[0]);
        leave(Client::connect(&sockets[1], WAIT_TIMEOUT).unwrap());
        assert!(host.read(1, 0, 16 << 10) == pattern(0, 16 << 10));
        drop(host);
        daemon.end();
        assert!(sockets.iter().all(|socket| !socket.exists()));
        assert!(test_dir.bytes("a.raw", 0, 16 << 10) == pattern(0, 16 << 10));
        assert!(test_dir.bytes("b.raw", 0, 16 << 10) == pattern(1, 16 << 10));
    }
}

#[test]
fn serve_help_explains_guest_setup() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["serve", "--help"])
        .output()
        .unwrap();
    assert!(output.status.success());
    let help = String::from_utf8(output.stdout).unwrap();
    for word in [
        "vfio-user-pci",
        "share=on",
        "truncate",
        "--read-only",
        "null://",
        "--user-device",
    ] {
        assert!(help.contains(word), "{word}");
    }
}

/// A volume that another process serves is shown, without its lock.
#[test]
fn info_shows_file_that_is_served() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 3 << 20);
    let daemon = Daemon::serve(&test_dir, &[&disk]);
    let info = |more: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_vnvme"));
        let output = command.args(["info", &disk]).args(more).output().unwrap();
        let (shown, said) = (output.stdout, String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success(), "{said}");
        String::from_utf8(shown).unwrap()
    };
    let shown = info(&[]);
    assert!(shown.starts_with(&disk), "{shown}");
    assert!(
        shown.contains("  3 MiB (3145728 bytes), blocks of "),
        "{shown}"
    );
    let json: serde_json::Value = serde_json::from_str(&info(&["--json"])).unwrap();
    assert_eq!(
        (&json["url"], &json["bytes"]),
        (&disk.clone().into(), &(3 << 20).into())
    );
    daemon.end();
}
