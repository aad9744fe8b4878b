//! Start of a connection: the initialization request (ICReq), and the Connect command, which names
//! the queue.
//!
//! Bytes beyond these are not read, so that later bytes belong to the queue. Time and size are
//! limited.

use crate::link::ConnectionEnd;
use nvme::Status;
use nvme::fabrics::{self, Connect, ConnectData, Fctype, InvalidParameter, status};
use nvme::{Command, Completion};
use nvme_tcp::pdu::{CommonHeader, DIGEST, INITIALIZE, MAX_DATA_OFFSET};
use nvme_tcp::{ADMIN_IN_CAPSULE, ConnectionLimits, Controller, Grants, Request, Requests, Writer};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Instant;
use zerocopy::FromBytes;

/// Maximum number of data bytes in one H2CData PDU of a host.
const H2C_DATA: u32 = 1 << 20;
/// Size in bytes of the common header of PDUs.
const COMMON: usize = size_of::<CommonHeader>();
/// Maximum size in bytes of the capsule with the Connect command.
const MAX_CAPSULE_LEN: usize = MAX_DATA_OFFSET + fabrics::CONNECT_DATA_LEN as usize + DIGEST;

/// New connection on which no Connect command has arrived yet.
#[derive(Debug)]
pub(crate) struct PendingConnection {
    fd: OwnedFd,
    pub(crate) address: Option<IpAddr>,
    pub(crate) began: Instant,
    bytes: Vec<u8>,
    limits: Option<ConnectionLimits>,
}

/// Connection on which a Connect command has arrived and was not answered yet.
#[derive(Debug)]
pub(crate) struct Connected {
    pub fd: OwnedFd,
    pub address: Option<IpAddr>,
    pub limits: ConnectionLimits,
    pub cid: u16,
    pub connect: Connect,
    pub data: ConnectData,
    pub hostnqn: String,
    pub subnqn: String,
}

/// State of a new connection after its bytes were read.
#[derive(Debug)]
pub(crate) enum Progress {
    /// The Connect command has not arrived completely.
    Waits(PendingConnection),
    /// The Connect command has arrived completely.
    Connected(Box<Connected>),
}

impl PendingConnection {
    pub(crate) fn new(fd: OwnedFd, now: Instant) -> Self {
        let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
        let _ = rustix::net::sockopt::set_socket_keepalive(&fd, true);
        let peer = rustix::net::getpeername(&fd).ok().flatten();
        let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
        Self {
            fd,
            address: peer.map(|peer| peer.ip().to_canonical()),
            began: now,
            bytes: Vec::new(),
            limits: None,
        }
    }

    pub(crate) const fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Reads the available bytes of a new connection, and handles complete PDUs.
    pub(crate) fn read(mut self) -> Result<Progress, ConnectionEnd> {
        loop {
            let wanted = self.wanted()?;
            if self.bytes.len() >= wanted {
                if self.limits.is_some() {
                    return self.connect();
                }
                self.initialize()?;
                continue;
            }
            let had = self.bytes.len();
            self.bytes.resize(wanted, 0);
            let room = self.bytes.get_mut(had..).unwrap_or_default();
            let got = recv(&self.fd, room, RecvFlags::empty());
            let len = got.map_or(0, |(_, len)| len);
            self.bytes.truncate(had + len);
            match got {
                Ok((_, 0)) => return Err(ConnectionEnd::Closed),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Progress::Waits(self)),
                Err(errno) => return Err(ConnectionEnd::Io(errno.into())),
            }
        }
    }

    /// Returns the number of bytes that the next PDU needs.
    fn wanted(&self) -> Result<usize, ConnectionEnd> {
        if self.limits.is_none() {
            return Ok(INITIALIZE);
        }
        let Ok((header, _)) = CommonHeader::read_from_prefix(&self.bytes) else {
            return Ok(COMMON);
        };
        match usize::try_from(header.plen.get()) {
            Ok(len @ COMMON..=MAX_CAPSULE_LEN) => Ok(len),
            _ => Err(ConnectionEnd::Refused(
                "a host's first command is not a Connect",
            )),
        }
    }

    fn initialize(&mut self) -> Result<(), ConnectionEnd> {
        let Some(request) = self.bytes.first_chunk::<INITIALIZE>() else {
            return Ok(());
        };
        let controller = Controller { h2c_data: H2C_DATA };
        match controller.agree(request) {
            Ok((limits, response)) => {
                write(&self.fd, &response)?;
                self.limits = Some(limits);
                self.bytes.clear();
                Ok(())
            }
            Err(violation) => {
                let _ = write(&self.fd, &violation.c2h_term_req());
                Err(violation.into())
            }
        }
    }

    fn connect(self) -> Result<Progress, ConnectionEnd> {
        let Some(limits) = self.limits else {
            return Err(ConnectionEnd::Refused("no limits"));
        };
        let mut requests = Requests::new(&limits, ADMIN_IN_CAPSULE);
        let mut grants = Grants::<()>::new(1);
        let mut rest = self.bytes.as_slice();
        let (mut command, mut data) = (None, Vec::new());
        while !rest.is_empty() {
            let (used, request) = match requests.next(rest, &mut grants) {
                Ok(next) => next,
                Err(violation) => {
                    let _ = write(&self.fd, &violation.c2h_term_req());
                    return Err(violation.into());
                }
            };
            rest = rest.get(used..).unwrap_or_default();
            match request {
                Request::Command { command: this, .. } => command = Some(this),
                Request::Data(bytes) => data.extend_from_slice(bytes),
                Request::DataEnd { corrupt: true, .. } => {
                    return Err(ConnectionEnd::Refused("Connect with a wrong data digest"));
                }
                Request::Terminated(why) => return Err(ConnectionEnd::Terminated(why)),
                Request::More if used == 0 => break,
                _ => {}
            }
        }
        let refused = ConnectionEnd::Refused("a host's first command is not a Connect");
        let command: Command = command.ok_or(refused)?;
        let cid = command.cid.get();
        let refuse = |why: Status, dw0: u32| {
            let _ = write(
                &self.fd,
                &Writer::new(limits).completion(&completion(cid, why, dw0)),
            );
        };
        if fabrics::fctype(&command) != Some(Fctype::CONNECT) {
            refuse(Status::COMMAND_SEQUENCE_ERROR.with_dnr(true), 0);
            return Err(ConnectionEnd::Refused(
                "a host's first command is not a Connect",
            ));
        }
        let data = ConnectData::read_from_bytes(&data);
        let connect = Connect::from_command(&command);
        let names = data.ok().and_then(|data| {
            let subnqn = data.subnqn.as_str()?.to_owned();
            let hostnqn = data.hostnqn.as_str()?.to_owned();
            Some((data, subnqn, hostnqn))
        });
        let Some((data, subnqn, hostnqn)) = names else {
            refuse(
                status::CONNECT_INVALID_PARAMETERS.with_dnr(true),
                invalid(512, true),
            );
            return Err(ConnectionEnd::Refused("a Connect without names"));
        };
        if connect.recfmt != 0 {
            refuse(status::CONNECT_INCOMPATIBLE_FORMAT.with_dnr(true), 0);
            return Err(ConnectionEnd::Refused("a Connect of another format"));
        }
        Ok(Progress::Connected(Box::new(Connected {
            fd: self.fd,
            address: self.address,
            limits,
            cid,
            connect,
            data,
            hostnqn,
            subnqn,
        })))
    }
}

impl Connected {
    /// Answers the Connect command with an error. Do Not Retry is clear only if the controller is
    /// busy.
    pub(crate) fn refuse(&self, why: Status, dw0: u32) {
        let is_final = why != status::CONNECT_CONTROLLER_BUSY;
        let answer = completion(self.cid, why.with_dnr(is_final), dw0);
        let _ = write(&self.fd, &Writer::new(self.limits).completion(&answer));
    }
}

/// Returns dword 0 of a failed Connect's completion: offset `at` of the invalid parameter, and
/// whether it is in the data.
pub(crate) fn invalid(at: u16, in_data: bool) -> u32 {
    let wrong = InvalidParameter::new().with_ipo(at).with_iattr(in_data);
    wrong.into_bits()
}

/// Returns a completion without a submission queue head, as used without flow control.
pub(crate) fn completion(cid: u16, status: Status, dw0: u32) -> Completion {
    Completion {
        dw0: dw0.into(),
        cid: cid.into(),
        status_phase: Completion::pack_status(status, false),
        ..Completion::default()
    }
}

/// Writes a few bytes to a new connection, which always has room for them.
fn write(fd: &OwnedFd, bytes: &[u8]) -> Result<(), ConnectionEnd> {
    match send(fd, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        Ok(len) if len == bytes.len() => Ok(()),
        Ok(_) => Err(ConnectionEnd::Refused("a host that reads nothing")),
        Err(errno) => Err(ConnectionEnd::Io(errno.into())),
    }
}
