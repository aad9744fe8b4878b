//! Volumes for other hosts, by NVMe over TCP: one daemon serves them, and another one its guests
//! from there, both in their sandboxes.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::Signal;

use crate::common::*;

pub const NQN: &str = "nqn.2014-08.org.vnvme:far";

/// `vnvme` with these arguments, to its end.
fn vnvme(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
    command.args(args).env_remove("VNVME_LOG").output().unwrap()
}

/// Where nobody listens. Not among the ports that the kernel chooses from: another socket, of a
/// connection for instance, could be given this one before a daemon has it, or while that is down.
pub fn address() -> String {
    static PORTS_USED: AtomicU32 = AtomicU32::new(0);
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let end: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
    let begin = end / 2;
    for _ in begin..end {
        // Another one for each process of tests, and for each of its threads.
        let tries = PORTS_USED.fetch_add(1, Ordering::Relaxed);
        let number = std::process::id().wrapping_mul(16).wrapping_add(tries);
        let port = begin + (number % u32::from(end - begin)) as u16;
        // Any address: one of the tests listens at all of them.
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return format!("127.0.0.1:{port}");
        }
    }
    // The kernel chooses from all that this user may have.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// Serves a volume to other hosts.
pub fn far(address: &str, volume: &str, more: &[&str]) -> Daemon {
    let args = ["serve", "--nvme-tcp", address, volume, "--subnqn", NQN];
    let daemon = Daemon::spawn(&[&args[..], more].concat());
    daemon.wait_log(|line| line.contains("listening for NVMe over TCP"));
    daemon
}

fn verify(socket: &str, more: &[&str]) {
    let url = format!("vfio-user://{socket}");
    let args = [
        "bench",
        &url,
        "--rw",
        "randrw",
        "--iodepth",
        "16",
        "--size",
        "16m",
        "--verify",
    ];
    let output = vnvme(&[&args[..], &["--destroy-data"], more].concat());
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn daemon_serves_guests_of_other_daemon() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 32 << 20);
    let address = address();
    let target = far(&address, &disk, &["--workers", "2"]);
    let found = vnvme(&["discover", "--json", &format!("tcp://{address}")]);
    let said = text_of(&found.stdout);
    assert!(
        said.contains(&format!("nvme+tcp://{address}/{NQN}")),
        "{said} {found:?}"
    );
    for options in ["", "?hdgst=on&ddgst=on&queues=2"] {
        let url = format!("nvme+tcp://{address}/{NQN}/1{options}");
        let near = Daemon::serve(&test_dir, &[&url]);
        for bs in ["4k", "256k"] {
            verify(
                text(&test_dir.socket()).as_str(),
                &["--bs", bs, "--ios", "2000"],
            );
        }
        assert_eq!(near.count("connecting again"), 0, "{:?}", near.log());
        near.end();
    }
    // The last write is in the file, and no host is left.
    target.wait_log(|line| line.contains("a host's association ends"));
    target.end();
}

#[test]
fn counters_of_subsystem_are_in_stats_and_metrics() {
    let test_dir = TestDir::new();
    let address = address();
    let control = text(&test_dir.path("control.sock"));
    let more = ["--control", &control, "--metrics", "127.0.0.1:0"];
    let target = far(&address, "mem://32M", &more);
    let scraped = crate::metrics::address(&target);
    let stats = |more: &[&str]| {
        let args = [&["stats", "--control", &control][..], more].concat();
        let output = vnvme(&args);
        assert!(output.status.success(), "{output:?}");
        text_of(&output.stdout)
    };
    let subsystem = || {
        let stats: serde_json::Value = serde_json::from_str(&stats(&["--json"])).unwrap();
        let disks = stats["measured"]["disks"].as_array().unwrap();
        let mut found = disks.iter().filter(|disk| disk["kind"] == "nvme-tcp");
        let disk = found.next().unwrap().clone();
        assert!(found.next().is_none(), "{stats}");
        disk
    };
    let count = |name: &str| subsystem()["counters"][name].as_u64().unwrap();
    for name in ["associations", "connections", "refused"] {
        assert_eq!(count(name), 0, "{name}");
    }
    assert_eq!(subsystem()["connected"], false);
    let socket = text(&test_dir.socket());
    let other = format!("nvme+tcp://{address}/nqn.2014-08.org.vnvme:other/1");
    let refused = vnvme(&["serve", "--socket", &socket, &other]);
    assert!(!refused.status.success());
    assert_eq!(count("refused"), 1);
    assert_eq!(count("associations"), 0);
    let near = Daemon::serve(&test_dir, &[&format!("nvme+tcp://{address}/{NQN}/1")]);
    verify(&socket, &["--bs", "4k", "--ios", "100"]);
    assert!(count("associations") >= 1, "{}", subsystem());
    // Each association has an admin queue, and the worker an I/O queue.
    assert!(count("connections") > count("associations"));
    assert_eq!(subsystem()["connected"], true);
    let name = subsystem()["name"].as_str().unwrap().to_owned();
    let of_one = stats(&[&name]);
    let line = format!("associations {}", count("associations"));
    assert!(of_one.contains(&line), "{of_one}");
    let samples = crate::metrics::scrape(scraped);
    for name_of in ["associations", "connections", "refused"] {
        let sample = format!("vnvme_nvme_tcp_{name_of}_total{{disk=\"{name}\"}}");
        assert_eq!(samples[&sample] as u64, count(name_of), "{sample}");
    }
    let hosts = samples
        .keys()
        .filter(|key| key.starts_with("vnvme_disk_info"));
    assert!(
        hosts.count() >= 2,
        "the subsystem and its host: {samples:#?}"
    );
    let top = vnvme(&[
        "top",
        "--control",
        &control,
        "--once",
        "--interval",
        "100ms",
    ]);
    assert!(text_of(&top.stdout).contains(" tcp "), "{top:?}");
    near.end();
    target.end();
}

/// The daemon that serves is killed under load and started again, and stops for longer than the
/// keep-alive time.
#[test]
fn target_daemon_killed_under_load_loses_nothing() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 32 << 20);
    let address = address();
    let first = far(&address, &disk, &[]);
    let url = format!("nvme+tcp://{address}/{NQN}/1?kato=2s&timeout=1s");
    let near = Daemon::serve(&test_dir, &[&url]);
    let socket = text(&test_dir.socket());
    let target = std::thread::scope(|scope| {
        let mut target = first;
        let load = scope.spawn(|| verify(&socket, &["--bs", "4k", "--runtime", "5"]));
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(700));
            target.kill();
            target = far(&address, &disk, &[]);
            near.wait_log(|line| line.contains("connected by") && line.contains("controller 0x1"));
        }
        target.signal(Signal::STOP);
        std::thread::sleep(Duration::from_secs(3));
        target.signal(Signal::CONT);
        load.join().unwrap();
        target
    });
    near.end();
    target.end();
}

#[test]
fn unlisted_hosts_and_taken_addresses_are_refused() {
    let test_dir = TestDir::new();
    let config = test_dir.path("vnvme.toml");
    let address = address();
    let toml = format!(
        "[[nvme-tcp]]\nlisten = \"{address}\"\nsubnqn = \"{NQN}\"\n\
         hosts = [\"nqn.2014-08.org.vnvme:a\"]\n\
         [[nvme-tcp.namespace]]\nvolume = \"mem://16M\"\n"
    );
    std::fs::write(&config, &toml).unwrap();
    let target = Daemon::spawn(&["serve", "--config", &text(&config)]);
    target.wait_log(|line| line.contains("listening for NVMe over TCP"));
    let url =
        |host: &str| format!("nvme+tcp://{address}/{NQN}/1?hostnqn=nqn.2014-08.org.vnvme:{host}");
    let socket = text(&test_dir.socket());
    let refused = vnvme(&["serve", "--socket", &socket, &url("b")]);
    let said = text_of(&refused.stderr);
    assert!(
        !refused.status.success()
            && said.contains("does not admit the host nqn.2014-08.org.vnvme:b"),
        "{said}"
    );
    target.wait_log(|line| line.contains("host nqn.2014-08.org.vnvme:b may not connect"));
    let other = url("a").replace(NQN, "nqn.2014-08.org.vnvme:other");
    let refused = vnvme(&["serve", "--socket", &socket, &other]);
    let said = text_of(&refused.stderr);
    assert!(
        said.contains("there is no subsystem nqn.2014-08.org.vnvme:other here"),
        "{said}"
    );
    target
        .wait_log(|line| line.contains(&format!("nqn.2014-08.org.vnvme:other, and this is {NQN}")));
    Daemon::serve(&test_dir, &[&url("a")]).end();
    for (host, finds) in [("a", true), ("b", false)] {
        let hostnqn = format!("nqn.2014-08.org.vnvme:{host}");
        let found = vnvme(&[
            "discover",
            "--json",
            "--hostnqn",
            &hostnqn,
            &format!("tcp://{address}"),
        ]);
        let said = text_of(&found.stdout);
        assert!(
            found.status.success() && said.contains(NQN) == finds,
            "{host}: {found:?}"
        );
    }
    target.end();
    for listen in ["0.0.0.0:0", "10.0.0.1:4420", "[::]:4420"] {
        let output = vnvme(&["serve", "--nvme-tcp", listen, "mem://1M"]);
        let said = text_of(&output.stderr);
        assert!(
            !output.status.success() && said.contains("not authenticated"),
            "{said}"
        );
    }
    // With secrets it can be any; here it is one that the test reaches.
    let own = "nqn.2014-08.org.vnvme:a";
    let secret = "DHHC-1:01:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
    let [keys, file] = ["keys", "secret"].map(|name| text(&test_dir.path(name)));
    std::fs::write(&keys, format!("{own} {secret}\n")).unwrap();
    std::fs::write(&file, secret).unwrap();
    let any = address.to_string().replace("127.0.0.1", "0.0.0.0");
    let serve = [
        "serve",
        "--nvme-tcp",
        &any,
        "mem://16M",
        "--subnqn",
        NQN,
        "--host-keys",
        &keys,
    ];
    let output = vnvme(&serve);
    let said = text_of(&output.stderr);
    assert!(
        !output.status.success() && said.contains("chmod 600"),
        "{said}"
    );
    for path in [&keys, &file] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let target = Daemon::spawn(&serve);
    target.wait_log(|line| line.contains("listening for NVMe over TCP"));
    let near = Daemon::serve(
        &test_dir,
        &[&format!("{}&dhchap-secret-file={file}", url("a"))],
    );
    verify(&socket, &["--bs", "4k", "--ios", "500"]);
    near.end();
    let refused = vnvme(&["serve", "--socket", &socket, &url("a")]);
    let said = text_of(&refused.stderr);
    assert!(said.contains("dhchap-secret-file"), "{said}");
    target.end();
    let toml = toml.replace("\"nqn.2014-08.org.vnvme:a\"", "");
    std::fs::write(&config, toml).unwrap();
    let output = vnvme(&["serve", "--config", &text(&config)]);
    let said = text_of(&output.stderr);
    assert!(
        !output.status.success() && said.contains("no host could connect"),
        "{said}"
    );
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
