//! What the tests of the target share: a worker that serves a subsystem on loopback, and a host
//! that says byte for byte what it wants.

// Each test program uses its own part.
#![allow(dead_code)]

use controller::{ControllerConfig, NamespaceConfig};
use fabrics_target::{
    Association, HostKey, NewAssociation, Target, TargetConfig, TargetLimits, TargetListener,
};
use nvme::fabrics::{CNTLID_DYNAMIC, Cattr, Connect, ConnectData, Property};
use nvme::identify::Nqn;
use nvme::regs::{self, Cc, Csts};
use nvme::sgl::SglDescriptor;
use nvme::{Command, Completion, Status};
use nvme_tcp::pdu::INITIALIZE;
use nvme_tcp::{Answer, Answers, CommandInfo, ConnectionLimits, Host, InFlight, Writer, digest};
use rustix::event::{EventfdFlags, eventfd};
use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use volume::{Io, IoOptions, MemVolume, Volume};
use worker::{ConnectRate, Handle, Options, Worker};
use zerocopy::{FromZeros, IntoBytes};

pub const NQN: &str = "nqn.2014-08.org.vnvme:target";
pub const HOST_NQN: &str = "nqn.2014-08.org.vnvme:host";
/// Long enough for any single operation on the slowest machine; only a hang takes this long.
pub const BOUND: Duration = Duration::from_secs(60);

/// What the tests' worker serves.
pub enum Front {
    Door(Box<TargetListener>),
    Association(Box<Association>),
}

worker::frontend_enum! { Front, Infallible: Door, Association }

/// A subsystem that a worker serves.
pub struct Served {
    pub target: Arc<Target>,
    pub address: SocketAddr,
    pub handle: Handle<Front>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

pub fn namespace(nsid: u32, volume: Arc<dyn Volume>) -> NamespaceConfig {
    NamespaceConfig {
        nguid: [nsid as u8; 16],
        eui64: [nsid as u8; 8],
        ..NamespaceConfig::new(nsid, volume)
    }
}

pub struct Setup {
    pub namespaces: Vec<NamespaceConfig>,
    pub limits: TargetLimits,
    pub hosts: Vec<String>,
    pub keys: Vec<HostKey>,
    pub controller: ControllerConfig,
}

impl Setup {
    pub fn new(volume: Arc<dyn Volume>) -> Self {
        Self {
            namespaces: vec![namespace(1, volume)],
            limits: TargetLimits::default(),
            hosts: Vec::new(),
            keys: Vec::new(),
            controller: ControllerConfig {
                serial: "SN1".into(),
                ..ControllerConfig::default()
            },
        }
    }

    /// With memory of so many bytes.
    pub fn memory(bytes: u64) -> Self {
        Self::new(Arc::new(MemVolume::new(bytes).unwrap()))
    }
}

impl Served {
    pub fn new(setup: Setup) -> Self {
        Self::at("127.0.0.1:0".parse().unwrap(), setup)
    }

    pub fn at(address: SocketAddr, setup: Setup) -> Self {
        let listener = loop {
            match TcpListener::bind(address) {
                Ok(listener) => break listener,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let target = Target::new(TargetConfig {
            nqn: NQN.into(),
            controller: setup.controller,
            namespaces: setup.namespaces,
            address,
            limits: setup.limits,
            hosts: setup.hosts,
            keys: setup.keys,
        });
        let handle = Handle::<Front>::new().unwrap();
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let (mine, served) = (handle.clone(), target.clone());
        let ends = stop.try_clone().unwrap();
        let thread = std::thread::spawn(move || {
            let io = Rc::new(Io::new(IoOptions::default()));
            let options = Options {
                shares_cpu: true,
                stop: Some(ends),
                ..Options::default()
            };
            let mut worker = Worker::new(io, &mine, options).unwrap();
            let launcher = mine.clone();
            let launch = Box::new(move |new: NewAssociation| {
                launcher.post(move |worker| {
                    let made = worker.add(|context| {
                        new.make(context)
                            .map(|made| Front::Association(Box::new(made)))
                    });
                    if let Err(error) = made {
                        eprintln!("{error}");
                    }
                });
            });
            let target_listener = worker.add(|context| {
                let target_listener = TargetListener::new(
                    served,
                    listener.into(),
                    ConnectRate::UNLIMITED,
                    None,
                    launch,
                    context,
                );
                target_listener.map(|target_listener| Front::Door(Box::new(target_listener)))
            });
            target_listener.unwrap().unwrap();
            worker.run().unwrap();
        });
        Self {
            target,
            address,
            handle,
            stop,
            thread: Some(thread),
        }
    }

    pub fn url(&self) -> String {
        format!("nvme+tcp://{}/{NQN}/1", self.address)
    }

    /// Hosts that are connected.
    pub fn hosts(&self) -> usize {
        self.target.hosts().len()
    }

    /// Waits until there are so many.
    pub fn wait_for_hosts(&self, count: usize) {
        let began = Instant::now();
        while self.hosts() != count {
            assert!(began.elapsed() < BOUND, "{} of {count} hosts", self.hosts());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The worker ends.
    pub fn stop(&mut self) {
        rustix::io::write(&*self.stop, &1u64.to_ne_bytes()).unwrap();
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if self.thread.is_some() && !std::thread::panicking() {
            self.stop();
        }
    }
}

/// A host's side of one queue.
pub struct Queue {
    pub stream: TcpStream,
    pub writer: Writer,
    answers: Answers,
    pub commands: InFlight<Vec<u8>>,
    received: Vec<u8>,
    /// Requests to transfer that have come: (identifier, tag, offset, length).
    pub transfers: Vec<(u16, u16, u32, u32)>,
    /// Answers that nobody has asked for yet.
    pub ended: Vec<(u16, Completion, bool)>,
}

/// Outcome in place of an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Other {
    Closed,
    Terminated(u16),
    Nothing,
}

impl Queue {
    /// A connection that is initialized.
    pub fn open(address: SocketAddr, host: Host) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.write_all(&host.request()).unwrap();
        let mut response = [0; INITIALIZE];
        stream.read_exact(&mut response).unwrap();
        let limits: ConnectionLimits = host.agree(&response).unwrap();
        Self {
            stream,
            writer: Writer::new(limits),
            answers: Answers::new(&limits),
            commands: InFlight::new(256),
            received: Vec::new(),
            transfers: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Sends a command, with what it says of its data and that data; its identifier.
    pub fn send(&mut self, mut command: Command, asked: CommandInfo, data: &[u8]) -> u16 {
        let cid = self.commands.insert(asked, Vec::new()).unwrap();
        command.cid = cid.into();
        let mut pdu = self.writer.command(&command, data.len() as u32).to_vec();
        pdu.extend_from_slice(data);
        if !data.is_empty() && self.writer.data_digest() {
            pdu.extend(digest::crc32c(data).to_le_bytes());
        }
        self.stream.write_all(&pdu).unwrap();
        cid
    }

    /// Data for a request to transfer.
    pub fn send_data(&mut self, cid: u16, tag: u16, at: u32, data: &[u8], last: bool) {
        let header = self.writer.h2c_data(cid, tag, at, data.len() as u32, last);
        let mut pdu = [&*header, data].concat();
        if self.writer.data_digest() {
            pdu.extend(digest::crc32c(data).to_le_bytes());
        }
        self.stream.write_all(&pdu).unwrap();
    }

    /// Receives until `found` returns something.
    fn until<T>(
        &mut self,
        mut found: impl FnMut(&mut Self) -> Option<T>,
        limit: Duration,
    ) -> Result<T, Other> {
        let began = Instant::now();
        loop {
            if let Some(found) = found(self) {
                return Ok(found);
            }
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(Other::Nothing);
            }
            self.stream
                .set_read_timeout(Some(left.max(Duration::from_millis(1))))
                .unwrap();
            let mut buffer = [0; 65536];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(Other::Closed),
                Ok(len) => self.received.extend_from_slice(&buffer[..len]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return Err(Other::Nothing);
                }
                Err(_) => return Err(Other::Closed),
            }
            let mut used_up = 0;
            loop {
                let input = &self.received[used_up..];
                let (used, answer) = self.answers.next(input, &mut self.commands).unwrap();
                used_up += used;
                match answer {
                    Answer::More if used == 0 => break,
                    Answer::More => {}
                    Answer::Data { cid, bytes, .. } => {
                        self.commands
                            .get(cid)
                            .unwrap()
                            .item
                            .extend_from_slice(bytes);
                    }
                    Answer::Transfer { cid, tag, at, len } => {
                        self.transfers.push((cid, tag, at, len));
                    }
                    Answer::End {
                        cid,
                        completion,
                        corrupt,
                    } => {
                        self.ended.push((cid, completion, corrupt));
                    }
                    Answer::Terminated(why) => return Err(Other::Terminated(why.fes)),
                }
            }
            self.received.drain(..used_up);
        }
    }

    /// Waits for a command's answer: its completion, and its data.
    pub fn wait(&mut self, cid: u16) -> Result<(Completion, Vec<u8>), Other> {
        self.wait_within(cid, BOUND)
    }

    pub fn wait_within(
        &mut self,
        cid: u16,
        limit: Duration,
    ) -> Result<(Completion, Vec<u8>), Other> {
        let ended = |queue: &mut Self| {
            let at = queue.ended.iter().position(|(ended, ..)| *ended == cid)?;
            Some(queue.ended.remove(at))
        };
        let (_, completion, corrupt) = self.until(ended, limit)?;
        assert!(!corrupt);
        Ok((completion, self.commands.remove(cid).unwrap().item))
    }

    /// Waits for a request to transfer.
    pub fn wait_transfer(&mut self) -> Result<(u16, u16, u32, u32), Other> {
        self.until(|queue| queue.transfers.pop(), BOUND)
    }

    /// Waits for the outcome in place of any further answer.
    pub fn ends(&mut self) -> Other {
        self.until(|_| None::<()>, BOUND).unwrap_err()
    }

    /// A command without data of the host's: its status and result, and data.
    pub fn execute(&mut self, mut command: Command, data_in: u32) -> (Status, u64, Vec<u8>) {
        command.set_sgl(SglDescriptor::transport(data_in));
        let asked = CommandInfo {
            data_in,
            ..CommandInfo::default()
        };
        let cid = self.send(command, asked, &[]);
        let (entry, data) = self.wait(cid).unwrap();
        (entry.status(), entry.result64(), data)
    }

    pub fn connect(
        &mut self,
        qid: u16,
        entries: u16,
        cntlid: u16,
        change: impl FnOnce(&mut Connect, &mut ConnectData),
    ) -> Completion {
        let mut connect = Connect {
            qid,
            sqsize_z: entries - 1,
            cattr: Cattr::new().with_dsqfc(qid != 0),
            kato: 0,
            ..Connect::default()
        };
        let mut data = ConnectData::new_zeroed();
        data.hostid = [9; 16];
        data.cntlid = cntlid.into();
        data.subnqn = Nqn::new(NQN).unwrap();
        data.hostnqn = Nqn::new(HOST_NQN).unwrap();
        change(&mut connect, &mut data);
        let mut command = connect.command(0);
        command.set_sgl(SglDescriptor::in_capsule(0, 1024));
        let cid = self.send(command, CommandInfo::default(), data.as_bytes());
        self.wait(cid).unwrap().0
    }
}

/// An association.
pub struct Client {
    pub admin: Queue,
    pub cntlid: u16,
    address: SocketAddr,
    host: Host,
}

impl Client {
    /// Connected, and its controller enabled.
    pub fn new(address: SocketAddr, host: Host) -> Self {
        let mut client = Self::disabled(address, host);
        client.enable();
        client
    }

    pub fn disabled(address: SocketAddr, host: Host) -> Self {
        let mut admin = Queue::open(address, host);
        let entry = admin.connect(0, 32, CNTLID_DYNAMIC, |_, _| ());
        assert_eq!(entry.status(), Status::SUCCESS);
        let cntlid = entry.dw0.get() as u16;
        Self {
            admin,
            cntlid,
            address,
            host,
        }
    }

    pub fn enable(&mut self) {
        let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        self.set_cc(cc);
        let began = Instant::now();
        while !self.csts().rdy() {
            assert!(began.elapsed() < BOUND);
        }
    }

    pub fn set_cc(&mut self, cc: Cc) {
        let set = Property::set(0, regs::CC as u32, cc.into_bits());
        assert_eq!(self.admin.execute(set, 0).0, Status::SUCCESS);
    }

    pub fn csts(&mut self) -> Csts {
        let get = Property::get(0, regs::CSTS as u32, false);
        let (status, value, _) = self.admin.execute(get, 0);
        assert_eq!(status, Status::SUCCESS);
        Csts::from_bits(value as u32)
    }

    /// An I/O queue.
    pub fn queue(&self, qid: u16, entries: u16) -> Queue {
        let mut queue = Queue::open(self.address, self.host);
        let entry = queue.connect(qid, entries, self.cntlid, |_, _| ());
        assert_eq!(entry.status(), Status::SUCCESS);
        queue
    }
}

/// A read or write of so many blocks of 512 bytes.
pub fn transfer(opcode: nvme::NvmOpcode, slba: u64, blocks: u32) -> Command {
    let mut command = Command::new(opcode.0, 0, 1);
    command.set_slba(slba);
    command.cdw12 = (blocks - 1).into();
    command
}
