//! Notifications to a service manager (sd_notify(3)).

use std::fs;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::process::Command;

use crate::common::*;

/// Starts a daemon with that service manager, and checks that it serves once it has notified it.
fn is_told(manager: &UnixDatagram, name: &str) {
    manager.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let test_dir = TestDir::new();
    let socket = text(&test_dir.socket());
    let args = ["serve", "--socket", &socket, "mem://1M"];
    let daemon = Daemon::spawn_with("NOTIFY_SOCKET", name, &args);
    let mut message = [0; 64];
    let len = manager.recv(&mut message).unwrap();
    assert_eq!(&message[..len], b"READY=1\n");
    let mut host = Lone::open(&format!("vfio-user://{socket}/1"));
    assert!(host.read(0), "it serves");
    drop(host);
    daemon.end();
    let len = manager.recv(&mut message).unwrap();
    assert_eq!(&message[..len], b"STOPPING=1\n");
}

/// The service manager kills a process that does not notify it in time.
#[test]
fn watchdog_is_notified_repeatedly() {
    let test_dir = TestDir::new();
    let path = test_dir.path("manager");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let variables = [
        ("NOTIFY_SOCKET", &*text(&path)),
        ("WATCHDOG_USEC", "300000"),
    ];
    let socket = text(&test_dir.socket());
    let daemon = Daemon::spawn_in(&variables, &["serve", "--socket", &socket, "mem://1M"]);
    let mut told = Vec::new();
    let mut message = [0; 64];
    while told.len() < 4 {
        let len = manager.recv(&mut message).unwrap();
        told.push(String::from_utf8_lossy(&message[..len]).into_owned());
    }
    assert_eq!(told[0], "READY=1\n");
    assert!(
        told.iter().skip(1).all(|text| text == "WATCHDOG=1\n"),
        "{told:?}"
    );
    daemon.end();
}

/// The notification prevents the service manager from treating the daemon as idle.
#[test]
fn reload_is_notified_for_every_result() {
    let test_dir = TestDir::new();
    let path = test_dir.path("manager");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let config = test_dir.path("c.toml");
    fs::write(&config, "").unwrap();
    let args = ["daemon", "--config", &text(&config)];
    let daemon = Daemon::spawn_with("NOTIFY_SOCKET", &text(&path), &args);
    let told = || {
        let mut message = [0; 64];
        let len = manager.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..len]).into_owned()
    };
    assert_eq!(told(), "READY=1\n");
    for file in ["[process]\n", "this is no TOML ["] {
        fs::write(&config, file).unwrap();
        daemon.signal(rustix::process::Signal::HUP);
        let message = told();
        let time = message.strip_prefix("RELOADING=1\nMONOTONIC_USEC=");
        let time = time.and_then(|time| time.trim_end().parse::<u64>().ok());
        assert!(time.is_some_and(|time| time > 0), "{message}");
        assert_eq!(told(), "READY=1\n");
    }
    daemon.end();
    assert_eq!(told(), "STOPPING=1\n");
}

/// A socket that is there before the daemon: clients wait for it, and it is there after it.
#[test]
fn passed_socket_is_used_and_left() {
    let test_dir = TestDir::new();
    let listener = UnixListener::bind(test_dir.socket()).unwrap();
    let again = listener.try_clone().unwrap();
    let file = fs::metadata(test_dir.socket()).unwrap().ino();
    // The client waits already.
    let mut early = UnixStream::connect(test_dir.socket()).ok();
    let socket = text(&test_dir.socket());
    let control = text(&test_dir.path("ctl"));
    let args = ["serve", "-s", &socket, "--control", &control, "mem://1M"];
    for listener in [listener, again] {
        let daemon = Daemon::spawn_with_socket(listener.into(), &args);
        daemon.wait_listening(&test_dir.socket());
        if let Some(client) = early.take() {
            daemon.wait_log(|line| line.contains("client connected"));
            drop(client);
            daemon.wait_log(|line| line.contains("client disconnected"));
        }
        let mut host = Host::up(&test_dir.socket());
        host.write(1, 0, &pattern(1, 4096));
        drop(host);
        assert_eq!(daemon.count("no configured disk has its path"), 0);
        daemon.end();
        assert_eq!(
            fs::metadata(test_dir.socket()).unwrap().ino(),
            file,
            "it is left"
        );
    }

    // The control socket, by another name for its directory. Disks make their own.
    std::os::unix::fs::symlink(test_dir.path(""), test_dir.path("link")).unwrap();
    let listener = UnixListener::bind(test_dir.path("link/ctl")).unwrap();
    fs::remove_file(test_dir.socket()).unwrap();
    let daemon = Daemon::spawn_with_socket(listener.into(), &args);
    daemon.wait_listening(&test_dir.socket());
    let listed = control_client(&control);
    assert!(listed.contains("vm.sock"), "{listed}");
    daemon.end();
    assert!(test_dir.path("ctl").exists() && !test_dir.socket().exists());
}

fn control_client(control: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
    let output = command.args(["list", "--control", control]).output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}

/// Other descriptors cause a warning.
#[test]
fn unusable_passed_descriptor_is_named() {
    let test_dir = TestDir::new();
    let serve = |other: OwnedFd, words: &str| {
        let socket = text(&test_dir.socket());
        let daemon = Daemon::spawn_with_socket(other, &["serve", "-s", &socket, "mem://1M"]);
        daemon.wait_listening(&test_dir.socket());
        daemon.wait_log(|line| line.contains("WARN") && line.contains(words));
        drop(Host::up(&test_dir.socket()));
        daemon.end();
    };
    let other = UnixListener::bind(test_dir.path("other")).unwrap();
    serve(other.into(), "no configured disk has its path");
    let none = "not a listening Unix stream socket";
    serve(UnixDatagram::unbound().unwrap().into(), none);
    serve(fs::File::open("/dev/null").unwrap().into(), none);
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    serve(tcp.into(), none);
}

/// Values that a service manager never sets are no reason to refuse to serve.
#[test]
fn invalid_environment_does_not_prevent_serving() {
    let long = "x".repeat(500);
    for (name, value) in [
        ("NOTIFY_SOCKET", ""),
        ("NOTIFY_SOCKET", "@"),
        ("NOTIFY_SOCKET", "not/a/socket"),
        ("NOTIFY_SOCKET", "vsock:2:1234"),
        ("NOTIFY_SOCKET", "/"),
        ("NOTIFY_SOCKET", &long),
        ("WATCHDOG_USEC", "often"),
        ("JOURNAL_STREAM", "8:12345"),
    ] {
        let test_dir = TestDir::new();
        let socket = text(&test_dir.socket());
        let daemon = Daemon::spawn_with(name, value, &["serve", "--socket", &socket, "mem://1M"]);
        daemon.wait_listening(&test_dir.socket());
        let log = daemon.log().concat();
        assert!(
            log.contains(" INFO "),
            "{name}={value}: text as ever: {log}"
        );
        daemon.end();
    }
}

#[test]
fn service_manager_is_notified_when_ready() {
    let test_dir = TestDir::new();
    let path = test_dir.path("manager");
    is_told(&UnixDatagram::bind(&path).unwrap(), &text(&path));
    // Abstract sockets of other processes are out of reach of the sandbox.
    let name = text(&test_dir.path("abstract"));
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    is_told(
        &UnixDatagram::bind_addr(&address).unwrap(),
        &format!("@{name}"),
    );
}

#[test]
fn missing_service_manager_does_not_prevent_serving() {
    let test_dir = TestDir::new();
    let (socket, nobody) = (text(&test_dir.socket()), text(&test_dir.path("nobody")));
    let args = ["serve", "--socket", &socket, "mem://1M"];
    let daemon = Daemon::spawn_with("NOTIFY_SOCKET", &nobody, &args);
    daemon.wait_listening(&test_dir.socket());
    daemon.wait_log(|line| line.contains("WARN") && line.contains(&nobody));
    daemon.end();
}

/// The service manager waits for a process that sends nothing before it can serve, or ends.
#[test]
fn failed_start_sends_no_notification() {
    let test_dir = TestDir::new();
    let path = test_dir.path("manager");
    let manager = UnixDatagram::bind(&path).unwrap();
    let (socket, none) = (text(&test_dir.socket()), text(&test_dir.path("none.raw")));
    let args = ["serve", "--socket", &socket, &none];
    let daemon = Daemon::spawn_with("NOTIFY_SOCKET", &text(&path), &args);
    assert_eq!(daemon.wait().status.code(), Some(1));
    manager.set_nonblocking(true).unwrap();
    let told = manager.recv(&mut [0; 64]);
    assert_eq!(told.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}
