//! A hostile NBD server: for any handshake and replies, no data lies outside the requested range,
//! every byte is parsed once, and a completed read has each of its bytes exactly once.

use nbd::protocol::{Event, InFlight, Replies, RequestInfo, negotiate};
use std::io::{self, Cursor, Read, Write};

/// First bytes and lengths of the requests that are in flight, and whether they read.
const REQUESTS: [(bool, u64, u32); 4] = [
    (true, 0, 16),
    (true, 4096, 512),
    (false, 1 << 40, 4096),
    (true, u64::MAX - 4095, 64),
];

/// The first byte of the input chooses: a handshake, or replies (simple or structured ones), which
/// come in pieces of that many bytes.
pub fn nbd(input: &[u8]) {
    let Some((&first, input)) = input.split_first() else {
        return;
    };
    match first & 3 {
        0 => handshake(input),
        kind => replies(kind != 1, usize::from(first >> 2) + 1, input),
    }
}

struct Says<'a>(Cursor<&'a [u8]>);

impl Read for Says<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Says<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn handshake(input: &[u8]) {
    let Ok(export) = negotiate(&mut Says(Cursor::new(input)), "name") else {
        return;
    };
    assert!(i64::try_from(export.size).is_ok());
    assert!(export.minimum.is_power_of_two() && export.minimum <= 64 << 10);
    assert!(export.preferred.is_power_of_two() && export.preferred >= export.minimum);
    assert!(export.maximum >= export.minimum && export.maximum <= 32 << 20);
    assert_eq!(export.maximum % export.minimum, 0);
}

fn replies(structured: bool, piece: usize, input: &[u8]) {
    let mut requests = InFlight::new(REQUESTS.len() as u32);
    for (number, (read, offset, len)) in REQUESTS.into_iter().enumerate() {
        let info = RequestInfo { read, offset, len };
        // The place and the sequence 1: inputs can name it.
        let cookie = requests.insert(info, vec![false; len as usize]).unwrap();
        assert_eq!(cookie, 1 << 32 | number as u64);
    }
    let mut replies = Replies::new(structured);
    let (mut have, mut used_up, mut ends) = (0, 0, 0);
    while have < input.len() {
        have = (have + piece).min(input.len());
        loop {
            // A part of the expected data is received in place.
            if let Some(expected) = replies.expects()
                && expected.left > 8
                && have - used_up >= 4
            {
                let entry = requests.get(expected.cookie).unwrap();
                assert!(
                    u64::from(expected.at) + u64::from(expected.left) <= u64::from(entry.info.len)
                );
                let at = expected.at as usize;
                entry.item[at..at + 4].fill(true);
                replies.took(4);
                used_up += 4;
                continue;
            }
            let Ok((used, event)) = replies.next(&input[used_up..have], &mut requests) else {
                return;
            };
            match event {
                Event::More if used == 0 => break,
                Event::More => {}
                Event::Data { cookie, at, bytes } => {
                    assert!(!bytes.is_empty() && bytes.len() == used);
                    take(&mut requests, cookie, at, bytes.len() as u32);
                }
                Event::Hole { cookie, at, len } => take(&mut requests, cookie, at, len),
                Event::End { cookie, error } => {
                    let entry = requests.remove(cookie).unwrap();
                    if error.is_none() && entry.info.read {
                        assert!(entry.item.iter().all(|come| *come), "bytes missing");
                    }
                    assert_ne!(error, Some(0));
                    ends += 1;
                }
            }
            used_up += used;
            assert!(used_up <= have);
        }
        // Whatever is left is the head of a reply.
        assert!(have - used_up < 32);
    }
    assert!(ends <= REQUESTS.len());
}

/// Data of a request, which asked for it, and to which these bytes have not come before.
fn take(requests: &mut InFlight<Vec<bool>>, cookie: u64, at: u32, len: u32) {
    let entry = requests.get(cookie).unwrap();
    assert!(entry.info.read);
    let come = &mut entry.item[at as usize..][..len as usize];
    assert!(!come.contains(&true), "bytes come twice");
    come.fill(true);
}

#[cfg(test)]
mod tests {
    #[test]
    fn mutated_streams_cause_no_panic() {
        crate::chance::run_mutated("nbd", super::nbd);
    }
}
