//! A subsystem in this process, with memory for a namespace and one portal or several, that lies,
//! hangs and disappears as a test wants it.

// Each test program uses its own part.
#![allow(dead_code)]

mod peer;

use crate::suite::Pieces;
use nvme::cmd::admin::{Cns, GetLogPage, IdentifyCdw10, SetFeaturesCdw10};
use nvme::cmd::io::{DsmRange, RwCdw12, WriteZeroesCdw12};
use nvme::fabrics::{self, Connect, ConnectData, Fctype, Property};
use nvme::feature::{Fid, NumberOfQueues};
use nvme::identify::{
    Anacap, Ascii, Cmic, Ctratt, IdentifyController, IdentifyNamespace, LbaFormat, Nqn, Nsattr,
    NsidList, Oaes, Oncs, QueueEntrySize, Vwc,
};
use nvme::log::Lid;
use nvme::log::discovery::{DiscoveryHeader, DiscoveryRecord};
use nvme::log::{AnaGroup, AnaGroupState, AnaHeader, AnaState};
use nvme::regs::{self, Cap, Cc, Csts};
use nvme::{AdminOpcode, Command, Completion, NvmOpcode, Status};
use nvme_tcp::pdu::{INITIALIZE, kind};
use nvme_tcp::{Controller, Grants, Request, Requests, Writer, digest};
use peer::Peer;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

pub const NQN: &str = "nqn.2014-08.org.vnvme:test";
pub const BLOCK: u64 = 512;

/// How a command is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// As it should be.
    Right,
    /// It is carried out, and the connection closed instead of an answer.
    Close,
    /// It is carried out, and all connections of the controller are closed instead of an answer.
    CloseAll,
    /// The connection is closed in the middle of the answer.
    CloseWithin,
    /// Never; others are read on.
    Never,
    /// By an error; nothing is carried out.
    Status(Status),
    /// With another command's identifier.
    WrongCid,
    /// By bytes that are no PDU.
    Garbage,
    /// With data beyond the command.
    TooLong,
    /// By a success, without all of its data.
    TooShort,
    /// With data twice.
    Twice,
    /// With data, or a capsule, with a wrong data digest.
    BadDataDigest,
    /// With a header with a wrong digest.
    BadHeaderDigest,
    /// By a request to transfer for more than it has.
    R2tBeyond,
    /// By requests to transfer without end, one byte each.
    R2tFlood,
    /// By data of a command that asked for none, again and again.
    Flood,
    /// By a PDU that ends the connection.
    Terminate,
    /// Never, until [`Target::release`]; it is carried out then.
    Held,
}

/// The answer to an I/O command, by its number.
pub type Answers = dyn Fn(usize, &Command) -> Answer + Send + Sync;

pub struct Setup {
    pub size: usize,
    pub portals: usize,
    pub in_capsule: u32,
    pub mdts: u8,
    pub h2c_data: u32,
    pub queues: u16,
    pub entries: u16,
    pub volatile_cache: bool,
    /// AWUN and AWUPF, zero-based.
    pub atomic_z: u16,
    pub oncs: Oncs,
    pub ana: bool,
    pub tbkas: bool,
    pub cqt: u16,
    pub read_only: bool,
    /// It closes nothing because the host has.
    pub stubborn: bool,
    /// Reads are answered by their data, where the host does without flow control.
    pub success: bool,
    /// Bytes that one request to transfer asks for, at most.
    pub r2t: u32,
    /// Number of bytes that are written at once.
    pub piece: usize,
    pub answer: Box<Answers>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            size: 4 << 20,
            portals: 1,
            in_capsule: 8192,
            mdts: 8,
            h2c_data: 64 << 10,
            queues: 16,
            entries: 128,
            volatile_cache: true,
            atomic_z: 0,
            oncs: Oncs::new().with_nvmwzsv(true).with_nvmdsmsv(true),
            ana: false,
            tbkas: false,
            cqt: 0,
            read_only: false,
            stubborn: false,
            success: true,
            r2t: u32::MAX,
            piece: usize::MAX,
            answer: Box::new(|_, _| Answer::Right),
        }
    }
}

pub struct State {
    pub setup: Setup,
    pub data: Mutex<Vec<u8>>,
    pub requests: AtomicUsize,
    pub connections: AtomicUsize,
    pub controllers: AtomicU16,
    pub keep_alives: AtomicUsize,
    pub shutdowns: AtomicUsize,
    /// Number of times that data arrived with a digest that does not match.
    pub corrupt: AtomicUsize,
    pub held: AtomicBool,
    /// By portals: new connections are taken, and nothing on them is answered.
    pub mute: Vec<AtomicBool>,
    /// Connections that were taken like that.
    pub unanswered: AtomicUsize,
    pub nguid: AtomicU8,
    pub states: Vec<AtomicU8>,
    pub changes: AtomicU64,
    /// Opcodes, lengths in bytes, and the portal, in the order of arrival.
    pub log: Mutex<Vec<Logged>>,
    pub most_in_flight: AtomicUsize,
    controllers_open: Mutex<Vec<Arc<Ctrl>>>,
    pub records: Mutex<Vec<DiscoveryRecord>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logged {
    pub opcode: u8,
    pub len: u32,
    pub fua: bool,
    pub portal: usize,
    pub in_capsule: bool,
}

/// A controller.
pub struct Ctrl {
    id: u16,
    portal: usize,
    cc: Mutex<Cc>,
    shut_down: AtomicBool,
    admin: Mutex<Option<(TcpStream, Writer)>>,
    events: Mutex<Events>,
    streams: Mutex<Vec<TcpStream>>,
    /// Whether the connections are closed, so that no command is executed. Set under the lock of
    /// the data.
    ended: AtomicBool,
}

/// Asynchronous Event Requests of the host, and events that wait for one.
#[derive(Default)]
struct Events {
    requests: Vec<u16>,
    /// Dwords 0 of completions.
    pending: VecDeque<u32>,
}

impl Ctrl {
    fn send_events(&self) {
        let mut events = self.events.lock().unwrap();
        let Events { requests, pending } = &mut *events;
        while !requests.is_empty() && !pending.is_empty() {
            let (cid, dw0) = (requests.pop().unwrap(), pending.pop_front().unwrap());
            if let Some((stream, writer)) = &mut *self.admin.lock().unwrap() {
                let completion = completion(cid, Status::SUCCESS, dw0.into());
                let _ = stream.write_all(&writer.completion(&completion));
            }
        }
    }

    fn end(&self, state: &State) {
        let _data = state.data.lock().unwrap();
        self.ended.store(true, Ordering::SeqCst);
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

struct Portal {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
}

pub struct Target {
    pub state: Arc<State>,
    portals: Mutex<Vec<Portal>>,
}

impl Target {
    pub fn new(setup: Setup) -> Self {
        let state = Arc::new(State {
            data: Mutex::new(vec![0; setup.size]),
            requests: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            controllers: AtomicU16::new(0),
            keep_alives: AtomicUsize::new(0),
            shutdowns: AtomicUsize::new(0),
            corrupt: AtomicUsize::new(0),
            held: AtomicBool::new(true),
            mute: (0..setup.portals).map(|_| AtomicBool::default()).collect(),
            unanswered: AtomicUsize::new(0),
            nguid: AtomicU8::new(7),
            states: (0..setup.portals)
                .map(|_| AtomicU8::new(AnaState::OPTIMIZED.0))
                .collect(),
            changes: AtomicU64::new(1),
            log: Mutex::default(),
            most_in_flight: AtomicUsize::new(0),
            controllers_open: Mutex::default(),
            records: Mutex::default(),
            setup,
        });
        let portals = (0..state.setup.portals)
            .map(|number| start(&state, number, None))
            .collect();
        let portals = Mutex::new(portals);
        Self { state, portals }
    }

    pub fn address(&self, portal: usize) -> SocketAddr {
        self.portals.lock().unwrap()[portal].address
    }

    pub fn url(&self) -> String {
        let portals = self.portals.lock().unwrap();
        let portals: Vec<String> = portals.iter().map(|p| p.address.to_string()).collect();
        format!("nvme+tcp://{}/{NQN}/1", portals.join(","))
    }

    /// Stops a portal, as if it were killed.
    pub fn stop(&self, portal: usize) {
        let portals = self.portals.lock().unwrap();
        portals[portal].stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(portals[portal].address);
        self.end_controllers(portal);
    }

    /// Its controllers close their connections.
    pub fn end_controllers(&self, portal: usize) {
        let mut open = self.state.controllers_open.lock().unwrap();
        open.retain(|ctrl| {
            if ctrl.portal == portal {
                ctrl.end(&self.state);
            }
            ctrl.portal != portal
        });
    }

    /// It is there again, at the same address.
    pub fn restart(&self, portal: usize) {
        let address = self.address(portal);
        self.portals.lock().unwrap()[portal] = start(&self.state, portal, Some(address));
    }

    /// New connections by a portal are taken and not answered, as by a proxy in front of a host
    /// with a pulled cable.
    pub fn set_mute(&self, portal: usize, mute: bool) {
        self.state.mute[portal].store(mute, Ordering::SeqCst);
    }

    pub fn release(&self) {
        self.state.held.store(false, Ordering::SeqCst);
    }

    pub fn count(&self, counter: impl Fn(&State) -> &AtomicUsize) -> usize {
        counter(&self.state).load(Ordering::SeqCst)
    }

    /// Another state of the namespace on a portal; told by an event if `tell`.
    pub fn set_state(&self, portal: usize, state: AnaState, tell: bool) {
        self.state.states[portal].store(state.0, Ordering::SeqCst);
        self.state.changes.fetch_add(1, Ordering::SeqCst);
        if tell {
            self.event(portal, 0x000c_0302);
        }
    }

    pub fn resize(&self, size: usize) {
        self.state.data.lock().unwrap().resize(size, 0);
        for portal in 0..self.state.states.len() {
            self.event(portal, 0x0004_0002);
        }
    }

    /// Reports an event, as dword 0 says it.
    fn event(&self, portal: usize, dw0: u32) {
        for ctrl in &*self.state.controllers_open.lock().unwrap() {
            if ctrl.portal != portal {
                continue;
            }
            ctrl.events.lock().unwrap().pending.push_back(dw0);
            ctrl.send_events();
        }
    }

    pub fn log(&self) -> Vec<Logged> {
        self.state.log.lock().unwrap().clone()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.release();
        for portal in 0..self.state.states.len() {
            self.stop(portal);
        }
    }
}

fn start(state: &Arc<State>, number: usize, address: Option<SocketAddr>) -> Portal {
    let address = address.unwrap_or("127.0.0.1:0".parse().unwrap());
    let listener = loop {
        match TcpListener::bind(address) {
            Ok(listener) => break listener,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let address = listener.local_addr().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (state, stopped) = (state.clone(), stop.clone());
    std::thread::spawn(move || {
        let mut unanswered = Vec::new();
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            if stopped.load(Ordering::SeqCst) {
                return;
            }
            state.connections.fetch_add(1, Ordering::SeqCst);
            if state.mute[number].load(Ordering::SeqCst) {
                state.unanswered.fetch_add(1, Ordering::SeqCst);
                unanswered.push(stream);
                continue;
            }
            stream.set_nodelay(true).unwrap();
            let state = state.clone();
            std::thread::spawn(move || {
                // Another descriptor of it is in the list.
                let end = stream.try_clone().unwrap();
                let _ = serve(&state, number, stream);
                if !state.setup.stubborn {
                    let _ = end.shutdown(std::net::Shutdown::Both);
                }
            });
        }
    });
    Portal { address, stop }
}

fn completion(cid: u16, status: Status, result: u64) -> Completion {
    Completion {
        dw0: (result as u32).into(),
        dw1: ((result >> 32) as u32).into(),
        cid: cid.into(),
        status_phase: Completion::pack_status(status, false),
        ..Completion::default()
    }
}

fn serve(state: &Arc<State>, portal: usize, stream: TcpStream) -> io::Result<()> {
    let end = stream.try_clone()?;
    let piece = state.setup.piece;
    let stream = Pieces { stream, piece };
    let mut peer = Peer::new(stream, state.setup.h2c_data, state.setup.in_capsule)?;
    let got = peer.next(None)?;
    let cid = got.command.cid.get();
    if fabrics::fctype(&got.command) != Some(Fctype::CONNECT) {
        return peer.complete(cid, Status::COMMAND_SEQUENCE_ERROR, 0);
    }
    let connect = Connect::from_command(&got.command);
    let data = ConnectData::read_from_bytes(&got.data).unwrap();
    let name = data.subnqn.as_str().unwrap().to_owned();
    if name != NQN && name != fabrics::DISCOVERY_NQN {
        let wrong = fabrics::InvalidParameter::new()
            .with_ipo(256)
            .with_iattr(true);
        let status = fabrics::status::CONNECT_INVALID_PARAMETERS.with_dnr(true);
        return peer.complete(cid, status, wrong.into_bits().into());
    }
    if connect.qid == 0 {
        let ctrl = Arc::new(Ctrl {
            id: state.controllers.fetch_add(1, Ordering::SeqCst) + 1,
            portal,
            cc: Mutex::new(Cc::new()),
            shut_down: AtomicBool::new(false),
            admin: Mutex::new(Some((end.try_clone()?, peer.writer))),
            events: Mutex::default(),
            streams: Mutex::new(vec![end]),
            ended: AtomicBool::new(false),
        });
        state.controllers_open.lock().unwrap().push(ctrl.clone());
        peer.complete(cid, Status::SUCCESS, ctrl.id.into())?;
        let served = admin(state, &ctrl, &mut peer);
        if state.setup.stubborn {
            return served;
        }
        ctrl.end(state);
        let mut open = state.controllers_open.lock().unwrap();
        open.retain(|other| other.id != ctrl.id);
        return served;
    }
    let open = state.controllers_open.lock().unwrap();
    let found = open
        .iter()
        .find(|ctrl| ctrl.id == data.cntlid.get())
        .cloned();
    drop(open);
    let Some(ctrl) = found.filter(|_| connect.qid <= state.setup.queues) else {
        return peer.complete(cid, fabrics::status::CONNECT_INVALID_PARAMETERS, 0);
    };
    ctrl.streams.lock().unwrap().push(end);
    let no_flow_control = connect.cattr.dsqfc();
    let mut answer = completion(cid, Status::SUCCESS, ctrl.id.into());
    if no_flow_control {
        answer.sqhd = fabrics::SQHD_NO_FLOW_CONTROL.into();
    }
    let header = peer.writer.completion(&answer);
    peer.stream.write_all(&header)?;
    io_queue(
        state,
        &ctrl,
        &mut peer,
        state.setup.success && no_flow_control,
    )
}

fn admin(state: &State, ctrl: &Ctrl, peer: &mut Peer) -> io::Result<()> {
    loop {
        let got = peer.next(None)?;
        let (command, cid) = (got.command, got.command.cid.get());
        match command.admin_opcode() {
            AdminOpcode::FABRICS => property(state, ctrl, peer, &command)?,
            AdminOpcode::IDENTIFY => {
                let page = identify(state, ctrl, &command);
                match page {
                    Some(page) => peer.send_data(cid, &page, false)?,
                    None => peer.complete(cid, Status::INVALID_FIELD.with_dnr(true), 0)?,
                }
            }
            AdminOpcode::SET_FEATURES => {
                let cdw10 = SetFeaturesCdw10::from_bits(command.cdw10.get());
                let result = match cdw10.fid() {
                    Fid::NUMBER_OF_QUEUES => {
                        let queues = state.setup.queues - 1;
                        let got = NumberOfQueues::new().with_nsq_z(queues).with_ncq_z(queues);
                        got.into_bits()
                    }
                    _ => 0,
                };
                peer.complete(cid, Status::SUCCESS, result.into())?;
            }
            AdminOpcode::GET_LOG_PAGE => {
                let log = GetLogPage::from_command(&command);
                let page = log_page(state, ctrl, &log);
                let from = (log.lpo as usize).min(page.len());
                let mut page = page[from..].to_vec();
                page.resize((log.numd_z as usize + 1) * 4, 0);
                peer.send_data(cid, &page, false)?;
            }
            AdminOpcode::KEEP_ALIVE => {
                state.keep_alives.fetch_add(1, Ordering::SeqCst);
                peer.complete(cid, Status::SUCCESS, 0)?;
            }
            AdminOpcode::ASYNC_EVENT_REQUEST => {
                ctrl.events.lock().unwrap().requests.push(cid);
                ctrl.send_events();
            }
            _ => peer.complete(cid, Status::INVALID_OPCODE.with_dnr(true), 0)?,
        }
    }
}

fn property(state: &State, ctrl: &Ctrl, peer: &mut Peer, command: &Command) -> io::Result<()> {
    let cid = command.cid.get();
    let property = Property::from_command(command);
    match fabrics::fctype(command) {
        Some(Fctype::PROPERTY_GET) => {
            let cc = *ctrl.cc.lock().unwrap();
            let value = match u64::from(property.offset) {
                regs::CAP => Cap::new()
                    .with_mqes_z(state.setup.entries - 1)
                    .with_to(20)
                    .into_bits(),
                regs::CC => cc.into_bits().into(),
                regs::CSTS => {
                    let done = ctrl.shut_down.load(Ordering::SeqCst);
                    let shst = nvme::regs::Shst(if done { 2 } else { 0 });
                    Csts::new()
                        .with_rdy(cc.en())
                        .with_shst(shst)
                        .into_bits()
                        .into()
                }
                _ => 0,
            };
            peer.complete(cid, Status::SUCCESS, value)
        }
        Some(Fctype::PROPERTY_SET) => {
            let cc = Cc::from_bits(property.value as u32);
            *ctrl.cc.lock().unwrap() = cc;
            if cc.shn().0 != 0 && !ctrl.shut_down.swap(true, Ordering::SeqCst) {
                state.shutdowns.fetch_add(1, Ordering::SeqCst);
            }
            peer.complete(cid, Status::SUCCESS, 0)
        }
        _ => peer.complete(cid, Status::INVALID_FIELD, 0),
    }
}

fn identify(state: &State, ctrl: &Ctrl, command: &Command) -> Option<Vec<u8>> {
    let setup = &state.setup;
    match IdentifyCdw10::from_bits(command.cdw10.get()).cns() {
        Cns::CONTROLLER => {
            let mut id = IdentifyController::new_zeroed();
            id.sn = Ascii::new("SN").unwrap();
            id.mn = Ascii::new("test target").unwrap();
            id.cmic = Cmic::new()
                .with_mports(true)
                .with_mctrs(true)
                .with_anars(setup.ana);
            id.cntlid = ctrl.id.into();
            id.mdts = setup.mdts;
            id.oaes = Oaes::new().with_nsan(true).with_anacn(setup.ana);
            id.ctratt = Ctratt::new().with_tbkas(setup.tbkas);
            id.cqt = setup.cqt.into();
            id.kas = 1.into();
            id.anacap = Anacap::new().with_ros(true);
            id.anagrpmax = 8.into();
            id.nanagrpid = 8.into();
            id.sqes = QueueEntrySize::exactly(6);
            id.cqes = QueueEntrySize::exactly(4);
            id.nn = 1.into();
            id.oncs = setup.oncs;
            id.vwc = Vwc::new().with_vwcp(setup.volatile_cache);
            (id.awun_z, id.awupf_z) = (setup.atomic_z.into(), setup.atomic_z.into());
            id.subnqn = Nqn::new(NQN).unwrap();
            id.ioccsz = (4 + setup.in_capsule / 16).into();
            id.iorcsz = 1.into();
            Some(id.as_bytes().to_vec())
        }
        Cns::NAMESPACE => {
            let mut id = IdentifyNamespace::new_zeroed();
            let size = state.data.lock().unwrap().len() as u64 / BLOCK;
            id.nsze = size.into();
            id.ncap = size.into();
            id.nsattr = Nsattr::new().with_cwp(setup.read_only);
            id.nguid = [state.nguid.load(Ordering::SeqCst); 16];
            id.anagrpid = 3.into();
            id.lbaf[0] = LbaFormat::new(9);
            Some(id.as_bytes().to_vec())
        }
        Cns::NAMESPACE_DESCRIPTORS => Some(vec![0; 4096]),
        _ => None,
    }
}

fn log_page(state: &State, ctrl: &Ctrl, log: &GetLogPage) -> Vec<u8> {
    match log.lid {
        Lid::ANA => {
            let changes = state.changes.load(Ordering::SeqCst);
            let header = AnaHeader {
                chgcnt: changes.into(),
                nagd: 2.into(),
                ..AnaHeader::default()
            };
            let group = |agid: u32, state: u8| AnaGroup {
                agid: agid.into(),
                nnsid: if log.lsp & 1 == 0 { 1 } else { 0 }.into(),
                state: AnaGroupState::from_bits(state),
                ..AnaGroup::default()
            };
            let nsid: &[u8] = if log.lsp & 1 == 0 { &[1, 0, 0, 0] } else { &[] };
            let mine = state.states[ctrl.portal].load(Ordering::SeqCst);
            [
                header.as_bytes(),
                group(1, 3).as_bytes(),
                nsid,
                group(3, mine).as_bytes(),
                nsid,
            ]
            .concat()
        }
        Lid::CHANGED_NAMESPACE_LIST => NsidList::from_iter([1]).as_bytes().to_vec(),
        Lid::DISCOVERY => {
            let records = state.records.lock().unwrap();
            let mut header = DiscoveryHeader::new_zeroed();
            header.genctr = state.changes.load(Ordering::SeqCst).into();
            header.numrec = (records.len() as u64).into();
            let mut page = header.as_bytes().to_vec();
            records
                .iter()
                .for_each(|record| page.extend(record.as_bytes()));
            page
        }
        _ => vec![0; 512],
    }
}

/// Returns the data for a command that changes it, unless the controller has closed its streams.
/// A host repeats the command elsewhere then.
fn change<'a>(state: &'a State, ctrl: &Ctrl) -> io::Result<MutexGuard<'a, Vec<u8>>> {
    let data = state.data.lock().unwrap();
    if ctrl.ended.load(Ordering::SeqCst) {
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    Ok(data)
}

fn io_queue(state: &State, ctrl: &Ctrl, peer: &mut Peer, success: bool) -> io::Result<()> {
    loop {
        let got = peer.next(None)?;
        let command = got.command;
        let (cid, opcode) = (command.cid.get(), command.nvm_opcode());
        let blocks = u32::from(RwCdw12::from_bits(command.cdw12.get()).nlb_z()) + 1;
        let len = match opcode {
            NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::WRITE_ZEROES => blocks * BLOCK as u32,
            NvmOpcode::DATASET_MANAGEMENT => {
                let range = DsmRange::read_from_bytes(&got.data).unwrap();
                range.nlb.get() * BLOCK as u32
            }
            _ => 0,
        };
        let fua = RwCdw12::from_bits(command.cdw12.get()).fua();
        state.log.lock().unwrap().push(Logged {
            opcode: command.opcode,
            len,
            fua,
            portal: ctrl.portal,
            in_capsule: !got.data.is_empty(),
        });
        let number = state.requests.fetch_add(1, Ordering::SeqCst);
        let mut answer = (state.setup.answer)(number, &command);
        let ana = AnaState(state.states[ctrl.portal].load(Ordering::SeqCst));
        if answer == Answer::Right {
            match ana {
                AnaState::INACCESSIBLE => answer = Answer::Status(Status::ANA_INACCESSIBLE),
                AnaState::CHANGE => answer = Answer::Status(Status::ANA_TRANSITION),
                _ => {}
            }
        }
        match answer {
            Answer::Never => continue,
            Answer::Status(status) => {
                peer.complete(cid, status, 0)?;
                continue;
            }
            Answer::Held => {
                while state.held.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Answer::Garbage => {
                peer.stream.write_all(&[0x5a; 64])?;
                return peer.ignore();
            }
            Answer::WrongCid => {
                peer.complete(cid ^ 0x4000, Status::SUCCESS, 0)?;
                return peer.ignore();
            }
            Answer::R2tBeyond => {
                let r2t = peer.writer.r2t(cid, 1, 0, len + 1);
                peer.stream.write_all(&r2t)?;
                return peer.ignore();
            }
            Answer::R2tFlood => {
                for at in 0..len {
                    let r2t = peer.writer.r2t(cid, 1, at, 1);
                    peer.stream.write_all(&r2t)?;
                }
                continue;
            }
            Answer::Flood => loop {
                peer.send_piece(cid, 0, &[0; 512], false, false)?;
            },
            Answer::Terminate => {
                let why = nvme_tcp::Violation::Last;
                peer.stream.write_all(&why.c2h_term_req())?;
                return Ok(());
            }
            _ => {}
        }
        let offset = (command.slba() * BLOCK) as usize;
        // A host may not know its end yet.
        if opcode != NvmOpcode::DATASET_MANAGEMENT
            && offset + len as usize > state.data.lock().unwrap().len()
        {
            peer.complete(cid, Status::LBA_OUT_OF_RANGE, 0)?;
            continue;
        }
        match opcode {
            NvmOpcode::READ => {
                let bytes = state.data.lock().unwrap()[offset..][..len as usize].to_vec();
                read(peer, answer, cid, &bytes, success)?;
                if answer == Answer::CloseAll {
                    ctrl.end(state);
                }
                if matches!(
                    answer,
                    Answer::Close | Answer::CloseWithin | Answer::CloseAll
                ) {
                    return Ok(());
                }
                if matches!(answer, Answer::TooLong | Answer::TooShort | Answer::Twice) {
                    return peer.ignore();
                }
                continue;
            }
            NvmOpcode::WRITE => {
                let got = if got.data.is_empty() {
                    peer.ask(cid, len, state.setup.r2t)?
                } else {
                    got
                };
                if got.corrupt {
                    state.corrupt.fetch_add(1, Ordering::SeqCst);
                }
                assert_eq!(got.data.len(), len as usize);
                change(state, ctrl)?[offset..][..len as usize].copy_from_slice(&got.data);
            }
            NvmOpcode::WRITE_ZEROES => {
                let _ = WriteZeroesCdw12::from_bits(command.cdw12.get());
                change(state, ctrl)?[offset..][..len as usize].fill(0);
            }
            NvmOpcode::DATASET_MANAGEMENT => {
                let range = DsmRange::read_from_bytes(&got.data).unwrap();
                let offset = (range.slba.get() * BLOCK) as usize;
                change(state, ctrl)?[offset..][..len as usize].fill(0);
            }
            _ => {}
        }
        match answer {
            Answer::CloseAll => {
                ctrl.end(state);
                return Ok(());
            }
            Answer::Close | Answer::CloseWithin => return Ok(()),
            Answer::BadHeaderDigest => {
                let mut pdu = peer
                    .writer
                    .completion(&completion(cid, Status::SUCCESS, 0))
                    .to_vec();
                *pdu.last_mut().unwrap() ^= 1;
                peer.stream.write_all(&pdu)?;
            }
            Answer::Twice => {
                peer.complete(cid, Status::SUCCESS, 0)?;
                peer.complete(cid, Status::SUCCESS, 0)?;
                return peer.ignore();
            }
            _ => peer.complete(cid, Status::SUCCESS, 0)?,
        }
    }
}

fn read(peer: &mut Peer, answer: Answer, cid: u16, bytes: &[u8], success: bool) -> io::Result<()> {
    match answer {
        Answer::Close | Answer::CloseAll => Ok(()),
        Answer::CloseWithin => {
            let header = peer
                .writer
                .c2h_data(cid, 0, bytes.len() as u32, true, false);
            let half = &bytes[..bytes.len() / 2];
            peer.stream.write_all(&[&*header, half].concat())
        }
        Answer::TooLong => {
            let longer = [bytes, &[1; 4]].concat();
            peer.send_piece(cid, 0, &longer, true, true)
        }
        Answer::TooShort => {
            let half = &bytes[..bytes.len() / 2];
            peer.send_piece(cid, 0, half, false, false)?;
            peer.complete(cid, Status::SUCCESS, 0)
        }
        Answer::Twice => {
            peer.send_piece(cid, 0, bytes, false, false)?;
            peer.send_piece(cid, 0, bytes, true, true)
        }
        Answer::BadDataDigest => {
            let header = peer
                .writer
                .c2h_data(cid, 0, bytes.len() as u32, true, false);
            let mut pdu = [&*header, bytes].concat();
            pdu.extend((digest::crc32c(bytes) ^ 1).to_le_bytes());
            peer.stream.write_all(&pdu)?;
            peer.complete(cid, Status::SUCCESS, 0)
        }
        Answer::BadHeaderDigest => {
            let mut header = peer
                .writer
                .completion(&completion(cid, Status::SUCCESS, 0))
                .to_vec();
            assert_eq!(header[0], kind::CAPSULE_RESP);
            *header.last_mut().unwrap() ^= 1;
            peer.stream.write_all(&header)
        }
        _ => peer.send_data(cid, bytes, success),
    }
}
