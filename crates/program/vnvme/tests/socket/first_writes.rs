//! First writes to the clusters of a qcow2 image, over data of a backing file, by a process that is
//! killed before the guest flushes, alone or with its keeper: the next process has all that was
//! answered, and the image is in order when the daemon has ended.
//!
//! `VNVME_KILLS` sets the number of kills (8).

use crate::common::*;
use crate::failure_domains::{Domain, controller, hide, show};
use std::fs;
use std::process::Command;

const PAGE: usize = 4096;
/// Blocks of a page and of a cluster.
const PAGE_BLOCKS: u64 = 8;
const CLUSTER_BLOCKS: u64 = 128;
const CLUSTERS: u64 = 1024;

/// Content of the backing file: every page is another one.
fn behind(page: u64) -> Vec<u8> {
    pattern(1_000_000 + page, PAGE)
}

/// Makes `image.qcow2` over `base.raw`. Returns the configuration of a disk with it.
fn make(test_dir: &TestDir) -> Option<String> {
    let (image, base) = (test_dir.path("image.qcow2"), test_dir.path("base.raw"));
    let pages = CLUSTERS * (CLUSTER_BLOCKS / PAGE_BLOCKS);
    let bytes: Vec<u8> = (0..pages).flat_map(behind).collect();
    fs::write(&base, bytes).unwrap();
    let create = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
        .args([&base, &image])
        .status();
    if !create.is_ok_and(|status| status.success()) {
        testkit::skip("vnvme::first_writes", "there is no qemu-img");
        return None;
    }
    let url = format!("qcow2://{}?backing={}", text(&image), text(&base));
    Some(controller(test_dir, "image", &[&url], ""))
}

/// Starts a daemon with an image as a disk.
fn start(variables: &[(&str, &str)]) -> Option<Domain> {
    let test_dir = TestDir::new();
    let disks = make(&test_dir)?;
    Some(Domain::start_in(test_dir, &disks, &[], variables))
}

/// Returns the number of entries in the folder of the journals.
fn journals(test_dir: &TestDir) -> usize {
    fs::read_dir(test_dir.path("control.journals"))
        .unwrap()
        .count()
}

/// Ends all processes of a daemon at once, as `pkill -KILL vnvme` does, and starts the next one.
fn kill_all(domain: Domain, disks: &str) -> Domain {
    let Domain {
        test_dir, daemon, ..
    } = domain;
    daemon.kill();
    assert_eq!(journals(&test_dir), 1);
    Domain::start_in(test_dir, disks, &[], &[])
}

/// Writes the third page of a cluster.
fn write(host: &mut Host, cluster: u64) {
    let data = pattern(cluster, PAGE);
    host.write(1, cluster * CLUSTER_BLOCKS + 2 * PAGE_BLOCKS, &data);
}

/// Checks the page that was written, and those beside it.
fn check(host: &mut Host, cluster: u64, when: &str) {
    let found = host.read(1, cluster * CLUSTER_BLOCKS + PAGE_BLOCKS, 3 * PAGE);
    let page = cluster * (CLUSTER_BLOCKS / PAGE_BLOCKS) + 1;
    let expected = [behind(page), pattern(cluster, PAGE), behind(page + 2)].concat();
    assert!(found == expected, "cluster {cluster}, {when}");
}

/// Ends the daemon. The image has no leaks and no other defects then.
fn end(domain: Domain) {
    let Domain {
        test_dir, daemon, ..
    } = domain;
    daemon.end();
    assert_eq!(journals(&test_dir), 0, "a journal was left");
    let image = test_dir.path("image.qcow2");
    let check = Command::new("qemu-img").arg("check").arg(image).output();
    let check = check.unwrap();
    let said = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(check.status.success(), "{said}");
    assert!(said.contains("No errors were found"), "{said}");
}

#[test]
fn unflushed_first_writes_survive_kills() {
    let said = std::env::var("VNVME_KILLS").ok();
    let kills: u64 = said.map_or(8, |text| text.parse().unwrap());
    let Some(domain) = start(&[]) else {
        return;
    };
    let mut host = domain.host("image");
    let each = (CLUSTERS / kills).clamp(1, 16);
    let rounds = kills.min(CLUSTERS);
    for round in 0..rounds {
        // In no order, so that entries belong together and stand alone.
        let clusters = (0..each).map(|n| (round * each + n) * 389 % CLUSTERS);
        let clusters: Vec<u64> = clusters.collect();
        for &cluster in &clusters {
            write(&mut host, cluster);
        }
        domain.kill();
        for cluster in clusters {
            check(&mut host, cluster, "after its kill");
        }
    }
    for n in 0..rounds * each {
        check(&mut host, n * 389 % CLUSTERS, "at the end");
    }
    drop(host);
    end(domain);
}

#[test]
fn unflushed_first_writes_survive_death_of_all_processes() {
    let test_dir = TestDir::new();
    let Some(disks) = make(&test_dir) else {
        return;
    };
    let mut domain = Domain::start_in(test_dir, &disks, &[], &[]);
    for round in 0..3 {
        let mut host = domain.host("image");
        let clusters = [round * 3, round * 3 + 1, 700 + round];
        for cluster in clusters {
            write(&mut host, cluster);
        }
        domain = kill_all(domain, &disks);
        drop(host);
        let mut host = domain.host("image");
        for cluster in clusters {
            check(&mut host, cluster, "after the death of all processes");
        }
    }
    end(domain);
}

/// The operator repairs the image before the daemon is started again.
#[test]
fn journal_is_dropped_after_repair_by_qemu_img() {
    let test_dir = TestDir::new();
    let Some(disks) = make(&test_dir) else {
        return;
    };
    let domain = Domain::start_in(test_dir, &disks, &[], &[]);
    let mut host = domain.host("image");
    write(&mut host, 5);
    host.flush(1);
    write(&mut host, 6);
    let Domain {
        test_dir, daemon, ..
    } = domain;
    daemon.kill();
    drop(host);
    // The kernel carries on with what a killed process had under way, and keeps its lock.
    eventually("the image is repaired", || {
        let mut repair = Command::new("qemu-img");
        repair.args(["check", "-q", "-r", "all"]);
        let repaired = repair.arg(test_dir.path("image.qcow2")).status();
        repaired.unwrap().success()
    });
    let domain = Domain::start_in(test_dir, &disks, &[], &[]);
    domain
        .daemon
        .wait_log(|line| line.contains("removed, no image needs this journal"));
    let mut host = domain.host("image");
    check(&mut host, 5, "which was flushed");
    let found = host.read(1, 6 * CLUSTER_BLOCKS + 2 * PAGE_BLOCKS, PAGE);
    assert!(found == behind(6 * (CLUSTER_BLOCKS / PAGE_BLOCKS) + 2));
    drop(host);
    end(domain);
}

/// The process dies while it records entries, while it writes them to the image, and its successor
/// while it does so.
#[test]
fn first_writes_survive_death_at_crash_point() {
    let never = "qcow2.entry.recorded:1000000\n";
    for plan in [
        "qcow2.entry.recorded:2\n",
        "qcow2.clusters.durable:1\n",
        "qcow2.entries.written:1\n",
        "qcow2.entries.forgotten:1\n",
        &format!("{never}qcow2.replay.written:2\n"),
        &format!("{never}qcow2.journal.begun:1\n"),
    ] {
        let variables = TestDir::new();
        let path = variables.path("crash");
        fs::write(&path, plan).unwrap();
        let Some(domain) = start(&[("VNVME_CRASH", &text(&path))]) else {
            return;
        };
        let mut host = domain.host("image");
        let clusters = [5, 6, 900];
        for cluster in clusters {
            write(&mut host, cluster);
        }
        if plan.starts_with(never) {
            domain.kill();
        } else {
            host.flush(1);
        }
        // A process that dies before it serves logs nothing else.
        eventually("another process serves", || {
            let log = |text| domain.daemon.count(text);
            (log("crash point qcow2."), log("this one goes on")) == (1, 1)
        });
        for cluster in clusters {
            check(&mut host, cluster, plan);
        }
        drop(host);
        end(domain);
    }
}

/// The journal stays where it is while the image is missing.
#[test]
fn unflushed_first_writes_wait_for_missing_image() {
    let Some(domain) = start(&[]) else {
        return;
    };
    let mut host = domain.host("image");
    let clusters = [1, 2, 700];
    for cluster in clusters {
        write(&mut host, cluster);
    }
    hide(&domain.test_dir, "image.qcow2");
    for _ in 0..2 {
        domain.kill();
        assert!(domain.error("image").is_some());
    }
    show(&domain.test_dir, "image.qcow2");
    domain.wait_served("image");
    for cluster in clusters {
        check(&mut host, cluster, "when the image is back");
    }
    drop(host);
    end(domain);
}
