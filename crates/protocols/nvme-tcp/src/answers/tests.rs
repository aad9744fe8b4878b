//! Answers as a controller sends them, in pieces of every size; and each way to break a rule.

use super::*;
use crate::digest::crc32c;
use crate::in_flight::CommandInfo;
use crate::write::Writer;
use nvme::Status;
use proptest::prelude::*;

fn limits(header_digest: bool, data_digest: bool, alignment: u8) -> ConnectionLimits {
    ConnectionLimits {
        header_digest,
        data_digest,
        alignment,
        h2c_data: 8192,
        r2t: 1,
    }
}

fn plain() -> ConnectionLimits {
    limits(false, false, 0)
}

fn reads(len: u32) -> CommandInfo {
    CommandInfo {
        data_in: len,
        whole: true,
        data_out: 0,
    }
}

fn writes(len: u32) -> CommandInfo {
    CommandInfo {
        data_out: len,
        ..CommandInfo::default()
    }
}

fn completion(cid: u16, status: Status) -> Completion {
    Completion {
        cid: cid.into(),
        status_phase: Completion::pack_status(status, false),
        ..Completion::default()
    }
}

/// A PDU with data.
fn with_data(writer: &Writer, header: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut pdu = [header, bytes].concat();
    if writer.data_digest() {
        pdu.extend(crc32c(bytes).to_le_bytes());
    }
    pdu
}

fn pattern(cid: u16, at: u32, len: u32) -> Vec<u8> {
    (at..at + len)
        .map(|i| (i * 3 + u32::from(cid)) as u8)
        .collect()
}

/// A controller's stream for some reads, in the order of `pieces`: (which, length, success).
fn stream(writer: &Writer, cids: &[u16], lens: &[u32], pieces: &[(usize, u32)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut sent = vec![0; cids.len()];
    let mut put = |which: usize, most: u32, bytes: &mut Vec<u8>| {
        let (cid, len, at) = (cids[which], lens[which], sent[which]);
        let piece = most.min(len - at);
        if piece == 0 {
            return;
        }
        sent[which] += piece;
        let last = at + piece == len;
        // Every other command is answered by its data.
        let success = last && which.is_multiple_of(2);
        let header = writer.c2h_data(cid, at, piece, last, success);
        bytes.extend(with_data(writer, &header, &pattern(cid, at, piece)));
        if last && !success {
            bytes.extend(&*writer.completion(&completion(cid, Status::SUCCESS)));
        }
    };
    for &(which, len) in pieces {
        put(which % cids.len(), len, &mut bytes);
    }
    for which in 0..cids.len() {
        put(which, u32::MAX, &mut bytes);
    }
    bytes
}

/// Parses a stream in pieces of so many bytes; a part of the expected data bypasses the parser.
fn run(
    limits: &ConnectionLimits,
    bytes: &[u8],
    piece: usize,
    commands: &mut InFlight<Vec<u8>>,
) -> Result<Vec<u16>, Violation> {
    let mut answers = Answers::new(limits);
    let (mut have, mut used_up) = (0, 0);
    let mut over = Vec::new();
    while have < bytes.len() {
        have = (have + piece).min(bytes.len());
        loop {
            if let Some(expected) = answers.expects()
                && expected.left > 8
                && have - used_up >= 4
            {
                let item = &mut commands.get(expected.cid).unwrap().item;
                assert_eq!(item.len() as u32, expected.at);
                item.extend(&bytes[used_up..used_up + 4]);
                answers.took(4);
                used_up += 4;
                continue;
            }
            let (used, answer) = answers.next(&bytes[used_up..have], commands)?;
            used_up += used;
            match answer {
                Answer::More if used == 0 => break,
                Answer::More => {}
                Answer::Data { cid, at, bytes } => {
                    let item = &mut commands.get(cid).unwrap().item;
                    assert_eq!(item.len() as u32, at);
                    item.extend(bytes);
                }
                Answer::End {
                    cid,
                    completion,
                    corrupt,
                } => {
                    assert!(completion.status().is_success() && !corrupt);
                    over.push(cid);
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(used_up, bytes.len());
    Ok(over)
}

proptest! {
    #[test]
    fn reads_in_pieces_are_assembled(
        lens in proptest::collection::vec(1..300u32, 1..5),
        pieces in proptest::collection::vec((0..5usize, 1..120u32), 0..12),
        piece in 1..200usize,
        digests in any::<(bool, bool)>(),
        alignment in 0..32u8,
    ) {
        let limits = limits(digests.0, digests.1, alignment);
        let writer = Writer::new(limits);
        let mut commands = InFlight::new(8);
        let insert = |len: &_| commands.insert(reads(*len), Vec::new()).unwrap();
        let cids: Vec<u16> = lens.iter().map(insert).collect();
        let bytes = stream(&writer, &cids, &lens, &pieces);
        let mut over = run(&limits, &bytes, piece, &mut commands).unwrap();
        over.sort_unstable();
        let mut all = cids.clone();
        all.sort_unstable();
        prop_assert_eq!(over, all);
        for (cid, len) in cids.iter().zip(&lens) {
            prop_assert_eq!(&commands.remove(*cid).unwrap().item, &pattern(*cid, 0, *len));
        }
    }

    /// A byte that was changed in a header with a digest is never believed.
    #[test]
    fn header_digest_detects_changed_header(at in 0..24usize, with in 1..=255u8) {
        let limits = limits(true, false, 0);
        let mut commands = InFlight::new(1);
        let cid = commands.insert(reads(16), ()).unwrap();
        let aborted = completion(cid, Status::ABORT_REQUESTED);
        let mut bytes = Writer::new(limits).completion(&aborted).to_vec();
        bytes[at] ^= with;
        bytes.resize(256, 0);
        prop_assert!(Answers::new(&limits).next(&bytes, &mut commands).is_err());
    }
}

/// Returns the violation in a stream with one command in flight; panics if there is none.
fn violation(
    info: CommandInfo,
    limits: &ConnectionLimits,
    make: impl Fn(&Writer, u16) -> Vec<u8>,
) -> Violation {
    let mut commands = InFlight::new(4);
    let cid = commands.insert(info, Vec::new()).unwrap();
    let bytes = make(&Writer::new(*limits), cid);
    run(limits, &bytes, bytes.len(), &mut commands).unwrap_err()
}

#[test]
fn unknown_command_ids_are_refused() {
    for other in [0u16, 1, 2, 0xffff] {
        let mut commands = InFlight::<()>::new(4);
        let cid = commands.insert(reads(8), ()).unwrap();
        assert_ne!(cid, other);
        let writer = Writer::new(plain());
        let pdus = [
            writer.completion(&completion(other, Status::SUCCESS)),
            writer.c2h_data(other, 0, 8, true, true),
            writer.r2t(other, 1, 0, 8),
        ];
        for pdu in pdus {
            let mut answers = Answers::new(&plain());
            let bytes = [&*pdu, &[0; 8]].concat();
            let bytes = if pdu[0] == kind::C2H_DATA {
                &bytes
            } else {
                &*pdu
            };
            assert_eq!(
                answers.next(bytes, &mut commands),
                Err(Violation::Cid(other))
            );
        }
    }
}

#[test]
fn second_completion_is_violation() {
    let twice = violation(CommandInfo::default(), &plain(), |writer, cid| {
        let answer = writer.completion(&completion(cid, Status::SUCCESS));
        [&*answer, &*answer].concat()
    });
    assert!(matches!(twice, Violation::Cid(_)), "{twice}");
    let after_data = violation(reads(4), &plain(), |writer, cid| {
        let data = with_data(writer, &writer.c2h_data(cid, 0, 4, true, true), &[1; 4]);
        let answer = writer.completion(&completion(cid, Status::SUCCESS));
        [&*data, &*answer].concat()
    });
    assert!(matches!(after_data, Violation::Cid(_)), "{after_data}");
}

#[test]
fn data_outside_command_or_order_is_violation() {
    for (at, len) in [
        (0, 9),
        (1, 8),
        (4, 4),
        (u32::MAX, 4),
        (8, 4),
        (u32::MAX - 3, 8),
    ] {
        let wrong = violation(reads(8), &plain(), |writer, cid| {
            with_data(
                writer,
                &writer.c2h_data(cid, at, len, false, false),
                &vec![0; len as usize],
            )
        });
        assert!(
            matches!(wrong, Violation::Range { .. }),
            "{at} {len} {wrong}"
        );
    }
    let twice = violation(reads(8), &plain(), |writer, cid| {
        with_data(writer, &writer.c2h_data(cid, 0, 4, false, false), &[0; 4]).repeat(2)
    });
    assert!(matches!(twice, Violation::Range { .. }), "{twice}");
    let not_asked = violation(writes(8), &plain(), |writer, cid| {
        with_data(writer, &writer.c2h_data(cid, 0, 8, true, false), &[0; 8])
    });
    assert!(matches!(not_asked, Violation::Range { .. }), "{not_asked}");
}

#[test]
fn read_success_before_all_data_is_violation() {
    let answered = violation(reads(8), &plain(), |writer, cid| {
        writer
            .completion(&completion(cid, Status::SUCCESS))
            .to_vec()
    });
    assert_eq!(answered, Violation::Incomplete);
    for (len, last) in [(4, true), (8, false)] {
        let early = violation(reads(8), &plain(), |writer, cid| {
            with_data(
                writer,
                &writer.c2h_data(cid, 0, len, last, true),
                &vec![0; len as usize],
            )
        });
        assert_eq!(early, Violation::Last);
    }
    // A command that fails needs no data.
    let mut commands = InFlight::new(1);
    let cid = commands.insert(reads(8), ()).unwrap();
    let failed = completion(cid, Status::UNRECOVERED_READ_ERROR);
    let pdu = Writer::new(plain()).completion(&failed);
    let answer = Answers::new(&plain()).next(&pdu, &mut commands).unwrap().1;
    assert_eq!(
        answer,
        Answer::End {
            cid,
            completion: failed,
            corrupt: false
        }
    );
}

#[test]
fn r2t_beyond_write_is_violation() {
    for (at, len) in [(0, 9), (4, 4), (0, 0), (u32::MAX, 2), (8, 1)] {
        let wrong = violation(writes(8), &plain(), |writer, cid| {
            writer.r2t(cid, 7, at, len).to_vec()
        });
        assert!(
            matches!(wrong, Violation::Range { .. }),
            "{at} {len} {wrong}"
        );
    }
    let read = violation(reads(8), &plain(), |writer, cid| {
        writer.r2t(cid, 7, 0, 8).to_vec()
    });
    assert!(matches!(read, Violation::Range { .. }), "{read}");
    // Two requests for all of it, and no success between them.
    let mut commands = InFlight::new(1);
    let cid = commands.insert(writes(8), ()).unwrap();
    let writer = Writer::new(plain());
    let mut answers = Answers::new(&plain());
    let transfer = |tag, at| Answer::Transfer {
        cid,
        tag,
        at,
        len: 4,
    };
    let first = writer.r2t(cid, 3, 0, 4);
    let said = answers.next(&first, &mut commands).unwrap();
    assert_eq!(said.1, transfer(3, 0));
    let success = writer.completion(&completion(cid, Status::SUCCESS));
    let said = answers.next(&success, &mut commands);
    assert_eq!(said, Err(Violation::Incomplete));
    let second = writer.r2t(cid, 4, 4, 4);
    let said = answers.next(&second, &mut commands).unwrap();
    assert_eq!(said.1, transfer(4, 4));
    let said = answers.next(&success, &mut commands).unwrap();
    assert!(matches!(said.1, Answer::End { .. }));
}

#[test]
fn wrong_pdu_length_or_flags_are_violations() {
    let good = |writer: &Writer, cid| {
        writer
            .completion(&completion(cid, Status::SUCCESS))
            .to_vec()
    };
    let changed = |at: usize, to: u8| {
        violation(CommandInfo::default(), &plain(), |writer, cid| {
            let mut pdu = good(writer, cid);
            pdu[at] = to;
            pdu
        })
    };
    let field = |violation| match violation {
        Violation::Field { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(
        changed(0, kind::CAPSULE_CMD),
        Violation::Kind(kind::CAPSULE_CMD)
    );
    assert_eq!(changed(0, kind::IC_RESP), Violation::Kind(kind::IC_RESP));
    assert_eq!(changed(0, 0xff), Violation::Kind(0xff));
    assert_eq!(field(changed(1, flags::HDGST)), "flag for a header digest");
    assert_eq!(field(changed(2, 25)), "header length");
    assert_eq!(field(changed(4, 23)), "length");
    assert_eq!(field(changed(7, 1)), "length");
    let data = |at: usize, to: u8| {
        violation(reads(8), &plain(), |writer, cid| {
            let header = writer.c2h_data(cid, 0, 8, true, true);
            let mut pdu = with_data(writer, &header, &[0; 8]);
            pdu[at] = to;
            pdu
        })
    };
    assert_eq!(
        field(data(1, flags::DDGST | flags::LAST)),
        "flag for a data digest"
    );
    assert_eq!(field(data(3, 0)), "data offset");
    assert_eq!(field(data(3, 20)), "data offset");
    assert_eq!(field(data(3, 25)), "data offset");
    assert_eq!(field(data(3, 255)), "data offset");
    assert_eq!(field(data(3, 32)), "length");
    assert_eq!(field(data(4, 24)), "length");
    assert_eq!(field(data(16, 7)), "data length");
    assert_eq!(field(data(16, 9)), "data length");
    let without = violation(reads(8), &limits(false, true, 0), |writer, cid| {
        let header = writer.c2h_data(cid, 0, 8, true, true);
        let mut pdu = with_data(writer, &header, &[0; 8]);
        pdu[1] = flags::LAST;
        pdu
    });
    assert_eq!(field(without), "flag for a data digest");
    let no_digest = violation(CommandInfo::default(), &limits(true, false, 0), |_, cid| {
        good(&Writer::new(plain()), cid)
    });
    assert_eq!(field(no_digest), "flag for a header digest");
}

#[test]
fn data_with_wrong_digest_does_not_count() {
    let limits = limits(false, true, 0);
    let writer = Writer::new(limits);
    for (at, success) in [(24, true), (31, false), (32, true), (35, false)] {
        let mut commands = InFlight::new(1);
        let cid = commands.insert(reads(8), ()).unwrap();
        let header = writer.c2h_data(cid, 0, 8, true, success);
        let mut bytes = with_data(&writer, &header, &pattern(0, 0, 8));
        bytes[at] ^= 1;
        if !success {
            bytes.extend(&*writer.completion(&completion(cid, Status::SUCCESS)));
        }
        let mut answers = Answers::new(&limits);
        let (mut rest, mut ended) = (&bytes[..], false);
        while let Ok((used, answer)) = answers.next(rest, &mut commands)
            && (used > 0 || answer != Answer::More)
        {
            rest = &rest[used..];
            if let Answer::End { corrupt, .. } = answer {
                assert!(corrupt);
                ended = true;
            }
        }
        assert!(ended && rest.is_empty());
    }
}

#[test]
fn controller_termination_request_is_parsed() {
    let mut commands = InFlight::<()>::new(1);
    // Digests are not for these.
    let mut answers = Answers::new(&limits(true, true, 0));
    let violation = Violation::Limit(9);
    let mut bytes = violation.c2h_term_req().to_vec();
    bytes[4] = 24 + 72;
    bytes.resize(24 + 72 + 5, 0xee);
    let (used, answer) = answers.next(&bytes, &mut commands).unwrap();
    assert_eq!(
        (used, answer),
        (24, Answer::Terminated(Terminated { fes: 5, fei: 0 }))
    );
    let (used, _) = answers.next(&bytes[24..], &mut commands).unwrap();
    assert_eq!(used, 72);
    assert_eq!(
        answers.next(&[1, 2, 3], &mut commands),
        Ok((3, Answer::More))
    );
    // Longer than it can be.
    bytes[4] = 153;
    let mut answers = Answers::new(&plain());
    assert!(matches!(
        answers.next(&bytes, &mut commands),
        Err(Violation::Field { .. })
    ));
}
