//! A device below: suspended and resumed by the control socket, and resized.

use std::os::unix::fs::FileExt;
use std::process::Command;

use nvme::aen::{AsyncEvent, Notice};
use nvme::feature::{AsyncEventConfig, Fid};
use nvme::log::Lid;
use nvme::{AdminOpcode, NvmOpcode, Status};

use crate::common::*;

/// Guest memory that nothing else is in.
const AT: u64 = RAM_SIZE - (1 << 20);

fn vnvme(args: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
    let output = command.args(args).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

fn json(args: &[&str]) -> serde_json::Value {
    let (good, text) = vnvme(&[args, &["--json"]].concat());
    assert!(good, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// A device below with a disk of 8 MiB, and a controller above with a part of it.
fn two(test_dir: &TestDir, options: &str) -> (Daemon, Daemon, String) {
    let disk = test_dir.disk("disk.raw", 8 << 20);
    let socket = text(&test_dir.path("below.sock"));
    let lower = Daemon::spawn(&["serve", "--socket", &socket, &disk]);
    lower.wait_listening(socket.as_ref());
    let control = text(&test_dir.path("control.sock"));
    let url = format!("vfio-user://{socket}/1?{options}");
    let upper = Daemon::serve(test_dir, &["--control", &control, &url]);
    (lower, upper, control)
}

#[test]
fn suspended_device_keeps_commands_until_resumed() {
    for options in [
        "offset=4M&path=direct",
        "offset=4M&path=generic",
        "offset=4M&weight=10",
    ] {
        let test_dir = TestDir::new();
        let (lower, upper, control) = two(&test_dir, options);
        let mut host = Host::up(&test_dir.socket());
        host.write(1, 0, &pattern(1, 4096));

        let device = format!("vfio-user://{}", text(&test_dir.path("below.sock")));
        let (good, text) = vnvme(&["resume", "--control", &control, &device]);
        assert!(!good && text.contains("is not suspended"), "{text}");
        let (good, text) = vnvme(&["suspend", "--control", &control, "below.sock"]);
        assert!(
            !good && text.contains("no device is called") && text.contains(&device),
            "{text}"
        );
        assert_eq!(
            json(&["suspend", "--control", &control, &device])["state"],
            "suspended"
        );
        // By its address, too.
        let address = device.strip_prefix("vfio-user://").unwrap();
        let (good, text) = vnvme(&["suspend", "--control", &control, address]);
        assert!(!good && text.contains("suspended already"), "{text}");

        host.ram.write_all_at(&pattern(2, 4096), AT).unwrap();
        let write = host.transfer(NvmOpcode::WRITE, 1, 8, 4096, AT);
        host.submit(1, write);
        assert_eq!(
            json(&["stats", "--control", &control])["devices"][0]["state"],
            "suspended"
        );
        assert!(host.try_completion(1).is_none(), "{options}");
        let zeroes = |bytes: Vec<u8>| bytes.iter().all(|byte| *byte == 0);
        assert!(zeroes(test_dir.bytes("disk.raw", (4 << 20) + 4096, 4096)));

        assert_eq!(
            json(&["resume", "--control", &control, &device])["state"],
            "live"
        );
        assert!(host.completion(1).status().is_success(), "{options}");
        assert!(test_dir.bytes("disk.raw", (4 << 20) + 4096, 4096) == pattern(2, 4096));
        assert!(host.read(1, 0, 4096) == pattern(1, 4096));
        drop(host);
        upper.end();
        lower.end();
    }
}

#[test]
fn suspend_without_devices_is_refused() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let daemon = Daemon::serve(&test_dir, &["--control", &control, "mem://1M"]);
    let (good, text) = vnvme(&["suspend", "--control", &control, "x"]);
    assert!(
        !good && text.contains("this process drives no device"),
        "{text}"
    );
    daemon.end();
}

/// Enables the events about changed namespaces.
fn expect_news(host: &mut Host) {
    let mut command = nvme::Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    command.cdw10 = u32::from(Fid::ASYNC_EVENT_CONFIG.0).into();
    command.cdw11 = AsyncEventConfig::new().with_nan(true).into_bits().into();
    assert!(host.run(0, command).status().is_success());
    host.submit(
        0,
        nvme::Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0),
    );
}

/// Waits for the news, and reads which namespaces they are about.
fn changed_namespaces(host: &mut Host) -> Vec<u8> {
    let news = AsyncEvent::notice(
        Notice::NAMESPACE_ATTRIBUTE_CHANGED,
        Lid::CHANGED_NAMESPACE_LIST,
    );
    assert_eq!(host.completion(0).dw0.get(), news.into_bits());
    let mut log = nvme::Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, u32::MAX);
    log.cdw10 = (u32::from(Lid::CHANGED_NAMESPACE_LIST.0) | 1 << 16).into();
    log.set_prps(RAM_BASE + AT, 0);
    assert!(host.run(0, log).status().is_success());
    let mut list = vec![0; 8];
    host.ram.read_exact_at(&mut list, AT).unwrap();
    list
}

#[test]
fn slice_without_length_follows_file_size() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 8 << 20);
    let (short, long) = (format!("{disk}?length=4M"), format!("{disk}?offset=4M"));
    let daemon = Daemon::serve(&test_dir, &[&short, &long]);
    let mut host = Host::up(&test_dir.socket());
    let file = std::fs::OpenOptions::new().write(true).open(&disk).unwrap();
    let beyond = |host: &mut Host, nsid: u32, blocks: u64| {
        let status = host.write_with(nsid, blocks - 1, &[0xee; 1024], false);
        assert!(status.is(Status::LBA_OUT_OF_RANGE), "{status:?}");
    };
    let sizes =
        |host: &mut Host| [1, 2].map(|nsid| host.identify_namespace(nsid).unwrap().nsze.get());

    expect_news(&mut host);
    file.set_len(12 << 20).unwrap();
    assert_eq!(changed_namespaces(&mut host), [2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(sizes(&mut host), [4 << 11, 8 << 11]);
    host.write(2, (8 << 11) - 8, &pattern(1, 4096));
    assert!(test_dir.bytes("disk.raw", (12 << 20) - 4096, 4096) == pattern(1, 4096));
    beyond(&mut host, 1, 4 << 11);
    beyond(&mut host, 2, 8 << 11);

    expect_news(&mut host);
    file.set_len(6 << 20).unwrap();
    assert_eq!(changed_namespaces(&mut host), [2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(sizes(&mut host), [4 << 11, 2 << 11]);
    beyond(&mut host, 2, 2 << 11);
    host.write(2, 0, &pattern(2, 4096));
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), 6 << 20);

    // Both namespaces are affected: one is smaller, and the other one has no block left. Each is
    // examined by itself, since the events may arrive together or one after the other.
    expect_news(&mut host);
    file.set_len(2 << 20).unwrap();
    match changed_namespaces(&mut host)[..] {
        [1, 0, 0, 0, 2, 0, 0, 0] => {}
        [first @ (1 | 2), 0, 0, 0, 0, 0, 0, 0] => {
            expect_news(&mut host);
            assert_eq!(
                changed_namespaces(&mut host),
                [3 - first, 0, 0, 0, 0, 0, 0, 0]
            );
        }
        ref other => panic!("{other:?}"),
    }
    assert_eq!(sizes(&mut host), [2 << 11, 0]);
    beyond(&mut host, 1, 2 << 11);
    let status = host.write_with(2, 0, &[0xee; 512], false);
    assert!(status.is(Status::LBA_OUT_OF_RANGE), "{status:?}");
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), 2 << 20);
    drop(host);
    daemon.end();
}

#[test]
fn slice_follows_device_size_on_both_paths() {
    for options in ["offset=4M&path=direct", "offset=4M&path=generic"] {
        let test_dir = TestDir::new();
        let (lower, upper, _) = two(&test_dir, options);
        let mut host = Host::up(&test_dir.socket());
        let disk = test_dir.path("disk.raw");
        let file = std::fs::OpenOptions::new().write(true).open(disk).unwrap();
        expect_news(&mut host);
        file.set_len(12 << 20).unwrap();
        assert_eq!(
            changed_namespaces(&mut host),
            [1, 0, 0, 0, 0, 0, 0, 0],
            "{options}"
        );
        assert_eq!(host.identify_namespace(1).unwrap().nsze.get(), 8 << 11);
        host.write(1, (8 << 11) - 8, &pattern(1, 4096));
        assert!(test_dir.bytes("disk.raw", (12 << 20) - 4096, 4096) == pattern(1, 4096));
        let status = host.write_with(1, 8 << 11, &[0xee; 512], false);
        assert!(status.is(Status::LBA_OUT_OF_RANGE), "{status:?}");
        drop(host);
        upper.end();
        lower.end();
    }
}
