//! Server-sent events, as they are read.

use crate::events::Received;
use serde::Deserialize;

/// Parser of an event stream, with the incomplete line and event.
#[derive(Debug, Default)]
pub(super) struct Lines {
    line: Vec<u8>,
    data: String,
    lost: bool,
}

#[derive(Deserialize)]
struct Lost {
    lost: u64,
}

impl Lines {
    /// Parses bytes, and returns the events that they complete.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<Result<Received, serde_json::Error>> {
        let mut all = Vec::new();
        for byte in bytes {
            if *byte != b'\n' {
                self.line.push(*byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            all.extend(self.end_of_line(&String::from_utf8_lossy(&line)));
        }
        all
    }

    fn end_of_line(&mut self, line: &str) -> Option<Result<Received, serde_json::Error>> {
        if let Some(name) = line.strip_prefix("event: ") {
            self.lost = name == "lost";
        } else if let Some(data) = line.strip_prefix("data: ") {
            self.data = data.to_owned();
        } else if line.is_empty() && !self.data.is_empty() {
            let data = std::mem::take(&mut self.data);
            return Some(if std::mem::take(&mut self.lost) {
                serde_json::from_str(&data).map(|Lost { lost }| Received::Lost(lost))
            } else {
                serde_json::from_str(&data).map(Received::Event)
            });
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_in_pieces_are_parsed() {
        let text = b": \n\nid: 1\nevent: attached\ndata: {\"sequence\":1,\"time_ms\":2,\
                     \"kind\":\"attached\",\"disk\":\"a\"}\n\nevent: lost\ndata: {\"lost\":7}\n\n";
        for size in 1..text.len() {
            let mut lines = Lines::default();
            let pieces = text.chunks(size).flat_map(|piece| lines.push(piece));
            let all: Vec<Received> = pieces.map(Result::unwrap).collect();
            assert!(matches!(&all[0], Received::Event(event) if event.disk == "a"));
            assert_eq!(all[1..], [Received::Lost(7)]);
        }
        let broken = Lines::default().push(b"data: {\"what\":1}\n\n");
        assert!(broken[0].is_err());
    }
}
