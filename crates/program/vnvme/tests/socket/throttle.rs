//! Limits of a volume as a host feels them, and as the control socket changes them.

use std::os::unix::fs::FileExt;
use std::process::Command;

use nvme::{NvmOpcode, Status};

use crate::common::*;

fn limits(control: &str, more: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["limits", "--control", control])
        .args(more)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

fn only(control: &str, more: &[&str]) -> serde_json::Value {
    let (good, text) = limits(control, &[more, &["--json"]].concat());
    assert!(good, "{text}");
    serde_json::from_str::<serde_json::Value>(&text).unwrap()[0].clone()
}

#[test]
fn limited_disk_sleeps_wakes_and_is_unlimited() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let volume = "mem://4M?iops=4&burst=1ms";
    let daemon = Daemon::serve(&test_dir, &["--control", &control, volume, "mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    // The first passes; only the limit's own deadline wakes the worker for the rest. They are
    // submitted together: one after the other, on a busy machine, each would find its time reached
    // already.
    let writes = [0, 1, 2, 3].map(|i| {
        let at = (4 << 20) + i * 4096;
        host.ram.write_all_at(&pattern(i, 4096), at).unwrap();
        host.transfer(NvmOpcode::WRITE, 1, i * 8, 4096, at)
    });
    let [first, second, third, last] = writes;
    for write in [first, second, third] {
        host.test_dir(1, write);
    }
    // Rings for all of them.
    host.submit(1, last);
    for _ in 0..4 {
        assert_eq!(host.completion(1).status(), Status::SUCCESS);
    }
    let told = only(&control, &[]);
    assert_eq!(
        (&told["volume"], &told["iops"]),
        (&volume.into(), &4.into())
    );
    assert_eq!(told["burst_us"], 1000);
    let delayed = told["delayed"].as_u64().unwrap();
    assert!((2..=3).contains(&delayed), "{told}");
    // The neighbour has no limits.
    host.write(2, 0, &pattern(9, 4096));

    assert_eq!(
        only(&control, &["--volume", volume, "--iops", "0"])["iops"],
        0
    );
    for i in 0..200 {
        host.write(1, i, &pattern(i, 512));
    }
    assert_eq!(
        only(&control, &[])["delayed"],
        delayed,
        "nothing waited any more"
    );
    for i in 0..200 {
        assert!(host.read(1, i, 512) == pattern(i, 512));
    }
    // By the disk's name; a part of a name is none.
    let told = only(&control, &["vm", "--iops", "9"]);
    assert_eq!((&told["disk"], &told["iops"]), (&"".into(), &9.into()));
    for wrong in [&["v"][..], &["--volume", "4M"], &["--volume", "mem://4M"]] {
        let (good, text) = limits(&control, &[wrong, &["--iops", "1"]].concat());
        assert!(!good, "{wrong:?}: {text}");
    }
    let (_, text) = limits(&control, &["--volume", "4M", "--iops", "1"]);
    assert!(
        text.contains("\"4M\" has no volume that is open") && text.contains(volume),
        "{text}"
    );
    assert_eq!(only(&control, &[])["iops"], 9);
    let (good, text) = limits(&control, &["--all", "--bps", "1M"]);
    assert!(
        good && text.contains("1048576") && text.contains(volume),
        "{text}"
    );
    drop(host);
    daemon.end();
}
