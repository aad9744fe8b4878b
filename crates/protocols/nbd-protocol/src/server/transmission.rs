//! Transmission phase: a client's requests, one after the other.

use super::handshake::ALLOCATION_ID;
use super::{Allocation, ExportInfo, MAX_REQUEST, Negotiated, ServeError, Storage, StorageError};
use crate::wire::{
    self, REQUEST, SIMPLE_REPLY, STRUCTURED_REPLY, allocation, chunk, command, u16_at, u32_at,
    u64_at,
};
use std::io::{Read, Write};

/// Maximum number of bytes that are read or written at once; windows begin at multiples of it.
const WINDOW: u64 = 1 << 20;
/// Room before the data of a window for the header of its reply: a chunk's, and an offset.
const HEAD: usize = 20 + 8;
/// Maximum number of extents in a reply to NBD_CMD_BLOCK_STATUS.
const MAX_EXTENTS: usize = 1024;
/// Unit of the search for zeroes in a window.
const SEARCHED: usize = 4096;

/// Request of a client.
struct Request {
    flags: u16,
    kind: u16,
    cookie: u64,
    offset: u64,
    len: u32,
}

impl Request {
    fn parse(head: &[u8; 28]) -> Option<Self> {
        Some(Self {
            flags: u16_at(head, 4)?,
            kind: u16_at(head, 6)?,
            cookie: u64_at(head, 8)?,
            offset: u64_at(head, 16)?,
            len: u32_at(head, 24)?,
        })
        .filter(|_| u32_at(head, 0) == Some(REQUEST))
    }

    /// Returns the end of the range, which lies within the export.
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.len.into())
    }

    /// Checks the request against the export.
    ///
    /// # Errors
    /// The NBD error code of the reply.
    fn check(&self, export: &ExportInfo, negotiated: Negotiated) -> Result<(), u32> {
        let invalid = Err(wire::EINVAL as u32);
        let flags = match self.kind {
            command::READ | command::FLUSH | command::WRITE | command::TRIM => 0,
            command::WRITE_ZEROES => command::NO_HOLE,
            command::BLOCK_STATUS if negotiated.allocation => command::REQ_ONE,
            _ => return invalid,
        };
        // A server that announces FUA accepts the flag with every command (NBD protocol, "Command
        // flags").
        let flags = if export.read_only {
            flags
        } else {
            flags | command::FUA
        };
        let is_change = !matches!(self.kind, command::READ | command::BLOCK_STATUS);
        if export.read_only && is_change {
            return Err(wire::EPERM);
        }
        if self.flags & !flags != 0 {
            return invalid;
        }
        if self.kind == command::FLUSH {
            return Ok(());
        }
        let end = self.offset.checked_add(self.len.into());
        if self.len == 0 || end.is_none_or(|end| end > export.size) {
            return match self.kind {
                command::WRITE | command::WRITE_ZEROES if self.len > 0 => Err(wire::ENOSPC),
                _ => invalid,
            };
        }
        let block = u64::from(export.block_size);
        if is_change && !(self.offset | u64::from(self.len)).is_multiple_of(block) {
            return invalid;
        }
        if self.kind == command::READ && self.len > MAX_REQUEST {
            return invalid;
        }
        Ok(())
    }
}

/// Answers the requests of a client after its handshake, until it ends the connection.
///
/// # Errors
/// [`ServeError`] when the connection breaks or the client violates the protocol.
pub fn transmit(
    stream: &mut (impl Read + Write),
    export: &ExportInfo,
    negotiated: Negotiated,
    storage: &mut impl Storage,
) -> Result<(), ServeError> {
    let mut connection = Connection {
        stream,
        export,
        negotiated,
        buffer: Vec::new(),
    };
    loop {
        let head = super::read(connection.stream)?;
        let Some(request) = Request::parse(&head) else {
            return Err(ServeError::Violation("a request without its magic number"));
        };
        if request.kind == command::DISCONNECT {
            return Ok(());
        }
        connection.execute(&request, storage)?;
    }
}

struct Connection<'a, S> {
    stream: &'a mut S,
    export: &'a ExportInfo,
    negotiated: Negotiated,
    /// Buffer for the present window, with room for the header of a reply before the data.
    buffer: Vec<u8>,
}

impl<S: Read + Write> Connection<'_, S> {
    fn execute(&mut self, request: &Request, storage: &mut impl Storage) -> Result<(), ServeError> {
        let checked = request.check(self.export, self.negotiated);
        if request.kind == command::WRITE {
            let result = self.write(request, checked, storage)?;
            return self.finish(request, result);
        }
        if let Err(code) = checked {
            return self.finish(request, Err(code));
        }
        let fua = request.flags & command::FUA != 0;
        let (offset, len) = (request.offset, u64::from(request.len));
        let result = match request.kind {
            command::READ => return self.read(request, storage),
            command::BLOCK_STATUS => return self.block_status(request, storage),
            command::FLUSH => storage.flush(),
            command::WRITE_ZEROES => {
                let deallocate = request.flags & command::NO_HOLE == 0;
                storage.zero(offset, len, deallocate, fua)
            }
            _ => {
                let trimmed = storage.trim(offset, len);
                if fua {
                    trimmed.and_then(|()| storage.flush())
                } else {
                    trimmed
                }
            }
        };
        self.finish(request, result.map_err(StorageError::code))
    }

    /// Sends a reply without data.
    fn finish(&mut self, request: &Request, result: Result<(), u32>) -> Result<(), ServeError> {
        let has_chunks = matches!(request.kind, command::READ | command::BLOCK_STATUS);
        let code = result.err().unwrap_or(0);
        if !(has_chunks && self.negotiated.structured) {
            let head = simple_head(request.cookie, code);
            return Ok(self.stream.write_all(&head)?);
        }
        let error = [&code.to_be_bytes()[..], &0u16.to_be_bytes()].concat();
        let (kind, payload) = match code {
            0 => (chunk::NONE, &[][..]),
            _ => (chunk::REQUEST_ERROR, &error[..]),
        };
        let head = chunk_head(chunk::DONE, kind, request.cookie, payload.len());
        let message = [&head[..], payload].concat();
        Ok(self.stream.write_all(&message)?)
    }

    /// Reads the range in windows, and sends each window's data as soon as it is there.
    fn read(&mut self, request: &Request, storage: &mut impl Storage) -> Result<(), ServeError> {
        let block = u64::from(self.export.block_size);
        let mut offset = request.offset;
        while offset < request.end() {
            let end = window_end(offset, request.end());
            // The storage reads whole blocks; the first block may begin before the request.
            let start = offset - offset % block;
            let padded = end.next_multiple_of(block) - start;
            self.buffer.resize(HEAD + padded as usize, 0);
            let from = HEAD + (offset - start) as usize;
            let to = from + (end - offset) as usize;
            let result = match self.buffer.get_mut(HEAD..) {
                Some(data) => storage.read(start, data),
                None => Err(StorageError::Failed),
            };
            if let Err(error) = result {
                if !self.negotiated.structured && offset > request.offset {
                    return Err(ServeError::HalfRead);
                }
                return self.finish(request, Err(error.code()));
            }
            if self.negotiated.structured {
                self.send_chunk(request.cookie, offset, from, to)?;
            } else if offset == request.offset {
                self.send_behind(&simple_head(request.cookie, 0), from, to)?;
            } else {
                self.send_behind(&[], from, to)?;
            }
            offset = end;
        }
        if self.negotiated.structured {
            return self.finish(request, Ok(()));
        }
        Ok(())
    }

    /// Sends the data of a window, which lies in `from..to` of the buffer, as a chunk.
    fn send_chunk(
        &mut self,
        cookie: u64,
        offset: u64,
        from: usize,
        to: usize,
    ) -> Result<(), ServeError> {
        let data = self.buffer.get(from..to).unwrap_or_default();
        let len = data.len();
        if is_zero(data) {
            let mut hole = chunk_head(0, chunk::OFFSET_HOLE, cookie, 12).to_vec();
            hole.extend(offset.to_be_bytes());
            hole.extend((len as u32).to_be_bytes());
            return Ok(self.stream.write_all(&hole)?);
        }
        let head = chunk_head(0, chunk::OFFSET_DATA, cookie, 8 + len);
        let head = [&head[..], &offset.to_be_bytes()].concat();
        self.send_behind(&head, from, to)
    }

    /// Sends `from..to` of the buffer behind a header, by one call.
    fn send_behind(&mut self, head: &[u8], from: usize, to: usize) -> Result<(), ServeError> {
        let at = from.saturating_sub(head.len());
        if let Some(room) = self.buffer.get_mut(at..from)
            && room.len() == head.len()
        {
            room.copy_from_slice(head);
        }
        let message = self.buffer.get(at..to).unwrap_or_default();
        Ok(self.stream.write_all(message)?)
    }

    /// Receives the data of a write in windows, and writes each. The data of a refused write is
    /// received, too, since the next request follows it.
    fn write(
        &mut self,
        request: &Request,
        checked: Result<(), u32>,
        storage: &mut impl Storage,
    ) -> Result<Result<(), u32>, ServeError> {
        if request.len > MAX_REQUEST {
            return Err(ServeError::Violation("a write is longer than 32 MiB"));
        }
        let mut result = checked;
        let fua = request.flags & command::FUA != 0;
        let (mut at, mut left) = (request.offset, u64::from(request.len));
        while left > 0 {
            let len = (WINDOW - at % WINDOW).min(left);
            self.buffer.resize(len as usize, 0);
            self.stream.read_exact(&mut self.buffer)?;
            if result.is_ok() {
                result = storage
                    .write(at, &self.buffer, fua)
                    .map_err(StorageError::code);
            }
            at = at.wrapping_add(len);
            left -= len;
        }
        Ok(result)
    }

    /// Returns the state at `at`, and the number of bytes up to `end` that have it. The extent ends
    /// with a block or at `end`; a block that is a hole in part counts as data.
    fn extent(&self, storage: &mut impl Storage, at: u64, end: u64) -> (Allocation, u64) {
        let block = u64::from(self.export.block_size);
        let (state, len) = storage.allocation(at, end - at);
        let stop = at + len.clamp(1, end - at);
        let whole = stop - stop % block;
        if stop == end || stop == whole {
            (state, stop - at)
        } else if state == Allocation::Hole && whole > at {
            (state, whole - at)
        } else {
            let stop = stop.next_multiple_of(block).min(end);
            (Allocation::Data, stop - at)
        }
    }

    fn block_status(
        &mut self,
        request: &Request,
        storage: &mut impl Storage,
    ) -> Result<(), ServeError> {
        let max = if request.flags & command::REQ_ONE != 0 {
            1
        } else {
            MAX_EXTENTS
        };
        let mut extents: Vec<(u64, u32)> = Vec::new();
        let mut at = request.offset;
        while at < request.end() {
            let (state, len) = self.extent(storage, at, request.end());
            let flags = match state {
                Allocation::Data => 0,
                Allocation::Hole => allocation::HOLE | allocation::ZERO,
            };
            let count = extents.len();
            match extents.last_mut() {
                Some((last, same)) if *same == flags => *last += len,
                _ if count == max => break,
                _ => extents.push((len, flags)),
            }
            at += len;
        }
        let mut payload = ALLOCATION_ID.to_be_bytes().to_vec();
        for (len, flags) in extents {
            // At most the length of the request, which has 32 bits.
            payload.extend((len as u32).to_be_bytes());
            payload.extend(flags.to_be_bytes());
        }
        let head = chunk_head(
            chunk::DONE,
            chunk::BLOCK_STATUS,
            request.cookie,
            payload.len(),
        );
        Ok(self.stream.write_all(&[&head[..], &payload].concat())?)
    }
}

/// Returns the end of the window that begins at `offset`, at most `end`.
fn window_end(offset: u64, end: u64) -> u64 {
    let next = offset - offset % WINDOW;
    next.saturating_add(WINDOW).min(end)
}

fn is_zero(data: &[u8]) -> bool {
    let mut parts = data.chunks(SEARCHED);
    parts.all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}

fn simple_head(cookie: u64, code: u32) -> [u8; 16] {
    joined(&[
        &SIMPLE_REPLY.to_be_bytes(),
        &code.to_be_bytes(),
        &cookie.to_be_bytes(),
    ])
}

fn chunk_head(flags: u16, kind: u16, cookie: u64, len: usize) -> [u8; 20] {
    joined(&[
        &STRUCTURED_REPLY.to_be_bytes(),
        &flags.to_be_bytes(),
        &kind.to_be_bytes(),
        &cookie.to_be_bytes(),
        // At most a window and an offset.
        &(len as u32).to_be_bytes(),
    ])
}

fn joined<const N: usize>(fields: &[&[u8]]) -> [u8; N] {
    let mut joined = [0; N];
    let bytes = fields.iter().copied().flatten();
    joined
        .iter_mut()
        .zip(bytes)
        .for_each(|(to, from)| *to = *from);
    joined
}
