//! Rate of connections, and connections when no descriptor is left.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::common::*;

fn limit_descriptors(daemon: &Daemon, current: u64) {
    let pid = Pid::from_raw(daemon.pid() as i32);
    let limit = Rlimit {
        current: Some(current),
        maximum: Some(1024),
    };
    prlimit(pid, Resource::Nofile, limit).unwrap();
}

#[test]
fn client_connections_are_rate_limited() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let args = ["--control", &control, "--client-connects", "5", "mem://1M"];
    let daemon = Daemon::serve(&test_dir, &args);
    let start = Instant::now();
    // Fifteen clients. Five come in at once. All but the last connect and close: were they served
    // one after the other, a busy machine would take so long that none has to wait.
    for _ in 0..14 {
        leave(UnixStream::connect(test_dir.socket()).unwrap());
    }
    drop(Host::attach(&test_dir.socket()));
    assert!(start.elapsed().as_millis() >= 1900, "{:?}", start.elapsed());
    daemon.wait_log(|line| line.contains("the next ones wait"));
    let told = &all_stats(&control)["controllers"][0]["clients"];
    assert_eq!(told["accepted"], 15, "{told}");
    assert!(told["delayed"].as_u64().unwrap() >= 2, "{told}");
    daemon.end();
}

/// The process does not spin, and the log stays short. The client is admitted when there is a
/// descriptor for it.
#[test]
fn client_without_free_descriptor_waits() {
    let test_dir = TestDir::new();
    let socket = test_dir.path("v.sock");
    let args = ["mem://1M", "--vhost-user-blk", &text(&socket), "mem://1M"];
    let daemon = Daemon::serve(&test_dir, &args);
    daemon.wait_listening(&socket);
    // The daemon's start is complete when a client is served and the daemon has opened nothing for
    // a while.
    drop(Host::up(&test_dir.socket()));
    daemon.settled_descriptors();
    limit_descriptors(&daemon, 3);
    let nvme = UnixStream::connect(test_dir.socket()).unwrap();
    let virtio = UnixStream::connect(&socket).unwrap();
    daemon.wait_log(|line| line.contains("accept") && line.contains("vm.sock"));
    daemon.wait_log(|line| line.contains("accept") && line.contains("v.sock"));
    let before = (ticks(daemon.pid()), daemon.log().len());
    std::thread::sleep(std::time::Duration::from_secs(2));
    let after = (ticks(daemon.pid()), daemon.log().len());
    // A clock tick is 10 ms: a loop without pause would take hundreds of them.
    assert!(after.0 - before.0 < 50, "{before:?} {after:?}");
    assert!(after.1 - before.1 < 20, "{:#?}", daemon.log());
    limit_descriptors(&daemon, 1024);
    daemon.wait_log(|line| line.contains("client connected"));
    daemon.wait_log(|line| line.contains("front-end connected"));
    drop((nvme, virtio));
    daemon.end();
}

/// Takes every descriptor that a client may: files until one is refused, and all vectors.
fn take_all(host: &mut Host) -> u64 {
    host.assign_vectors(65);
    let map = |host: &mut Host, at: u64| {
        let window = window((1 << 40) + at * 4096, 4096);
        let file = memfd(4096);
        host.client.dma_map(window, Some(file.as_fd())).is_ok()
    };
    (0..).find(|at| !map(host, *at)).unwrap()
}

/// Under a low limit each client may have less: a client at its limit leaves the remaining clients
/// theirs.
#[test]
fn client_at_descriptor_limit_does_not_affect_others() {
    let test_dir = TestDir::new();
    let (config, control) = (
        test_dir.path("vnvme.toml"),
        text(&test_dir.path("control.sock")),
    );
    let sockets = ["a.sock", "b.sock", "c.sock"].map(|name| test_dir.path(name));
    let one = |socket: &std::path::PathBuf| {
        let socket = text(socket);
        format!(
            "[[controller]]\nsocket = {socket:?}\n[[controller.namespace]]\nvolume = \"mem://1M\"\n"
        )
    };
    let table = format!("[process]\ncontrol = {control:?}\n");
    let controllers: String = sockets.iter().map(one).collect();
    std::fs::write(&config, table + &controllers).unwrap();
    let args = ["serve", "--config", &text(&config)];
    let daemon = Daemon::spawn_with_descriptors(800, &args);
    sockets
        .iter()
        .for_each(|socket| daemon.wait_listening(socket));
    daemon.wait_log(|line| line.contains("limit of open descriptors is low"));
    // The sockets listen before their worker has all that it needs: it has when it has served one.
    drop(Host::up(&sockets[0]));
    daemon.wait_log(|line| line.contains("client disconnected"));
    let before = daemon.settled_descriptors();
    let mut hosts: Vec<Host> = Vec::new();
    for socket in &sockets {
        let mut host = Host::up(socket);
        let files = take_all(&mut host);
        assert!((16..512).contains(&files), "{files}");
        hosts.push(host);
    }
    assert!(descriptors(daemon.pid()) > before + 3 * 65);
    for host in &mut hosts {
        host.write(1, 0, &pattern(3, 4096));
        assert!(host.read(1, 0, 4096) == pattern(3, 4096));
    }
    // Further clients are accepted, too, to be refused or answered.
    for socket in &sockets {
        drop(UnixStream::connect(socket).unwrap());
    }
    daemon.wait_log(|line| line.contains("refused a second client"));
    assert_eq!(
        all_stats(&control)["controllers"].as_array().unwrap().len(),
        3
    );
    assert!(!daemon.log().iter().any(|line| line.contains("accept")));
    drop(hosts);
    daemon.wait_descriptors(before);
    daemon.end();
}
