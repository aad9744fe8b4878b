//! Command of a request: its operation, range, memory and progress.

use dma::{Buffer, SegmentList};
use std::time::Instant;
use volume::{IoErrorKind, Op};

/// Command to a server that executes a request or a part of it. `A` is the protocol's answer.
#[derive(Debug)]
pub struct Subrequest<A> {
    /// Index of the request that the command belongs to.
    pub(super) parent: usize,
    /// Operation that the server executes.
    pub op: Op,
    /// Byte offset of the command in the volume.
    pub offset: u64,
    /// Length of the command's range in bytes.
    pub len: u32,
    /// Memory of the command's data; empty while the kernel uses all of it.
    pub list: SegmentList,
    /// Whether `list` is all of the request's memory, not only a part.
    pub(super) whole: bool,
    /// Time at which the command was created.
    pub made: Instant,
    /// Time at which the command was sent to the server.
    pub(super) since: Instant,
    /// Number of pieces of the command's memory that the kernel uses.
    pub lent: u32,
    /// Whether the request was cancelled, so that the answer is discarded.
    pub(super) given_up: bool,
    /// Whether data could not be copied, because the request's memory is inaccessible.
    pub unstored: bool,
    /// Number of the message on the connection that contains the command.
    pub(super) batch: u64,
    /// Whether the connection has ended before the command was sent.
    pub unsent: bool,
    /// Number of data bytes that the server may still request.
    pub owed: u32,
    /// Number of connections that failed for a [`Blame`] while the command was outstanding.
    pub(super) violations: u8,
    /// Cause of the last of those failures.
    pub(super) blame: Blame,
    /// Number of times that the command was answered and sent again.
    pub tries: u8,
    /// Answer that arrived while the kernel used the command's memory.
    pub(super) answer: Option<A>,
}

/// Cause of a connection's failure for which commands eventually fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blame {
    /// The server has violated the protocol.
    Server,
    /// The memory of a request is inaccessible (the guest has shrunk its file).
    Memory,
}

impl<A> Subrequest<A> {
    pub(super) fn new(parent: usize, op: Op, now: Instant) -> Self {
        Self {
            parent,
            op,
            offset: 0,
            len: 0,
            list: SegmentList::new(),
            whole: false,
            made: now,
            since: now,
            lent: 0,
            given_up: false,
            unstored: false,
            batch: 0,
            unsent: true,
            owed: 0,
            violations: 0,
            blame: Blame::Server,
            tries: 0,
            answer: None,
        }
    }

    /// Returns whether the command changes data of the volume.
    pub fn changes(&self) -> bool {
        !matches!(self.op, Op::Read | Op::Flush)
    }

    /// Returns the kind of error of a command that fails because of its server.
    pub fn failed(&self) -> IoErrorKind {
        match self.op {
            Op::Read => IoErrorKind::MediaRead,
            _ => IoErrorKind::MediaWrite,
        }
    }

    /// Returns the memory of the command to its request, and keeps a copy if the server may still
    /// request data.
    pub(super) fn keep_copy(&mut self) -> SegmentList {
        let list = std::mem::take(&mut self.list);
        if self.owed > 0 {
            let mut copy = Buffer::new(self.len as usize);
            list.copy_to(0, &mut copy);
            self.list = SegmentList::owned(copy);
        }
        list
    }

    /// Copies received data into the command's memory, at byte offset `at` of the command.
    pub(super) fn store(&mut self, at: u32, bytes: &[u8]) {
        if !self.given_up {
            self.unstored |= self.list.copy_from(at.into(), bytes) != bytes.len();
        }
    }

    /// Zeroes `len` bytes of the command's memory from offset `at` on, for a hole in a read.
    pub(super) fn clear(&mut self, at: u32, len: u32) {
        if !self.given_up {
            let mut hole = SegmentList::new();
            self.list.slice(at.into(), len.into(), &mut hole);
            self.unstored |= hole.fill(0) != u64::from(len);
        }
    }
}
