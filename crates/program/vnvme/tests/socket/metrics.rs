//! `/metrics` over TCP, and `vnvme top`, of a daemon in its sandbox.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use crate::common::*;

/// Returns the address where a daemon serves metrics, from its log.
pub fn address(daemon: &Daemon) -> SocketAddr {
    let line = daemon.wait_log(|line| line.contains("metrics are served"));
    let found = line.split("address=").nth(1).expect("an address");
    found.split(' ').next().unwrap().parse().unwrap()
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    stream
}

/// The status line, the headers and the body of an answer.
fn ask(address: SocketAddr, request: &str) -> (String, String, String) {
    let mut stream = connect(address);
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("a header");
    let (status, headers) = head.split_once("\r\n").expect("headers");
    (status.into(), headers.into(), body.into())
}

/// Returns all samples of a daemon by name and labels.
pub fn scrape(address: SocketAddr) -> BTreeMap<String, f64> {
    let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let (status, headers, body) = ask(address, request);
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(headers.contains("text/plain; version=0.0.4"), "{headers}");
    assert!(headers.contains(&format!("Content-Length: {}", body.len())));
    let samples = body.lines().filter(|line| !line.starts_with('#'));
    let split = samples.map(|line| line.rsplit_once(' ').expect("a value"));
    split
        .map(|(name, value)| (name.into(), value.parse().unwrap()))
        .collect()
}

#[test]
fn prometheus_scrape_reports_disk_activity() {
    let test_dir = TestDir::new();
    // A name that ends quotes, if it can.
    let socket = test_dir.path("vm\"\\é.sock");
    let args = [
        "serve",
        "--metrics",
        "127.0.0.1:0",
        "--socket",
        &text(&socket),
        "mem://4M?iops=0",
    ];
    let daemon = Daemon::spawn(&args);
    daemon.wait_log(|line| line.contains("listening"));
    let address = address(&daemon);
    let disk = "disk=\"vm\\\"\\\\é\"";
    let before = scrape(address);
    assert_eq!(before[&format!("vnvme_disk_connected{{{disk}}}")], 0.0);
    let mut host = Host::up(&socket);
    for i in 0..5 {
        host.write(1, i, &pattern(i, 4096));
        host.read(1, i, 8192);
    }
    let all = scrape(address);
    let of = |name: &str, more: &str| {
        let key = format!("{name}{{{disk},namespace=\"1\",{more}}}");
        *all.get(&key)
            .unwrap_or_else(|| panic!("no {key} in {all:#?}"))
    };
    assert_eq!(of("vnvme_operations_total", "op=\"read\""), 5.0);
    assert_eq!(of("vnvme_operations_total", "op=\"write\""), 5.0);
    assert_eq!(of("vnvme_bytes_total", "op=\"read\""), 5.0 * 8192.0);
    assert_eq!(of("vnvme_bytes_total", "op=\"write\""), 5.0 * 4096.0);
    assert_eq!(of("vnvme_errors_total", "kind=\"media\""), 0.0);
    let sampled = "vnvme_command_latency_sampled_seconds_count";
    assert_eq!(
        of(sampled, "op=\"write\""),
        1.0,
        "the first command is timed"
    );
    assert_eq!(all[&format!("vnvme_disk_connected{{{disk}}}")], 1.0);
    assert!(all[&format!("vnvme_commands_total{{{disk}}}")] > 10.0);
    // Values that the process may read about itself in its sandbox.
    for name in [
        "process_resident_memory_bytes",
        "process_threads",
        "process_cpu_seconds_total",
        "vnvme_worker_cpu_seconds_total{worker=\"0\"}",
        "vnvme_worker_wake_ups_total{worker=\"0\"}",
        "vnvme_throttled_seconds_total{volume=\"mem://4M?iops=0\"}",
    ] {
        assert!(all.contains_key(name), "no {name} in {all:#?}");
    }
    assert!(all["process_resident_memory_bytes"] > 1e6);
    assert!(all["process_threads"] >= 2.0);
    drop(host);
    daemon.end();
}

#[test]
fn metrics_port_serves_metrics_only() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["--metrics", "[::1]:0", "mem://1M"]);
    let address = address(&daemon);
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("GET /v1/stats HTTP/1.1\r\n\r\n", "404 Not Found"),
        (
            "POST /metrics HTTP/1.1\r\nContent-Length: 1\r\n\r\nx",
            "405 Method Not Allowed",
        ),
        ("{\"method\":\"stats\"}\n\n", "400 Bad Request"),
        (
            &format!("GET /{} HTTP/1.1\r\n", "a".repeat(9000)),
            "431 Request Header Fields Too Large",
        ),
    ] {
        let found = ask(address, request).0;
        assert_eq!(found, format!("HTTP/1.1 {status}"), "{request:.40}");
    }
    daemon.end();
}

#[test]
fn silent_scrape_clients_delay_neither_others_nor_end() {
    let test_dir = TestDir::new();
    let mut daemon = Daemon::serve(&test_dir, &["--metrics", "127.0.0.1:0", "mem://1M"]);
    let address = address(&daemon);
    let silent: Vec<TcpStream> = (0..7).map(|_| connect(address)).collect();
    // The client sends a request, and closes in the middle of the answer.
    for _ in 0..20 {
        let mut rude = connect(address);
        rude.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    }
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    scrape(address);
    // Silent clients displace each other. The time limit of their places would take minutes.
    let more: Vec<TcpStream> = (0..300).map(|_| connect(address)).collect();
    host.write(1, 0, &pattern(1, 4096));
    assert!(daemon.is_alive());
    scrape(address);
    let is_open = |mut client: &TcpStream| {
        client.set_nonblocking(true).unwrap();
        let read = client.read(&mut [0; 1]);
        read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    eventually("at most eight places are taken", || {
        more.iter().filter(|client| is_open(client)).count() <= 8
    });
    scrape(address);
    drop(host);
    daemon.end();
    drop(silent);
}

#[test]
fn invalid_metrics_address_is_explained() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for (address, words) in [
        (&*taken, "metrics: cannot listen on"),
        ("9469", "an IP address and a port are expected"),
        ("localhost:9469", "an IP address and a port are expected"),
    ] {
        let test_dir = TestDir::new();
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args([
                "serve",
                "--socket",
                &text(&test_dir.socket()),
                "--metrics",
                address,
                "mem://1M",
            ])
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && told.contains(words), "{told}");
    }
}

fn top(control: &str, more: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["top", "--control", control])
        .args(more)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn top_lists_disks() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let daemon = Daemon::serve(&test_dir, &["--control", &control, "mem://4M"]);
    let host = Host::up(&test_dir.socket());
    let screen = top(&control, &["--once", "--interval", "100ms"]);
    assert!(screen.starts_with("1 disk "), "{screen}");
    assert!(
        screen.contains("DISK ") && screen.contains("ctrl"),
        "{screen}"
    );
    let json = top(&control, &["--json", "--interval", "100ms"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let disk = &json[1]["disks"][0];
    assert_eq!(disk["address"], text(&test_dir.socket()));
    assert_eq!(disk["connected"], true);
    assert_eq!(disk["namespaces"][0]["volume"], "mem://4M");
    let empty = top(
        &control,
        &["--once", "--interval", "100ms", "--filter", "xyz"],
    );
    assert!(empty.contains("no disk's name has this"), "{empty}");
    let nowhere = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["top", "--control", &control])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&nowhere.stderr);
    assert!(told.contains("needs a terminal"), "{told}");
    drop(host);
    daemon.end();
}
