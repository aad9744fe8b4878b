//! Properties of the request parser: for any content of guest memory a chain ends, and the
//! resulting memory lies in the guest's.

use crate::chain::{Buffer, ChainError, MAX_CHAIN, Walker};
use crate::request::{Action, NoStatus, Parsed, RequestLimits, VolumeOperation, parse};
use crate::ring::{Descriptor, Ring, RingAddress, flag};
use crate::virtio::BlkStatus;
use dma::{DmaMap, Memory, Prot, SegmentList};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::VecDeque;
use volume::Op;

const SIZE: u16 = 8;
/// Layout: the table, then the rings; indirect tables and data behind them.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x100;
const USED: u64 = 0x200;
const INNER: u64 = 0x400;
const DATA: u64 = 0x1000;
const MEMORY: u64 = 0x8000;

struct Guest {
    memory: Memory,
    map: DmaMap,
    ring: Ring,
}

fn guest() -> Guest {
    let memory = Memory::anonymous(MEMORY as usize).unwrap();
    let mut map = DmaMap::new();
    map.map(0, MEMORY, Some((memory.clone(), 0)), Prot::RW)
        .unwrap();
    let at = RingAddress {
        descriptors: DESCRIPTORS,
        available: AVAILABLE,
        used: USED,
    };
    let ring = Ring::resolve(&map, at, SIZE, true).unwrap();
    Guest { memory, map, ring }
}

impl Guest {
    fn describe(&self, table: u64, descriptors: &[Descriptor]) {
        for (i, d) in descriptors.iter().enumerate() {
            let mut bytes = d.addr.to_le_bytes().to_vec();
            bytes.extend(d.len.to_le_bytes());
            bytes.extend(d.flags.to_le_bytes());
            bytes.extend(d.next.to_le_bytes());
            self.memory.write(table as usize + i * 16, &bytes).unwrap();
        }
    }
}

/// A simple model of a chain: follows descriptors and remembers each one.
fn model(
    head: u16,
    outer: &[Descriptor],
    inner: &[Descriptor],
) -> Result<Vec<Buffer>, &'static str> {
    let (mut table, mut index, mut indirect) = (outer, head, false);
    let (mut seen, mut found) = (Vec::new(), Vec::<Buffer>::new());
    loop {
        let d = table.get(usize::from(index)).ok_or("index")?;
        if seen.contains(&(indirect, index)) {
            return Err("loop");
        }
        seen.push((indirect, index));
        if d.flags & flag::INDIRECT != 0 {
            if indirect || d.flags & flag::NEXT != 0 {
                return Err("indirect");
            }
            let entries = d.len as usize / 16;
            if d.len % 16 != 0 || entries == 0 || entries > MAX_CHAIN {
                return Err("size");
            }
            // In these tests a table lies at `INNER`, or outside of memory.
            if d.addr != INNER {
                return Err("memory");
            }
            (table, index, indirect) = (&inner[..entries.min(inner.len())], 0, true);
            if entries > inner.len() {
                return Err("test");
            }
            continue;
        }
        let writable = d.flags & flag::WRITE != 0;
        if !writable && found.last().is_some_and(|last| last.writable) {
            return Err("order");
        }
        if d.len > 0 {
            found.push(Buffer {
                addr: d.addr,
                len: d.len,
                writable,
            });
        }
        if d.flags & flag::NEXT == 0 {
            return Ok(found);
        }
        index = d.next;
    }
}

fn descriptor() -> impl Strategy<Value = Descriptor> {
    let addr = prop_oneof![
        6 => Just(INNER),
        6 => DATA..MEMORY,
        1 => any::<u64>(),
        1 => (u64::MAX - 64)..=u64::MAX
    ];
    let len = prop_oneof![4 => (1u32..=6).prop_map(|n| n * 16), 3 => 0u32..600, 1 => any::<u32>()];
    let flags = prop_oneof![8 => Just(flag::NEXT), 3 => Just(0u16), 3 => Just(flag::WRITE | flag::NEXT), 3 => Just(flag::WRITE), 3 => Just(flag::INDIRECT), 1 => any::<u16>()];
    let next = prop_oneof![9 => 0..SIZE, 1 => any::<u16>()];
    (addr, len, flags, next).prop_map(|(addr, len, flags, next)| Descriptor {
        addr,
        len,
        flags,
        next,
    })
}

fn limits() -> RequestLimits {
    RequestLimits {
        block_size: 512,
        max_transfer: 1 << 20,
        fua: false,
        discard: true,
        write_zeroes: true,
    }
}

/// Checks the parser's output for any input.
fn check_parsed(
    parsed: Result<Parsed, NoStatus>,
    buffers: &[Buffer],
    data: &SegmentList,
    ranges: &VecDeque<VolumeOperation>,
    memory: &Memory,
) -> Result<(), TestCaseError> {
    let Ok(parsed) = parsed else {
        prop_assert!(buffers.last().is_none_or(
            |last| !last.writable || last.addr.checked_add(u64::from(last.len) - 1).is_none()
        ));
        return Ok(());
    };
    let whole = memory.segment(0, memory.len()).unwrap();
    let start = whole.as_ptr().addr();
    for segment in data.segments() {
        let at = segment.as_ptr().addr();
        prop_assert!(at >= start && at + segment.len() <= start + memory.len());
    }
    let last = buffers.last().unwrap();
    prop_assert_eq!(parsed.status_at, last.addr + (u64::from(last.len) - 1));
    match parsed.action {
        Action::Work(work) => {
            prop_assert_eq!(data.len_bytes(), work.len);
            prop_assert!(work.len.is_multiple_of(512) && work.offset.is_multiple_of(512));
            prop_assert!(work.op != Op::Read || data.is_writable());
        }
        Action::Id => prop_assert!(data.len_bytes() <= 20),
        Action::Ranges => prop_assert!(!ranges.is_empty() && data.is_empty()),
        Action::End(status) => {
            prop_assert_ne!(status, BlkStatus::Ok);
            prop_assert!(data.is_empty() && ranges.is_empty());
        }
    }
    Ok(())
}

/// Cuts buffers in two at the given offsets; empty ones may result.
fn cut(buffers: &[Buffer], at: &[u32]) -> Vec<Buffer> {
    let mut out = Vec::new();
    for (i, buffer) in buffers.iter().enumerate() {
        let mut rest = *buffer;
        for cut in at.iter().skip(i).step_by(buffers.len()) {
            let first = cut % (rest.len + 1);
            out.push(Buffer { len: first, ..rest });
            rest.addr += u64::from(first);
            rest.len -= first;
        }
        out.push(rest);
    }
    out.retain(|buffer| buffer.len > 0);
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn random_chain_matches_model(
        outer in vec(descriptor(), usize::from(SIZE)),
        inner in vec(descriptor(), usize::from(SIZE)),
        head in 0..SIZE,
        junk in vec(any::<u8>(), 64),
    ) {
        let guest = guest();
        guest.describe(DESCRIPTORS, &outer);
        guest.describe(INNER, &inner);
        guest.memory.write(DATA as usize, &junk).unwrap();
        let mut walker = Walker::default();
        let walked = walker.walk(head, &guest.ring, SIZE, true, &guest.map);
        match (model(head, &outer, &inner), walked) {
            // The model excludes memory behind the inner table, and an indirect descriptor's view
            // of data.
            (Err("test" | "memory"), _) => {}
            (Ok(expected), walked) => prop_assert_eq!(walked.map(<[Buffer]>::to_vec), Ok(expected)),
            (Err(why), Ok(walked)) => prop_assert!(false, "{why}: {walked:?}"),
            // A chain that has used up its table and continues outside of it is a loop, too.
            (Err("index" | "loop"), Err(error)) => {
                prop_assert!(!matches!(error, ChainError::Indirect | ChainError::TableSize(_)), "{error}");
            }
            (Err(_), Err(_)) => {}
        }
        // The parser accepts any of these chains.
        let mut walker = Walker::default();
        if let Ok(buffers) = walker.walk(head, &guest.ring, SIZE, true, &guest.map) {
            let (mut data, mut ranges) = (SegmentList::new(), VecDeque::new());
            let parsed = parse(buffers, &guest.map, &limits(), &mut data, &mut ranges);
            check_parsed(parsed, buffers, &data, &ranges, &guest.memory)?;
        }
    }

    /// The layout of a request's buffers does not change the request.
    #[test]
    fn chain_layout_does_not_matter(
        kind in prop_oneof![Just(0u32), Just(1), Just(4), Just(8), Just(11), Just(13), any::<u32>()],
        sector in prop_oneof![0u64..100, any::<u64>()],
        out in prop_oneof![Just(0u32), Just(512), Just(1024), Just(16), Just(48), 0u32..1500],
        wanted in prop_oneof![Just(0u32), Just(512), Just(4096), Just(20), 0u32..1500],
        payload in vec(prop_oneof![4 => Just(0u8), 1 => any::<u8>()], 256),
        cuts in vec(any::<u32>(), 0..12),
    ) {
        let guest = guest();
        let (header, out_at, in_at) = (DATA, DATA + 16, DATA + 0x1000);
        guest.memory.write(header as usize, &kind.to_le_bytes()).unwrap();
        guest.memory.write(header as usize + 8, &sector.to_le_bytes()).unwrap();
        guest.memory.write(out_at as usize, &payload).unwrap();
        let whole = [
            Buffer { addr: header, len: 16 + out, writable: false },
            Buffer { addr: in_at, len: wanted + 1, writable: true },
        ];
        let pieces = cut(&whole, &cuts);
        let (mut data, mut ranges) = (SegmentList::new(), VecDeque::new());
        let first = parse(&whole, &guest.map, &limits(), &mut data, &mut ranges);
        check_parsed(first, &whole, &data, &ranges, &guest.memory)?;
        let (mut data2, mut ranges2) = (SegmentList::new(), VecDeque::new());
        let second = parse(&pieces, &guest.map, &limits(), &mut data2, &mut ranges2);
        check_parsed(second, &pieces, &data2, &ranges2, &guest.memory)?;
        prop_assert_eq!(first, second);
        prop_assert_eq!(ranges, ranges2);
        // Adjacent pieces are merged again.
        prop_assert_eq!(data.segments(), data2.segments());
        // The parsed request is the expected one.
        let offset = sector.checked_mul(512);
        let expected = match kind {
            0 if wanted % 512 == 0 => offset.map(|offset| VolumeOperation { op: Op::Read, offset, len: u64::from(wanted) }),
            1 if out % 512 == 0 => offset.map(|offset| VolumeOperation { op: Op::Write { fua: false }, offset, len: u64::from(out) }),
            4 => Some(VolumeOperation { op: Op::Flush, offset: 0, len: 0 }),
            _ => None,
        };
        let action = first.unwrap().action;
        match (kind, expected) {
            (0 | 1 | 4, Some(work)) => prop_assert_eq!(action, Action::Work(work)),
            (0 | 1, None) => prop_assert_eq!(action, Action::End(BlkStatus::IoErr)),
            (8, _) => prop_assert_eq!(action, Action::Id),
            (11 | 13, _) => prop_assert!(matches!(action, Action::Ranges | Action::End(_))),
            _ => prop_assert_eq!(action, Action::End(BlkStatus::Unsupported)),
        }
    }
}

/// A chain may name the same memory many times: the limit applies to the sum.
#[test]
fn chain_data_is_bounded() {
    let guest = guest();
    let one = Buffer {
        addr: DATA + 0x1000,
        len: 512,
        writable: true,
    };
    let header = Buffer {
        addr: DATA,
        len: 16,
        writable: false,
    };
    let status = Buffer { len: 1, ..one };
    for (buffers, fits) in [(4, true), (5, false), (1000, false)] {
        let limits = RequestLimits {
            max_transfer: 2048,
            ..limits()
        };
        let chain: Vec<Buffer> = std::iter::once(header)
            .chain(std::iter::repeat_n(one, buffers))
            .chain([status])
            .collect();
        let (mut data, mut ranges) = (SegmentList::new(), VecDeque::new());
        let parsed = parse(&chain, &guest.map, &limits, &mut data, &mut ranges).unwrap();
        assert_eq!(matches!(parsed.action, Action::Work(_)), fits, "{buffers}");
        assert_eq!(data.len_bytes(), if fits { 2048 } else { 0 });
    }
}
