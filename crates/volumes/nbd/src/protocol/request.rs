//! Encoding of NBD requests.

use super::wire::{REQUEST, command};

/// Command that is sent to an NBD server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// NBD_CMD_READ.
    Read,
    /// NBD_CMD_WRITE; the data follows the header.
    Write {
        /// Whether the data has to be durable before the reply (FUA).
        fua: bool,
    },
    /// NBD_CMD_FLUSH.
    Flush,
    /// NBD_CMD_TRIM.
    Trim,
    /// NBD_CMD_WRITE_ZEROES.
    WriteZeroes {
        /// Whether the zeroes have to be durable before the reply (FUA).
        fua: bool,
        /// Whether the server may deallocate the space.
        hole: bool,
    },
    /// NBD_CMD_DISC, which ends the connection; servers do not answer it.
    Disconnect,
}

impl Command {
    fn numbers(self) -> (u16, u16) {
        let fua = |fua: bool| if fua { command::FUA } else { 0 };
        match self {
            Self::Read => (0, command::READ),
            Self::Write { fua: durable } => (fua(durable), command::WRITE),
            Self::Flush => (0, command::FLUSH),
            Self::Trim => (0, command::TRIM),
            Self::WriteZeroes { fua: durable, hole } => {
                let no_hole = if hole { 0 } else { command::NO_HOLE };
                (fua(durable) | no_hole, command::WRITE_ZEROES)
            }
            Self::Disconnect => (0, command::DISCONNECT),
        }
    }

    /// Returns the 28-byte header of the command with this cookie and range.
    pub fn header(self, cookie: u64, offset: u64, len: u32) -> [u8; 28] {
        let (flags, kind) = self.numbers();
        let fields = [
            &REQUEST.to_be_bytes()[..],
            &flags.to_be_bytes(),
            &kind.to_be_bytes(),
            &cookie.to_be_bytes(),
            &offset.to_be_bytes(),
            &len.to_be_bytes(),
        ];
        let mut header = [0; 28];
        for (to, from) in header.iter_mut().zip(fields.into_iter().flatten()) {
            *to = *from;
        }
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_fields_follow_protocol() {
        let command = Command::WriteZeroes {
            fua: true,
            hole: false,
        };
        let header = command.header(0x0102_0304_0506_0708, 0x1122_3344_5566_7788, 0x9900_aabb);
        let expected = [
            0x25, 0x60, 0x95, 0x13, 0, 3, 0, 6, 1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x22, 0x33, 0x44,
            0x55, 0x66, 0x77, 0x88, 0x99, 0, 0xaa, 0xbb,
        ];
        assert_eq!(header, expected);
        assert_eq!(
            Command::Write { fua: true }.header(0, 0, 0)[4..8],
            [0, 1, 0, 1]
        );
        assert_eq!(Command::Trim.header(0, 0, 0)[4..8], [0, 0, 0, 4]);
        assert_eq!(Command::Disconnect.header(0, 0, 0)[4..8], [0, 0, 0, 2]);
    }
}
