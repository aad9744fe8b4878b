//! Data that the load generator must not destroy, and the path of the suites.

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::{Command, Output};

use crate::common::*;

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
