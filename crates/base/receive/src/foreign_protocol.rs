//! Clients at the wrong socket, recognised by their first bytes. The log, and where their protocol
//! allows also the client, can then report the mistake.

use std::fmt;

/// Protocol of a client that uses the wrong socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignProtocol {
    /// vfio-user, the protocol of QEMU's device `vfio-user-pci`.
    VfioUser,
    /// vhost-user, the protocol of QEMU's device `vhost-user-blk-pci`.
    VhostUser,
    /// Text, most likely HTTP for a control socket.
    Text,
}

/// Number of first bytes of a client from which its protocol is recognised.
const DECISION_LEN: usize = 12;

impl ForeignProtocol {
    /// Returns the protocol of these first bytes; `None` if they match none, or are too few.
    ///
    /// The first message in vfio-user is `VFIO_USER_VERSION`: its number, the command 1, its size,
    /// and no flags ("vfio-user Protocol Specification", Header). In vhost-user it is a request of
    /// a small number, with the version 1 in its flags and a small size ("Vhost-user Protocol",
    /// Message Specification).
    pub fn of(first: &[u8]) -> Option<Self> {
        let head: &[u8; DECISION_LEN] = first.first_chunk()?;
        if head
            .iter()
            .all(|byte| matches!(byte, b'\r' | b'\n' | b' '..=b'~'))
        {
            return Some(Self::Text);
        }
        let [id0, id1, command0, command1, rest @ ..] = *head;
        let [a0, a1, a2, a3, b0, b1, b2, b3] = rest;
        let (second, third) = (
            u32::from_ne_bytes([a0, a1, a2, a3]),
            u32::from_ne_bytes([b0, b1, b2, b3]),
        );
        let request = u32::from_ne_bytes([id0, id1, command0, command1]);
        if (1..=64).contains(&request) && second & 0x3 == 1 && second < 16 && third <= 4096 {
            return Some(Self::VhostUser);
        }
        let command = u16::from_ne_bytes([command0, command1]);
        (command == 1 && (20..=65536).contains(&second) && third == 0).then_some(Self::VfioUser)
    }

    /// Returns an error reply in the client's own protocol, to be sent before the socket is closed.
    pub fn answer(self, first: &[u8]) -> Vec<u8> {
        match (self, first) {
            // A reply (type 1) with an error (bit 5): EPROTONOSUPPORT.
            (Self::VfioUser, [id0, id1, command0, command1, ..]) => {
                let mut reply = vec![*id0, *id1, *command0, *command1];
                reply.extend(16u32.to_ne_bytes());
                reply.extend(0x21u32.to_ne_bytes());
                reply.extend(93u32.to_ne_bytes());
                reply
            }
            (Self::Text, _) => {
                let body = "{\"error\":\"this is the socket of a disk, not a control socket\"}\n";
                format!(
                    "HTTP/1.1 421 Misdirected Request\r\nContent-Type: application/json\r\n\
                     Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
                    body.len()
                )
                .into_bytes()
            }
            _ => Vec::new(),
        }
    }
}

impl fmt::Display for ForeignProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::VfioUser => {
                "it speaks vfio-user: this is the socket of a vhost-user-blk disk, which QEMU \
                 attaches as vhost-user-blk-pci"
            }
            Self::VhostUser => {
                "it speaks vhost-user: this is the socket of an NVMe controller, which QEMU \
                 attaches as vfio-user-pci"
            }
            Self::Text => {
                "it takes this socket of a disk for a control socket, which vnvme commands and \
                 HTTP clients want"
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes of three words of 32 bits, as a message of the protocol holds them.
    fn words(words: [u32; 3]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn stranger_protocol_is_detected_by_first_bytes() {
        let version = [7u16.to_ne_bytes(), 1u16.to_ne_bytes()].concat();
        let version = [version, 180u32.to_ne_bytes().into(), vec![0; 4]].concat();
        for (first, wanted) in [
            (version.clone(), Some(ForeignProtocol::VfioUser)),
            (words([1, 1, 0]), Some(ForeignProtocol::VhostUser)),
            (words([16, 9, 8]), Some(ForeignProtocol::VhostUser)),
            (
                b"GET /v1/stats HTTP/1.1\r\n".to_vec(),
                Some(ForeignProtocol::Text),
            ),
            (
                b"{\"method\":\"stats\"}\n".to_vec(),
                Some(ForeignProtocol::Text),
            ),
            (version[..11].to_vec(), None),
            (words([0, 1, 0]), None),
            (words([1, 2, 0]), None),
            (words([1 << 16, 16, 0]), None),
            (vec![0xff; 64], None),
            (Vec::new(), None),
        ] {
            assert_eq!(ForeignProtocol::of(&first), wanted, "{first:?}");
        }
    }

    #[test]
    fn stranger_gets_answer_of_its_protocol() {
        let reply = ForeignProtocol::VfioUser.answer(&[3, 0, 1, 0, 9, 9]);
        assert_eq!(reply.len(), 16);
        assert_eq!(&reply[..5], [3, 0, 1, 0, 16]);
        let text = String::from_utf8(ForeignProtocol::Text.answer(b"GET /")).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("Content-Length: {}\r\n", body.len())),
            "{head}"
        );
        assert!(ForeignProtocol::VhostUser.answer(b"").is_empty());
        assert!(ForeignProtocol::VfioUser.answer(b"").is_empty());
    }
}
