//! A server in this process, with memory for an export, that lies, hangs and disappears as a test
//! wants it.

// Each test program uses its own part.
#![allow(dead_code)]
use nbd::protocol::wire::{self, export_flags as flags};
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::suite::Pieces;

/// All that the client uses.
pub const ALL: u16 = flags::HAS_FLAGS
    | flags::SEND_FLUSH
    | flags::SEND_FUA
    | flags::SEND_TRIM
    | flags::SEND_WRITE_ZEROES
    | flags::CAN_MULTI_CONN;

/// How a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// As it should be.
    Right,
    /// It is carried out, and the connection closed instead of an answer.
    Close,
    /// The connection is closed in the middle of the answer.
    CloseWithin,
    /// Never; others are read on.
    Never,
    /// By an error.
    Errno(u32),
    /// With another request's cookie.
    WrongCookie,
    /// By bytes that are no reply.
    Garbage,
    /// With data beyond the request.
    TooLong,
    /// By chunks without end.
    Flood,
    /// Never, until [`Server::release`].
    Held,
}

/// The answer to a request, by its number.
pub type Answers = dyn Fn(usize, &Request) -> Answer + Send + Sync;

pub struct State {
    pub data: Mutex<Vec<u8>>,
    pub flags: u16,
    pub structured: bool,
    /// Number of bytes that are written at once.
    pub piece: usize,
    pub blocks: Mutex<[u32; 3]>,
    /// How requests are answered: by their number.
    pub answer: Box<Answers>,
    pub requests: AtomicUsize,
    pub connections: AtomicUsize,
    pub flushes: AtomicUsize,
    pub fuas: AtomicUsize,
    pub disconnects: AtomicUsize,
    pub held: AtomicBool,
    /// Of the next connections: the handshake ends after so many bytes.
    pub cuts: Mutex<Vec<usize>>,
    /// Kinds of commands, their flags and lengths, in the order of arrival.
    pub log: Mutex<Vec<(u16, u16, u32)>>,
}

#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub flags: u16,
    pub kind: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
}

pub struct Server {
    pub state: Arc<State>,
    pub path: PathBuf,
    stop: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<UnixStream>>>,
    _dir: Arc<tempfile::TempDir>,
}

pub struct Setup {
    pub size: usize,
    pub flags: u16,
    pub structured: bool,
    pub piece: usize,
    pub blocks: [u32; 3],
    pub answer: Box<Answers>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            size: 2 << 20,
            flags: ALL,
            structured: true,
            piece: usize::MAX,
            blocks: [512, 4096, 32 << 20],
            answer: Box::new(|_, _| Answer::Right),
        }
    }
}

impl Server {
    pub fn new(setup: Setup) -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let path = dir.path().join("nbd.sock");
        let state = Arc::new(State {
            data: Mutex::new(vec![0; setup.size]),
            flags: setup.flags,
            structured: setup.structured,
            piece: setup.piece,
            blocks: Mutex::new(setup.blocks),
            answer: setup.answer,
            requests: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            flushes: AtomicUsize::new(0),
            fuas: AtomicUsize::new(0),
            disconnects: AtomicUsize::new(0),
            held: AtomicBool::new(true),
            cuts: Mutex::default(),
            log: Mutex::default(),
        });
        let mut server = Self {
            state,
            path,
            stop: Arc::default(),
            streams: Arc::default(),
            _dir: dir,
        };
        server.start();
        server
    }

    /// Accepts connections.
    pub fn start(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        let listener = UnixListener::bind(&self.path).unwrap();
        self.stop = Arc::default();
        let (state, stop, streams) = (self.state.clone(), self.stop.clone(), self.streams.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                state.connections.fetch_add(1, Ordering::SeqCst);
                streams.lock().unwrap().push(stream.try_clone().unwrap());
                let state = state.clone();
                std::thread::spawn(move || {
                    // Another descriptor of it is in the list.
                    let end = stream.try_clone().unwrap();
                    let _ = serve(&state, stream);
                    let _ = end.shutdown(std::net::Shutdown::Both);
                });
            }
        });
    }

    /// Stops the server, as if it were killed.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// The client of the `number`th connection sends nothing more.
    pub fn has_client_stopped(&self, number: usize) -> bool {
        use rustix::net::{RecvFlags, recv};
        let streams = self.streams.lock().unwrap();
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(recv(&streams[number], &mut [0u8; 1], flags), Ok((_, 0)))
    }

    pub fn is_held(&self) -> bool {
        self.state.held.load(Ordering::SeqCst)
    }

    pub fn release(&self) {
        self.state.held.store(false, Ordering::SeqCst);
    }

    pub fn url(&self) -> String {
        url(&self.path)
    }

    pub fn count(&self, counter: impl Fn(&State) -> &AtomicUsize) -> usize {
        counter(&self.state).load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.release();
        self.stop();
    }
}

pub fn url(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

fn take<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn handshake(state: &State, stream: &mut Pieces<UnixStream>) -> io::Result<()> {
    let mut left = state.cuts.lock().unwrap().pop().unwrap_or(usize::MAX);
    let mut say = |stream: &mut Pieces<UnixStream>, bytes: &[u8]| {
        let said = bytes.len().min(left);
        left -= said;
        stream.write_all(&bytes[..said])?;
        if said < bytes.len() || left == 0 {
            Err(io::Error::other("cut"))
        } else {
            Ok(())
        }
    };
    say(stream, b"NBDMAGICIHAVEOPT\0\x03")?;
    take::<4>(stream)?;
    loop {
        let head: [u8; 16] = take(stream)?;
        let option = wire::u32_at(&head, 8).unwrap();
        let mut data = vec![0; wire::u32_at(&head, 12).unwrap() as usize];
        stream.read_exact(&mut data)?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut bytes = wire::OPTION_REPLY.to_be_bytes().to_vec();
            bytes.extend(option.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            say(stream, &bytes)
        };
        match option {
            wire::option::STRUCTURED_REPLY if state.structured => reply(1, &[])?,
            wire::option::GO => {
                let size = state.data.lock().unwrap().len() as u64;
                let flags = state.flags.to_be_bytes();
                reply(3, &[&[0, 0][..], &size.to_be_bytes(), &flags].concat())?;
                let blocks = state.blocks.lock().unwrap().map(u32::to_be_bytes).concat();
                reply(3, &[&[0, 3][..], &blocks].concat())?;
                reply(1, &[])?;
                return Ok(());
            }
            _ => reply(wire::option_reply::UNSUPPORTED, &[])?,
        }
    }
}

fn serve(state: &State, stream: UnixStream) -> io::Result<()> {
    let piece = state.piece;
    let mut stream = Pieces { stream, piece };
    handshake(state, &mut stream)?;
    loop {
        let head: [u8; 28] = take(&mut stream)?;
        assert_eq!(wire::u32_at(&head, 0), Some(wire::REQUEST), "a request");
        let request = Request {
            flags: wire::u16_at(&head, 4).unwrap(),
            kind: wire::u16_at(&head, 6).unwrap(),
            cookie: wire::u64_at(&head, 8).unwrap(),
            offset: wire::u64_at(&head, 16).unwrap(),
            len: wire::u32_at(&head, 24).unwrap(),
        };
        let range = request.offset as usize..request.offset as usize + request.len as usize;
        let mut data = Vec::new();
        if request.kind == wire::command::WRITE {
            data.resize(request.len as usize, 0);
            stream.read_exact(&mut data)?;
        }
        let entry = (request.kind, request.flags, request.len);
        state.log.lock().unwrap().push(entry);
        if request.kind == wire::command::DISCONNECT {
            state.disconnects.fetch_add(1, Ordering::SeqCst);
            return Ok(());
        }
        let [minimum, _, maximum] = *state.blocks.lock().unwrap();
        let number = state.requests.fetch_add(1, Ordering::SeqCst);
        assert!((request.offset | u64::from(request.len)).is_multiple_of(minimum.into()));
        let has_data = matches!(request.kind, wire::command::READ | wire::command::WRITE);
        assert!(!has_data || request.len <= maximum, "{request:?}");
        let answer = (state.answer)(number, &request);
        if answer == Answer::Held {
            while state.held.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        if !matches!(answer, Answer::Errno(_)) {
            let mut bytes = state.data.lock().unwrap();
            match request.kind {
                wire::command::READ => data = bytes[range].to_vec(),
                wire::command::WRITE => bytes[range].copy_from_slice(&data),
                wire::command::WRITE_ZEROES => bytes[range].fill(0),
                // What is trimmed reads as anything.
                wire::command::TRIM => bytes[range].fill(0x77),
                wire::command::FLUSH => {
                    state.flushes.fetch_add(1, Ordering::SeqCst);
                }
                other => panic!("command {other}"),
            }
        }
        if request.flags & wire::command::FUA != 0 {
            state.fuas.fetch_add(1, Ordering::SeqCst);
        }
        let read = request.kind == wire::command::READ;
        reply(
            state,
            &mut stream,
            &request,
            answer,
            if read { &data } else { &[] },
        )?;
        if matches!(
            answer,
            Answer::WrongCookie | Answer::Garbage | Answer::TooLong
        ) {
            // The client closes the connection. Requests that were executed here would count, and
            // each `n`th answer could be the first one of each connection, so that the same
            // requests are lost every time.
            while stream.read(&mut [0; 4096])? > 0 {}
            return Ok(());
        }
    }
}

fn chunk(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = wire::STRUCTURED_REPLY.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn reply(
    state: &State,
    stream: &mut impl Write,
    request: &Request,
    answer: Answer,
    data: &[u8],
) -> io::Result<()> {
    let cookie = match answer {
        Answer::WrongCookie => request.cookie ^ (5 << 40),
        _ => request.cookie,
    };
    let error = match answer {
        Answer::Errno(error) => error,
        _ => 0,
    };
    let read = request.kind == wire::command::READ;
    let mut bytes = Vec::new();
    if state.structured && read && error == 0 {
        // The second half first; what is zero as a hole.
        let (first, second) = data.split_at(data.len() / 2);
        let mut parts = vec![
            (request.offset + first.len() as u64, second),
            (request.offset, first),
        ];
        parts.retain(|(_, part)| !part.is_empty());
        for (offset, part) in parts {
            let offset = offset.to_be_bytes();
            bytes.extend(if part.iter().all(|byte| *byte == 0) {
                let len = (part.len() as u32).to_be_bytes();
                chunk(0, 2, cookie, &[&offset[..], &len].concat())
            } else {
                chunk(0, 1, cookie, &[&offset[..], part].concat())
            });
        }
        if answer == Answer::TooLong {
            let offset = request.offset.to_be_bytes();
            bytes.extend(chunk(0, 1, cookie, &[&offset[..], &[0; 100]].concat()));
        }
        bytes.extend(chunk(1, 0, cookie, &[]));
    } else {
        bytes.extend(wire::SIMPLE_REPLY.to_be_bytes());
        bytes.extend(error.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        if error == 0 {
            bytes.extend(data);
        }
        if answer == Answer::TooLong {
            bytes.extend([7; 100]);
        }
    }
    match answer {
        Answer::Never => Ok(()),
        Answer::Close => Err(io::ErrorKind::Other.into()),
        Answer::CloseWithin => {
            stream.write_all(&bytes[..bytes.len() / 2])?;
            Err(io::ErrorKind::Other.into())
        }
        Answer::Garbage => stream.write_all(&[0x5a; 4096]),
        Answer::Flood => loop {
            let text = [&5u32.to_be_bytes()[..], &[0; 2]].concat();
            stream.write_all(&chunk(0, 1 << 15 | 1, cookie, &text))?;
        },
        _ => stream.write_all(&bytes),
    }
}
