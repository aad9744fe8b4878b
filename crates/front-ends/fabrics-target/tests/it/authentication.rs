//! Hosts that have to authenticate: this project's initiator, and hosts that cheat.

use crate::worker_common;

use crate::common::{BOUND, HOST_NQN, NQN, Other, Queue, Served, Setup};
use dhchap::{AuthFailure, Host, Names, Random, Secret, Secrets};
use fabrics::{FabricsOptions, FabricsVolume, HostIdentity, Subsystem};
use fabrics_target::{HostKey, TargetLimits};
use nvme::fabrics::{Authentication, CNTLID_DYNAMIC, Connected, Property, status};
use nvme::regs;
use nvme::sgl::SglDescriptor;
use nvme::{AdminOpcode, Command, Completion, Status};
use nvme_tcp::CommandInfo;
use std::time::{Duration, Instant};
use volume::Volume;
use worker_common::Worker;

const HOST: &str = "DHHC-1:01:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
const OTHER: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
const SUBSYSTEM: &str =
    "DHHC-1:02:ZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXp7fH1+f4CBgoOEhYaHiImKi4yNjo+QkZKTvGwQfg==:";

fn secrets(host: &str, controller: Option<&str>) -> Secrets {
    Secrets {
        host: Secret::parse(host).unwrap(),
        controller: controller.map(|text| Secret::parse(text).unwrap()),
    }
}

fn served(handshake: Duration) -> Served {
    let key = HostKey {
        nqn: HOST_NQN.into(),
        secrets: secrets(HOST, Some(SUBSYSTEM)),
    };
    Served::new(Setup {
        keys: vec![key],
        limits: TargetLimits {
            handshake,
            ..TargetLimits::default()
        },
        ..Setup::memory(1 << 20)
    })
}

fn long() -> Served {
    served(Duration::from_secs(60))
}

fn open(served: &Served, host: &str, secrets: Option<Secrets>) -> Result<FabricsVolume, String> {
    let name = format!("{}/{NQN}/1", served.address);
    let options = FabricsOptions {
        identity: HostIdentity::named(host).unwrap(),
        secrets,
        queues: 3,
        ..FabricsOptions::new()
    };
    let volume = FabricsVolume::open(Subsystem::parse(&name).unwrap(), options);
    volume.map_err(|error| error.to_string())
}

#[test]
fn host_and_controller_authenticate_on_each_queue() {
    let served = long();
    for controller in [None, Some(SUBSYSTEM)] {
        let volume = open(&served, HOST_NQN, Some(secrets(HOST, controller))).unwrap();
        let mut worker = Worker::new(&volume);
        for at in 0..8 {
            worker.write(at * 4096, &[at as u8 + 1; 4096]).unwrap();
            assert_eq!(worker.read(at * 4096, 4096).unwrap(), [at as u8 + 1; 4096]);
        }
        drop(worker);
        drop(volume);
        served.wait_for_hosts(0);
    }
    assert_eq!(served.target.stats().refused.get(), 0);
}

#[test]
fn unauthenticated_host_is_refused_with_reason() {
    let served = long();
    for (host, secrets, why) in [
        (HOST_NQN, None, "dhchap-secret-file"),
        (
            HOST_NQN,
            Some(secrets(OTHER, None)),
            "the controller reports: authentication failed",
        ),
        (
            HOST_NQN,
            Some(secrets(HOST, Some(OTHER))),
            "authentication (DH-HMAC-CHAP): authentication failed",
        ),
        (
            "nqn.2014-08.org.vnvme:unlisted",
            Some(secrets(HOST, None)),
            "does not admit the host nqn.2014-08.org.vnvme:unlisted",
        ),
    ] {
        let said = open(&served, host, secrets).unwrap_err();
        assert!(said.contains(why), "{said}");
        assert!(!said.contains("AQID"), "{said}");
        served.wait_for_hosts(0);
    }
    // A host that requires the target to authenticate, and a target without a secret for that.
    let anybody = Served::new(Setup::memory(1 << 20));
    let said = open(&anybody, HOST_NQN, Some(secrets(HOST, Some(SUBSYSTEM)))).unwrap_err();
    assert!(said.contains("does not authenticate itself"), "{said}");
    open(&anybody, HOST_NQN, Some(secrets(HOST, None))).unwrap();
}

/// Clients that know the name of a host, and not its secret.
#[test]
fn clients_without_the_secret_take_no_place_of_the_host() {
    let key = HostKey {
        nqn: HOST_NQN.into(),
        secrets: secrets(HOST, None),
    };
    let served = Served::new(Setup {
        keys: vec![key],
        limits: TargetLimits {
            // Only displacement makes room.
            handshake: Duration::from_secs(3600),
            associations: 2,
            authenticating: 4,
            ..TargetLimits::default()
        },
        ..Setup::memory(1 << 20)
    });
    let mut cheats: Vec<Queue> = Vec::new();
    let began = Instant::now();
    while cheats.len() < 40 {
        assert!(began.elapsed() < BOUND, "{} were admitted", cheats.len());
        let (queue, entry) = Cheat::connect(&served, 0, CNTLID_DYNAMIC);
        // An association that was displaced ends on its worker.
        match entry.status() {
            Status::SUCCESS => cheats.push(queue),
            busy => assert_eq!(busy, status::CONNECT_CONTROLLER_BUSY),
        }
    }
    let volume = open(&served, HOST_NQN, Some(secrets(HOST, None))).unwrap();
    let mut worker = Worker::new(&volume);
    worker.write(0, &[7; 4096]).unwrap();
    assert_eq!(worker.read(0, 4096).unwrap(), [7; 4096]);
    for queue in cheats.iter_mut().take(36) {
        assert_eq!(queue.ends(), Other::Closed);
    }
    // The host's second place is the last one.
    let second = open(&served, HOST_NQN, Some(secrets(HOST, None))).unwrap();
    let third = open(&served, HOST_NQN, Some(secrets(HOST, None))).unwrap_err();
    assert!(third.contains("Connect Controller Busy"), "{third}");
    drop(second);
}

/// A host that speaks for itself.
struct Cheat {
    queue: Queue,
    cntlid: u16,
}

impl Cheat {
    fn connect(served: &Served, qid: u16, cntlid: u16) -> (Queue, Completion) {
        let mut queue = Queue::open(served.address, nvme_tcp::Host::default());
        let entry = queue.connect(qid, 32, cntlid, |_, _| ());
        (queue, entry)
    }

    fn new(served: &Served) -> Self {
        let (queue, entry) = Self::connect(served, 0, CNTLID_DYNAMIC);
        assert_eq!(entry.status(), Status::SUCCESS);
        let connected = Connected::from_bits(entry.dw0.get());
        assert!(connected.atr() && !connected.ascr());
        Self {
            queue,
            cntlid: connected.cntlid(),
        }
    }

    fn say(&mut self, message: &[u8]) -> Status {
        send(&mut self.queue, message, message.len() as u32)
    }

    fn ask(&mut self) -> (Status, Vec<u8>) {
        ask(&mut self.queue, 4096)
    }

    /// Authenticates the host.
    fn prove(queue: &mut Queue) -> Result<(), AuthFailure> {
        let mut host = host(HOST);
        assert_eq!(send(queue, &host.negotiate(), 72), Status::SUCCESS);
        let reply = host.reply(&ask(queue, 4096).1)?;
        assert_eq!(send(queue, &reply, reply.len() as u32), Status::SUCCESS);
        host.conclude(&ask(queue, 4096).1).map(drop)
    }
}

fn host(secret: &str) -> Host {
    let names = Names {
        host: HOST_NQN.into(),
        subsystem: NQN.into(),
    };
    Host::new(names, secrets(secret, None), Random::new().unwrap())
}

fn send(queue: &mut Queue, message: &[u8], said: u32) -> Status {
    let mut command = Authentication::nvme(said).send(0);
    command.set_sgl(SglDescriptor::in_capsule(0, message.len() as u32));
    let cid = queue.send(command, CommandInfo::default(), message);
    queue.wait(cid).unwrap().0.status()
}

fn ask(queue: &mut Queue, room: u32) -> (Status, Vec<u8>) {
    let (status, _, message) = queue.execute(Authentication::nvme(room).receive(0), room);
    (status, message)
}

fn dnr(status: Status) -> Status {
    status.with_dnr(true)
}

#[test]
fn commands_before_authentication_are_refused() {
    let served = long();
    let mut cheat = Cheat::new(&served);
    let required = dnr(status::AUTHENTICATION_REQUIRED);
    for command in [
        Property::get(0, regs::CAP as u32, true),
        Property::set(0, regs::CC as u32, 0x0046_0001),
        Command::new(AdminOpcode::KEEP_ALIVE.0, 0, 0),
        Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0),
    ] {
        assert_eq!(cheat.queue.execute(command, 0).0, required, "{command:?}");
    }
    let mut identify = Command::new(AdminOpcode::IDENTIFY.0, 0, 0);
    identify.cdw10 = 1.into();
    assert_eq!(cheat.queue.execute(identify, 4096).0, required);
    // No I/O queue can be had.
    let (_, entry) = Cheat::connect(&served, 1, cheat.cntlid);
    assert_eq!(entry.status(), dnr(Status::COMMAND_SEQUENCE_ERROR));
    // It is not over.
    Cheat::prove(&mut cheat.queue).unwrap();
    let get = Property::get(0, regs::CSTS as u32, false);
    assert_eq!(cheat.queue.execute(get, 0).0, Status::SUCCESS);
    // Once is enough.
    let again = send(&mut cheat.queue, &host(HOST).negotiate(), 72);
    assert!(!again.is_success(), "{again}");
    assert_eq!(cheat.queue.execute(get, 0).0, Status::SUCCESS);
}

#[test]
fn each_io_queue_needs_own_authentication() {
    let served = long();
    let mut cheat = Cheat::new(&served);
    Cheat::prove(&mut cheat.queue).unwrap();
    let set = Property::set(0, regs::CC as u32, 0x0046_0001);
    assert_eq!(cheat.queue.execute(set, 0).0, Status::SUCCESS);
    let (mut queue, entry) = Cheat::connect(&served, 1, cheat.cntlid);
    assert_eq!(entry.status(), Status::SUCCESS);
    assert!(Connected::from_bits(entry.dw0.get()).atr());
    let read = crate::common::transfer(nvme::NvmOpcode::READ, 0, 8);
    let required = dnr(status::AUTHENTICATION_REQUIRED);
    assert_eq!(queue.execute(read, 4096).0, required);
    let mut write = crate::common::transfer(nvme::NvmOpcode::WRITE, 0, 8);
    write.set_sgl(SglDescriptor::in_capsule(0, 4096));
    let cid = queue.send(write, CommandInfo::default(), &[7; 4096]);
    assert_eq!(queue.wait(cid).unwrap().0.status(), required);
    Cheat::prove(&mut queue).unwrap();
    let (status, _, data) = queue.execute(read, 4096);
    assert_eq!((status, data), (Status::SUCCESS, vec![0; 4096]));
}

#[test]
fn malformed_message_ends_authentication() {
    let served = long();
    let good = host(HOST).negotiate();
    let failed = |cheat: &mut Cheat, why: u8| {
        let (status, message) = cheat.ask();
        assert_eq!(status, Status::SUCCESS);
        assert_eq!(message[..2], [0, 0xf1]);
        assert_eq!(message[6..8], [1, why]);
        // There is no second attempt.
        let required = dnr(status::AUTHENTICATION_REQUIRED);
        assert_eq!(cheat.say(&host(HOST).negotiate()), required);
        assert_eq!(cheat.ask().0, required);
    };
    // Cut off, out of turn, another protocol; nothing asked for.
    for (message, why) in [
        (&good[..5], 6),
        (&good[..71], 6),
        (&[0; 1][..], 6),
        (&[1, 2, 0, 0, 0, 0, 0, 0][..], 7),
        (&[0xff; 4096][..], 7),
    ] {
        let mut cheat = Cheat::new(&served);
        assert_eq!(cheat.say(message), Status::SUCCESS);
        failed(&mut cheat, why);
    }
    let mut early = Cheat::new(&served);
    failed(&mut early, 7);
    // Lengths that differ, or are too large, are errors of the command: nothing is lost by them.
    let mut cheat = Cheat::new(&served);
    let wrong = dnr(Status::INVALID_FIELD);
    assert_eq!(send(&mut cheat.queue, &good, 71), wrong);
    assert_eq!(send(&mut cheat.queue, &good, u32::MAX), wrong);
    assert_eq!(send(&mut cheat.queue, &[0; 8192], 8192), wrong);
    let (status, _) = ask(&mut cheat.queue, 15);
    assert_eq!(status, wrong);
    let (status, _) = ask(&mut cheat.queue, 8192);
    assert_eq!(status, wrong);
    let mut other = Authentication::nvme(72);
    other.secp = 0xea;
    let mut command = other.send(0);
    command.set_sgl(SglDescriptor::in_capsule(0, 72));
    let cid = cheat.queue.send(command, CommandInfo::default(), &good);
    assert_eq!(cheat.queue.wait(cid).unwrap().0.status(), wrong);
    Cheat::prove(&mut cheat.queue).unwrap();
}

/// A reply that another association has taken is of no use.
#[test]
fn reply_of_other_association_is_rejected() {
    let served = long();
    let (mut one, mut other) = (Cheat::new(&served), Cheat::new(&served));
    let mut host = host(HOST);
    assert_eq!(one.say(&host.negotiate()), Status::SUCCESS);
    assert_eq!(other.say(&host.negotiate()), Status::SUCCESS);
    let reply = host.reply(&one.ask().1).unwrap();
    other.ask();
    assert_eq!(other.say(&reply), Status::SUCCESS);
    assert_eq!(other.ask().1[..2], [0, 0xf1]);
    assert_eq!(one.say(&reply), Status::SUCCESS);
    assert_eq!(one.ask().1[..2], [1, 3]);
    assert_eq!(served.target.stats().refused.get(), 1);
}

#[test]
fn slow_authentication_times_out() {
    let served = served(Duration::from_millis(300));
    let mut cheat = Cheat::new(&served);
    assert_eq!(cheat.queue.ends(), crate::common::Other::Closed);
    served.wait_for_hosts(0);
    // Of an I/O queue only that ends. Proving takes time itself.
    let served = self::served(Duration::from_secs(4));
    let mut cheat = Cheat::new(&served);
    Cheat::prove(&mut cheat.queue).unwrap();
    let set = Property::set(0, regs::CC as u32, 0x0046_0001);
    assert_eq!(cheat.queue.execute(set, 0).0, Status::SUCCESS);
    let (mut queue, _) = Cheat::connect(&served, 1, cheat.cntlid);
    assert_eq!(queue.ends(), crate::common::Other::Closed);
    let get = Property::get(0, regs::CSTS as u32, false);
    assert_eq!(cheat.queue.execute(get, 0).0, Status::SUCCESS);
}

/// Arithmetic of one host is done elsewhere: others are served meanwhile, and a host may go away.
#[test]
fn host_lost_during_authentication_leaves_nothing() {
    let served = long();
    for _ in 0..20 {
        let mut cheat = Cheat::new(&served);
        cheat.say(&host(HOST).negotiate());
        let mut receive = Authentication::nvme(4096).receive(0);
        receive.set_sgl(SglDescriptor::transport(4096));
        cheat.queue.send(receive, CommandInfo::default(), &[]);
    }
    served.wait_for_hosts(0);
    let volume = open(&served, HOST_NQN, Some(secrets(HOST, None))).unwrap();
    assert_eq!(volume.info().size, 1 << 20);
}
