//! The messages of the kernel's FUSE protocol, as far as a file system of plain files needs them
//! (`linux/fuse.h`, version 7.38).

/// An error number of `errno.h`, positive, such as 5 for `EIO`.
pub type Errno = i32;

pub(crate) const ENOENT: Errno = 2;
pub(crate) const EIO: Errno = 5;
const ENOSYS: Errno = 38;

/// Length in bytes of `fuse_in_header`, which begins each message of the kernel.
const HEADER: usize = 40;
/// Maximum amount of data in one read or write request, in bytes.
pub(crate) const MAX_TRANSFER: u32 = 1 << 20;

const O_SYNC: u32 = 0o4_010_000;
const O_DSYNC: u32 = 0o10_000;

/// Opcodes of the kernel's messages. A test names those that it holds ([`Disk::silence`]).
///
/// [`Disk::silence`]: crate::Disk::silence
pub mod op {
    /// Lookup of a name in a directory.
    pub const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    /// Query of a file's attributes.
    pub const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    /// Opening of a file.
    pub const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    /// An fsync.
    pub const FSYNC: u32 = 20;
    /// Closing of a file descriptor.
    pub const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const FALLOCATE: u32 = 43;
}

/// The number by which the kernel knows a file or the root directory (an inode number).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node(pub u64);

impl Node {
    /// The root directory of the mounted file system.
    pub const ROOT: Self = Self(1);

    /// Returns the node of the file with the name `number`.
    pub const fn file(number: u64) -> Self {
        Self(number + 2)
    }

    /// Returns the number that is the file's name.
    pub const fn number(self) -> u64 {
        self.0.saturating_sub(2)
    }
}

/// Operation on a file. Offsets and lengths are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation<'a> {
    /// Queries the file's length; the answer is [`Answer::Size`], or an error if there is no such
    /// file.
    Size,
    /// Sets the file's length to this number of bytes.
    Resize(u64),
    /// Reads data from the file.
    Read {
        /// Offset of the read in the file, in bytes.
        offset: u64,
        /// Number of bytes to read.
        len: u32,
    },
    /// Writes data to the file.
    Write {
        /// Offset of the write in the file, in bytes.
        offset: u64,
        /// Data to write.
        data: &'a [u8],
        /// Whether the data must be durable before the answer (`O_DSYNC`).
        durable: bool,
    },
    /// Zeroes a range of the file, or makes it a hole.
    Zero {
        /// Offset of the range in the file, in bytes.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
    },
    /// Makes all written data of the file durable (fsync).
    Sync,
}

/// Request of the kernel to a [`RequestHandler`](crate::RequestHandler) of the file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request<'a> {
    /// The kernel's identifier of the request, valid until the request is answered.
    pub id: u64,
    /// File to which the request applies.
    pub node: Node,
    /// Operation that the kernel requests.
    pub operation: Operation<'a>,
}

/// Answer of a [`RequestHandler`](crate::RequestHandler) to a request of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The operation has succeeded. A write has stored all of its data.
    Done,
    /// Data that a read returns to the kernel.
    Data(Vec<u8>),
    /// A write has stored only this number of bytes.
    Short(u32),
    /// Length of the file in bytes, in answer to a query.
    Size(u64),
    /// Length of the file, whose data the kernel may cache and map into memory.
    Cached(u64),
    /// The operation has failed with this error.
    Error(Errno),
    /// Deferred: [`Sender::answer`](crate::Sender::answer) answers later, or never.
    Later,
}

/// How a message of the kernel is handled after it was parsed.
pub(crate) enum Dispatch<'a> {
    /// The request handler is asked, and its answer is encoded in this form.
    Server(Request<'a>, Form),
    /// The message is answered with these bytes, without asking the request handler.
    Here(Vec<u8>),
    /// The kernel expects no answer to the message.
    Nothing,
}

/// Structure of the FUSE protocol in which an answer is encoded for the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// `fuse_entry_out`: the answer to a lookup of this node.
    Entry(Node),
    /// `fuse_attr_out`: the attributes of this node.
    Attributes(Node),
    /// `fuse_open_out`: the file has been opened, or does not exist.
    Open,
    /// The bytes of a read, without a structure around them.
    Data,
    /// `fuse_write_out`: a write of this number of bytes has succeeded.
    Write(u32),
    /// Only the header, without a body.
    Empty,
}

/// Returns the opcode of a message of the kernel.
pub(crate) fn opcode(message: &[u8]) -> u32 {
    word(message, 4)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    bytes.map_or(0, u32::from_ne_bytes)
}

fn long(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes.get(at..at + 8).and_then(|b| b.try_into().ok());
    bytes.map_or(0, u64::from_ne_bytes)
}

/// Parses a message of the kernel.
pub(crate) fn parse(message: &[u8]) -> Dispatch<'_> {
    let (opcode, id, node) = (opcode(message), long(message, 8), long(message, 16));
    let body = message.get(HEADER..).unwrap_or_default();
    let node = Node(node);
    let server = |node, operation, form| {
        let request = Request {
            id,
            node,
            operation,
        };
        Dispatch::Server(request, form)
    };
    let here = |body: Vec<u8>| Dispatch::Here(reply(id, Ok(body)));
    match opcode {
        op::FORGET | op::BATCH_FORGET | op::INTERRUPT | op::DESTROY => Dispatch::Nothing,
        op::INIT => here(init(body)),
        op::STATFS => here(statfs()),
        op::OPENDIR => here(vec![0; 16]),
        op::GETATTR | op::SETATTR if node == Node::ROOT => here(attributes_out(node, 0)),
        op::RELEASE | op::RELEASEDIR | op::FLUSH | op::READDIR => here(Vec::new()),
        op::LOOKUP => {
            let name = body.split(|byte| *byte == 0).next().unwrap_or_default();
            let number = std::str::from_utf8(name).ok().and_then(|n| n.parse().ok());
            match number {
                Some(number) => {
                    let node = Node::file(number);
                    server(node, Operation::Size, Form::Entry(node))
                }
                None => Dispatch::Here(reply(id, Err(ENOENT))),
            }
        }
        op::GETATTR => server(node, Operation::Size, Form::Attributes(node)),
        op::SETATTR => {
            const SIZE: u32 = 1 << 3;
            let operation = match word(body, 0) & SIZE {
                0 => Operation::Size,
                _ => Operation::Resize(long(body, 16)),
            };
            server(node, operation, Form::Attributes(node))
        }
        op::OPEN => server(node, Operation::Size, Form::Open),
        op::READ => {
            let (offset, len) = (long(body, 8), word(body, 16).min(MAX_TRANSFER));
            server(node, Operation::Read { offset, len }, Form::Data)
        }
        op::WRITE => {
            let (offset, len) = (long(body, 8), word(body, 16));
            let flags = word(body, 32);
            let data = body.get(40..).unwrap_or_default();
            let data = data.get(..len as usize).unwrap_or(data);
            let operation = Operation::Write {
                offset,
                data,
                durable: flags & (O_DSYNC | O_SYNC) != 0,
            };
            server(node, operation, Form::Write(data.len() as u32))
        }
        op::FALLOCATE => {
            // struct fuse_fallocate_in: handle, offset, length, mode. Those that zero keep the
            // size.
            const KEEP_SIZE: u32 = 1;
            const PUNCH_HOLE: u32 = 2;
            const ZERO_RANGE: u32 = 0x10;
            let (offset, len, mode) = (long(body, 8), long(body, 16), word(body, 24));
            if mode & (PUNCH_HOLE | ZERO_RANGE) != 0 && mode & KEEP_SIZE != 0 {
                server(node, Operation::Zero { offset, len }, Form::Empty)
            } else {
                Dispatch::Here(reply(id, Err(95)))
            }
        }
        op::FSYNC => server(node, Operation::Sync, Form::Empty),
        _ => Dispatch::Here(reply(id, Err(ENOSYS))),
    }
}

/// Encodes a server's answer; `None` for a deferred one.
pub(crate) fn answer(id: u64, form: Form, answer: Answer) -> Option<Vec<u8>> {
    // Requests go to the server as they are made, several at a time, unless the file is cached.
    const DIRECT_IO: u32 = 1;
    const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    let (answer, flags) = match answer {
        Answer::Cached(size) => (Answer::Size(size), 0),
        other => (other, DIRECT_IO | PARALLEL_DIRECT_WRITES),
    };
    let body = match (form, answer) {
        (_, Answer::Later) => return None,
        (_, Answer::Error(errno)) => Err(errno),
        (Form::Entry(node), Answer::Size(size)) => Ok(entry_out(node, size)),
        (Form::Attributes(node), Answer::Size(size)) => Ok(attributes_out(node, size)),
        (Form::Open, Answer::Size(_)) => Ok([0, 0, flags, 0].map(u32::to_ne_bytes).concat()),
        (Form::Data, Answer::Data(data)) => Ok(data),
        (Form::Write(len), Answer::Done) => Ok([len, 0].map(u32::to_ne_bytes).concat()),
        (Form::Write(_), Answer::Short(len)) => Ok([len, 0].map(u32::to_ne_bytes).concat()),
        (Form::Empty, _) => Ok(Vec::new()),
        // The server has answered something else than it was asked.
        _ => Err(EIO),
    };
    Some(reply(id, body))
}

fn reply(id: u64, body: Result<Vec<u8>, Errno>) -> Vec<u8> {
    let (error, body) = match body {
        Ok(body) => (0, body),
        Err(errno) => (-errno, Vec::new()),
    };
    let mut message = (16 + body.len() as u32).to_ne_bytes().to_vec();
    message.extend(error.to_ne_bytes());
    message.extend(id.to_ne_bytes());
    message.extend(body);
    message
}

/// Encodes `struct fuse_init_out`.
fn init(body: &[u8]) -> Vec<u8> {
    const ASYNC_READ: u32 = 1;
    const BIG_WRITES: u32 = 1 << 5;
    const ASYNC_DIO: u32 = 1 << 15;
    const PARALLEL_DIROPS: u32 = 1 << 18;
    const MAX_PAGES: u32 = 1 << 22;
    let (minor, readahead) = (word(body, 4).min(38), word(body, 8));
    let flags = ASYNC_READ | BIG_WRITES | ASYNC_DIO | PARALLEL_DIROPS | MAX_PAGES;
    let flags = flags & word(body, 12);
    let mut out: Vec<u8> = [7, minor, readahead, flags].map(u32::to_ne_bytes).concat();
    // Requests that nobody waits for by name, and when the kernel slows down.
    out.extend([256u16, 192].map(u16::to_ne_bytes).concat());
    out.extend([MAX_TRANSFER, 1].map(u32::to_ne_bytes).concat());
    out.extend(
        [(MAX_TRANSFER / 4096) as u16, 0]
            .map(u16::to_ne_bytes)
            .concat(),
    );
    out.resize(64, 0);
    out
}

/// Encodes `struct fuse_entry_out`; nothing may be cached.
fn entry_out(node: Node, size: u64) -> Vec<u8> {
    let mut out: Vec<u8> = [node.0, 1, 0, 0, 0].map(u64::to_ne_bytes).concat();
    out.extend(attributes(node, size));
    out
}

/// Encodes `struct fuse_attr_out`; nothing may be cached.
fn attributes_out(node: Node, size: u64) -> Vec<u8> {
    [vec![0; 16], attributes(node, size)].concat()
}

/// Encodes `struct fuse_attr`.
fn attributes(node: Node, size: u64) -> Vec<u8> {
    let (size, mode) = match node {
        Node::ROOT => (0, 0o040_755u32),
        _ => (size, 0o100_666),
    };
    let mut out: Vec<u8> = [node.0, size, size / 512, 0, 0, 0]
        .map(u64::to_ne_bytes)
        .concat();
    let rest = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0];
    out.extend(rest.map(u32::to_ne_bytes).concat());
    out
}

/// Encodes `struct fuse_kstatfs`.
fn statfs() -> Vec<u8> {
    let mut out: Vec<u8> = [1u64 << 20; 5].map(u64::to_ne_bytes).concat();
    out.extend([4096u32, 255, 4096].map(u32::to_ne_bytes).concat());
    out.resize(80, 0);
    out
}
