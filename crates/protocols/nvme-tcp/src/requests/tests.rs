//! Requests as a host sends them, in pieces of every size; and each way to break a rule.

use super::*;
use crate::digest::crc32c;
use crate::write::Writer;
use proptest::prelude::*;

const IN_CAPSULE: u32 = 64;

fn limits(header_digest: bool, data_digest: bool, alignment: u8) -> ConnectionLimits {
    ConnectionLimits {
        header_digest,
        data_digest,
        alignment,
        h2c_data: 4096,
        r2t: 1,
    }
}

fn plain() -> ConnectionLimits {
    limits(false, false, 0)
}

fn with_data(writer: &Writer, header: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut pdu = [header, bytes].concat();
    if writer.data_digest() && !bytes.is_empty() {
        pdu.extend(crc32c(bytes).to_le_bytes());
    }
    pdu
}

/// Result of parsing a stream: commands with the data of their capsules, and data by its tag.
#[derive(Debug, Default, PartialEq, Eq)]
struct Understood {
    commands: Vec<(u16, Vec<u8>)>,
    transfers: Vec<(u16, Vec<u8>)>,
}

fn run(
    limits: &ConnectionLimits,
    bytes: &[u8],
    piece: usize,
    grants: &mut Grants<()>,
) -> Result<Understood, Violation> {
    let mut requests = Requests::new(limits, IN_CAPSULE);
    let mut understood = Understood::default();
    let mut in_transfer = false;
    let mut tag = 0;
    let (mut have, mut used_up) = (0, 0);
    while have < bytes.len() {
        have = (have + piece).min(bytes.len());
        loop {
            let expected = requests.expects();
            if expected > 8 && have - used_up >= 4 {
                let list = if in_transfer {
                    &mut understood.transfers
                } else {
                    &mut understood.commands
                };
                list.last_mut()
                    .unwrap()
                    .1
                    .extend(&bytes[used_up..used_up + 4]);
                requests.took(4);
                used_up += 4;
                continue;
            }
            let (used, request) = requests.next(&bytes[used_up..have], grants)?;
            used_up += used;
            match request {
                Request::More if used == 0 => break,
                Request::More => {}
                Request::Command { command, data } => {
                    understood.commands.push((command.cid.get(), Vec::new()));
                    in_transfer = false;
                    assert!(data <= IN_CAPSULE);
                }
                Request::Transfer { tag: of, at, .. } => {
                    let list = &mut understood.transfers;
                    if list.last().is_none_or(|(last, _)| *last != of) {
                        list.push((of, Vec::new()));
                    }
                    assert_eq!(list.last().unwrap().1.len() as u32, at);
                    (in_transfer, tag) = (true, of);
                }
                Request::Data(bytes) => {
                    let list = if in_transfer {
                        &mut understood.transfers
                    } else {
                        &mut understood.commands
                    };
                    list.last_mut().unwrap().1.extend(bytes);
                }
                Request::DataEnd { corrupt, whole } => {
                    assert!(!corrupt);
                    if whole {
                        assert!(in_transfer && grants.remove(tag).is_some());
                    }
                }
                Request::Terminated(why) => panic!("{why}"),
            }
        }
    }
    assert_eq!(used_up, bytes.len());
    Ok(understood)
}

proptest! {
    #[test]
    fn requests_in_pieces_are_assembled(
        commands in proptest::collection::vec(0..=IN_CAPSULE, 0..6),
        transfers in proptest::collection::vec(proptest::collection::vec(1..200u32, 1..4), 0..4),
        piece in 1..200usize,
        digests in any::<(bool, bool)>(),
        alignment in 0..32u8,
    ) {
        let limits = limits(digests.0, digests.1, alignment);
        let writer = Writer::new(limits);
        let mut grants = Grants::new(8);
        let mut bytes = Vec::new();
        let mut expected = Understood::default();
        let byte = |i: u32| (i * 5 + 1) as u8;
        for (cid, len) in (0..).zip(&commands) {
            let data: Vec<u8> = (0..*len).map(byte).collect();
            let command = Command::new(1, cid, 1);
            bytes.extend(with_data(&writer, &writer.command(&command, *len), &data));
            expected.commands.push((cid, data));
        }
        for (cid, pieces) in (100..).zip(&transfers) {
            let whole: u32 = pieces.iter().sum();
            let tag = grants.insert(cid, 0, whole, ()).unwrap();
            let mut at = 0;
            for len in pieces {
                let data: Vec<u8> = (at..at + len).map(byte).collect();
                let header = writer.h2c_data(cid, tag, at, *len, at + len == whole);
                bytes.extend(with_data(&writer, &header, &data));
                at += len;
            }
            expected.transfers.push((tag, (0..whole).map(byte).collect()));
        }
        let understood = run(&limits, &bytes, piece, &mut grants).unwrap();
        prop_assert_eq!(understood, expected);
        prop_assert!(grants.is_empty());
    }
}

/// Returns the violation in a stream while a request to transfer 100 bytes of command 9 is
/// outstanding.
fn violation(make: impl Fn(&Writer, u16) -> Vec<u8>) -> Violation {
    let mut grants = Grants::new(4);
    let tag = grants.insert(9, 0, 100, ()).unwrap();
    let bytes = make(&Writer::new(plain()), tag);
    run(&plain(), &bytes, bytes.len(), &mut grants).unwrap_err()
}

#[test]
fn in_capsule_data_beyond_limit_is_violation() {
    for len in [IN_CAPSULE + 1, 1 << 20, u32::MAX - 72] {
        let wrong = violation(|writer, _| writer.command(&Command::new(1, 0, 1), len).to_vec());
        assert_eq!(wrong, Violation::Limit(len));
    }
}

#[test]
fn data_outside_grant_is_violation() {
    let data = |writer: &Writer, cid, tag, at, len: u32, last| {
        with_data(
            writer,
            &writer.h2c_data(cid, tag, at, len, last),
            &vec![0; len as usize],
        )
    };
    let range = |at, len| {
        let wrong = violation(|writer, tag| data(writer, 9, tag, at, len, false));
        assert!(
            matches!(wrong, Violation::Range { .. }),
            "{at} {len} {wrong}"
        );
    };
    for (at, len) in [(0, 101), (1, 4), (100, 1), (u32::MAX, 1), (u32::MAX - 3, 8)] {
        range(at, len);
    }
    let wrong = violation(|writer, tag| data(writer, 9, tag + 1, 0, 4, false));
    assert!(matches!(wrong, Violation::Tag(_)), "{wrong}");
    let wrong = violation(|writer, tag| data(writer, 8, tag, 0, 4, false));
    assert!(matches!(wrong, Violation::Tag(_)), "{wrong}");
    let wrong = violation(|writer, tag| data(writer, 9, tag, 0, 100, true).repeat(2));
    assert!(matches!(wrong, Violation::Tag(_)), "{wrong}");
    let wrong = violation(|writer, tag| data(writer, 9, tag, 0, 4, false).repeat(2));
    assert!(matches!(wrong, Violation::Range { .. }), "{wrong}");
    let wrong = violation(|writer, tag| data(writer, 9, tag, 0, 4, true));
    assert_eq!(wrong, Violation::Last);
    let wrong = violation(|writer, tag| data(writer, 9, tag, 0, 4100, false));
    assert_eq!(wrong, Violation::Limit(4100));
}

#[test]
fn wrong_pdu_kind_or_length_is_violation() {
    for other in [
        kind::IC_REQ,
        kind::IC_RESP,
        kind::C2H_TERM_REQ,
        kind::CAPSULE_RESP,
        kind::C2H_DATA,
        kind::R2T,
        8,
        10,
        0xff,
    ] {
        let wrong = violation(|writer, _| {
            let mut pdu = writer.command(&Command::new(1, 0, 1), 0).to_vec();
            pdu[0] = other;
            pdu
        });
        assert_eq!(wrong, Violation::Kind(other));
    }
    for (at, to) in [(2, 71), (4, 71), (4, 73), (1, 1)] {
        let wrong = violation(|writer, _| {
            let mut pdu = writer.command(&Command::new(1, 0, 1), 0).to_vec();
            pdu[at] = to;
            pdu
        });
        assert!(matches!(wrong, Violation::Field { .. }), "{wrong}");
    }
    // Without data, data for a request to transfer is none.
    let wrong = violation(|writer, tag| writer.h2c_data(9, tag, 0, 0, false).to_vec());
    assert!(matches!(wrong, Violation::Field { .. }), "{wrong}");
}

#[test]
fn digest_mismatch_is_violation() {
    let limits = limits(true, true, 0);
    let writer = Writer::new(limits);
    let header = writer.command(&Command::new(1, 0, 1), 8);
    let good = with_data(&writer, &header, &[3; 8]);
    for (at, bit) in [(8, 1), (40, 0x80), (71, 1), (72, 1), (75, 0x80)] {
        let mut bytes = good.clone();
        bytes[at] ^= bit;
        let wrong = run(&limits, &bytes, bytes.len(), &mut Grants::new(1));
        assert!(
            matches!(wrong, Err(Violation::HeaderDigest { .. })),
            "{wrong:?}"
        );
    }
    for at in 76..good.len() {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        let mut requests = Requests::new(&limits, IN_CAPSULE);
        let mut grants = Grants::<()>::new(1);
        let (used, _) = requests.next(&bytes, &mut grants).unwrap();
        let (data, _) = requests.next(&bytes[used..], &mut grants).unwrap();
        let (_, end) = requests.next(&bytes[used + data..], &mut grants).unwrap();
        assert_eq!(
            end,
            Request::DataEnd {
                corrupt: true,
                whole: false
            }
        );
    }
}

#[test]
fn host_termination_request_is_parsed() {
    let mut requests = Requests::new(&limits(true, true, 0), IN_CAPSULE);
    let bytes = Violation::Last.h2c_term_req();
    let (used, request) = requests.next(&bytes, &mut Grants::<()>::new(1)).unwrap();
    let why = Terminated { fes: 2, fei: 0 };
    assert_eq!((used, request), (24, Request::Terminated(why)));
    assert_eq!(why.to_string(), "PDU Sequence Error (information 0x0)");
}
