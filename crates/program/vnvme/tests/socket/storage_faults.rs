//! Disks that fail, below the kernel: the guest's statuses, the contents of logs, SMART and
//! metrics, and the effect of the error policy.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::time::Duration;

use fuse_disk::{Disk, Fault, RequestKind};
use nvme::log::{ErrorInformation, Lid, Smart};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use serde_json::Value;
use zerocopy::FromBytes;

use crate::common::*;

const MIB: usize = 1 << 20;
/// Where the pages of logs are put, in guest memory.
const AT_LOG: u64 = 6 << 20;

fn vnvme(control: &Path, args: &[&str]) -> (bool, String) {
    let output = Process::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(args)
        .args(["--control", &text(control)])
        .output()
        .unwrap();
    let out = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&out).into_owned(),
    )
}

/// Returns the error policy and counters of the process's one volume.
fn on_error(control: &Path) -> Value {
    let (ok, text) = vnvme(control, &["on-error", "--json"]);
    assert!(ok, "{text}");
    serde_json::from_str::<Value>(&text).unwrap()[0].clone()
}

fn log_page<T: FromBytes>(host: &mut Host, lid: Lid) -> T {
    let len = size_of::<T>();
    let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, u32::MAX);
    command.set_prps(RAM_BASE + AT_LOG, 0);
    command.cdw10 = (u32::from(lid.0) | ((len / 4 - 1) as u32) << 16).into();
    assert_eq!(host.run(0, command).status(), Status::SUCCESS);
    let mut page = vec![0; len];
    host.ram.read_exact_at(&mut page, AT_LOG).unwrap();
    T::read_from_bytes(&page).ok().unwrap()
}

fn media_errors(host: &mut Host) -> u128 {
    log_page::<Smart>(host, Lid::SMART).mdie.get()
}

/// The newest entry of the error log: status, block.
fn last_error(host: &mut Host) -> (Status, u64) {
    let entry: ErrorInformation = log_page(host, Lid::ERROR_INFORMATION);
    (entry.status(), entry.lba.get())
}

/// A loop device, taken away when it is dropped.
pub struct Loop(pub PathBuf);

impl Loop {
    pub fn new(file: &Path) -> Option<Self> {
        let losetup = Process::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file)
            .output();
        match losetup {
            Ok(output) if output.status.success() => {
                let path = String::from_utf8_lossy(&output.stdout);
                Some(Self(path.trim().into()))
            }
            _ => {
                testkit::skip("vnvme::storage_faults::block_devices", "losetup: no device");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Process::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// A daemon and its guest, on the disk itself and, through the ring, on a block device of it.
fn each_way(test: &str, options: &str, run: impl Fn(&Disk, &Path, &mut Host, bool)) {
    for block_device in [false, true] {
        let test_dir = TestDir::new();
        let Some(disk) = breaking(&format!("storage_faults::{test}"), &test_dir, 8 * MIB) else {
            return;
        };
        let device = if block_device {
            match Loop::new(&disk.path()) {
                Some(device) => Some(device),
                None => return,
            }
        } else {
            None
        };
        let path = device
            .as_ref()
            .map_or(disk.path(), |device| device.0.clone());
        let url = format!("{}{options}", text(&path));
        let control = test_dir.path("control.sock");
        let daemon = Daemon::serve(&test_dir, &["--control", &text(&control), &url]);
        let mut host = Host::up(&test_dir.socket());
        run(&disk, &control, &mut host, block_device);
        disk.heal();
        disk.release();
        drop(host);
        daemon.end();
    }
}

fn read_fails(host: &mut Host, lba: u64) -> Status {
    let command = host.transfer(NvmOpcode::READ, 1, lba, 4096, 4 << 20);
    host.run(1, command).status()
}

#[test]
fn media_errors_are_reported_everywhere() {
    each_way("media_errors", "", |disk, control, host, _| {
        host.write(1, 0, &pattern(1, 64 << 10));
        assert_eq!(media_errors(host), 0);
        // The kernel may repeat a read in pieces, above the disk.
        let at = 64 * 512;
        disk.fail(RequestKind::Read, at..at + 4096, u64::MAX, Fault::Error(5));
        assert_eq!(read_fails(host, 64), Status::UNRECOVERED_READ_ERROR);
        assert_eq!(last_error(host), (Status::UNRECOVERED_READ_ERROR, 64));
        assert_eq!(media_errors(host), 1);
        disk.heal();
        disk.fail(RequestKind::Write, 0..4096, u64::MAX, Fault::Error(5));
        let status = host.write_with(1, 0, &pattern(2, 4096), false);
        assert_eq!(status, Status::WRITE_FAULT);
        assert_eq!(media_errors(host), 2);
        disk.heal();
        disk.fail(RequestKind::Sync, 0..1, 1, Fault::Error(5));
        let flush = Command::new(NvmOpcode::FLUSH.0, 0, 1);
        assert_eq!(host.run(1, flush).status(), Status::WRITE_FAULT);
        assert_eq!(media_errors(host), 3);
        let smart: Smart = log_page(host, Lid::SMART);
        assert_eq!((smart.neile.get(), smart.avsp, smart.pused), (3, 100, 0));
        // Other blocks are not affected.
        assert!(host.read(1, 72, 4096) == pattern(1, 64 << 10)[72 * 512..72 * 512 + 4096]);
        let told = on_error(control);
        assert_eq!(
            (&told["read_errors"], &told["write_errors"]),
            (&1.into(), &2.into())
        );
        assert!(
            told["last_error"].as_str().unwrap().contains("durable"),
            "{told}"
        );
        let stats = all_stats(&text(control));
        let failed = &stats["measured"]["disks"][0]["namespaces"][0]["errors"];
        assert_eq!(failed["media"], 3, "{failed}");
        let on_error = &stats["measured"]["on_error"][0];
        assert_eq!(on_error["read_errors"], 1, "{on_error}");
    });
}

#[test]
fn missing_space_is_no_media_error() {
    each_way("no_space", "", |disk, _, host, _| {
        disk.fail(RequestKind::Write, 0..4096, u64::MAX, Fault::Error(28));
        let status = host.write_with(1, 0, &pattern(2, 4096), false);
        // The error of a full block device: Linux reports missing space below by ENOSPC, too.
        assert!(status.is(Status::CAPACITY_EXCEEDED), "{status}");
        assert_eq!(media_errors(host), 0);
        assert!(last_error(host).0.is(Status::CAPACITY_EXCEEDED));
    });
}

#[test]
fn short_and_slow_requests_complete() {
    each_way("short", "", |disk, _, host, block_device| {
        let data = pattern(3, 64 << 10);
        // Linux's loop devices take a short write for a whole one (drivers/block/loop.c).
        if !block_device {
            disk.fail(RequestKind::Write, 0..MIB as u64, 1, Fault::Short);
        }
        host.write(1, 0, &data);
        disk.fail(RequestKind::Read, 0..MIB as u64, 1, Fault::Short);
        assert!(host.read(1, 0, data.len()) == data);
        let slow = Fault::Slow(Duration::from_millis(300));
        disk.fail(RequestKind::Write, 0..MIB as u64, 2, slow);
        disk.fail(RequestKind::Sync, 0..1, 1, slow);
        host.write(1, 8, &data);
        host.flush(1);
        assert!(host.read(1, 8, data.len()) == data);
        assert_eq!(media_errors(host), 0);
    });
}

#[test]
fn retried_error_is_invisible_to_guest() {
    let options = "?on-read-error=retry&on-write-error=retry";
    each_way("repeated", options, |disk, control, host, _| {
        let data = pattern(4, 4096);
        disk.fail(RequestKind::Write, 0..4096, 3, Fault::Error(5));
        host.write(1, 0, &data);
        disk.fail(RequestKind::Read, 0..4096, 2, Fault::Error(5));
        assert!(host.read(1, 0, 4096) == data);
        assert_eq!(media_errors(host), 0);
        let told = on_error(control);
        assert_eq!(told["write_errors"], 3, "{told}");
        assert!(told["repeated"].as_u64().unwrap() >= 4, "{told}");
        // A failed flush is reported all the same.
        disk.fail(RequestKind::Sync, 0..1, 1, Fault::Error(5));
        let flush = Command::new(NvmOpcode::FLUSH.0, 0, 1);
        assert_eq!(host.run(1, flush).status(), Status::WRITE_FAULT);
    });
}

#[test]
fn disk_without_space_is_stopped_and_resumed() {
    let options = "?on-write-error=enospc-stop";
    each_way("stopped", options, |disk, control, host, _| {
        let data = pattern(5, 4096);
        // Other errors are reported.
        disk.fail(RequestKind::Write, 0..4096, 1, Fault::Error(5));
        assert_eq!(host.write_with(1, 0, &data, false), Status::WRITE_FAULT);
        disk.fail(RequestKind::Write, 0..4096, u64::MAX, Fault::Error(28));
        host.ram.write_all_at(&data, 4 << 20).unwrap();
        let write = host.transfer(NvmOpcode::WRITE, 1, 0, data.len(), 4 << 20);
        let first = host.submit(1, write);
        eventually("it stops", || on_error(control)["stopped"] == true);
        let second = host.submit(1, Command::new(NvmOpcode::FLUSH.0, 0, 1));
        eventually("both wait", || on_error(control)["held"] == 2);
        assert!(host.try_completion(1).is_none());
        let (_, shown) = vnvme(control, &["stats"]);
        assert!(shown.contains("STOPPED"), "{shown}");
        // The disk is still full, so the volume stops again.
        let (ok, shown) = vnvme(control, &["resume", "vm"]);
        assert!(ok, "{shown}");
        eventually("it stops again", || on_error(control)["stops"] == 2);
        assert!(shown.contains("STOPPED: "), "{shown}");
        disk.heal();
        let (ok, shown) = vnvme(control, &["resume", "vm"]);
        assert!(ok && !shown.contains("STOPPED"), "{shown}");
        let mut done: Vec<_> = (0..2).map(|_| host.completion(1)).collect();
        done.sort_by_key(|completion| completion.cid.get());
        let ids = done.iter().map(|completion| completion.cid.get());
        assert_eq!(ids.collect::<Vec<_>>(), [first, second]);
        assert!(done.iter().all(|done| done.status() == Status::SUCCESS));
        assert!(host.read(1, 0, data.len()) == data);
        // The policy changes while it is in use, also for requests that wait.
        disk.fail(RequestKind::Write, 0..4096, u64::MAX, Fault::Error(28));
        host.submit(1, write);
        eventually("it stops", || on_error(control)["stopped"] == true);
        let (ok, shown) = vnvme(control, &["on-error", "vm", "--on-write-error", "report"]);
        assert!(ok && shown.contains("on write errors report"), "{shown}");
        assert!(host.completion(1).status().is(Status::CAPACITY_EXCEEDED));
    });
}

#[test]
fn stopped_disk_is_reset_and_ended_like_others() {
    let options = "?on-write-error=stop";
    each_way("reset", options, |disk, control, host, _| {
        disk.fail(RequestKind::Write, 0..4096, u64::MAX, Fault::Error(5));
        let write = host.transfer(NvmOpcode::WRITE, 1, 0, 4096, 4 << 20);
        host.submit(1, write);
        eventually("it stops", || on_error(control)["stopped"] == true);
        host.enable();
        host.create_queues(1, None);
        assert_eq!(on_error(control)["held"], 0);
        disk.heal();
        host.write(1, 0, &pattern(1, 4096));
        // The end does not wait for it either (see `each_way`).
        disk.fail(RequestKind::Write, 0..4096, u64::MAX, Fault::Error(5));
        let write = host.transfer(NvmOpcode::WRITE, 1, 0, 4096, 4 << 20);
        host.submit(1, write);
        eventually("it stops", || on_error(control)["stopped"] == true);
    });
}

/// A file system in memory, unmounted when it is dropped.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf, test: &str) -> Option<Self> {
        std::fs::create_dir(&at).unwrap();
        let mount = Process::new("mount")
            .args(["-t", "tmpfs", "-o", "size=2m", "vnvme-test"])
            .arg(&at)
            .output();
        match mount {
            Ok(output) if output.status.success() => Some(Self(at)),
            _ => {
                let what = format!("vnvme::storage_faults::{test}");
                testkit::skip(&what, "mount: no tmpfs can be mounted");
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Process::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A volume that answers at once, as its errors do.
#[test]
fn full_tmpfs_stops_guest_until_space_returns() {
    let test_dir = TestDir::new();
    let test = "full_tmpfs_stops_guest_until_space_returns";
    let Some(small) = Small::mount(test_dir.path("small"), test) else {
        return;
    };
    let disk = small.0.join("disk.raw");
    File::create(&disk).unwrap().set_len(8 << 20).unwrap();
    let other = small.0.join("other");
    std::fs::write(&other, vec![1; MIB]).unwrap();
    let control = test_dir.path("control.sock");
    let args = [
        "--control",
        &text(&control),
        "--on-write-error",
        "enospc-stop",
    ];
    let daemon = Daemon::serve(&test_dir, &[&args[..], &[&text(&disk)]].concat());
    let mut host = Host::up(&test_dir.socket());
    let data = pattern(1, 64 << 10);
    let mut written = 0;
    let held = loop {
        host.ram.write_all_at(&data, 4 << 20).unwrap();
        let write = host.transfer(NvmOpcode::WRITE, 1, written * 128, data.len(), 4 << 20);
        let cid = host.submit(1, write);
        let mut stopped = false;
        let mut done = None;
        eventually("it is written, or stops", || {
            done = host.try_completion(1);
            stopped = done.is_none() && on_error(&control)["stopped"] == true;
            stopped || done.is_some()
        });
        if stopped {
            break cid;
        }
        assert_eq!(done.unwrap().status(), Status::SUCCESS);
        written += 1;
    };
    assert!(written > 4, "{written}");
    assert_eq!(on_error(&control)["no_space"], 1);
    std::fs::remove_file(&other).unwrap();
    let (ok, shown) = vnvme(&control, &["resume", "vm"]);
    assert!(ok, "{shown}");
    let completion = host.completion(1);
    assert_eq!(
        (completion.cid.get(), completion.status()),
        (held, Status::SUCCESS)
    );
    for number in 0..=written {
        assert!(host.read(1, number * 128, data.len()) == data);
    }
    drop(host);
    daemon.end();
    drop(small);
}

/// A write that has no space is in the journal of atomic writes. The next process cannot repeat it,
/// and serves the disk all the same.
#[test]
fn full_disk_with_atomic_writes_is_readable_after_kill() {
    let test_dir = TestDir::new();
    let test = "full_disk_with_atomic_writes_is_readable_after_kill";
    let Some(small) = Small::mount(test_dir.path("small"), test) else {
        return;
    };
    let disk = small.0.join("disk.raw");
    File::create(&disk).unwrap().set_len(8 << 20).unwrap();
    // The size of the journal is no power of two: a unit that ends the space has a part of it.
    let other = small.0.join("other");
    std::fs::write(&other, vec![1; 100 << 10]).unwrap();
    let url = format!("{}?atomic=16K", text(&disk));
    let mut daemon = Daemon::serve(&test_dir, &[&url]);
    let mut host = Host::up(&test_dir.socket());
    let data = pattern(1, 16 << 10);
    let mut number = 0;
    loop {
        let status = host.write_with(1, number * 32, &data, false);
        if !status.is_success() {
            assert!(status.is(Status::CAPACITY_EXCEEDED), "{status}");
            break;
        }
        number += 1;
    }
    assert!(number > 4, "{number}");
    for _ in 0..2 {
        drop(host);
        daemon.kill();
        daemon = Daemon::serve(&test_dir, &[&url]);
        host = Host::up(&test_dir.socket());
        // The failed write is there as a whole, from the journal.
        for number in 0..=number {
            assert!(host.read(1, number * 32, data.len()) == data, "{number}");
        }
        // Blocks that have their space can be written.
        host.write(1, 0, &data);
        let status = host.write_with(1, number * 32, &data, false);
        assert!(status.is(Status::CAPACITY_EXCEEDED), "{status}");
    }
    std::fs::remove_file(&other).unwrap();
    let new = pattern(2, 16 << 10);
    host.write(1, number * 32, &new);
    drop(host);
    daemon.kill();
    let daemon = Daemon::serve(&test_dir, &[&url]);
    let mut host = Host::up(&test_dir.socket());
    assert!(host.read(1, number * 32, new.len()) == new);
    assert_eq!(media_errors(&mut host), 0);
    drop(host);
    daemon.end();
    drop(small);
}

#[test]
fn shrunk_file_is_reported_and_disk_survives() {
    let test_dir = TestDir::new();
    let path = test_dir.disk("disk.raw", 4 << 20);
    let control = test_dir.path("control.sock");
    let args = ["--control", &text(&control), &path];
    let daemon = Daemon::serve(&test_dir, &args);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    let status = read_fails(&mut host, 2 << 11);
    // Noticed by the read, or by the look at its size before that.
    let told = [Status::UNRECOVERED_READ_ERROR, Status::LBA_OUT_OF_RANGE];
    assert!(told.iter().any(|one| status.is(*one)), "{status}");
    assert!(host.read(1, 0, 4096) == pattern(1, 4096));
    drop(host);
    daemon.end();
}

/// A disk whose file system is full says so in the log and wherever its state is shown, whatever
/// its policy is.
#[test]
fn full_disk_is_shown_everywhere() {
    let test_dir = TestDir::new();
    let Some(small) = Small::mount(test_dir.path("small"), "full_disk_is_shown_everywhere") else {
        return;
    };
    let disk = small.0.join("disk.raw");
    File::create(&disk).unwrap().set_len(8 << 20).unwrap();
    let other = small.0.join("other");
    std::fs::write(&other, vec![1; MIB]).unwrap();
    let control = test_dir.path("control.sock");
    let options = ["--control", &text(&control), &text(&disk)];
    let daemon = Daemon::serve(&test_dir, &options);
    let mut host = Host::up(&test_dir.socket());
    let shown = |words: &[&str]| {
        let (ok, shown) = vnvme(&control, words);
        assert!(ok, "{words:?}: {shown}");
        shown
    };
    let trouble = || {
        let shown: Value = serde_json::from_str(&shown(&["show", "vm", "--json"])).unwrap();
        shown["namespaces"][0]["trouble"].clone()
    };
    assert_eq!(trouble(), Value::Null);
    let data = pattern(1, 64 << 10);
    let mut written = 0;
    loop {
        match host.write_with(1, written * 128, &data, false) {
            Status::SUCCESS => written += 1,
            status => break assert!(status.is(Status::CAPACITY_EXCEEDED), "{status}"),
        }
    }
    daemon.wait_log(|line| line.contains("the guest gets the error: no space left"));
    assert_eq!(trouble()["state"], "failing");
    for words in [&["list"][..], &["show", "vm"]] {
        let shown = shown(words);
        assert!(
            shown.contains("namespace 1: the guest gets errors, 1 so far: no space left"),
            "{words:?}: {shown}"
        );
    }
    // The log lines are limited, the counter is not.
    for _ in 0..50 {
        host.write_with(1, written * 128, &data, false);
    }
    assert_eq!(trouble()["requests"], 51);
    let lines = daemon.log().into_iter();
    let lines = lines.filter(|line| line.contains("the guest gets the error"));
    assert!(lines.count() < 20);

    shown(&["on-error", "vm", "--on-write-error", "enospc-stop"]);
    host.ram.write_all_at(&data, 4 << 20).unwrap();
    for _ in 0..2 {
        let write = host.transfer(NvmOpcode::WRITE, 1, written * 128, data.len(), 4 << 20);
        host.submit(1, write);
    }
    eventually("both wait", || trouble()["requests"] == 2);
    assert_eq!(trouble()["state"], "stopped");
    for words in [&["list"][..], &["show", "vm"], &["top", "--once"]] {
        let shown = shown(words);
        assert!(shown.contains("STOPPED: 2 "), "{words:?}: {shown}");
    }
    let metrics = control::Client::new(vec![control.clone()])
        .unwrap()
        .metrics()
        .unwrap();
    let held = format!("vnvme_volume_held_requests{{volume=\"{}\"}} 2", text(&disk));
    assert!(metrics.contains(&held), "{metrics}");
    let said = shown(&["resume", "vm"]);
    assert!(said.contains("STOPPED: 2 requests wait"), "{said}");
    std::fs::remove_file(&other).unwrap();
    let said = shown(&["resume", "vm"]);
    assert!(!said.contains("STOPPED"), "{said}");
    for _ in 0..2 {
        assert_eq!(host.completion(1).status(), Status::SUCCESS);
    }
    assert!(host.read(1, written * 128, data.len()) == data);
    assert_eq!(trouble()["state"], "failing", "there were errors lately");
    drop(host);
    daemon.end();
    drop(small);
}
