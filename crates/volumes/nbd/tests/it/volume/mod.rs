//! The volume against a server in this process: what it does, and what it makes of a server that
//! lies, hangs and disappears.

mod given_up;
mod histories;
mod lost;
mod shared;
use crate::server;

use crate::common::{BOUND, Worker};
use crate::suite::{WRITE, pattern};
use nbd::protocol::wire::{command, export_flags as flags};
use nbd::{NbdOptions, NbdServer as Named, NbdVolume};
use server::{ALL, Answer, Server, Setup};
use std::time::{Duration, Instant};
use volume::{Io, IoErrorKind, IoOptions, Op, OpenOptions, Registry, Volume};

/// With time-outs that no busy machine reaches.
fn options() -> NbdOptions {
    NbdOptions::default()
}

fn open(server: &Server, options: NbdOptions) -> NbdVolume {
    let named = Named::unix("/", server.path.to_str().unwrap()).unwrap();
    NbdVolume::open(named, options).unwrap()
}

fn serving(answer: impl Fn(usize, &server::Request) -> Answer + Send + Sync + 'static) -> Server {
    Server::new(Setup {
        answer: Box::new(answer),
        ..Setup::default()
    })
}

#[test]
fn written_data_is_read_back() {
    for structured in [true, false] {
        let server = Server::new(Setup {
            structured,
            ..Setup::default()
        });
        let volume = open(&server, options());
        let mut worker = Worker::new(&volume);
        for (offset, len) in [(0, 512), (4096, 4096), (65536, 1 << 20), (1 << 20, 70_144)] {
            let data = pattern(len as u8, len);
            worker.write(offset, &data).unwrap();
            assert_eq!(worker.read(offset, len).unwrap(), data, "{offset} {len}");
            let there = server.state.data.lock().unwrap();
            assert!(there[offset as usize..][..len as usize] == data[..]);
        }
        worker.without_data(Op::Flush, 0, 0).unwrap();
        assert_eq!(server.count(|s| &s.flushes), 1);
        drop(worker);
        assert_eq!(server.count(|s| &s.connections), 1);
    }
}

#[test]
fn volume_info_matches_server() {
    let server = Server::new(Setup {
        blocks: [4096, 8192, 1 << 20],
        ..Setup::default()
    });
    let volume = open(&server, options());
    let info = volume.info();
    assert_eq!((info.size, info.block_size), (2 << 20, 4096));
    assert_eq!((info.optimal_io, info.deallocate_granularity), (8192, 8192));
    assert!(info.deallocate && info.write_zeroes && info.volatile_cache && !info.read_only);
    let mut worker = Worker::new(&volume);
    let refused = worker.read(512, 4096).unwrap_err();
    assert_eq!(refused.kind, IoErrorKind::Invalid);
    assert_eq!(
        worker.read(2 << 20, 4096).unwrap_err().kind,
        IoErrorKind::OutOfRange
    );
    let bare = Server::new(Setup {
        flags: flags::HAS_FLAGS | flags::READ_ONLY,
        ..Setup::default()
    });
    let volume = open(&bare, options());
    let info = volume.info();
    assert!(info.read_only && !info.deallocate && !info.volatile_cache && !info.write_zeroes);
    let mut worker = Worker::new(&volume);
    assert_eq!(
        worker.write(0, &[1; 512]).unwrap_err().kind,
        IoErrorKind::ReadOnly
    );
    assert_eq!(bare.count(|s| &s.requests), 0);
}

#[test]
fn long_requests_are_split() {
    let server = Server::new(Setup {
        blocks: [512, 4096, 64 << 10],
        ..Setup::default()
    });
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    let data = pattern(3, (1 << 20) + 512);
    worker.write(512, &data).unwrap();
    assert_eq!(worker.read(512, data.len() as u64).unwrap(), data);
    let log = server.state.log.lock().unwrap();
    assert_eq!(
        log.iter().filter(|entry| entry.0 == command::WRITE).count(),
        17
    );
}

#[test]
fn durable_write_uses_fua_or_flush() {
    let fua = Op::Write { fua: true };
    let zeroes = Op::WriteZeroes {
        deallocate: false,
        fua: true,
    };
    for known in [true, false] {
        let server = Server::new(Setup {
            flags: if known { ALL } else { ALL & !flags::SEND_FUA },
            ..Setup::default()
        });
        let volume = open(&server, options());
        let mut worker = Worker::new(&volume);
        let data = worker.guest.holding(0, &[9; 4096]);
        assert_eq!(worker.run(fua, 0, 4096, data).result, Ok(()));
        worker.without_data(zeroes, 4096, 4096).unwrap();
        let counts = (server.count(|s| &s.fuas), server.count(|s| &s.flushes));
        assert_eq!(counts, if known { (2, 0) } else { (0, 2) });
        let log = server.state.log.lock().unwrap();
        let zeroed = log.iter().find(|entry| entry.0 == command::WRITE_ZEROES);
        let no_hole = zeroed.unwrap().1 & command::NO_HOLE;
        assert_ne!(no_hole, 0, "space that was not to be deallocated");
    }
}

#[test]
fn unsupported_operations_are_emulated_or_refused() {
    let server = Server::new(Setup {
        flags: flags::HAS_FLAGS,
        ..Setup::default()
    });
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[7; 8192]).unwrap();
    let zeroes = Op::WriteZeroes {
        deallocate: true,
        fua: false,
    };
    worker.without_data(zeroes, 4096, (2 << 20) - 4096).unwrap();
    assert_eq!(worker.read(0, 4096).unwrap(), [7; 4096]);
    assert_eq!(worker.read(4096, 65536).unwrap(), [0; 65536]);
    let refused = worker.without_data(Op::Deallocate, 0, 4096).unwrap_err();
    assert_eq!(refused.kind, IoErrorKind::Unsupported);
    worker.without_data(Op::Flush, 0, 0).unwrap();
    assert_eq!(server.count(|s| &s.flushes), 0);
}

#[test]
fn server_error_fails_own_request_only() {
    let server = serving(|number, _| match number {
        0 => Answer::Errno(28),
        1 => Answer::Errno(5),
        2 => Answer::Errno(0xffff_ffff),
        3 => Answer::Errno(1),
        4 => Answer::Errno(22),
        5 => Answer::Errno(12),
        _ => Answer::Right,
    });
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    assert_eq!(
        worker.write(0, &[1; 4096]).unwrap_err().kind,
        IoErrorKind::NoSpace
    );
    assert_eq!(
        worker.read(0, 4096).unwrap_err().kind,
        IoErrorKind::MediaRead
    );
    assert_eq!(
        worker.read(0, 4096).unwrap_err().kind,
        IoErrorKind::MediaRead
    );
    for kind in [
        IoErrorKind::ReadOnly,
        IoErrorKind::Invalid,
        IoErrorKind::Busy,
    ] {
        assert_eq!(worker.write(0, &[1; 4096]).unwrap_err().kind, kind);
    }
    assert_eq!(worker.read(0, 4096).unwrap(), [0; 4096]);
    assert_eq!(server.count(|s| &s.connections), 1);
}

#[test]
fn several_connections_share_load_where_allowed() {
    let server = Server::new(Setup::default());
    let several = NbdOptions {
        connections: 3,
        ..options()
    };
    let volume = open(&server, several);
    let mut worker = Worker::new(&volume);
    let began = Instant::now();
    while server.count(|s| &s.connections) < 3 {
        assert!(began.elapsed() < BOUND);
        worker.read(0, 4096).unwrap();
    }
    // A second worker has its own.
    let mut other = Worker::new(&volume);
    other.write(0, &[3; 4096]).unwrap();
    other.without_data(Op::Flush, 0, 0).unwrap();
    assert_eq!(worker.read(0, 4096).unwrap(), [3; 4096]);
    // Where it is not allowed, there is one of everything.
    let server = Server::new(Setup {
        flags: ALL & !flags::CAN_MULTI_CONN,
        ..Setup::default()
    });
    let named = || Named::unix("/", server.path.to_str().unwrap()).unwrap();
    let error = NbdVolume::open(named(), several).unwrap_err().to_string();
    assert!(
        error.contains("does not allow several connections"),
        "{error}"
    );
    let volume = open(&server, options());
    let io = Io::new(IoOptions::default());
    let first = volume.open(&io).unwrap();
    let error = volume.open(&io).unwrap_err().to_string();
    assert!(error.contains("NBD_FLAG_CAN_MULTI_CONN"), "{error}");
    drop(first);
    assert!(volume.open(&io).is_ok());
}

#[test]
fn urls_open_volume_and_errors_name_server() {
    let server = Server::new(Setup::default());
    let kinds = remote::volume_kinds(&nbd::Nbd, |_| (), None);
    let registry = kinds.fold(Registry::<()>::new(), Registry::with);
    let open = |url: &str| registry.open(url, OpenOptions::default());
    let opened = open(&format!("{}&read-only=on&offset=1M", server.url())).unwrap();
    assert_eq!(opened.volume.info().size, 1 << 20);
    assert!(opened.volume.info().read_only);
    let error = |url: &str| open(url).map(|_| ()).unwrap_err().to_string();
    let gone = server.path.with_extension("gone");
    let text = error(&server::url(&gone));
    let name = gone.to_str().unwrap();
    assert!(
        text.contains(name) && text.contains("no server can be reached"),
        "{text}"
    );
    assert!(error("nbd+unix:///x").contains("socket=PATH"));
    assert!(error("nbd://").contains("names the server's host"));
    assert!(error("nbd://127.0.0.1:1/x").contains("nbd://127.0.0.1:1/x: no server"));
    let with = |option: &str| error(&format!("{}&{option}", server.url()));
    assert!(with("connections=17").contains("from 1 to 16"));
    assert!(with("timeout=1ms").contains("at least 100ms"));
    assert!(with("reconnect-delay=999ms").contains("at least 1s"));
    assert!(with("colour=red").contains("nbd+unix volumes have read-only, socket"));
    // What answers is another kind of server.
    let stranger = tempfile::tempdir().unwrap();
    let path = stranger.path().join("x");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 mail.example.org ESMTP\r\n").unwrap();
    });
    assert!(error(&server::url(&path)).contains("not an NBD server"));
}
