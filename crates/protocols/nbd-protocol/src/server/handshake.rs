//! Server's side of the handshake: fixed newstyle, with structured replies and metadata contexts.

use super::{ExportInfo, MAX_REQUEST, Negotiated, ServeError, read};
use crate::wire::{
    self, IHAVEOPT, INIT_PASSWD, OPTION_REPLY, allocation, handshake_flags, info, option,
    option_reply, u16_at, u32_at,
};
use std::io::{Read, Write};

/// Maximum length in bytes of an option's data.
const MAX_OPTION: u32 = 64 << 10;
/// Maximum number of options of one client.
const MAX_OPTIONS: u32 = 256;
/// Number of zero bytes after the reply to NBD_OPT_EXPORT_NAME.
const PADDING: usize = 124;
/// ID of the metadata context `base:allocation`.
pub(super) const ALLOCATION_ID: u32 = 1;

/// Performs the handshake with a new client. Returns `None` if the client ends it.
///
/// # Errors
/// [`ServeError`] when the connection breaks or the client violates the protocol.
pub fn negotiate(
    stream: &mut (impl Read + Write),
    export: &ExportInfo,
) -> Result<Option<Negotiated>, ServeError> {
    let known = handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES;
    let mut greeting = INIT_PASSWD.to_vec();
    greeting.extend(IHAVEOPT.to_be_bytes());
    greeting.extend(known.to_be_bytes());
    stream.write_all(&greeting)?;
    let flags = u32::from_be_bytes(read(stream)?);
    if flags & !u32::from(known) != 0 {
        return Err(ServeError::Violation("unknown handshake flags"));
    }
    let mut client = Client {
        stream,
        export,
        negotiated: Negotiated {
            structured: false,
            allocation: false,
        },
    };
    for _ in 0..MAX_OPTIONS {
        match client.option(flags)? {
            Next::Option => {}
            Next::Transmission => return Ok(Some(client.negotiated)),
            Next::End => return Ok(None),
        }
    }
    Err(ServeError::Violation("too many options"))
}

/// Continuation of a handshake after an option.
enum Next {
    Option,
    Transmission,
    End,
}

struct Client<'a, S> {
    stream: &'a mut S,
    export: &'a ExportInfo,
    negotiated: Negotiated,
}

impl<S: Read + Write> Client<'_, S> {
    /// Reads an option and answers it. `flags` are the handshake flags of the client.
    fn option(&mut self, flags: u32) -> Result<Next, ServeError> {
        let magic = u64::from_be_bytes(read(self.stream)?);
        if magic != IHAVEOPT {
            return Err(ServeError::Violation("an option without its magic number"));
        }
        let option = u32::from_be_bytes(read(self.stream)?);
        let len = u32::from_be_bytes(read(self.stream)?);
        if len > MAX_OPTION {
            return Err(ServeError::Violation("an option is too long"));
        }
        let mut data = vec![0; len as usize];
        self.stream.read_exact(&mut data)?;
        match option {
            option::EXPORT_NAME => {
                if !self.is_export(&data) {
                    // This option has no error reply.
                    return Ok(Next::End);
                }
                let mut answer = self.export.size.to_be_bytes().to_vec();
                answer.extend(self.export.flags().to_be_bytes());
                if flags & u32::from(handshake_flags::NO_ZEROES) == 0 {
                    answer.resize(answer.len() + PADDING, 0);
                }
                self.stream.write_all(&answer)?;
                return Ok(Next::Transmission);
            }
            option::ABORT => {
                // The client may have closed the connection without waiting for the reply.
                let _ = self.reply(option, option_reply::ACK, &[]);
                return Ok(Next::End);
            }
            option::LIST if data.is_empty() => {
                let name = &self.export.name;
                let mut server = (name.len() as u32).to_be_bytes().to_vec();
                server.extend(name.as_bytes());
                self.reply(option, option_reply::SERVER, &server)?;
                self.reply(option, option_reply::ACK, &[])?;
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.negotiated.structured = true;
                self.reply(option, option_reply::ACK, &[])?;
            }
            option::INFO | option::GO => {
                let is_known = self.info(option, &data)?;
                if is_known && option == option::GO {
                    return Ok(Next::Transmission);
                }
            }
            option::LIST_META_CONTEXT => self.contexts(option, &data)?,
            option::SET_META_CONTEXT if self.negotiated.structured => {
                self.negotiated.allocation = false;
                self.contexts(option, &data)?;
            }
            option::LIST | option::STRUCTURED_REPLY | option::SET_META_CONTEXT => {
                self.reply(option, option_reply::INVALID, &[])?;
            }
            _ => self.reply(option, option_reply::UNSUPPORTED, &[])?,
        }
        Ok(Next::Option)
    }

    fn is_export(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.export.name.as_bytes()
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> Result<(), ServeError> {
        let mut message = OPTION_REPLY.to_be_bytes().to_vec();
        message.extend(option.to_be_bytes());
        message.extend(kind.to_be_bytes());
        message.extend((data.len() as u32).to_be_bytes());
        message.extend(data);
        Ok(self.stream.write_all(&message)?)
    }

    fn unknown(&mut self, option: u32) -> Result<(), ServeError> {
        let text = format!("the only export is \"{}\"", self.export.name);
        self.reply(option, option_reply::UNKNOWN, text.as_bytes())
    }

    /// Answers NBD_OPT_INFO or NBD_OPT_GO. Returns whether the export was known.
    fn info(&mut self, option: u32, data: &[u8]) -> Result<bool, ServeError> {
        let Some((name, requests)) = parse_info(data) else {
            self.reply(option, option_reply::INVALID, &[])?;
            return Ok(false);
        };
        if !self.is_export(name) {
            self.unknown(option)?;
            return Ok(false);
        }
        let export = self.export;
        let mut of_export = info::EXPORT.to_be_bytes().to_vec();
        of_export.extend(export.size.to_be_bytes());
        of_export.extend(export.flags().to_be_bytes());
        self.reply(option, option_reply::INFO, &of_export)?;
        for text in [
            (info::NAME, &export.name),
            (info::DESCRIPTION, &export.description),
        ] {
            let (kind, text) = text;
            if requests.contains(&kind) && !text.is_empty() {
                let information = [&kind.to_be_bytes(), text.as_bytes()].concat();
                self.reply(option, option_reply::INFO, &information)?;
            }
        }
        let mut blocks = info::BLOCK_SIZE.to_be_bytes().to_vec();
        blocks.extend(export.block_size.to_be_bytes());
        blocks.extend(export.preferred.to_be_bytes());
        blocks.extend(MAX_REQUEST.to_be_bytes());
        self.reply(option, option_reply::INFO, &blocks)?;
        self.reply(option, option_reply::ACK, &[])?;
        Ok(true)
    }

    /// Answers NBD_OPT_LIST_META_CONTEXT or NBD_OPT_SET_META_CONTEXT.
    fn contexts(&mut self, option: u32, data: &[u8]) -> Result<(), ServeError> {
        let Some((name, queries)) = parse_queries(data) else {
            return self.reply(option, option_reply::INVALID, &[]);
        };
        if !self.is_export(name) {
            return self.unknown(option);
        }
        let is_list = option == option::LIST_META_CONTEXT;
        let full = allocation::CONTEXT.as_bytes();
        // A list without queries is of all contexts, and a namespace stands for its contexts.
        let listed = is_list && (queries.is_empty() || queries.contains(&&b"base:"[..]));
        if listed || queries.contains(&full) {
            let id = if is_list { 0 } else { ALLOCATION_ID };
            let context = [&id.to_be_bytes(), full].concat();
            self.reply(option, option_reply::META_CONTEXT, &context)?;
            self.negotiated.allocation |= !is_list;
        }
        self.reply(option, option_reply::ACK, &[])
    }
}

/// Splits a text with a 32-bit length off the front of `data`.
fn text(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let len = usize::try_from(u32_at(data, 0)?).ok()?;
    data.get(4..)?.split_at_checked(len)
}

/// Parses the data of NBD_OPT_INFO and NBD_OPT_GO: the export's name and requested information.
fn parse_info(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let (name, rest) = text(data)?;
    let count = usize::from(u16_at(rest, 0)?);
    let requests = rest.get(2..)?;
    if requests.len() != count * 2 {
        return None;
    }
    let requests = requests.chunks_exact(2);
    let requests = requests.filter_map(|bytes| wire::u16_at(bytes, 0));
    Some((name, requests.collect()))
}

/// Parses the data of options for metadata contexts: the export's name and the queries.
fn parse_queries(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let (name, rest) = text(data)?;
    let count = u32_at(rest, 0)?;
    let mut rest = rest.get(4..)?;
    let mut queries = Vec::new();
    for _ in 0..count {
        // Each query takes four bytes at least, so the data bounds their number.
        let (query, left) = text(rest)?;
        queries.push(query);
        rest = left;
    }
    rest.is_empty().then_some((name, queries))
}
