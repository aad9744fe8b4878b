//! The load generator's targets, data that it must not destroy, and the path of the suites.

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::{Command, Output};

use crate::common::*;
use crate::failure_domains::{NbdServer, qcow2};
use crate::nvme_tcp::{NQN, address, far};

/// `vnvme bench` with these arguments, to its end.
fn bench(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
    command.arg("bench").args(args).env_remove("VNVME_LOG");
    command.output().unwrap()
}

fn refused(args: &[&str], reason: &str) {
    let output = bench(args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
    assert!(said.contains(reason), "{args:?}: {said}");
}

/// Writes to a target and reads back, with a result in fio's layout.
fn loaded(target: &str) {
    let args = ["--rw", "randrw", "--iodepth", "4", "--ios", "200"];
    let more = ["--size", "1m", "--verify", "--destroy-data", "--json"];
    let output = bench(&[&[target][..], &args, &more].concat());
    assert!(output.status.success(), "{target}: {output:?}");
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let job = &document["jobs"][0];
    let ios = |direction: &str| job[direction]["total_ios"].as_u64().unwrap();
    assert_eq!(ios("read") + ios("write"), 200, "{target}: {job}");
    assert_eq!(job["job options"]["filename"], *target);
}

/// The forms of URLs that the error about an unknown one names.
fn known_forms() -> Vec<String> {
    let output = bench(&["tape://0"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let (_, known) = said.split_once("known are a path, ").expect(&said);
    let forms = known.trim().split(", ");
    forms
        .map(|form| form.split("//").next().unwrap().to_owned())
        .collect()
}

#[test]
fn every_kind_of_target_is_loaded() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("bad.raw", 4 << 20);
    for target in [&disk, &format!("file://{disk}"), "mem://4M"] {
        loaded(target);
    }
    let null = bench(&["null://1G", "--rw", "randrw", "--ios", "100"]);
    assert!(null.status.success(), "{null:?}");
    match qcow2(&test_dir) {
        Some(url) => {
            loaded(&url);
            loaded(&format!(
                "{}?format=qcow2",
                url.strip_prefix("qcow2://").unwrap()
            ));
        }
        None => testkit::skip("vnvme::bench::qcow2", "there is no qemu-img"),
    }
    match NbdServer::start(&test_dir) {
        Some(_server) => {
            let socket = text(&test_dir.path("nbd"));
            loaded(&format!("nbd+unix:///?socket={socket}"));
        }
        None => testkit::skip("vnvme::bench::nbd", "there is no qemu-nbd"),
    }
    let address = address();
    let target = far(&address, "mem://4M", &[]);
    loaded(&format!("nvme+tcp://{address}/{NQN}/1"));
    target.end();
    let daemon = Daemon::serve(&test_dir, &["mem://4M"]);
    loaded(&format!("vfio-user://{}/1", text(&test_dir.socket())));
    daemon.end();
    let export = test_dir.path("export.sock");
    let daemon = Daemon::spawn(&["serve", "--vhost-user-blk", &text(&export), "mem://4M"]);
    daemon.wait_listening(&export);
    loaded(&format!("vhost-user-blk://{}", text(&export)));
    daemon.end();
    // What is left needs a device, a cluster (guest test `rbd`) or is part of another volume. A new
    // kind has to be tried above.
    let tried = [
        "mem:",
        "null:",
        "file:",
        "nbd:",
        "nbd+unix:",
        "qcow2:",
        "nvme+tcp:",
    ];
    let others = [
        "vfio-user:",
        "vhost-user-blk:",
        "nvme:",
        "rbd:",
        "controller+URL",
    ];
    let mut known = known_forms();
    known.retain(|form| ![&tried[..], &others].concat().contains(&form.as_str()));
    assert_eq!(known, [""; 0]);
}

#[test]
fn unusable_target_is_explained() {
    let test_dir = TestDir::new();
    let missing = text(&test_dir.path("none.raw"));
    refused(&[&missing], "none.raw: no such file");
    refused(&["mem:4M"], "did you mean mem://4M?");
    let socket = test_dir.path("vm.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let socket = text(&socket);
    refused(&[&socket], &format!("vhost-user-blk://{socket}"));
    for form in [
        format!("vhost-user-blk:{socket}"),
        "vhost-user-blk://vm.sock".into(),
    ] {
        refused(&[&form], "vhost-user-blk:///PATH");
    }
    let missing = text(&test_dir.path("none.sock"));
    let url = format!("vhost-user-blk://{missing}");
    refused(&[&url], &format!("connecting to {missing}"));
    let queues = ["--queues", "2"];
    refused(&[&[url.as_str()][..], &queues].concat(), "one queue, not 2");
    refused(&["rbd://pool/image"], "rbd");
}

#[test]
fn bench_overwrites_data_only_on_demand() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let file = fs::File::options().write(true).open(&disk).unwrap();
    file.write_all_at(b"\x53\xef", 0x438).unwrap();
    let before = fs::read(&disk).unwrap();
    let url = format!("file://{disk}");
    let reason = "holds an ext2, ext3 or ext4 filesystem; --destroy-data overwrites it";
    for target in [&disk, &url] {
        for rw in ["write", "randwrite", "randrw"] {
            refused(&[target, "--rw", rw, "--ios", "300"], reason);
        }
        assert!(fs::read(&disk).unwrap() == before);
        let read = bench(&[target, "--ios", "10"]);
        assert!(read.status.success(), "{read:?}");
    }
    // Behind a socket, too: a guest's disk.
    let daemon = Daemon::serve(&test_dir, &[&disk]);
    let served = format!("vfio-user://{}/1", text(&test_dir.socket()));
    refused(&[&served, "--rw", "randwrite", "--ios", "300"], reason);
    daemon.end();
    for target in [&disk, &url] {
        let args = [target, "--rw", "write", "--ios", "256", "--verify"];
        let wanted = bench(&[&args[..], &["--destroy-data"]].concat());
        assert!(wanted.status.success(), "{wanted:?}");
    }
    assert!(fs::read(&disk).unwrap() != before);
    // Data of an earlier load is data, too.
    refused(&[&disk, "--rw", "write", "--ios", "1"], "holds data");
}

#[test]
fn bench_refuses_served_disk() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let daemon = Daemon::serve(&test_dir, &[&disk]);
    let url = format!("file://{disk}");
    for target in [&disk, &url] {
        let holder = format!("process {}", daemon.pid());
        let args = [target, "--rw", "randwrite", "--ios", "1", "--destroy-data"];
        refused(&args, &holder);
    }
    daemon.end();
    assert!(test_dir.bytes("disk.raw", 0, 1 << 20) == vec![0; 1 << 20]);
    let free = bench(&[&disk, "--rw", "randwrite", "--ios", "1"]);
    assert!(free.status.success(), "{free:?}");
}

#[test]
fn bench_suites_run_in_program_beside() {
    let test_dir = TestDir::new();
    let vnvme = test_dir.path("vnvme");
    put_program(env!("CARGO_BIN_EXE_vnvme"), &vnvme);
    let run = || {
        Command::new(&vnvme)
            .args(["bench", "--suite", "cost", "--runs=1"])
            .output()
            .unwrap()
    };
    let missing = run();
    let said = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert_eq!(missing.status.code(), Some(2), "{said}");
    assert!(
        said.contains("vnvme-bench") && said.lines().count() == 1,
        "{said}"
    );
    let script = test_dir.path("script");
    fs::write(&script, "#!/bin/sh\necho \"$@\"\nexit 7\n").unwrap();
    put_program(&script, &test_dir.path("vnvme-bench"));
    let output = run();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!(output.stdout, b"--suite cost --runs=1\n");
}
