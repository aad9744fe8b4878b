//! Hostile clients of an export over NBD, whose protocol has no descriptors.

use super::{Attack, PROMPT, apart, attack, is_stopped, send_attack};
use crate::common::*;
use crate::lingering::Lingering;
use control::Client;
use control::api::NewExport;
use rustix::process::Signal;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::channel;

/// Number of clients that an export has at most.
const CLIENTS: usize = 8;

/// A daemon with an exported disk "a".
struct Exporting {
    test_dir: TestDir,
    daemon: Daemon,
    client: Client,
}

impl Exporting {
    fn start() -> Self {
        let test_dir = TestDir::new();
        let disk = test_dir.disk("a.raw", 1 << 20);
        let socket = text(&test_dir.path("a.sock"));
        let config = test_dir.path("vnvme.toml");
        let controller = format!(
            "[[controller]]\nname = \"a\"\nsocket = \"{socket}\"\n\
             namespace = [{{ volume = \"{disk}\" }}]\n"
        );
        std::fs::write(&config, controller).unwrap();
        let control = test_dir.path("control");
        let (config, at) = (text(&config), text(&control));
        let folder = text(test_dir.path("x").parent().unwrap());
        let args = ["daemon", "--keeper", "off", "--config", &config];
        let args = [&args[..], &["--allow", &folder]].concat();
        let starting = apart();
        let daemon = Daemon::spawn(&[&args[..], &["--control", &at]].concat());
        drop(starting);
        daemon.wait_listening(&test_dir.path("a.sock"));
        let client = Client::new(vec![control]).unwrap();
        let exporting = Self {
            test_dir,
            daemon,
            client,
        };
        let nbd = format!("unix:{}", exporting.socket().display());
        let new = NewExport {
            disk: "a".into(),
            nsid: None,
            nbd,
            writable: false,
        };
        exporting.client.export(&new).unwrap();
        exporting
    }

    fn socket(&self) -> std::path::PathBuf {
        self.test_dir.path("nbd.sock")
    }

    /// Clients that send an attack before the daemon accepts them.
    fn raid(&self, count: usize, attack: &Attack, poison: &Lingering) -> Vec<UnixStream> {
        let _apart = apart();
        self.daemon.signal(Signal::STOP);
        eventually("it is stopped", || is_stopped(self.daemon.pid()));
        let connect = |_| UnixStream::connect(self.socket()).unwrap();
        let clients: Vec<UnixStream> = (0..count).map(connect).collect();
        for client in &clients {
            send_attack(client, attack, poison);
        }
        self.daemon.signal(Signal::CONT);
        clients
    }

    /// Ends the export, the disk and the daemon, although clients hold up their threads.
    fn end(self) {
        let Self {
            test_dir,
            daemon,
            client,
        } = self;
        let client = promptly("vnvme unexport", move || {
            client.unexport("a").unwrap();
            client
        });
        assert!(!test_dir.path("nbd.sock").exists());
        promptly("vnvme remove", move || client.remove("a", true).unwrap());
        let disk = test_dir.path("a.raw");
        assert!(!has_open(daemon.pid(), &disk));
        promptly("the end of the process", move || daemon.end());
    }
}

/// Does what must not wait for a client.
fn promptly<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = channel();
    std::thread::spawn(move || tell.send(work()));
    told.recv_timeout(PROMPT).expect(what)
}

fn has_open(pid: u32, file: &Path) -> bool {
    let mut open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    open.any(|fd| std::fs::read_link(fd.unwrap().path()).is_ok_and(|path| path == file))
}

/// Clients in their handshake, refused clients, and clients that wait to be accepted.
#[test]
fn lingering_sockets_hold_up_neither_end_of_export_nor_volume() {
    let poison = Lingering::new();
    let exporting = Exporting::start();
    assert!(has_open(
        exporting.daemon.pid(),
        &exporting.test_dir.path("a.raw")
    ));
    let flags = attack("handshake flags", Vec::new(), vec![0, 0, 0, 3]);
    let connected = exporting.raid(CLIENTS, &flags, &poison);
    // None of them waits in the backlog, which has room for the others only.
    eventually("all were accepted", || {
        exporting.client.exports().unwrap()[0].clients == CLIENTS as u32
    });
    let others = exporting.raid(CLIENTS + 4, &flags, &poison);
    let is_refused = |line: &str| line.contains("refused a client");
    exporting.daemon.wait_log(is_refused);
    exporting.end();
    drop((connected, others));
}

/// A client counts until its socket is closed, so that hostile ones cannot take more threads.
#[test]
fn clients_whose_sockets_linger_count_as_connected() {
    let poison = Lingering::new();
    let exporting = Exporting::start();
    let violation = attack("behind a violation", vec![0xff; 4], vec![1]);
    let connected = exporting.raid(CLIENTS, &violation, &poison);
    let mut ninth = UnixStream::connect(exporting.socket()).unwrap();
    ninth.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    assert_eq!(ninth.read(&mut [0; 18]).unwrap(), 0, "it is refused");
    let shown = exporting.client.exports().unwrap();
    assert_eq!(shown[0].clients, CLIENTS as u32);
    exporting.end();
    drop(connected);
}
