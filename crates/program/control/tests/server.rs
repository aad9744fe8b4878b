//! The server by its sockets: what its clients get, and what hostile ones do to the others.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use control::api::{
    AnaChange, AnaStatus, DeviceState, DeviceStatus, Disk, DiskKind, DiskState, ErrorAction,
    ErrorChange, EventKind, Export, LimitChange, Namespace, NewExport, PathChange, PathState, Plan,
    Stats, VolumeErrors, VolumeLimits,
};
use control::server::{Access, Endpoint, MAX_CLIENTS, MAX_LISTENERS, RunningServer, Server};
use control::{Client, ClientError, Daemon, Error, EventReceiver, EventSender, Received};
use receive::Intake;
use serde_json::{Map, Value, json};
use std::convert::Infallible;
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Long for anything that is waited for.
const LIMIT: Duration = Duration::from_secs(30);

/// A daemon that keeps names.
struct Fake {
    names: Mutex<Vec<String>>,
    events: EventSender,
    /// `suspend` says that it has begun, and waits for a word.
    begun: Sender<()>,
    go_on: Mutex<Receiver<()>>,
}

fn disk(name: &str) -> Disk {
    Disk {
        name: name.to_owned(),
        kind: DiskKind::Controller,
        socket: Some(format!("/run/{name}")),
        device: None,
        attached: false,
        not_yet_kept: false,
        not_kept: false,
        state: DiskState::Free,
        client_pid: None,
        client: None,
        serial: None,
        error: None,
        namespaces: Vec::new(),
    }
}

impl Daemon for Fake {
    fn disks(&self) -> Result<Vec<Disk>, Error> {
        let names = self.names.lock().unwrap();
        if names.iter().any(|name| name == "starting") {
            Err(Error::busy("the process is starting"))
        } else {
            Ok(names.iter().map(|name| disk(name)).collect())
        }
    }

    fn disk(&self, name: &str) -> Result<Disk, Error> {
        let disks = self.disks()?;
        let found = disks.into_iter().find(|disk| disk.name == name);
        found.ok_or_else(|| Error::not_found(format!("no disk is called \"{name}\"")))
    }

    fn add(&self, kind: DiskKind, table: Map<String, Value>) -> Result<Disk, Error> {
        let name = table["name"].as_str().unwrap();
        assert_eq!(kind, DiskKind::Controller);
        self.names.lock().unwrap().push(name.to_owned());
        self.events.send(EventKind::Added, name, None, None);
        self.disk(name)
    }

    fn remove(&self, name: &str, force: bool) -> Result<(), Error> {
        self.disk(name)?;
        if !force {
            return Err(Error::conflict("a client is attached"));
        }
        self.names.lock().unwrap().retain(|known| known != name);
        Ok(())
    }

    fn apply(&self, config: Map<String, Value>, dry_run: bool) -> Result<Plan, Error> {
        Ok(Plan {
            dry_run,
            added: config.keys().cloned().collect(),
            ..Plan::default()
        })
    }

    fn reload(&self) -> Result<Plan, Error> {
        panic!("a bug")
    }

    fn accept(&self, name: &str) -> Result<(), Error> {
        match name {
            "a" => Ok(()),
            _ => Err(Error::conflict("it has the volumes that its guest knows")),
        }
    }

    fn upgrade(&self) -> Result<Infallible, Error> {
        Err(Error::conflict("no other program"))
    }

    fn attach(&self, _: &str, namespace: Map<String, Value>) -> Result<Namespace, Error> {
        Ok(Namespace {
            nsid: 1,
            volume: namespace["volume"].as_str().unwrap().to_owned(),
            bytes: 1,
            block_size: 512,
            nguid: None,
            encrypted: false,
            read_only: false,
            path: None,
            atomic_unit: None,
            ana_group: None,
            ana_state: None,
            of_guest: None,
            trouble: None,
        })
    }

    fn detach(&self, _: &str, _: u32) -> Result<(), Error> {
        Ok(())
    }

    fn resize(&self, name: &str, nsid: u32, bytes: u64) -> Result<Namespace, Error> {
        let namespace = self.attach(name, json!({"volume": "a"}).as_object().unwrap().clone())?;
        Ok(Namespace {
            nsid,
            bytes,
            ..namespace
        })
    }

    fn exports(&self) -> Result<Vec<Export>, Error> {
        Ok(Vec::new())
    }

    fn export(&self, export: &NewExport) -> Result<Export, Error> {
        self.disk(&export.disk)?;
        Ok(Export {
            disk: export.disk.clone(),
            nsid: export.nsid.unwrap_or(1),
            nbd: export.nbd.clone(),
            writable: export.writable,
            bytes: 1,
            encrypted: false,
            clients: 0,
        })
    }

    fn unexport(&self, disk: &str) -> Result<(), Error> {
        Err(Error::not_found(format!("\"{disk}\" has no export")))
    }

    fn limits(&self, change: &LimitChange) -> Result<Vec<VolumeLimits>, Error> {
        Ok(vec![VolumeLimits {
            iops: change.iops.unwrap_or(7),
            ..VolumeLimits::default()
        }])
    }

    fn on_error(&self, change: &ErrorChange) -> Result<Vec<VolumeErrors>, Error> {
        Ok(vec![VolumeErrors {
            disk: change.disk.clone().unwrap_or_default(),
            on_write_error: change.on_write_error.unwrap_or_default(),
            held: u64::from(!change.resume),
            ..VolumeErrors::default()
        }])
    }

    fn path(&self, _: &PathChange) -> Result<Vec<PathState>, Error> {
        Ok(Vec::new())
    }

    fn ana(&self, change: &AnaChange) -> Result<Vec<AnaStatus>, Error> {
        let status = |disk: &String| AnaStatus {
            disk: disk.clone(),
            subsystem: "s".to_owned(),
            cntlid: 1,
            group: change.group.unwrap_or(1),
            state: change.state.unwrap_or_default(),
            nsids: vec![1],
        };
        Ok(change.disk.iter().map(status).collect())
    }

    fn suspend(&self, device: &str) -> Result<DeviceStatus, Error> {
        self.begun.send(()).unwrap();
        let _ = self.go_on.lock().unwrap().recv();
        Ok(DeviceStatus {
            device: device.to_owned(),
            state: DeviceState::Suspended,
            resets: 0,
        })
    }

    fn resume(&self, _: &str) -> Result<DeviceStatus, Error> {
        Err(Error::unsupported("not here"))
    }

    fn save(&self) -> Result<String, Error> {
        Ok("[process]\n".to_owned())
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }

    fn metrics(&self) -> Result<String, Error> {
        // More than a socket has room for.
        Ok("# much\n".repeat(1 << 20))
    }

    fn page(&self) -> Result<&'static str, Error> {
        Ok("<!doctype html>")
    }

    fn events(&self) -> EventReceiver {
        self.events.receiver()
    }
}

/// Descriptors of the process are counted: one test at a time.
static ONE: Mutex<()> = Mutex::new(());

/// A server with both kinds of sockets.
struct World {
    dir: tempfile::TempDir,
    running: Option<RunningServer>,
    daemon: Arc<Fake>,
    begun: Receiver<()>,
    go_on: Sender<()>,
    _one: MutexGuard<'static, ()>,
}

impl World {
    fn new() -> Self {
        Self::with_rate(1_000_000)
    }

    fn with_rate(rate: u32) -> Self {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().unwrap();
        let endpoint = |name: &str, access| {
            let listener = UnixListener::bind(dir.path().join(name)).unwrap();
            listener.set_nonblocking(true).unwrap();
            Endpoint {
                listener: Box::new(listener),
                intake: Intake::in_place(0),
                access,
                rate,
            }
        };
        let endpoints = vec![
            endpoint("full", Access::Full),
            endpoint("questions", Access::ReadOnly),
        ];
        let (begun, has_begun) = channel();
        let (go_on, goes_on) = channel();
        let daemon = Arc::new(Fake {
            names: Mutex::new(vec!["a".into(), "b".into()]),
            events: EventSender::new(),
            begun,
            go_on: Mutex::new(goes_on),
        });
        let server = Server::new(endpoints).unwrap();
        let world = Self {
            dir,
            running: Some(server.start(daemon.clone()).unwrap()),
            daemon,
            begun: has_begun,
            go_on,
            _one: one,
        };
        // Everything that it opens is open.
        world.is_well();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn client(&self, name: &str) -> Client {
        Client::new(vec![self.path(name)]).unwrap()
    }

    fn connect(&self) -> UnixStream {
        let mut socket = None;
        eventually("it listens", || {
            socket = UnixStream::connect(self.path("full")).ok();
            socket.is_some()
        });
        let socket = socket.unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.set_write_timeout(Some(LIMIT)).unwrap();
        socket
    }

    /// Sends bytes, and reads until the server closes, or `len` bytes are there.
    fn exchange(&self, bytes: &[u8]) -> String {
        let mut socket = self.connect();
        // It may answer and close before everything is written.
        let _ = socket.write_all(bytes);
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// A good client is answered.
    fn is_well(&self) {
        assert_eq!(self.client("full").disks().unwrap().len(), 2);
    }
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < LIMIT, "not so: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The server closes the connection, whatever it says before.
fn is_closed(socket: &mut UnixStream) -> bool {
    let mut piece = [0; 4096];
    loop {
        match socket.read(&mut piece) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

const CLOSE: &str = "Host: x\r\nConnection: close\r\n\r\n";

#[test]
fn client_performs_every_request() {
    let world = World::new();
    let client = world.client("full");
    let table = json!({"name": "c/d e"}).as_object().unwrap().clone();
    let added = client.add(DiskKind::Controller, table).unwrap();
    assert_eq!(added.name, "c/d e");
    assert_eq!(client.disk("c/d e").unwrap(), added);
    let refused = client.remove("c/d e", false).unwrap_err();
    assert!(matches!(refused, ClientError::Refused { status: 409, .. }));
    assert_eq!(refused.to_string(), "a client is attached");
    client.remove("c/d e", true).unwrap();
    let missing = client.disk("c/d e").unwrap_err();
    assert!(matches!(missing, ClientError::Refused { status: 404, .. }));
    let config = json!({"controller": []}).as_object().unwrap().clone();
    let plan = client.apply(&config, true).unwrap();
    assert_eq!(
        (plan.dry_run, &plan.added[..]),
        (true, &["controller".to_owned()][..])
    );
    assert_eq!(client.resize("a", 3, 1 << 40).unwrap().bytes, 1 << 40);
    assert_eq!(
        client
            .attach("a", &json!({"volume": "x"}).as_object().unwrap().clone())
            .unwrap()
            .volume,
        "x"
    );
    client.detach("a", 1).unwrap();
    assert_eq!(client.save().unwrap(), "[process]\n");
    assert_eq!(client.metrics().unwrap().len(), 7 << 20);
    assert_eq!(client.limits(&LimitChange::default()).unwrap()[0].iops, 7);
    let change = LimitChange {
        iops: Some(9),
        ..LimitChange::default()
    };
    let refused = client.limits(&change).unwrap_err();
    assert!(refused.to_string().contains("--all"), "{refused}");
    let change = LimitChange {
        all: true,
        ..change
    };
    assert_eq!(client.limits(&change).unwrap()[0].iops, 9);
    assert_eq!(client.on_error(&ErrorChange::default()).unwrap()[0].held, 1);
    let change = ErrorChange {
        on_write_error: Some(ErrorAction::EnospcStop),
        resume: true,
        ..ErrorChange::default()
    };
    let refused = client.on_error(&change).unwrap_err();
    assert!(refused.to_string().contains("--all"), "{refused}");
    let change = ErrorChange {
        disk: Some("a".into()),
        ..change
    };
    let told = &client.on_error(&change).unwrap()[0];
    assert_eq!((&*told.disk, told.held), ("a", 0));
    assert_eq!(told.on_write_error, ErrorAction::EnospcStop);
    let refused = client.resume("x").unwrap_err();
    assert!(matches!(refused, ClientError::Refused { status: 501, .. }));
    // The daemon's bug is not the server's.
    let refused = client.reload().unwrap_err();
    assert!(matches!(refused, ClientError::Refused { status: 500, .. }));
    world.is_well();
}

#[test]
fn query_socket_refuses_changes() {
    let world = World::new();
    let client = world.client("questions");
    assert_eq!(client.disks().unwrap().len(), 2);
    assert_eq!(client.limits(&LimitChange::default()).unwrap().len(), 1);
    client.stats().unwrap();
    let table = json!({"name": "c"}).as_object().unwrap().clone();
    let config = Map::new();
    let change = LimitChange {
        all: true,
        iops: Some(1),
        ..LimitChange::default()
    };
    let path = PathChange {
        all: true,
        ..PathChange::default()
    };
    let on_error = ErrorChange {
        all: true,
        resume: true,
        ..ErrorChange::default()
    };
    let export = NewExport {
        disk: "a".into(),
        nsid: None,
        nbd: "unix:/x".into(),
        writable: false,
    };
    for (what, refused) in [
        (
            "add",
            client.add(DiskKind::Controller, table.clone()).map(drop),
        ),
        ("remove", client.remove("a", true)),
        ("apply", client.apply(&config, true).map(drop)),
        ("reload", client.reload().map(drop)),
        ("attach", client.attach("a", &table).map(drop)),
        ("detach", client.detach("a", 1)),
        ("resize", client.resize("a", 1, 1).map(drop)),
        ("export", client.export(&export).map(drop)),
        ("unexport", client.unexport("a")),
        ("limits", client.limits(&change).map(drop)),
        ("path", client.paths(&path).map(drop)),
        ("on-error", client.on_error(&on_error).map(drop)),
        ("suspend", client.suspend("a").map(drop)),
        ("resume", client.resume("a").map(drop)),
    ] {
        let refused = refused.expect_err(what);
        assert!(
            matches!(refused, ClientError::Refused { status: 403, .. }),
            "{what}: {refused}"
        );
    }
    world.is_well();
}

#[test]
fn several_requests_share_connection() {
    let world = World::new();
    let mut socket = world.connect();
    let request = "GET /v1/disks HTTP/1.1\r\nHost: x\r\n\r\n";
    socket.write_all(request.repeat(50).as_bytes()).unwrap();
    socket
        .write_all(format!("HEAD /v1/disks HTTP/1.1\r\n{CLOSE}").as_bytes())
        .unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert_eq!(answer.matches("HTTP/1.1 200 OK").count(), 51, "{answer}");
    assert_eq!(
        answer.matches("\"name\":\"a\"").count(),
        50,
        "HEAD has no body"
    );
}

#[test]
fn malformed_request_is_refused() {
    let world = World::new();
    let many: String = (0..200).map(|i| format!("X-{i}: y\r\n")).collect();
    let post = "POST /v1/disks HTTP/1.1\r\n";
    for (what, request, status) in [
        ("nothing", String::new(), ""),
        ("no HTTP", "what?\r\n\r\n".into(), "400"),
        ("the old protocol", "{\"method\":\"stats\"}\n".into(), "400"),
        ("TLS", "\u{16}\u{3}\u{1}\0\r\n\r\n".into(), "400"),
        ("an unknown version", "GET / HTTP/9.9\r\n\r\n".into(), "400"),
        ("no version", "GET /\r\n\r\n".into(), "400"),
        (
            "the preface of HTTP/2",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".into(),
            "",
        ),
        (
            "a long address",
            format!("GET /{} HTTP/1.1\r\n{CLOSE}", "x".repeat(70_000)),
            "4",
        ),
        (
            "a long header",
            format!("GET / HTTP/1.1\r\nX: {}\r\n{CLOSE}", "x".repeat(70_000)),
            "431",
        ),
        (
            "many headers",
            format!("GET / HTTP/1.1\r\n{many}{CLOSE}"),
            "431",
        ),
        (
            "another path",
            format!("GET /etc/passwd HTTP/1.1\r\n{CLOSE}"),
            "404",
        ),
        (
            "a path that climbs",
            format!("GET /v1/../../etc HTTP/1.1\r\n{CLOSE}"),
            "404",
        ),
        (
            "another method",
            format!("BREW /v1/disks HTTP/1.1\r\n{CLOSE}"),
            "405",
        ),
        ("no body", format!("{post}{CLOSE}"), "400"),
        (
            "half a body",
            format!("{post}Content-Length: 9\r\n{CLOSE}{{}}"),
            "",
        ),
        (
            "a body that is no JSON",
            format!("{post}Content-Length: 2\r\n{CLOSE}no"),
            "400",
        ),
        (
            "deep JSON",
            format!("{post}Content-Length: 5000\r\n{CLOSE}{}", "[".repeat(5000)),
            "400",
        ),
        (
            "a body that is too long",
            format!("{post}Content-Length: 1048577\r\n{CLOSE}"),
            "413",
        ),
        (
            "as long as numbers go",
            format!("{post}Content-Length: 18446744073709551615\r\n{CLOSE}"),
            "4",
        ),
        (
            "longer",
            format!("{post}Content-Length: 99999999999999999999999\r\n{CLOSE}"),
            "400",
        ),
        (
            "two lengths",
            format!("{post}Content-Length: 1\r\nContent-Length: 2\r\n{CLOSE}{{}}"),
            "400",
        ),
        (
            "chunks without end",
            format!(
                "{post}Transfer-Encoding: chunked\r\n{CLOSE}{}",
                "8\r\n12345678\r\n".repeat(140_000)
            ),
            "413",
        ),
        (
            "chunks that are none",
            format!("{post}Transfer-Encoding: chunked\r\n{CLOSE}xyz\r\n"),
            "400",
        ),
        (
            "a chunk as long as numbers go",
            format!("{post}Transfer-Encoding: chunked\r\n{CLOSE}ffffffffffffffff\r\n"),
            "",
        ),
        (
            "a chunk that says much of itself",
            format!(
                "{post}Transfer-Encoding: chunked\r\n{CLOSE}1;{}",
                "x".repeat(100_000)
            ),
            "400",
        ),
        (
            "trailers without end",
            format!(
                "{post}Transfer-Encoding: chunked\r\n{CLOSE}0\r\n{}",
                "X: y\r\n".repeat(50_000)
            ),
            "4",
        ),
        (
            "a name that is no UTF-8",
            format!("GET /v1/disks/%ff HTTP/1.1\r\n{CLOSE}"),
            "400",
        ),
        (
            "an unknown field",
            format!("PATCH /v1/limits HTTP/1.1\r\nContent-Length: 10\r\n{CLOSE}{{\"iosp\":1}}"),
            "400",
        ),
        (
            "a change of everything",
            format!("PATCH /v1/limits HTTP/1.1\r\nContent-Length: 10\r\n{CLOSE}{{\"iops\":1}}"),
            "400",
        ),
    ] {
        let answer = world.exchange(request.as_bytes());
        let told = answer.strip_prefix("HTTP/1.1 ").unwrap_or(&answer);
        match status {
            // It is closed, sooner or later.
            "" => assert!(!told.starts_with('2'), "{what}: {answer}"),
            status => assert!(told.starts_with(status), "{what}: {answer}"),
        }
        world.is_well();
    }
}

#[test]
fn slow_clients_are_dropped_without_blocking_others() {
    let world = World::new();
    let before = descriptors();
    let mut silent = world.connect();
    let mut head: Vec<_> = (0..20).map(|_| world.connect()).collect();
    for socket in &mut head {
        socket.write_all(b"GET /v1/sta").unwrap();
    }
    let mut body = world.connect();
    let begin = b"POST /v1/apply HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{";
    body.write_all(begin).unwrap();
    let mut chunks = world.connect();
    let begin = b"POST /v1/apply HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    chunks.write_all(begin).unwrap();
    // It takes nothing of an answer that does not fit into its socket.
    let mut deaf = world.connect();
    deaf.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    world.is_well();
    // Bytes that come one by one are no more time.
    eventually("a slow one is dropped", || {
        std::thread::sleep(Duration::from_millis(50));
        chunks.write_all(b"1\r\nx\r\n").is_err()
    });
    for socket in head.iter_mut().chain([&mut silent, &mut body]) {
        assert!(is_closed(socket));
    }
    let mut answer = Vec::new();
    eventually("who takes no answer is dropped", || {
        world.is_well();
        let gone = rustix::net::sockopt::socket_error(&deaf).is_ok();
        gone && descriptors() <= before + 24
    });
    let _ = deaf.read_to_end(&mut answer);
    assert!(answer.len() < 7 << 20, "it got all: {}", answer.len());
    drop((head, silent, body, chunks, deaf));
    eventually("all is closed", || descriptors() <= before);
}

#[test]
fn too_many_clients_drop_slowest() {
    let world = World::new();
    let before = descriptors();
    let mut idle = world.connect();
    idle.write_all(b"GET /v1/disks HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    assert!(idle.read(&mut [0; 4096]).unwrap() > 0);
    let mut all: Vec<_> = (0..2 * MAX_CLIENTS).map(|_| world.connect()).collect();
    world.is_well();
    // Ours and the server's.
    let most = 1 + 2 * MAX_CLIENTS + MAX_CLIENTS + 8;
    eventually("some are dropped", || descriptors() <= before + most);
    assert!(is_closed(&mut idle), "who asks for nothing goes first");
    assert!(is_closed(&mut all[0]));
    drop((idle, all));
    eventually("all are closed", || descriptors() <= before);
}

#[test]
fn thousands_of_short_clients_leak_nothing() {
    let world = World::new();
    world.is_well();
    let before = descriptors();
    for round in 0..10_000 {
        let mut socket = world.connect();
        match round % 4 {
            0 => {}
            1 => socket.write_all(b"GET /v1/disks HTTP/1.1\r\n").unwrap(),
            2 => {
                let _ = socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
            }
            _ => {
                let _ = socket.write_all(b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
            }
        }
        if round % 1000 == 0 {
            world.is_well();
        }
    }
    world.is_well();
    eventually("all are closed", || descriptors() <= before);
}

/// A client that may connect and send requests this often has its share of the thread, and no more.
#[test]
fn requests_are_rate_limited() {
    let world = World::with_rate(20);
    let begin = Instant::now();
    let mut socket = world.connect();
    let request = "GET /v1/disks HTTP/1.1\r\nHost: x\r\n\r\n";
    socket.write_all(request.repeat(59).as_bytes()).unwrap();
    socket
        .write_all(format!("GET /v1/disks HTTP/1.1\r\n{CLOSE}").as_bytes())
        .unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert_eq!(answer.matches("HTTP/1.1 200 OK").count(), 60);
    // Twenty at once, the others in two seconds.
    assert!(
        begin.elapsed() >= Duration::from_millis(1900),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn slow_request_blocks_no_other_client() {
    let world = World::new();
    let path = world.path("full");
    let asked: Vec<_> = (0..8)
        .map(|_| {
            let path = path.clone();
            std::thread::spawn(move || Client::new(vec![path]).unwrap().suspend("0000:44:00.0"))
        })
        .collect();
    for _ in 0..8 {
        world.begun.recv_timeout(LIMIT).unwrap();
    }
    world.is_well();
    let refused = world.client("full").suspend("x").unwrap_err();
    assert!(
        matches!(refused, ClientError::Refused { status: 503, .. }),
        "{refused}"
    );
    for _ in 0..8 {
        world.go_on.send(()).unwrap();
    }
    for one in asked {
        assert_eq!(one.join().unwrap().unwrap().device, "0000:44:00.0");
    }
    // Clients that ask for it and disconnect do not add up.
    let request = "POST /v1/devices/x/suspend HTTP/1.1\r\nHost: x\r\n\r\n";
    for _ in 0..200 {
        world.connect().write_all(request.as_bytes()).unwrap();
    }
    let mut begun = 0;
    while world.begun.recv_timeout(Duration::from_millis(300)).is_ok() {
        begun += 1;
    }
    assert!(begun <= 8, "{begun} at a time");
    world.is_well();
    // It ends although they hang.
    let World { running, go_on, .. } = world;
    let begin = Instant::now();
    drop(running);
    assert!(
        begin.elapsed() < Duration::from_secs(60),
        "{:?}",
        begin.elapsed()
    );
    drop(go_on);
}

#[test]
fn events_reach_every_listener() {
    let world = World::new();
    let (told, tell) = channel();
    let (ready, is_ready) = channel();
    let listeners: Vec<_> = ["full", "questions"]
        .map(|name| {
            let (client, told, ready) = (world.client(name), told.clone(), ready.clone());
            std::thread::spawn(move || {
                let each = |received| {
                    let last = matches!(&received, Received::Event(event) if event.disk == "end");
                    told.send(received).unwrap();
                    if last {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                };
                client.events(|| ready.send(()).unwrap(), each).unwrap();
            })
        })
        .into();
    for _ in &listeners {
        is_ready.recv_timeout(LIMIT).unwrap();
    }
    let events = &world.daemon.events;
    events.send(
        EventKind::Attached,
        "a\nb",
        Some(1),
        Some("über \"alles\"".into()),
    );
    events.send(EventKind::Removed, "end", None, None);
    let mut all: Vec<Received> = (0..4).map(|_| tell.recv_timeout(LIMIT).unwrap()).collect();
    all.retain(|one| {
        matches!(one, Received::Event(e) if e.disk == "a\nb" && e.nsid == Some(1)
        && e.kind == EventKind::Attached && e.message.as_deref() == Some("über \"alles\""))
    });
    assert_eq!(all.len(), 2);
    for listener in listeners {
        listener.join().unwrap();
    }
}

#[test]
fn listeners_without_reads_are_dropped() {
    let world = World::new();
    let before = descriptors();
    let listen = || {
        let mut socket = world.connect();
        let request = b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n";
        socket.write_all(request).unwrap();
        let mut begin = [0; 12];
        socket.read_exact(&mut begin).unwrap();
        (socket, String::from_utf8(begin[9..].into()).unwrap())
    };
    let mut all = Vec::new();
    for _ in 0..MAX_LISTENERS {
        let (socket, status) = listen();
        assert_eq!(status, "200");
        all.push(socket);
    }
    assert_eq!(listen().1, "503", "one too many");
    // What no socket has room for: nobody takes it.
    let message = "x".repeat(4096);
    let gone = || descriptors() < before + 2 * MAX_LISTENERS;
    eventually("they are dropped", || {
        for _ in 0..100 {
            let kind = EventKind::Error;
            world
                .daemon
                .events
                .send(kind, "a", None, Some(message.clone()));
        }
        world.is_well();
        gone() && listen().1 == "200"
    });
    drop(all);
    eventually("all are closed", || descriptors() <= before);
    world.is_well();
}

#[test]
fn foreign_socket_is_told_from_control_socket() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let client = || Client::new(vec![dir.path().join("nothing"), path.clone()]).unwrap();
    let error = client().disks().unwrap_err().to_string();
    assert!(
        error.contains("nothing") && error.contains("disk: no control socket"),
        "{error}"
    );
    let listener = UnixListener::bind(&path).unwrap();
    // As a server of vfio-user: it reads a header, and closes.
    for answer in [&b""[..], b"\x01\0\x02\0\x10\0\0\0"] {
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| client().disks().unwrap_err().to_string());
            let (mut socket, _) = listener.accept().unwrap();
            socket.read_exact(&mut [0; 16]).unwrap();
            socket.write_all(answer).unwrap();
            drop(socket);
            let error = asking.join().unwrap();
            assert!(error.contains("socket of a disk"), "{error}");
        });
    }
    drop(listener);
    let error = client().disks().unwrap_err().to_string();
    assert!(error.contains("has ended"), "{error}");
}
