use super::*;
use crate::protocol::in_flight::RequestInfo;
use proptest::prelude::*;

const READ: RequestInfo = RequestInfo {
    read: true,
    offset: 1 << 20,
    len: 1000,
};

fn chunk_of(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = STRUCTURED_REPLY.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn data_of(flags: u16, cookie: u64, offset: u64, data: &[u8]) -> Vec<u8> {
    let payload = [&offset.to_be_bytes(), data].concat();
    chunk_of(flags, chunk::OFFSET_DATA, cookie, &payload)
}

fn hole_of(flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let payload = [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat();
    chunk_of(flags, chunk::OFFSET_HOLE, cookie, &payload)
}

fn error_of(flags: u16, cookie: u64, errno: u32, text: &[u8]) -> Vec<u8> {
    let len = (text.len() as u16).to_be_bytes();
    let payload = [&errno.to_be_bytes()[..], &len, text].concat();
    chunk_of(flags, chunk::ERROR | 1, cookie, &payload)
}

fn simple_of(error: u32, cookie: u64, data: &[u8]) -> Vec<u8> {
    let mut bytes = SIMPLE_REPLY.to_be_bytes().to_vec();
    bytes.extend(error.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Result of parsing a stream: the data of each request, and how it ended.
type Outcome = (Vec<(u64, Vec<u8>)>, Vec<(u64, Option<u32>)>);

/// Feeds bytes in pieces of these lengths, by turns.
fn feed(
    replies: &mut Replies,
    requests: &mut InFlight<()>,
    bytes: &[u8],
    pieces: &[usize],
) -> Result<Outcome, Violation> {
    let mut data: Vec<(u64, Vec<u8>)> = Vec::new();
    let mut ends = Vec::new();
    let mut pending = Vec::new();
    let mut pieces = pieces.iter().cycle();
    let mut rest = bytes;
    loop {
        loop {
            let (used, event) = replies.next(&pending, requests)?;
            match event {
                Event::More if used == 0 && replies.state != (State::Head) => {
                    if !matches!(replies.state, State::End { .. }) {
                        break;
                    }
                }
                Event::More if used == 0 => break,
                Event::More => {}
                Event::Data { cookie, at, bytes } => {
                    put(&mut data, requests, cookie, at, bytes);
                }
                Event::Hole { cookie, at, len } => {
                    put(&mut data, requests, cookie, at, &vec![0; len as usize]);
                }
                Event::End { cookie, error } => {
                    requests.remove(cookie).unwrap();
                    ends.push((cookie, error));
                }
            }
            pending.drain(..used);
        }
        if rest.is_empty() {
            assert!(pending.len() < 32, "complete messages are used up");
            return Ok((data, ends));
        }
        let (piece, others) = rest.split_at((*pieces.next().unwrap()).clamp(1, rest.len()));
        pending.extend_from_slice(piece);
        rest = others;
    }
}

fn put(
    data: &mut Vec<(u64, Vec<u8>)>,
    requests: &mut InFlight<()>,
    cookie: u64,
    at: u32,
    bytes: &[u8],
) {
    let len = requests.get(cookie).unwrap().info.len as usize;
    let place = match data.iter_mut().find(|(of, _)| *of == cookie) {
        Some((_, place)) => place,
        None => {
            data.push((cookie, vec![0xee; len]));
            &mut data.last_mut().unwrap().1
        }
    };
    // Never out of the request: else this panics.
    place[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
}

fn one(structured: bool, info: RequestInfo) -> (Replies, InFlight<()>, u64) {
    let mut requests = InFlight::new(8);
    let cookie = requests.insert(info, ()).unwrap();
    (Replies::new(structured), requests, cookie)
}

fn of(
    structured: bool,
    info: RequestInfo,
    make: impl Fn(u64) -> Vec<u8>,
) -> Result<Outcome, Violation> {
    let (mut replies, mut requests, cookie) = one(structured, info);
    feed(&mut replies, &mut requests, &make(cookie), &[7])
}

#[test]
fn simple_reply_carries_all_data() {
    let bytes: Vec<u8> = (0..1000u32).map(|n| n as u8).collect();
    let (data, ends) = of(false, READ, |cookie| simple_of(0, cookie, &bytes)).unwrap();
    assert_eq!(data[0].1, bytes);
    assert_eq!(ends[0].1, None);
    let (data, ends) = of(false, READ, |cookie| simple_of(5, cookie, &[])).unwrap();
    assert!(data.is_empty());
    assert_eq!(ends[0].1, Some(5));
}

#[test]
fn chunks_in_any_order_are_assembled() {
    let (data, ends) = of(true, READ, |cookie| {
        let base = READ.offset;
        [
            data_of(0, cookie, base + 900, &[9; 100]),
            hole_of(0, cookie, base + 100, 800),
            data_of(1, cookie, base, &[1; 100]),
        ]
        .concat()
    })
    .unwrap();
    let expected = [vec![1; 100], vec![0; 800], vec![9; 100]].concat();
    assert_eq!((&data[0].1, ends[0].1), (&expected, None));
}

#[test]
fn first_error_of_reply_counts() {
    let (_, ends) = of(true, READ, |cookie| {
        [
            data_of(0, cookie, READ.offset, &[1; 10]),
            error_of(0, cookie, 28, b"no room"),
            error_of(0, cookie, 5, b""),
            chunk_of(1, chunk::NONE, cookie, &[]),
        ]
        .concat()
    })
    .unwrap();
    assert_eq!(ends[0].1, Some(28));
}

#[test]
fn replies_in_any_order_are_matched() {
    let mut requests = InFlight::new(8);
    let write = RequestInfo {
        read: false,
        ..READ
    };
    let cookies: Vec<u64> = [READ, write, READ]
        .map(|info| requests.insert(info, ()).unwrap())
        .into();
    let bytes = [
        simple_of(0, cookies[2], &[3; 1000]),
        simple_of(0, cookies[1], &[]),
        simple_of(0, cookies[0], &[1; 1000]),
    ];
    let mut replies = Replies::new(false);
    let (data, ends) = feed(&mut replies, &mut requests, &bytes.concat(), &[1, 300]).unwrap();
    assert_eq!(data[0], (cookies[2], vec![3; 1000]));
    assert_eq!(data[1], (cookies[0], vec![1; 1000]));
    assert_eq!(ends.len(), 3);
    assert!(requests.is_empty());
}

/// Every protocol violation that a server can commit.
#[test]
fn malformed_replies_are_violations() {
    let write = RequestInfo {
        read: false,
        ..READ
    };
    let base = READ.offset;
    type Lie = (bool, RequestInfo, Box<dyn Fn(u64) -> Vec<u8>>, Violation);
    let lies: Vec<Lie> = vec![
        (
            true,
            READ,
            Box::new(|_| b"HTTP/1.1 400".to_vec()),
            Violation::Magic(0x4854_5450),
        ),
        (
            false,
            READ,
            Box::new(|c| chunk_of(1, 0, c, &[])),
            Violation::Kind("structured"),
        ),
        (
            true,
            READ,
            Box::new(|c| simple_of(0, c, &[0; 1000])),
            Violation::Kind("simple"),
        ),
        (
            true,
            READ,
            Box::new(|c| simple_of(5, c + 1, &[])),
            Violation::Cookie((1 << 32) + 1),
        ),
        // The place is there, but this use of it is over.
        (
            true,
            READ,
            Box::new(|c| simple_of(5, c + (1 << 32), &[])),
            Violation::Cookie(2 << 32),
        ),
        (
            true,
            READ,
            Box::new(|c| [simple_of(5, c, &[]), simple_of(5, c, &[])].concat()),
            Violation::Cookie(1 << 32),
        ),
        (
            true,
            READ,
            Box::new(|c| chunk_of(1, 5, c, &[0; 12])),
            Violation::Chunk(5),
        ),
        (
            true,
            READ,
            Box::new(|c| chunk_of(0, 0, c, &[])),
            Violation::Length { kind: 0, len: 0 },
        ),
        (
            true,
            READ,
            Box::new(|c| chunk_of(1, 1, c, &[0; 8])),
            Violation::Length { kind: 1, len: 8 },
        ),
        (
            true,
            READ,
            Box::new(|c| chunk_of(1, 2, c, &[0; 13])),
            Violation::Length { kind: 2, len: 13 },
        ),
        (
            true,
            READ,
            Box::new(|c| chunk_of(1, 1 << 15, c, &[0; 5000])),
            Violation::Length {
                kind: 1 << 15,
                len: 5000,
            },
        ),
        (
            true,
            READ,
            Box::new(move |c| data_of(1, c, base + 1, &[0; 1000])),
            Violation::Range,
        ),
        (
            true,
            READ,
            Box::new(move |c| data_of(1, c, base - 1, &[0; 10])),
            Violation::Range,
        ),
        (
            true,
            READ,
            Box::new(move |c| hole_of(1, c, base, u32::MAX)),
            Violation::Range,
        ),
        (
            true,
            READ,
            Box::new(move |c| hole_of(0, c, base, 0)),
            Violation::Range,
        ),
        // All of it twice.
        (
            true,
            READ,
            Box::new(move |c| [hole_of(0, c, base, 1000), hole_of(1, c, base, 1000)].concat()),
            Violation::Twice,
        ),
        // The number of bytes is right, but some arrive twice: the missing ones would keep the old
        // content of the request's memory.
        (
            true,
            READ,
            Box::new(move |c| [hole_of(0, c, base, 500), hole_of(1, c, base + 499, 500)].concat()),
            Violation::Twice,
        ),
        // Every second byte.
        (
            true,
            READ,
            Box::new(move |c| {
                let pieces = (0..500u64).map(|piece| hole_of(0, c, base + piece * 2, 1));
                pieces.collect::<Vec<_>>().concat()
            }),
            Violation::Scattered,
        ),
        (
            true,
            write,
            Box::new(move |c| data_of(1, c, base, &[0; 10])),
            Violation::Range,
        ),
        (
            true,
            READ,
            Box::new(move |c| data_of(1, c, base, &[0; 999])),
            Violation::Incomplete,
        ),
        (
            true,
            READ,
            Box::new(|c| chunk_of(1, 0, c, &[])),
            Violation::Incomplete,
        ),
        (
            true,
            READ,
            Box::new(|c| error_of(0, c, 5, b"x").repeat(100)),
            Violation::Errors,
        ),
    ];
    for (at, (structured, info, make, violation)) in lies.into_iter().enumerate() {
        assert_eq!(of(structured, info, make), Err(violation), "lie {at}");
    }
}

#[test]
fn data_received_in_place_is_skipped() {
    let (mut replies, mut requests, cookie) = one(true, READ);
    let head = data_of(1, cookie, READ.offset, &[7; 1000]);
    let (used, _) = replies.next(&head[..28], &mut requests).unwrap();
    assert_eq!(used, 28);
    let expected = replies.expects().unwrap();
    assert_eq!((expected.at, expected.left), (0, 1000));
    replies.took(990);
    assert_eq!(replies.expects().unwrap().at, 990);
    replies.took(10);
    let (used, event) = replies.next(&[], &mut requests).unwrap();
    let end = Event::End {
        cookie,
        error: None,
    };
    assert_eq!((used, event), (0, end));
}

proptest! {
    /// The result does not depend on how the stream is split.
    #[test]
    fn replies_in_pieces_are_parsed(
        cuts in proptest::collection::vec(1..2000usize, 1..20),
        parts in proptest::collection::vec((1..400u32, any::<bool>()), 1..8),
        fails in any::<bool>(),
    ) {
        let mut requests = InFlight::new(4);
        let len = parts.iter().map(|(len, _)| len).sum();
        let info = RequestInfo { read: true, offset: 4096, len };
        let cookie = requests.insert(info, ()).unwrap();
        let (mut bytes, mut model, mut at) = (Vec::new(), Vec::new(), 4096u64);
        for (number, &(len, hole)) in parts.iter().enumerate() {
            if hole {
                bytes.extend(hole_of(0, cookie, at, len));
                model.extend(vec![0; len as usize]);
            } else {
                bytes.extend(data_of(0, cookie, at, &vec![number as u8 + 1; len as usize]));
                model.extend(vec![number as u8 + 1; len as usize]);
            }
            at += u64::from(len);
        }
        bytes.extend(if fails {
error_of(1, cookie, 5, b"late")
} else {
chunk_of(1, chunk::NONE, cookie, &[])
});
        let mut replies = Replies::new(true);
        let (data, ends) = feed(&mut replies, &mut requests, &bytes, &cuts).unwrap();
        prop_assert_eq!(&data[0].1, &model);
        prop_assert_eq!(&ends, &vec![(cookie, fails.then_some(5))]);
    }

    /// Any bytes: no panic, no data outside of a request, no event without end.
    #[test]
    fn random_bytes_cause_no_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        structured in any::<bool>(),
        kind in 0..5u16,
    ) {
        let (mut replies, mut requests, cookie) = one(structured, READ);
        let head = match kind {
            0 => Vec::new(),
            1 => simple_of(0, cookie, &[]),
            kind => chunk_of(kind & 1, kind / 2, cookie, &[])[..16].to_vec(),
        };
        let _ = feed(&mut replies, &mut requests, &[head, bytes].concat(), &[3, 50]);
    }
}
