//! One connection: capsules in, capsules and data out.

use super::*;

/// One side of a connection.
pub(super) struct Peer {
    pub(super) stream: Pieces<TcpStream>,
    pub(super) writer: Writer,
    pub(super) requests: Requests,
    pub(super) grants: Grants<()>,
    pub(super) bytes: Vec<u8>,
    /// Commands that arrived while data was asked for.
    pub(super) early: VecDeque<Got>,
}

/// A command with the data of its capsule.
pub(super) struct Got {
    pub(super) command: Command,
    pub(super) data: Vec<u8>,
    pub(super) corrupt: bool,
}

impl Peer {
    pub(super) fn new(
        mut stream: Pieces<TcpStream>,
        h2c_data: u32,
        in_capsule: u32,
    ) -> io::Result<Self> {
        let mut request = [0; INITIALIZE];
        stream.read_exact(&mut request)?;
        let controller = Controller { h2c_data };
        let agreed = controller.agree(&request);
        let (limits, response) = agreed.map_err(|error| io::Error::other(error.to_string()))?;
        stream.write_all(&response)?;
        Ok(Self {
            stream,
            writer: Writer::new(limits),
            // Its Connect has data on every queue.
            requests: Requests::new(&limits, in_capsule.max(8192)),
            grants: Grants::new(64),
            bytes: Vec::new(),
            early: VecDeque::new(),
        })
    }

    /// The next command, or the data of one that was asked for.
    pub(super) fn next(&mut self, of: Option<u16>) -> io::Result<Got> {
        if of.is_none()
            && let Some(early) = self.early.pop_front()
        {
            return Ok(early);
        }
        let mut got: Option<Got> = None;
        let mut data = Vec::new();
        let mut inside = Vec::new();
        let mut corrupt_sum = false;
        loop {
            let (used, request) = match self.requests.next(&self.bytes, &mut self.grants) {
                Ok(next) => next,
                Err(violation) => {
                    eprintln!("target: {violation}");
                    let _ = self.stream.write_all(&violation.c2h_term_req());
                    return Err(io::Error::other(violation.to_string()));
                }
            };
            let mut done = None;
            let mut more = false;
            match request {
                Request::More => more = used == 0,
                Request::Command { command, data: len } => {
                    let command = Got {
                        command,
                        data: Vec::new(),
                        corrupt: false,
                    };
                    match len {
                        0 => done = Some(command),
                        _ => got = Some(command),
                    }
                }
                Request::Transfer { .. } => {}
                Request::Data(bytes) if got.is_some() => inside.extend_from_slice(bytes),
                Request::Data(bytes) => data.extend_from_slice(bytes),
                Request::DataEnd { corrupt, whole } => {
                    corrupt_sum |= corrupt && got.is_none();
                    if let Some(mut got) = got.take() {
                        got.data = std::mem::take(&mut inside);
                        got.corrupt = corrupt;
                        done = Some(got);
                    } else if whole {
                        self.grants.remove(of.unwrap());
                        done = Some(Got {
                            command: Command::default(),
                            data: std::mem::take(&mut data),
                            corrupt: corrupt_sum,
                        });
                    }
                }
                Request::Terminated(why) => return Err(io::Error::other(why.to_string())),
            }
            self.bytes.drain(..used);
            match done {
                Some(early) if of.is_some() && early.command != Command::default() => {
                    self.early.push_back(early);
                }
                Some(done) => return Ok(done),
                None => {}
            }
            if more {
                let mut buffer = [0; 65536];
                match self.stream.read(&mut buffer)? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    len => self.bytes.extend_from_slice(&buffer[..len]),
                }
            }
        }
    }

    /// Discards what arrives until the host closes the connection, as it does after a violation.
    /// Commands that were executed here would count, and each `n`th answer could be the first one
    /// of each connection, so that the same commands are lost every time.
    pub(super) fn ignore(&mut self) -> io::Result<()> {
        while self.stream.read(&mut [0; 4096])? > 0 {}
        Ok(())
    }

    pub(super) fn complete(&mut self, cid: u16, status: Status, result: u64) -> io::Result<()> {
        let header = self.writer.completion(&completion(cid, status, result));
        self.stream.write_all(&header)
    }

    /// Data, in pieces, and the end of its command.
    pub(super) fn send_data(&mut self, cid: u16, bytes: &[u8], success: bool) -> io::Result<()> {
        let pieces = bytes.chunks(16 << 10);
        let (count, mut at) = (pieces.len(), 0);
        for (number, piece) in pieces.enumerate() {
            let last = number + 1 == count;
            self.send_piece(cid, at, piece, last, last && success)?;
            at += piece.len() as u32;
        }
        if success && count > 0 {
            Ok(())
        } else {
            self.complete(cid, Status::SUCCESS, 0)
        }
    }

    pub(super) fn send_piece(
        &mut self,
        cid: u16,
        at: u32,
        piece: &[u8],
        last: bool,
        success: bool,
    ) -> io::Result<()> {
        let header = self
            .writer
            .c2h_data(cid, at, piece.len() as u32, last, success);
        let mut pdu = [&*header, piece].concat();
        if self.writer.data_digest() {
            pdu.extend(digest::crc32c(piece).to_le_bytes());
        }
        self.stream.write_all(&pdu)
    }

    /// The data of a command that is not in its capsule.
    pub(super) fn ask(&mut self, cid: u16, len: u32, most: u32) -> io::Result<Got> {
        let mut all = Got {
            command: Command::default(),
            data: Vec::new(),
            corrupt: false,
        };
        while (all.data.len() as u32) < len {
            let at = all.data.len() as u32;
            let piece = (len - at).min(most);
            let tag = self.grants.insert(cid, at, piece, ()).unwrap();
            let r2t = self.writer.r2t(cid, tag, at, piece);
            self.stream.write_all(&r2t)?;
            let got = self.next(Some(tag))?;
            all.data.extend(got.data);
            all.corrupt |= got.corrupt;
        }
        Ok(all)
    }
}
