//! Hostile sides of an NVMe/TCP connection. For any answers of a controller, no data lies outside
//! the requested range, arrives twice or out of order, no transfer exceeds the write, and no
//! command succeeds before all of its data has been moved. For any PDUs of a host, its capsules
//! respect the negotiated length, and its data is the requested data, in order, once.

use nvme_tcp::{
    Answer, Answers, CommandInfo, ConnectionLimits, Controller, Grants, Host, InFlight, Request,
    Requests,
};

/// Bytes that a command may be answered with, whether they all have to come, and bytes that it
/// sends.
const COMMANDS: [(u32, bool, u32); 4] =
    [(64, true, 0), (512, false, 0), (0, true, 96), (0, true, 0)];
/// Requests to transfer: the command, where its data begins, and how much it is.
const GRANTS: [(u16, u32, u32); 3] = [(1, 0, 96), (2, 512, 64), (3, u32::MAX - 16, 16)];
/// Bytes of data that a capsule may have.
const IN_CAPSULE: u32 = 128;

/// Runs a script. The first byte of the input chooses the side, its digests, and the size of the
/// pieces in which the remaining bytes arrive.
pub fn nvme_tcp(input: &[u8]) {
    let Some((&first, input)) = input.split_first() else {
        return;
    };
    let limits = ConnectionLimits {
        header_digest: first & 1 != 0,
        data_digest: first & 2 != 0,
        alignment: 0,
        h2c_data: 4096,
        r2t: 1,
    };
    let piece = usize::from(first >> 4) * 8 + 1;
    match first >> 2 & 3 {
        0 | 1 => answers(&limits, piece, input),
        2 => requests(&limits, piece, input),
        _ => initialize(first & 3, input),
    }
}

fn initialize(wanted: u8, input: &[u8]) {
    let Some(pdu) = input.first_chunk::<128>() else {
        return;
    };
    let host = Host {
        header_digest: wanted & 1 != 0,
        data_digest: wanted & 2 != 0,
    };
    if let Ok(limits) = host.agree(pdu) {
        assert_eq!(
            (limits.header_digest, limits.data_digest),
            (host.header_digest, host.data_digest)
        );
        assert!(limits.h2c_data >= 4096 && limits.h2c_data % 4 == 0 && limits.alignment < 32);
    }
    let controller = Controller { h2c_data: 1 << 17 };
    if let Ok((limits, response)) = controller.agree(pdu) {
        assert!(limits.r2t > 0 && limits.alignment < 32);
        let host = Host {
            header_digest: limits.header_digest,
            data_digest: limits.data_digest,
        };
        assert_eq!(host.agree(&response).unwrap().h2c_data, 1 << 17);
    }
}

fn answers(limits: &ConnectionLimits, piece: usize, input: &[u8]) {
    let mut commands = InFlight::new(COMMANDS.len() as u16);
    for (number, (data_in, whole, data_out)) in (0u16..).zip(COMMANDS) {
        let info = CommandInfo {
            data_in,
            whole,
            data_out,
        };
        // The place and the sequence 1: inputs can name it.
        assert_eq!(commands.insert(info, (0, 0)).unwrap(), 8 | number);
    }
    let mut answers = Answers::new(limits);
    let (mut have, mut used_up, mut ends) = (0, 0, 0);
    while have < input.len() {
        have = (have + piece).min(input.len());
        loop {
            // A part of the expected data is received in place.
            if let Some(expected) = answers.expects()
                && expected.left > 8
                && have - used_up >= 4
            {
                let entry = commands.get(expected.cid).unwrap();
                assert_eq!(entry.item.0, expected.at);
                assert!(
                    u64::from(expected.at) + u64::from(expected.left)
                        <= u64::from(entry.info.data_in)
                );
                entry.item.0 += 4;
                answers.took(4);
                used_up += 4;
                continue;
            }
            let Ok((used, answer)) = answers.next(&input[used_up..have], &mut commands) else {
                return;
            };
            used_up += used;
            assert!(used_up <= have);
            match answer {
                Answer::More if used == 0 => break,
                Answer::More => {}
                Answer::Data { cid, at, bytes } => {
                    let entry = commands.get(cid).unwrap();
                    assert!(!bytes.is_empty() && bytes.len() == used);
                    assert_eq!(entry.item.0, at);
                    entry.item.0 += bytes.len() as u32;
                    assert!(entry.item.0 <= entry.info.data_in);
                }
                Answer::Transfer { cid, at, len, .. } => {
                    let entry = commands.get(cid).unwrap();
                    assert!(len > 0 && entry.item.1 == at);
                    entry.item.1 += len;
                    assert!(entry.item.1 <= entry.info.data_out);
                }
                Answer::End {
                    cid, completion, ..
                } => {
                    let entry = commands.remove(cid).unwrap();
                    assert_eq!(completion.cid.get(), cid);
                    if completion.status().is_success() {
                        assert!(!entry.info.whole || entry.item.0 == entry.info.data_in);
                        assert_eq!(entry.item.1, entry.info.data_out);
                    }
                    ends += 1;
                }
                Answer::Terminated(_) => return,
            }
        }
        // Whatever is left is a header, or a digest.
        assert!(have - used_up < 32);
    }
    assert!(ends <= COMMANDS.len());
}

fn requests(limits: &ConnectionLimits, piece: usize, input: &[u8]) {
    let mut grants = Grants::new(GRANTS.len() as u16);
    for (number, (cid, from, len)) in (0u16..).zip(GRANTS) {
        assert_eq!(
            grants.insert(cid, from, len, (from, len)).unwrap(),
            4 | number
        );
    }
    let mut requests = Requests::new(limits, IN_CAPSULE);
    // Remaining length of the present data PDU, and its tag.
    let (mut left, mut tag) = (0, None);
    let (mut have, mut used_up) = (0, 0);
    while have < input.len() {
        have = (have + piece).min(input.len());
        loop {
            let expected = requests.expects();
            assert!(expected == 0 || expected == left);
            if expected > 8 && have - used_up >= 4 {
                left -= 4;
                requests.took(4);
                used_up += 4;
                continue;
            }
            let Ok((used, request)) = requests.next(&input[used_up..have], &mut grants) else {
                return;
            };
            used_up += used;
            assert!(used_up <= have);
            match request {
                Request::More if used == 0 => break,
                Request::More => {}
                Request::Command { data, .. } => {
                    assert!(data <= IN_CAPSULE && left == 0);
                    (left, tag) = (data, None);
                }
                Request::Transfer { tag: of, at, len } => {
                    let (next, rest) = &mut grants.get(of).unwrap().item;
                    assert!(len > 0 && *next == at && len <= *rest && left == 0);
                    *next += len;
                    *rest -= len;
                    (left, tag) = (len, Some(of));
                }
                Request::Data(bytes) => {
                    assert!(!bytes.is_empty() && bytes.len() == used && used <= left as usize);
                    left -= bytes.len() as u32;
                }
                Request::DataEnd { whole, .. } => {
                    assert_eq!(left, 0);
                    if whole {
                        assert_eq!(grants.remove(tag.unwrap()).unwrap().item.1, 0);
                    }
                }
                Request::Terminated(_) => return,
            }
        }
        assert!(have - used_up < 80);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn mutated_streams_cause_no_panic() {
        crate::chance::run_mutated("nvme_tcp", super::nvme_tcp);
    }
}
