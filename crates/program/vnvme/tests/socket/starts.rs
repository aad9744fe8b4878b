//! Starts, kills and upgrades with an unopenable volume of each kind among healthy ones.
//!
//! `VNVME_STARTS` is the number of processes that are started, at least.

use crate::common::*;
use crate::failure_domains::{
    BESIDE, Domain, NbdServer, command, controller, hide, qcow2, replace, set_corrupt, show,
    with_files,
};
use std::fs;
use std::time::{Duration, Instant};

const HEALTHY: usize = 10;
const DEFAULT_STARTS: u32 = 3;

/// Guests of the healthy disks.
struct Guests(Vec<Host>);

impl Guests {
    fn attach(domain: &Domain) -> Self {
        let hosts = (0..HEALTHY).map(|n| domain.host(&format!("healthy{n}")));
        Self(hosts.collect())
    }

    /// Reads each disk.
    fn check(&mut self) {
        for (n, host) in self.0.iter_mut().enumerate() {
            assert!(host.read(1, 0, 4096) == pattern(n as u64, 4096), "{n}");
        }
    }
}

/// Makes all volumes unopenable that are not healthy.
fn break_all(test_dir: &TestDir, server: Option<NbdServer>) {
    hide(test_dir, "missing.raw");
    replace(test_dir, "cut.raw", &[7; 1000]);
    for (name, file, _) in BESIDE {
        match name {
            // Bytes of a Boot Partition are never wrong, and a pool is a folder.
            "boot" | "pool" => hide(test_dir, file),
            _ => replace(test_dir, file, &[0xa5; 1 << 16]),
        }
    }
    if server.is_some() {
        set_corrupt(test_dir, true);
        drop(server);
        fs::remove_file(test_dir.path("nbd")).unwrap();
    }
}

/// Makes all volumes openable again.
fn mend_all(test_dir: &TestDir, has_tools: bool) -> Option<NbdServer> {
    for file in ["missing.raw", "cut.raw"] {
        show(test_dir, file);
    }
    for (_, file, _) in BESIDE {
        show(test_dir, file);
    }
    if !has_tools {
        return None;
    }
    set_corrupt(test_dir, false);
    NbdServer::start(test_dir)
}

/// Checks that exactly the broken disks are unavailable, and returns their names.
fn unavailable(domain: &Domain, count: usize) -> Vec<String> {
    let disks = domain.client.disks().unwrap().into_iter();
    let broken = disks.filter(|disk| disk.error.is_some());
    let broken: Vec<String> = broken.map(|disk| disk.name).collect();
    assert_eq!(broken.len(), count, "{broken:?}");
    assert!(!broken.iter().any(|name| name.starts_with("healthy")));
    broken
}

#[test]
fn healthy_disks_are_served_at_every_start_among_unopenable_ones() {
    let starts = std::env::var("VNVME_STARTS").ok();
    let starts: u32 = starts.map_or(DEFAULT_STARTS, |starts| starts.parse().unwrap());
    let test_dir = TestDir::new();
    let mut disks = with_files(&test_dir);
    for n in 0..HEALTHY {
        let name = format!("healthy{n}");
        let volume = test_dir.disk(&format!("{name}.raw"), 1 << 20);
        disks += &controller(&test_dir, &name, &[&volume], "");
    }
    for name in ["missing", "cut"] {
        let volume = test_dir.disk(&format!("{name}.raw"), 1 << 20);
        disks += &controller(&test_dir, name, &[&volume], "");
    }
    let mut count = 2 + BESIDE.len();
    test_dir.disk("bad.raw", 1 << 20);
    let mut server = qcow2(&test_dir).and_then(|image| {
        let server = NbdServer::start(&test_dir)?;
        let nbd = format!("nbd+unix:///?socket={}", text(&test_dir.path("nbd")));
        disks += &controller(&test_dir, "image", &[&image], "");
        disks += &controller(&test_dir, "nbd", &[&nbd], "");
        count += 2;
        Some(server)
    });
    let has_tools = server.is_some();
    if !has_tools {
        testkit::skip("vnvme::starts", "there is no qemu-img, or no qemu-nbd");
    }
    let mut domain = Domain::start(test_dir, &disks);
    let mut guests = Guests::attach(&domain);
    for (n, host) in guests.0.iter_mut().enumerate() {
        host.write(1, 0, &pattern(n as u64, 4096));
        host.flush(1);
    }
    let (mut started, mut longest) = (0, Duration::ZERO);
    let mut longest_wait = Duration::ZERO;
    while started < starts {
        break_all(&domain.test_dir, server.take());
        for kind in ["kill", "upgrade", "start"] {
            let began = Instant::now();
            match kind {
                "kill" => domain.kill(),
                "upgrade" => {
                    let (code, said) = command(&domain, &["upgrade"]);
                    assert_eq!(code, Some(0), "{said}");
                }
                _ => {
                    drop(guests);
                    let Domain {
                        test_dir, daemon, ..
                    } = domain;
                    daemon.end();
                    domain = Domain::start(test_dir, &disks);
                    guests = Guests::attach(&domain);
                }
            }
            guests.check();
            longest = longest.max(began.elapsed());
            started += 1;
            unavailable(&domain, count);
        }
        let broken = unavailable(&domain, count);
        let began = Instant::now();
        server = mend_all(&domain.test_dir, has_tools);
        for name in broken {
            domain.wait_served(&name);
        }
        longest_wait = longest_wait.max(began.elapsed());
        guests.check();
    }
    println!(
        "{started} starts, {HEALTHY} healthy and {count} unopenable disks: all healthy ones read \
         within {longest:?} of the kill, upgrade or start; the others served within \
         {longest_wait:?} of their repair"
    );
    drop(guests);
    domain.daemon.end();
}
