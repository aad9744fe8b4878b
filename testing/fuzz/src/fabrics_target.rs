//! A subsystem for other hosts, against a host that sends anything.
//!
//! The input is a script: raw bytes, capsules and data with arbitrary contents, connections, and
//! turns of the worker. For every script, replies are well-formed PDUs, no resource is left when
//! the connections have ended, and the next host is served.

use std::convert::Infallible;
use std::io::{ErrorKind, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use controller::{ControllerConfig, NamespaceConfig};
use dhchap::{Names, Random, Secret, Secrets};
use fabrics_target::{
    Association, HostKey, NewAssociation, Target, TargetConfig, TargetLimits, TargetListener,
};
use nvme::fabrics::{
    Authentication, CNTLID_DYNAMIC, Cattr, Connect, ConnectData, DISCOVERY_NQN, Property,
};
use nvme::identify::Nqn;
use nvme::regs::{self, Cc};
use nvme::sgl::SglDescriptor;
use nvme::{Command, Completion};
use nvme_tcp::{ConnectionLimits, Host, Writer, digest};
use rustix::net::{SendFlags, send};
use volume::{Io, IoOptions, MemVolume};
use worker::{ConnectRate, Handle, Options, Worker};
use zerocopy::{FromZeros, IntoBytes};

const NQN: &str = "nqn.2014-08.org.vnvme:fuzz";
/// Opcodes of most commands: those that controllers know, of both kinds of queues.
const OPCODES: [u8; 16] = [
    0x00, 0x01, 0x02, 0x05, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x0d, 0x0e, 0x18, 0x7f, 0x80, 0x81, 0x19,
];
/// Offsets of existing properties, and invalid ones.
const PROPERTIES: [u32; 6] = [0x00, 0x14, 0x1c, 0x20, 0x24, 0x68];
/// No end needs more turns.
const MAX_TURNS: usize = 10_000;

enum Front {
    Door(Box<TargetListener>),
    Association(Box<Association>),
}

worker::frontend_enum! { Front, Infallible: Door, Association }

/// A connection's other end.
struct Link {
    stream: UnixStream,
    writer: Writer,
    said: Vec<u8>,
}

impl Link {
    fn send(&self, bytes: &[u8]) {
        // A target that has hung up, or that does not read any more, is fine.
        let _ = send(
            &self.stream,
            bytes,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        );
    }

    /// A capsule with so many bytes of data.
    fn command(&self, command: &Command, data: &[u8]) {
        let mut pdu = self.writer.command(command, data.len() as u32).to_vec();
        self.with_data(&mut pdu, data);
    }

    fn with_data(&self, pdu: &mut Vec<u8>, data: &[u8]) {
        pdu.extend_from_slice(data);
        if !data.is_empty() && self.writer.data_digest() {
            pdu.extend(digest::crc32c(data).to_le_bytes());
        }
        self.send(pdu);
    }

    fn read(&mut self) {
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return,
                Ok(len) => self.said.extend_from_slice(&buffer[..len]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The connection was reset.
                Err(_) => return,
            }
        }
    }

    /// PDUs of a controller, the last of which may be a part of one.
    fn check(&self) {
        let mut rest = self.said.as_slice();
        while let Some(header) = rest.first_chunk::<8>() {
            let [kind, _, hlen, _, len @ ..] = *header;
            let len = u32::from_le_bytes(len) as usize;
            assert!(matches!(kind, 1 | 3 | 5 | 7 | 9), "{header:?}");
            assert!(hlen >= 8 && len >= usize::from(hlen), "{header:?}");
            rest = rest.get(len..).unwrap_or_default();
        }
    }
}

/// A host that no input can be.
fn key() -> HostKey {
    let secret = "DHHC-1:01:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
    HostKey {
        nqn: "nqn.2014-08.org.vnvme:h".into(),
        secrets: Secrets {
            host: Secret::parse(secret).unwrap(),
            controller: None,
        },
    }
}

struct Bench {
    worker: Worker<Front>,
    target: Arc<Target>,
    address: SocketAddr,
    host: Host,
}

impl Bench {
    /// Makes a bench with or without authentication of hosts.
    fn new(host: Host, proven: bool) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vnvme-fuzz-target-{}-{count}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let namespace = NamespaceConfig {
            block_size: 512,
            nguid: [1; 16],
            eui64: [1; 8],
            ..NamespaceConfig::new(1, Arc::new(MemVolume::new(0x1_0000).unwrap()))
        };
        let target = Target::new(TargetConfig {
            nqn: NQN.into(),
            controller: ControllerConfig {
                serial: "SN".into(),
                ..ControllerConfig::default()
            },
            namespaces: vec![namespace],
            address: "127.0.0.1:4420".parse().unwrap(),
            limits: TargetLimits {
                queues: 2,
                entries: 8,
                in_capsule: 1024,
                memory: 0x1_0000,
                associations: 3,
                newcomers: 3,
                handshake: Duration::from_secs(60),
                ..TargetLimits::default()
            },
            hosts: Vec::new(),
            keys: proven.then(key).into_iter().collect(),
        });
        let handle = Handle::<Front>::new().unwrap();
        let io = Rc::new(Io::new(IoOptions::default()));
        let mut worker = Worker::new(io, &handle, Options::default()).unwrap();
        let launch = Box::new(move |new: NewAssociation| {
            handle.post(move |worker| {
                let made = worker.add(|context| {
                    let made = new.make(context)?;
                    Ok::<_, fabrics_target::AssociationError>(Front::Association(Box::new(made)))
                });
                made.unwrap().unwrap();
            });
        });
        let served = target.clone();
        let target_listener = worker.add(|context| {
            let listener = listener.into();
            let rate = ConnectRate::UNLIMITED;
            let target_listener =
                TargetListener::new(served, listener, rate, None, launch, context)?;
            Ok::<_, fabrics_target::ListenerError>(Front::Door(Box::new(target_listener)))
        });
        target_listener.unwrap().unwrap();
        Self {
            worker,
            target,
            address,
            host,
        }
    }

    fn turns(&mut self, count: usize) {
        for _ in 0..count {
            assert!(!self.worker.poll_once().unwrap());
        }
    }

    /// A connection of which nothing has come yet.
    fn open(&self) -> Link {
        let stream = UnixStream::connect_addr(&self.address).unwrap();
        stream.set_nonblocking(true).unwrap();
        let limits = ConnectionLimits {
            header_digest: self.host.header_digest,
            data_digest: self.host.data_digest,
            alignment: 0,
            h2c_data: 4096,
            r2t: 1,
        };
        Link {
            stream,
            writer: Writer::new(limits),
            said: Vec::new(),
        }
    }

    /// Opens a connection, and sends Connect for a queue.
    fn connect(&self, qid: u16, cntlid: u16, how: u8) -> Link {
        let link = self.open();
        link.send(&self.host.request());
        let connect = Connect {
            qid,
            sqsize_z: u16::from(how & 15),
            cattr: Cattr::new().with_dsqfc(how & 16 != 0),
            kato: 0,
            ..Connect::default()
        };
        let mut data = ConnectData::new_zeroed();
        data.hostid = [9; 16];
        data.cntlid = cntlid.into();
        let subnqn = if how & 32 != 0 { DISCOVERY_NQN } else { NQN };
        data.subnqn = Nqn::new(subnqn).unwrap();
        data.hostnqn = Nqn::new("nqn.2014-08.org.vnvme:h").unwrap();
        let mut command = connect.command(0);
        command.set_sgl(SglDescriptor::in_capsule(0, 1024));
        link.command(&command, data.as_bytes());
        link
    }

    /// An Admin queue, of an enabled controller.
    fn enabled(&self, how: u8) -> Link {
        let admin = self.connect(0, CNTLID_DYNAMIC, how & 32 | 7);
        let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        let mut enable = Property::set(1, regs::CC as u32, cc.into_bits());
        enable.set_sgl(SglDescriptor::transport(0));
        admin.command(&enable, &[]);
        admin
    }
}

fn names() -> Names {
    Names {
        host: "nqn.2014-08.org.vnvme:h".into(),
        subsystem: NQN.into(),
    }
}

fn random() -> Random {
    Random {
        challenge: [7; 64],
        exponent: [7; 56],
        sequence: 7,
        transaction: 0,
    }
}

struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let (bytes, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        bytes.to_vec()
    }

    /// Mostly small.
    fn word(&mut self) -> u32 {
        match self.byte() {
            0xff => {
                let bytes = self.bytes(4);
                bytes
                    .iter()
                    .fold(0, |word, byte| word << 8 | u32::from(*byte))
            }
            byte => byte.into(),
        }
    }

    fn command(&mut self, link: &Link) {
        let opcode = self.byte();
        let opcode = match opcode {
            16.. => opcode,
            known => OPCODES[usize::from(known)],
        };
        let mut command = Command::new(opcode, u16::from(self.byte()), self.word());
        command.cdw10 = self.word().into();
        command.cdw11 = self.word().into();
        command.cdw12 = self.word().into();
        let (kind, len) = (self.byte(), self.word().wrapping_mul(32));
        let mut data = Vec::new();
        match kind & 3 {
            0 => {
                command.set_sgl(SglDescriptor::in_capsule(0, len));
                data = vec![kind; len.min(2048) as usize];
            }
            1 | 2 => command.set_sgl(SglDescriptor::transport(len)),
            _ => command.set_sgl(SglDescriptor::data_block(0x100_0000_0000, len)),
        }
        link.command(&command, &data);
    }

    /// Sends an authentication message of a host, or the request for one.
    fn message(&mut self, link: &Link) {
        let (kind, len) = (self.byte(), self.byte());
        let mut message = match kind & 3 {
            0 => {
                let room = u32::from(len) * 32;
                let mut command = Authentication::nvme(room).receive(3);
                command.set_sgl(SglDescriptor::transport(room));
                return link.command(&command, &[]);
            }
            1 => dhchap::Host::new(names(), key().secrets, random()).negotiate(),
            _ => self.bytes(len.into()),
        };
        if kind & 4 != 0 {
            // Give the message a valid header, possibly of the expected kind.
            let head = [1, kind >> 3 & 7, 0, 0, 0, 0, 64];
            message
                .iter_mut()
                .zip(head)
                .for_each(|(byte, head)| *byte = head);
        }
        let said = match kind & 128 {
            0 => message.len() as u32,
            _ => self.word(),
        };
        let mut command = Authentication::nvme(said).send(3);
        command.set_sgl(SglDescriptor::in_capsule(0, message.len() as u32));
        link.command(&command, &message);
    }

    fn data(&mut self, link: &Link) {
        let (cid, tag) = (self.byte().into(), self.byte().into());
        let (at, len) = (self.word().wrapping_mul(32), self.word().wrapping_mul(32));
        let header = link.writer.h2c_data(cid, tag, at, len, cid & 128 == 0);
        let mut pdu = header.to_vec();
        link.with_data(&mut pdu, &vec![7; len.min(8192) as usize]);
    }
}

/// Runs a script. The first byte of the input chooses the digests, whether the first host uses
/// discovery, and whether hosts must authenticate.
pub fn fabrics_target(input: &[u8]) {
    let Some((&how, script)) = input.split_first() else {
        return;
    };
    let host = Host {
        header_digest: how & 1 != 0,
        data_digest: how & 2 != 0,
    };
    let proven = how & 64 != 0;
    let mut bench = Bench::new(host, proven);
    let mut script = Script(script);
    let mut links = vec![bench.enabled(how)];
    bench.turns(20);
    if how & 4 != 0 {
        links.push(bench.connect(1, 1, how & 16 | 7));
        bench.turns(20);
    }
    while !script.0.is_empty() {
        let step = script.byte();
        let at = usize::from(step >> 3) % links.len();
        match step & 7 {
            0 => {
                let count = script.byte().into();
                links[at].send(&script.bytes(count));
            }
            1 => script.command(&links[at]),
            2 => script.data(&links[at]),
            3 if proven => script.message(&links[at]),
            3 => {
                let offset = PROPERTIES[usize::from(script.byte()) % PROPERTIES.len()];
                let mut set = Property::set(2, offset, script.word());
                set.set_sgl(SglDescriptor::transport(0));
                links[at].command(&set, &[]);
            }
            4 => bench.turns(usize::from(script.byte() & 31)),
            5 if links.len() < 8 => {
                let (qid, cntlid) = (script.byte() & 3, script.byte());
                let cntlid = match cntlid & 7 {
                    0 => CNTLID_DYNAMIC,
                    other => other.into(),
                };
                let link = bench.connect(qid.into(), cntlid, script.byte());
                links.push(link);
            }
            6 => links[at].read(),
            _ => {
                links[at] = bench.open();
            }
        }
    }
    bench.turns(20);
    for mut link in links {
        link.read();
        link.check();
    }
    let gone = (0..MAX_TURNS).any(|_| {
        bench.turns(1);
        bench.target.hosts().is_empty()
    });
    assert!(gone, "{:?}", bench.target.hosts());
    serves_another(&mut bench);
    bench.worker.stop();
    bench.worker.run().unwrap();
}

/// A host that keeps to the rules has its Connect answered.
fn serves_another(bench: &mut Bench) {
    let mut admin = bench.connect(0, CNTLID_DYNAMIC, 7);
    let digest = if bench.host.header_digest { 4 } else { 0 };
    let all = 128 + 8 + size_of::<Completion>() + digest;
    for _ in 0..MAX_TURNS {
        bench.turns(1);
        admin.read();
        if admin.said.len() >= all {
            break;
        }
    }
    admin.check();
    assert_eq!(admin.said.len(), all);
    let status = &admin.said[128 + 8 + 14..][..2];
    assert_eq!(status, [0, 0], "the Connect's status");
}

#[cfg(test)]
mod tests {
    use super::fabrics_target;
    use crate::chance::Chance;

    #[test]
    fn random_scripts_cause_no_panic() {
        let mut chance = Chance::new();
        for _ in 0..400 {
            fabrics_target(&chance.script(300, |first| *first |= 4));
        }
    }
}
