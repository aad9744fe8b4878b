use super::*;
use crate::wire::{
    IHAVEOPT, REQUEST, SIMPLE_REPLY, STRUCTURED_REPLY, allocation, chunk, command, option,
    option_reply,
};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::io::Write;

const SIZE: u64 = 4 << 20;
const BLOCK: u64 = 512;

/// Storage in memory. Reads of blocks in `bad` fail.
struct Memory {
    bytes: Vec<u8>,
    bad: Option<std::ops::Range<u64>>,
    flushes: u32,
    /// Offset from which on there is a hole.
    hole: u64,
}

impl Memory {
    fn new() -> Self {
        let pattern: Vec<u8> = (0..4093u32).map(|at| (at / 7) as u8 | 1).collect();
        let mut bytes = pattern.repeat((SIZE / 2 / 4093) as usize + 1);
        bytes.truncate(SIZE as usize / 2);
        bytes.resize(SIZE as usize, 0);
        Self {
            bytes,
            bad: None,
            flushes: 0,
            hole: SIZE / 2,
        }
    }

    fn range(&mut self, offset: u64, len: u64) -> &mut [u8] {
        assert!((offset | len).is_multiple_of(BLOCK), "whole blocks");
        &mut self.bytes[offset as usize..][..len as usize]
    }
}

impl Storage for Memory {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), StorageError> {
        assert!(data.len() <= (1 << 20) + 2 * BLOCK as usize);
        let end = offset + data.len() as u64;
        if self
            .bad
            .as_ref()
            .is_some_and(|bad| bad.start < end && offset < bad.end)
        {
            return Err(StorageError::Failed);
        }
        data.copy_from_slice(self.range(offset, end - offset));
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8], _: bool) -> Result<(), StorageError> {
        self.range(offset, data.len() as u64).copy_from_slice(data);
        Ok(())
    }

    fn zero(&mut self, offset: u64, len: u64, _: bool, _: bool) -> Result<(), StorageError> {
        self.range(offset, len).fill(0);
        Ok(())
    }

    fn trim(&mut self, offset: u64, len: u64) -> Result<(), StorageError> {
        self.range(offset, len).fill(0);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), StorageError> {
        self.flushes += 1;
        Ok(())
    }

    fn allocation(&mut self, offset: u64, len: u64) -> (Allocation, u64) {
        if offset < self.hole {
            (Allocation::Data, len.min(self.hole - offset))
        } else {
            (Allocation::Hole, len)
        }
    }
}

fn export(read_only: bool) -> ExportInfo {
    ExportInfo {
        name: "vm0".into(),
        description: "a disk".into(),
        size: SIZE,
        block_size: BLOCK as u32,
        preferred: 4096,
        read_only,
    }
}

/// Client that has sent everything before the server reads it.
struct Script {
    sent: VecDeque<u8>,
    received: Vec<u8>,
}

impl Read for Script {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        self.sent.read(data)
    }
}

impl Write for Script {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.received.extend(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Builder of a client's messages.
#[derive(Default)]
struct Messages(Vec<u8>);

impl Messages {
    fn new(flags: u32) -> Self {
        Self(flags.to_be_bytes().to_vec())
    }

    fn option(mut self, option: u32, data: &[u8]) -> Self {
        self.0.extend(IHAVEOPT.to_be_bytes());
        self.0.extend(option.to_be_bytes());
        self.0.extend((data.len() as u32).to_be_bytes());
        self.0.extend(data);
        self
    }

    fn contexts(self, option: u32, queries: &[&str]) -> Self {
        let mut data = named("vm0");
        data.extend((queries.len() as u32).to_be_bytes());
        queries.iter().for_each(|query| data.extend(named(query)));
        self.option(option, &data)
    }

    fn go(self, name: &str, requests: &[u16]) -> Self {
        self.option(option::GO, &info_of(name, requests))
    }

    fn request(mut self, flags: u16, kind: u16, offset: u64, len: u32) -> Self {
        self.0.extend(REQUEST.to_be_bytes());
        self.0.extend(flags.to_be_bytes());
        self.0.extend(kind.to_be_bytes());
        self.0.extend((offset ^ 7).to_be_bytes());
        self.0.extend(offset.to_be_bytes());
        self.0.extend(len.to_be_bytes());
        self
    }

    fn data(mut self, data: &[u8]) -> Self {
        self.0.extend(data);
        self
    }

    fn run(self, export: &ExportInfo, memory: &mut Memory) -> (Vec<u8>, Result<(), ServeError>) {
        let mut script = Script {
            sent: self.0.into(),
            received: Vec::new(),
        };
        let result = match negotiate(&mut script, export) {
            Ok(Some(negotiated)) => transmit(&mut script, export, negotiated, memory),
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        let greeting = b"NBDMAGICIHAVEOPT\0\x03";
        (script.received.split_off(greeting.len()), result)
    }

    /// Serves the messages, which end with a disconnection; returns the received bytes.
    fn run_well(self, export: &ExportInfo, memory: &mut Memory) -> Vec<u8> {
        let end = self.request(0, command::DISCONNECT, 0, 0);
        let (received, result) = end.run(export, memory);
        result.unwrap();
        received
    }
}

fn named(name: &str) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes()[..], name.as_bytes()].concat()
}

fn info_of(name: &str, requests: &[u16]) -> Vec<u8> {
    let mut data = named(name);
    data.extend((requests.len() as u16).to_be_bytes());
    requests
        .iter()
        .for_each(|one| data.extend(one.to_be_bytes()));
    data
}

/// Takes a reply to an option off the front: option, type and data.
fn reply(received: &mut Vec<u8>) -> (u32, u32, Vec<u8>) {
    let rest = received.split_off(20);
    let at = |at| wire::u32_at(received, at).unwrap();
    assert_eq!(wire::u64_at(received, 0), Some(wire::OPTION_REPLY));
    let (option, kind, len) = (at(8), at(12), at(16));
    let mut data = rest;
    *received = data.split_off(len as usize);
    (option, kind, data)
}

/// Takes the replies to an option up to the last one; returns their types.
fn replies(received: &mut Vec<u8>, wanted: u32) -> Vec<u32> {
    let mut kinds = Vec::new();
    loop {
        let (option, kind, _) = reply(received);
        assert_eq!(option, wanted);
        kinds.push(kind);
        if kind == option_reply::ACK || kind & option_reply::ERROR != 0 {
            return kinds;
        }
    }
}

/// Takes a chunk off the front: flags, type, cookie and payload.
fn take_chunk(received: &mut Vec<u8>) -> (u16, u16, u64, Vec<u8>) {
    let rest = received.split_off(20);
    assert_eq!(wire::u32_at(received, 0), Some(STRUCTURED_REPLY));
    let u16_at = |at| wire::u16_at(received, at).unwrap();
    let (flags, kind) = (u16_at(4), u16_at(6));
    let cookie = wire::u64_at(received, 8).unwrap();
    let len = wire::u32_at(received, 16).unwrap();
    let mut payload = rest;
    *received = payload.split_off(len as usize);
    (flags, kind, cookie, payload)
}

/// Takes the chunks of a read off the front; returns its data, or its error code.
fn take_read(received: &mut Vec<u8>, offset: u64, len: usize) -> Result<Vec<u8>, u32> {
    let mut data = Vec::new();
    loop {
        let (flags, kind, cookie, payload) = take_chunk(received);
        assert_eq!(cookie, offset ^ 7);
        if kind == chunk::REQUEST_ERROR {
            assert_eq!(flags, chunk::DONE);
            return Err(wire::u32_at(&payload, 0).unwrap());
        }
        if kind == chunk::NONE {
            assert_eq!((flags, payload.len()), (chunk::DONE, 0));
            assert_eq!(data.len(), len);
            return Ok(data);
        }
        let at = wire::u64_at(&payload, 0);
        assert_eq!(at, Some(offset + data.len() as u64));
        match kind {
            chunk::OFFSET_DATA => data.extend(&payload[8..]),
            chunk::OFFSET_HOLE => {
                data.resize(data.len() + wire::u32_at(&payload, 8).unwrap() as usize, 0);
            }
            kind => panic!("chunk {kind}"),
        }
    }
}

/// Takes a simple reply off the front; returns its error code.
fn take_simple(received: &mut Vec<u8>, offset: u64) -> u32 {
    let rest = received.split_off(16);
    assert_eq!(wire::u32_at(received, 0), Some(SIMPLE_REPLY));
    assert_eq!(wire::u64_at(received, 8), Some(offset ^ 7));
    let code = wire::u32_at(received, 4).unwrap();
    *received = rest;
    code
}

fn structured() -> Messages {
    let messages = Messages::new(3).option(option::STRUCTURED_REPLY, &[]);
    let queries = ["qemu:dirty-bitmap:", allocation::CONTEXT];
    let messages = messages.contexts(option::SET_META_CONTEXT, &queries);
    messages.go("", &[3])
}

/// Takes the replies to the options of [`structured`] off the front.
fn skip_options(received: &mut Vec<u8>) {
    let ack = option_reply::ACK;
    assert_eq!(replies(received, option::STRUCTURED_REPLY), [ack]);
    let contexts = replies(received, option::SET_META_CONTEXT);
    assert_eq!(contexts, [option_reply::META_CONTEXT, ack]);
    let info = option_reply::INFO;
    assert_eq!(replies(received, option::GO), [info, info, ack]);
}

#[test]
fn options_describe_the_export() {
    let messages = Messages::new(3)
        .option(option::LIST, &[])
        .option(5, &[])
        .option(option::SET_META_CONTEXT, &named("vm0"))
        .contexts(option::LIST_META_CONTEXT, &[])
        .contexts(option::LIST_META_CONTEXT, &["base:"])
        .contexts(option::LIST_META_CONTEXT, &["other:x"])
        .option(option::INFO, &info_of("vm1", &[]))
        .option(option::INFO, &info_of("vm0", &[1, 2, 3]))
        .option(option::INFO, &info_of("vm0", &[1])[..9])
        .go("vm0", &[]);
    let mut received = messages.run_well(&export(true), &mut Memory::new());
    let (_, kind, data) = reply(&mut received);
    assert_eq!((kind, data), (option_reply::SERVER, named("vm0")));
    let ack = option_reply::ACK;
    assert_eq!(replies(&mut received, option::LIST), [ack]);
    assert_eq!(replies(&mut received, 5), [option_reply::UNSUPPORTED]);
    let invalid = option_reply::INVALID;
    assert_eq!(replies(&mut received, option::SET_META_CONTEXT), [invalid]);
    let context = option_reply::META_CONTEXT;
    for expected in [&[context, ack][..], &[context, ack], &[ack]] {
        assert_eq!(replies(&mut received, option::LIST_META_CONTEXT), expected);
    }
    let unknown = option_reply::UNKNOWN;
    assert_eq!(replies(&mut received, option::INFO), [unknown]);
    let info = [option_reply::INFO; 4];
    let described = replies(&mut received, option::INFO);
    assert_eq!(described, [&info[..], &[ack]].concat());
    assert_eq!(replies(&mut received, option::INFO), [invalid]);
    let (_, _, data) = reply(&mut received);
    assert_eq!(wire::u64_at(&data, 2), Some(SIZE));
    let flags = wire::u16_at(&data, 10).unwrap();
    assert_eq!(flags, export(true).flags());
    assert_ne!(flags & wire::export_flags::READ_ONLY, 0);
    let (_, _, data) = reply(&mut received);
    let blocks = [2, 6, 10].map(|at| wire::u32_at(&data, at).unwrap());
    assert_eq!(blocks, [512, 4096, MAX_REQUEST]);
    assert_eq!(reply(&mut received).1, ack);
    assert!(received.is_empty());
}

#[test]
fn export_is_selected_by_name_alone() {
    for (flags, padding) in [(1, 124), (3, 0)] {
        let messages = Messages::new(flags).option(option::EXPORT_NAME, b"vm0");
        let mut memory = Memory::new();
        let messages = messages.request(0, command::READ, 3, 700);
        let mut received = messages.run_well(&export(false), &mut memory);
        assert_eq!(wire::u64_at(&received, 0), Some(SIZE));
        let mut received = received.split_off(10 + padding);
        assert_eq!(take_simple(&mut received, 3), 0);
        assert_eq!(received, memory.bytes[3..703]);
    }
    let messages = Messages::new(3).option(option::EXPORT_NAME, b"other");
    let (received, result) = messages.run(&export(false), &mut Memory::new());
    assert!(result.is_ok() && received.is_empty());
}

/// Any range is read, whether it begins and ends within blocks and windows or not, and zeroes are
/// sent as holes.
#[test]
fn reads_return_data_and_holes() {
    let mut memory = Memory::new();
    let ranges = [
        (0, 4 << 20),
        (1, 1),
        (511, 2),
        ((1 << 20) - 3, 7),
        (700, 3 << 20),
        (SIZE - 5, 5),
        ((2 << 20) - 1, 2),
    ];
    let mut messages = structured();
    for (offset, len) in ranges {
        messages = messages.request(0, command::READ, offset, len);
    }
    let mut received = messages.run_well(&export(true), &mut memory);
    skip_options(&mut received);
    assert!(received.len() < 7 << 20, "holes are sent");
    for (offset, len) in ranges {
        let data = take_read(&mut received, offset, len as usize).unwrap();
        assert!(
            data == memory.bytes[offset as usize..][..len as usize],
            "{offset} {len}"
        );
    }
    assert!(received.is_empty());
}

#[test]
fn failed_read_is_error_or_ends_connection() {
    let mut memory = Memory::new();
    memory.bad = Some(3 << 19..(3 << 19) + 512);
    let mut messages = structured();
    for offset in [0, 1 << 20] {
        messages = messages.request(0, command::READ, offset, 2 << 20);
    }
    messages = messages.request(0, command::READ, 0, 512);
    let mut received = messages.run_well(&export(true), &mut memory);
    skip_options(&mut received);
    for offset in [0, 1 << 20] {
        assert_eq!(take_read(&mut received, offset, 0), Err(wire::EIO));
    }
    assert!(take_read(&mut received, 0, 512).is_ok());
    // Simple replies: an error that is known before the first byte, and one that is not.
    let simple = || Messages::new(3).option(option::EXPORT_NAME, b"");
    let messages = simple().request(0, command::READ, 1 << 20, 2 << 20);
    let mut received = messages.run_well(&export(true), &mut memory).split_off(10);
    assert_eq!(take_simple(&mut received, 1 << 20), wire::EIO);
    assert!(received.is_empty());
    let messages = simple().request(0, command::READ, 0, 2 << 20);
    let (_, result) = messages.run(&export(true), &mut memory);
    assert!(matches!(result, Err(ServeError::HalfRead)));
}

/// Takes the extents of a range with block status off the front: lengths and flags.
fn take_extents(received: &mut Vec<u8>, offset: u64) -> Vec<(u32, u32)> {
    let (flags, kind, cookie, payload) = take_chunk(received);
    let head = (chunk::DONE, chunk::BLOCK_STATUS, offset ^ 7);
    assert_eq!((flags, kind, cookie), head);
    assert_eq!(wire::u32_at(&payload, 0), Some(1));
    let extents = payload[4..].chunks(8);
    extents
        .map(|one| (wire::u32_at(one, 0).unwrap(), wire::u32_at(one, 4).unwrap()))
        .collect()
}

#[test]
fn block_status_has_extents() {
    let half = 2 << 20;
    let cases = [
        (0, 0, 4 << 20, vec![(half, 0), (half, 3)]),
        (command::REQ_ONE, 0, 4 << 20, vec![(half, 0)]),
        (0, u64::from(half) - 512, 1024, vec![(512, 0), (512, 3)]),
    ];
    let mut messages = structured();
    for (flags, offset, len, _) in &cases {
        messages = messages.request(*flags, command::BLOCK_STATUS, *offset, *len);
    }
    let mut received = messages.run_well(&export(true), &mut Memory::new());
    skip_options(&mut received);
    for (_, offset, _, expected) in cases {
        assert_eq!(take_extents(&mut received, offset), expected);
    }
}

#[test]
fn extents_end_with_blocks() {
    let mut memory = Memory::new();
    memory.hole = 1000;
    let mut received = structured()
        .request(0, command::BLOCK_STATUS, 0, 8192)
        .run_well(&export(true), &mut memory);
    skip_options(&mut received);
    assert_eq!(take_extents(&mut received, 0), [(1024, 0), (7168, 3)]);
}

/// NBD protocol, "Command flags": a server that announces FUA accepts it with every command.
#[test]
fn fua_is_accepted_with_every_command_where_it_is_announced() {
    let mut memory = Memory::new();
    let mut received = structured()
        .request(command::FUA, command::FLUSH, 0, 0)
        .request(command::FUA, command::READ, 0, 512)
        .request(command::FUA, command::BLOCK_STATUS, 0, 512)
        .run_well(&export(false), &mut memory);
    skip_options(&mut received);
    assert_eq!(take_simple(&mut received, 0), 0);
    assert!(take_read(&mut received, 0, 512).unwrap() == memory.bytes[..512]);
    assert_eq!(take_extents(&mut received, 0), [(512, 0)]);
}

#[test]
fn changes_are_done_or_refused_in_step() {
    let data = vec![9; 3 << 20];
    let messages = || {
        structured()
            .request(command::FUA, command::WRITE, 512, data.len() as u32)
            .data(&data)
            .request(0, command::WRITE, 1, 512)
            .data(&data[..512])
            .request(0, command::WRITE, SIZE, 512)
            .data(&data[..512])
            .request(0, command::WRITE_ZEROES, 1024, 512)
            .request(command::FUA, command::TRIM, 2048, 512)
            .request(0, command::FLUSH, 0, 0)
            .request(0, 99, 0, 0)
            .request(0, command::READ, 0, 4096)
    };
    let codes = |received: &mut Vec<u8>| {
        let offsets = [512, 1, SIZE, 1024, 2048, 0, 0];
        let codes = offsets.map(|offset| take_simple(received, offset));
        (codes, take_read(received, 0, 4096).unwrap())
    };
    let mut memory = Memory::new();
    let before = memory.bytes.clone();
    let mut received = messages().run_well(&export(false), &mut memory);
    skip_options(&mut received);
    let invalid = wire::EINVAL as u32;
    let (found, read) = codes(&mut received);
    assert_eq!(found, [0, invalid, wire::ENOSPC, 0, 0, 0, invalid]);
    let mut expected = [&before[..512], &data[..3584]].concat();
    expected[1024..1536].fill(0);
    expected[2048..2560].fill(0);
    assert!(read == expected);
    assert_eq!(memory.flushes, 2);
    let mut memory = Memory::new();
    let mut received = messages().run_well(&export(true), &mut memory);
    skip_options(&mut received);
    let (found, read) = codes(&mut received);
    let refused = [wire::EPERM; 6];
    assert_eq!(found, [&refused[..], &[invalid]].concat()[..]);
    assert!(read == before[..4096] && memory.bytes == before);
}

#[test]
fn broken_clients_are_disconnected() {
    let far = |messages: Messages| messages.run(&export(false), &mut Memory::new()).1;
    let long = structured().request(0, command::WRITE, 0, MAX_REQUEST + 1);
    let option_len = Messages(vec![0, 0, 0, 3])
        .data(&IHAVEOPT.to_be_bytes())
        .data(&[0, 0, 0, 3, 0, 1, 0, 1]);
    let endless = (0..300).fold(Messages::new(3), |all, _| all.option(99, &[]));
    for broken in [
        Messages::new(4),
        Messages::new(3).data(&[7; 16]),
        option_len,
        endless,
        structured().data(&[7; 28]),
        long,
    ] {
        let result = far(broken);
        assert!(
            matches!(result, Err(ServeError::Violation(_))),
            "{result:?}"
        );
    }
    let cut = far(structured().data(&[0; 27]));
    assert!(matches!(cut, Err(ServeError::Io(_))), "{cut:?}");
    assert!(far(Messages::new(3).option(option::ABORT, &[])).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a client sends is answered without a panic.
    #[test]
    fn any_client_is_survived(
        options in proptest::collection::vec((0u32..12, proptest::collection::vec(any::<u8>(), 0..40)), 0..4),
        requests in proptest::collection::vec((any::<u16>(), 0u16..9, any::<u64>(), any::<u32>()), 0..4),
        small in proptest::collection::vec((0u16..16, 0u16..9, 0..SIZE + 1024, 0u32..1 << 20), 0..6),
        rest in proptest::collection::vec(any::<u8>(), 0..60),
        read_only in any::<bool>(),
    ) {
        let mut messages = Messages::new(3).option(option::STRUCTURED_REPLY, &[]);
        for (option, data) in options {
            messages = messages.option(option, &data);
        }
        messages = messages.contexts(option::SET_META_CONTEXT, &[allocation::CONTEXT]);
        messages = messages.go("vm0", &[]);
        for (flags, kind, offset, len) in small.into_iter().chain(requests) {
            messages = messages.request(flags, kind, offset, len);
        }
        let _ = messages.data(&rest).run(&export(read_only), &mut Memory::new());
    }
}
