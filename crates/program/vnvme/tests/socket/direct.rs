//! The direct path: a guest's commands on a device below, queue to queue, beside the volume and in
//! turn with it.

use std::os::unix::fs::FileExt;
use std::process::{Command, Output};

use nvme::cmd::io::{DsmCdw10, DsmCdw11, DsmRange};
use nvme::{NvmOpcode, Status};
use zerocopy::IntoBytes;

use crate::common::*;

const MIB: usize = 1 << 20;
/// Guest memory that nothing else is in.
const AT: u64 = RAM_SIZE - (1 << 20);

fn vnvme(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(args)
        .output()
        .unwrap()
}

fn path(control: &str, args: &[&str]) -> String {
    let output = vnvme(&[&["path", "--control", control], args].concat());
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn counters(control: &str) -> serde_json::Value {
    let output = vnvme(&["stats", "--control", control, "--json"]);
    let all: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    all["controllers"][0].clone()
}

/// Commands that went directly to the device below, from any queue, since the upper daemon started.
fn direct_commands(control: &str) -> u64 {
    let told = counters(control);
    let lanes = told["direct"][0]["lanes"].as_array().unwrap();
    let commands = lanes.iter().map(|lane| lane["commands"].as_u64().unwrap());
    commands.sum()
}

/// A device below, and a controller above with a slice of it.
fn two(
    test_dir: &TestDir,
    options: &str,
    below: &[&str],
) -> (Daemon, Daemon, std::path::PathBuf, String) {
    let disk = test_dir.disk("disk.raw", 16 << 20);
    let socket = text(&test_dir.path("below.sock"));
    let mut all = vec!["serve", "--socket", &socket];
    all.extend(below);
    all.push(&disk);
    let lower = Daemon::spawn(&all);
    lower.wait_listening(socket.as_ref());
    let control = text(&test_dir.path("control.sock"));
    let url = format!("vfio-user://{socket}/1?offset=4M&length=8M{options}");
    let upper = Daemon::serve(test_dir, &["--control", &control, &url]);
    (lower, upper, test_dir.socket(), control)
}

#[test]
fn commands_use_configured_path() {
    for (options, name) in [
        ("", "direct"),
        ("&path=direct", "direct"),
        ("&path=generic", "generic"),
    ] {
        let test_dir = TestDir::new();
        // A device that takes less than the guest may put into one command.
        let (lower, upper, socket, control) = two(&test_dir, options, &["--mdts", "5"]);
        let told = path(&control, &[]);
        let row: Vec<_> = told.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(row[1..], ["1", name], "{told}");
        let mut host = Host::up(&socket);
        let blocks = 8 << 11;
        assert_eq!(host.identify_namespace(1).unwrap().nsze.get(), blocks);
        for (i, len) in [512, 4096, 8192, 300 << 10, MIB].into_iter().enumerate() {
            let data = pattern(i as u64, len);
            let lba = i as u64 * 2500;
            host.write(1, lba, &data);
            assert!(host.read(1, lba, len) == data);
            assert!(test_dir.bytes("disk.raw", (4 << 20) + lba * 512, len) == data);
        }
        host.flush(1);
        for (lba, len) in [(blocks, 512), (blocks - 1, 1024), (u64::MAX, 512)] {
            let beyond = host.write_with(1, lba, &vec![0xee; len], false);
            assert!(beyond.is(Status::LBA_OUT_OF_RANGE), "{beyond:?}");
        }
        assert!(
            test_dir
                .bytes("disk.raw", 12 << 20, 4 << 20)
                .iter()
                .all(|b| *b == 0)
        );
        // Commands without plain data: compare, write zeroes, deallocate.
        let data = pattern(50, 4096);
        host.write(1, 8, &data);
        host.ram.write_all_at(&data, AT).unwrap();
        let compare = host.transfer(NvmOpcode::COMPARE, 1, 8, 4096, AT);
        assert!(host.run(1, compare).status().is_success());
        let mut zeroes = nvme::Command::new(NvmOpcode::WRITE_ZEROES.0, 0, 1);
        zeroes.set_slba(8);
        zeroes.cdw12 = 3.into();
        assert!(host.run(1, zeroes).status().is_success());
        assert!(host.read(1, 8, 2048).iter().all(|b| *b == 0));
        assert!(host.read(1, 12, 2048) == data[2048..]);
        let mut dsm = host.transfer(NvmOpcode::DATASET_MANAGEMENT, 1, 0, 512, AT);
        let range = |slba: u64, nlb: u32| DsmRange {
            slba: slba.into(),
            nlb: nlb.into(),
            ..DsmRange::default()
        };
        dsm.cdw10 = DsmCdw10::new().with_nr_z(0).into_bits().into();
        dsm.cdw11 = DsmCdw11::new().with_ad(true).into_bits().into();
        host.ram.write_all_at(range(12, 4).as_bytes(), AT).unwrap();
        assert!(host.run(1, dsm).status().is_success());
        host.ram
            .write_all_at(range(blocks - 1, 2).as_bytes(), AT)
            .unwrap();
        assert!(host.run(1, dsm).status().is(Status::LBA_OUT_OF_RANGE));

        let told = counters(&control);
        let lane = &told["direct"][0]["lanes"][0];
        let commands = lane["commands"].as_u64().unwrap();
        if name == "direct" {
            assert!(
                commands >= 17 && lane["refused"].as_u64() >= Some(3),
                "{told:#}"
            );
            assert_eq!((&lane["split"], &lane["bounced"]), (&4.into(), &0.into()));
            for work in ["translate", "complete"] {
                assert_eq!(lane[work]["count"], commands, "{told:#}");
                assert!(lane[work]["average_ns"].as_f64() > Some(0.0));
                assert!(lane[work]["p99"].as_u64() >= lane[work]["p50"].as_u64());
            }
        } else {
            assert_eq!(commands, 0);
        }
        let table = vnvme(&["stats", "--control", &control]);
        assert!(
            String::from_utf8(table.stdout)
                .unwrap()
                .contains(&format!("{name} path"))
        );
        drop(host);
        upper.end();
        lower.end();
    }
}

#[test]
fn path_change_under_load_is_invisible() {
    let test_dir = TestDir::new();
    let (lower, upper, socket, control) = two(&test_dir, "", &[]);
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let load = {
        let (socket, stop) = (socket.clone(), stop.clone());
        std::thread::spawn(move || {
            let mut host = Host::up(&socket);
            let mut rounds = 0u64;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) || rounds < 300 {
                let lba = rounds % 100 * 128;
                let data = pattern(rounds, 4096 * (1 + rounds as usize % 9));
                host.write(1, lba, &data);
                if rounds.is_multiple_of(7) {
                    host.flush(1);
                }
                assert!(host.read(1, lba, data.len()) == data, "round {rounds}");
                rounds += 1;
            }
            rounds
        })
    };
    for i in 0..60 {
        let wanted = if i % 2 == 0 { "generic" } else { "direct" };
        assert!(path(&control, &["--set", wanted, "--all"]).contains(wanted));
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(load.join().unwrap() >= 300);
    let told = counters(&control);
    let direct = told["direct"][0]["lanes"][0]["commands"].as_u64().unwrap();
    let all = told["queues"][1]["commands"].as_u64().unwrap();
    assert!(
        direct > 0 && direct < all,
        "{direct} of {all} commands were direct"
    );
    assert_eq!(told["errors"], 0);
    upper.end();
    lower.end();
}

#[test]
fn resets_and_new_clients_work_on_direct_path() {
    let test_dir = TestDir::new();
    let (lower, upper, socket, control) = two(&test_dir, "", &[]);
    for round in 0..4u64 {
        let mut host = Host::up(&socket);
        for i in 0..5u64 {
            let data = pattern(round * 10 + i, 64 << 10);
            host.write(1, i * 200, &data);
            // Commands in flight at the time of the reset.
            for _ in 0..8 {
                let read = host.transfer(NvmOpcode::READ, 1, i * 200, 64 << 10, AT);
                host.submit(1, read);
            }
            host.client.reset().unwrap();
            host.enable();
            host.create_queues(1, None);
            // After each reset the new queue takes the direct path again.
            let before = direct_commands(&control);
            assert!(host.read(1, i * 200, data.len()) == data);
            let after = direct_commands(&control);
            assert!(
                after > before,
                "round {round}, reset {i}: {before}, then {after}"
            );
        }
        // The client disconnects with commands in flight.
        let read = host.transfer(NvmOpcode::READ, 1, 0, 64 << 10, AT);
        host.submit(1, read);
    }
    upper.end();
    lower.end();
}

#[test]
fn lost_device_fails_commands_and_daemon_survives() {
    let test_dir = TestDir::new();
    let (lower, mut upper, socket, control) = two(&test_dir, "", &[]);
    let mut host = Host::up(&socket);
    host.write(1, 0, &pattern(1, 4096));
    assert!(direct_commands(&control) > 0);
    lower.kill();
    let read = host.transfer(NvmOpcode::READ, 1, 0, 4096, AT);
    for _ in 0..3 {
        let status = host.run(1, read).status();
        assert!(
            status.is(Status::INTERNAL_ERROR) && status.dnr(),
            "{status:?}"
        );
    }
    assert!(upper.is_alive());
    drop(host);
    upper.signal(rustix::process::Signal::TERM);
    upper.wait();
}

#[test]
fn unsupported_direct_path_is_reported() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let below = Daemon::serve(&test_dir, &[&disk]);
    let socket = text(&test_dir.path("above.sock"));
    for (options, args, why) in [
        ("path=direct&iops=1000", &[][..], "generic path only"),
        ("path=direct", &["--block-size", "4096"][..], "block size"),
        ("path=sideways", &[][..], "direct or generic"),
    ] {
        let url = format!("vfio-user://{}/1?{options}", text(&test_dir.socket()));
        let output = vnvme(&[&["serve", "--socket", &socket], args, &[&url]].concat());
        assert_eq!(output.status.code(), Some(1));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(why), "{error}");
    }
    below.end();
}
