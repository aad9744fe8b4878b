//! Discovery controller: an Admin queue that answers the commands by which hosts find the
//! subsystem. It needs no volume, no memory and no disk's controller.

use crate::handshake::{Connected, completion};
use crate::link::{ConnectionEnd, Link};
use crate::target::Target;
use controller::KeepAlive;
use nvme::cmd::admin::{Cns, GetLogPage, IdentifyCdw10, SetFeaturesCdw10};
use nvme::fabrics::{self, DISCOVERY_NQN, Fctype, Property};
use nvme::feature::Fid;
use nvme::identify::{
    Ascii, ControllerType, Ctratt, IdentifyController, Lpa, Nqn, Oaes, QueueEntrySize, Sgls,
};
use nvme::log::Lid;
use nvme::regs::{self, Cap, CapCss, Cc, Csts, Shst, Vs};
use nvme::{AdminOpcode, Command, Completion, Status};
use nvme_tcp::{ADMIN_IN_CAPSULE, Grants, Request, Requests, digest};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::RingStreams;
use worker::Descriptors;
use zerocopy::{FromZeros, IntoBytes};

/// Maximum number of outstanding Asynchronous Event Requests of a discovery connection.
const EVENTS: usize = 4;
/// Maximum length in bytes of the data of one Get Log Page command.
const MAX_ANSWER_LEN: u32 = 64 << 10;
/// Time limit of a discovery connection without Keep Alive.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(120);

/// Returns the time after which a silent host with this Keep Alive Timeout is disconnected.
fn timeout(milliseconds: u32) -> Duration {
    match milliseconds {
        0 => DISCOVERY_TIMEOUT,
        milliseconds => Duration::from_millis(milliseconds.into()),
    }
}

/// Connection of a host to the discovery controller.
pub(crate) struct Discovery {
    target: Arc<Target>,
    link: Link,
    requests: Requests,
    grants: Grants<()>,
    cc: Cc,
    keep_alive: KeepAlive,
    events: usize,
    local: Option<SocketAddr>,
    /// Whether the host may connect to the subsystem, so that the log page lists it.
    admitted: bool,
    cntlid: u16,
    /// Whether the connection has ended, although the kernel may still execute operations on it.
    ended: bool,
}

impl Discovery {
    pub(crate) fn new(
        target: Arc<Target>,
        connected: &Connected,
        streams: &RingStreams,
        descriptors: &Descriptors,
        token: u32,
        now: Instant,
    ) -> Result<Self, Errno> {
        let fd = rustix::io::fcntl_dupfd_cloexec(&connected.fd, 0)?;
        let local = rustix::net::getsockname(&fd).ok();
        let local = local.and_then(|local| SocketAddr::try_from(local).ok());
        let link = Link::new(streams, descriptors, token, fd, connected.limits)?;
        let mut discovery = Self {
            admitted: target.admits(&connected.hostnqn),
            target,
            link,
            requests: Requests::new(&connected.limits, ADMIN_IN_CAPSULE),
            grants: Grants::new(1),
            cc: Cc::new(),
            keep_alive: KeepAlive::new(timeout(connected.connect.kato), now),
            events: 0,
            local,
            cntlid: 1,
            ended: false,
        };
        let answer = completion(connected.cid, Status::SUCCESS, discovery.cntlid.into());
        discovery.complete(&answer);
        Ok(discovery)
    }

    pub(crate) fn has_news(&self) -> bool {
        self.link.has_news()
    }

    /// Returns the time at which the discovery connection times out.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.keep_alive.deadline()
    }

    /// Handles events of the connection. Returns `false` when it has ended and no operation is
    /// outstanding.
    pub(crate) fn poll(&mut self, now: Instant) -> bool {
        if self.ended {
            let _ = self.link.sent(|_, _| ());
            let _ = self.link.received(drop);
            return !self.link.is_quiet();
        }
        // Commands that arrived while this process did not run are read before checking the
        // time-out.
        let mut result = self.read(now);
        if result.is_ok() && self.keep_alive.has_expired(now) {
            result = Err(ConnectionEnd::Refused("no Keep Alive in time"));
        }
        match result {
            Ok(()) => {
                self.link.send();
            }
            Err(why) => {
                tracing::debug!("a host's discovery ends: {why}");
                let last = match &why {
                    ConnectionEnd::Violation(violation) => Some(violation.c2h_term_req()),
                    _ => None,
                };
                self.link.end(last.as_deref(), |_, _| ());
                self.ended = true;
            }
        }
        true
    }

    fn read(&mut self, now: Instant) -> Result<(), ConnectionEnd> {
        self.link.sent(|_, _| ())?;
        self.link.received(drop)?;
        loop {
            if self.link.is_full() {
                return Ok(());
            }
            let Some(bytes) = self.link.bytes() else {
                return Ok(());
            };
            let (used, request) = self.requests.next(bytes, &mut self.grants)?;
            let command = match request {
                Request::More if used == 0 => {
                    self.link.receive(None);
                    return Ok(());
                }
                // In-capsule data of an unknown command is discarded.
                Request::Command { command, .. } => Some(command),
                Request::Terminated(why) => return Err(ConnectionEnd::Terminated(why)),
                _ => None,
            };
            self.link.consume(used);
            if let Some(command) = command {
                self.command(&command, now);
            }
        }
    }

    fn complete(&mut self, entry: &Completion) {
        let capsule = self.link.writer.completion(entry);
        self.link.header(&capsule);
    }

    fn answer(&mut self, command: &Command, result: Result<u64, Status>) {
        let status = result.err().unwrap_or(Status::SUCCESS);
        let value = result.unwrap_or(0);
        let entry = Completion {
            dw1: ((value >> 32) as u32).into(),
            ..completion(command.cid.get(), status, value as u32)
        };
        self.complete(&entry);
    }

    fn send(&mut self, command: &Command, page: &[u8]) {
        let len = page.len() as u32;
        let cid = command.cid.get();
        if len > 0 {
            let header = self.link.writer.c2h_data(cid, 0, len, true, false);
            self.link.header(&header);
            self.link.staged.bytes(page);
            if self.link.writer.data_digest() {
                self.link.staged.bytes(&digest::crc32c(page).to_le_bytes());
            }
        }
        self.answer(command, Ok(0));
    }

    fn command(&mut self, command: &Command, now: Instant) {
        let invalid = Err(Status::INVALID_FIELD.with_dnr(true));
        match fabrics::fctype(command) {
            Some(Fctype::PROPERTY_GET) => {
                let result = self.property(command);
                return self.answer(command, result);
            }
            Some(Fctype::PROPERTY_SET) => {
                let property = Property::from_command(command);
                let is_cc = u64::from(property.offset) == regs::CC && !property.is_64_bits;
                if is_cc {
                    self.cc = Cc::from_bits(property.value as u32);
                }
                return self.answer(command, if is_cc { Ok(0) } else { invalid });
            }
            Some(_) => return self.answer(command, invalid),
            None => {}
        }
        if !self.cc.en() {
            let wrong = Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr(true));
            return self.answer(command, wrong);
        }
        let room = command.sgl1().length.get();
        match command.admin_opcode() {
            AdminOpcode::IDENTIFY => {
                let cns = IdentifyCdw10::from_bits(command.cdw10.get()).cns();
                let page = (cns == Cns::CONTROLLER && room >= 4096).then(|| self.identify());
                match page {
                    Some(page) => self.send(command, page.as_bytes()),
                    None => self.answer(command, invalid),
                }
            }
            AdminOpcode::GET_LOG_PAGE => {
                let log = GetLogPage::from_command(command);
                let len = log.bytes();
                let fits = len <= u64::from(room.min(MAX_ANSWER_LEN)) && !log.ot;
                if log.lid != Lid::DISCOVERY {
                    let wrong = Err(Status::INVALID_LOG_PAGE.with_dnr(true));
                    return self.answer(command, wrong);
                }
                let page = self.target.discovery_log(self.local, self.admitted);
                let from = usize::try_from(log.lpo)
                    .ok()
                    .filter(|from| *from <= page.len());
                match from.and_then(|from| page.get(from..)).filter(|_| fits) {
                    Some(rest) => {
                        let mut rest = rest.to_vec();
                        // At most 64 KiB.
                        rest.resize(len as usize, 0);
                        self.send(command, &rest);
                    }
                    None => self.answer(command, invalid),
                }
            }
            AdminOpcode::KEEP_ALIVE => {
                self.keep_alive.restart(now);
                self.answer(command, Ok(0));
            }
            AdminOpcode::SET_FEATURES => {
                let fid = SetFeaturesCdw10::from_bits(command.cdw10.get()).fid();
                match fid {
                    Fid::KEEP_ALIVE_TIMER => {
                        self.keep_alive.set(timeout(command.cdw11.get()), now);
                        self.answer(command, Ok(0));
                    }
                    Fid::ASYNC_EVENT_CONFIG => self.answer(command, Ok(0)),
                    _ => self.answer(command, invalid),
                }
            }
            AdminOpcode::ASYNC_EVENT_REQUEST if self.events < EVENTS => self.events += 1,
            AdminOpcode::ASYNC_EVENT_REQUEST => {
                let wrong = Err(Status::AER_LIMIT_EXCEEDED.with_dnr(true));
                self.answer(command, wrong);
            }
            _ => {
                let wrong = Err(Status::INVALID_OPCODE.with_dnr(true));
                self.answer(command, wrong);
            }
        }
    }

    fn property(&self, command: &Command) -> Result<u64, Status> {
        let property = Property::from_command(command);
        let shut_down = self.cc.shn() != nvme::regs::Shn::NONE;
        Ok(match (u64::from(property.offset), property.is_64_bits) {
            (regs::CAP, true) => Cap::new()
                .with_mqes_z(127)
                .with_cqr(true)
                .with_to(1)
                .with_css(CapCss::new().with_ncss(true).with_noiocss(true))
                .into_bits(),
            (regs::VS, false) => Vs::V2_1.into_bits().into(),
            (regs::CC, false) => self.cc.into_bits().into(),
            (regs::CSTS, false) => {
                let shst = if shut_down {
                    Shst::COMPLETE
                } else {
                    Shst::NORMAL
                };
                Csts::new()
                    .with_rdy(self.cc.en())
                    .with_shst(shst)
                    .into_bits()
                    .into()
            }
            _ => return Err(Status::INVALID_FIELD.with_dnr(true)),
        })
    }

    fn identify(&self) -> IdentifyController {
        let config = &self.target.config.controller;
        let mut page = IdentifyController::new_zeroed();
        page.sn = Ascii::new(&config.serial).unwrap_or_default();
        page.mn = Ascii::new(&config.model).unwrap_or_default();
        page.fr = Ascii::new(&config.firmware).unwrap_or_default();
        page.mdts = 4; // 64 KiB, as `MAX_ANSWER_LEN`
        page.cntlid = self.cntlid.into();
        page.ver = Vs::V2_1.into_bits().into();
        page.oaes = Oaes::new();
        page.ctratt = Ctratt::new().with_hids(true);
        page.cntrltype = ControllerType::DISCOVERY;
        page.aerl_z = (EVENTS - 1) as u8;
        page.lpa = Lpa::new().with_lpeds(true);
        page.kas = 1.into();
        page.sqes = QueueEntrySize::exactly(Command::SIZE_LOG2);
        page.cqes = QueueEntrySize::exactly(Completion::SIZE_LOG2);
        page.maxcmd = 128.into();
        page.sgls = Sgls::new().with_sgls(1).with_ofs(true).with_tsdbd(true);
        page.subnqn = Nqn::new(DISCOVERY_NQN).unwrap_or_default();
        page.ioccsz = 4.into();
        page.iorcsz = 1.into();
        page
    }
}
