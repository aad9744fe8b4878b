//! A host that keeps to the rules, and one that breaks each of them, against a subsystem of this
//! process.

mod limits;

use crate::common::{BOUND, Client, HOST_NQN, Other, Queue, Served, Setup, namespace, transfer};
use fabrics_target::TargetLimits;
use nvme::cmd::admin::{Cns, GetLogPage, IdentifyCdw10, SetFeaturesCdw10};
use nvme::fabrics::{self, CNTLID_DYNAMIC, DISCOVERY_NQN, Property, SQHD_NO_FLOW_CONTROL};
use nvme::feature::{AsyncEventConfig, Fid, NumberOfQueues};
use nvme::identify::{IdentifyController, IdentifyNamespace, Nqn};
use nvme::log::Lid;
use nvme::log::discovery::{DiscoveryHeader, DiscoveryRecord, SubsystemType};
use nvme::log::{AnaState, ana_groups};
use nvme::regs::{self, Cap, Cc, Shn, Shst};
use nvme::sgl::SglDescriptor;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use nvme_tcp::pdu::fes;
use nvme_tcp::{CommandInfo, Host, digest};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{MemVolume, NullOptions, NullVolume};
use zerocopy::FromBytes;

const DIGESTS: [Host; 4] = [
    host(false, false),
    host(true, false),
    host(false, true),
    host(true, true),
];

const fn host(header_digest: bool, data_digest: bool) -> Host {
    Host {
        header_digest,
        data_digest,
    }
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(7) ^ (i >> 8) as u8 ^ seed)
        .collect()
}

/// Writes by the way that the length asks for, and says how that ended.
fn write(queue: &mut Queue, slba: u64, data: &[u8]) -> Status {
    let len = data.len() as u32;
    let mut command = transfer(NvmOpcode::WRITE, slba, len / 512);
    if len <= 8192 {
        command.set_sgl(SglDescriptor::in_capsule(0, len));
        let cid = queue.send(command, CommandInfo::default(), data);
        return queue.wait(cid).unwrap().0.status();
    }
    command.set_sgl(SglDescriptor::transport(len));
    let asked = CommandInfo {
        data_out: len,
        ..CommandInfo::default()
    };
    let cid = queue.send(command, asked, &[]);
    let (of, tag, at, asked_for) = queue.wait_transfer().unwrap();
    assert_eq!((of, at, asked_for), (cid, 0, len));
    // In pieces.
    let pieces: Vec<&[u8]> = data.chunks(20_000).collect();
    let mut at = 0;
    for (number, piece) in pieces.iter().enumerate() {
        queue.send_data(cid, tag, at, piece, number + 1 == pieces.len());
        at += piece.len() as u32;
    }
    queue.wait(cid).unwrap().0.status()
}

fn read(queue: &mut Queue, slba: u64, len: u32) -> Vec<u8> {
    let (status, _, data) = queue.execute(transfer(NvmOpcode::READ, slba, len / 512), len);
    assert_eq!(status, Status::SUCCESS);
    data
}

#[test]
fn written_data_is_read_back() {
    for host in DIGESTS {
        let served = Served::new(Setup::memory(8 << 20));
        let client = Client::new(served.address, host);
        let mut queue = client.queue(1, 32);
        for (slba, len) in [
            (0, 512),
            (8, 4096),
            (100, 8192),
            (200, 8704),
            (4096, 1 << 20),
        ] {
            let data = pattern(len as u8, len);
            assert_eq!(write(&mut queue, slba, &data), Status::SUCCESS);
            assert_eq!(
                read(&mut queue, slba, len as u32),
                data,
                "{slba} {len} {host:?}"
            );
        }
        let flush = Command::new(NvmOpcode::FLUSH.0, 0, 1);
        assert_eq!(queue.execute(flush, 0).0, Status::SUCCESS);
        drop(queue);
        drop(client);
        served.wait_for_hosts(0);
    }
}

fn identify(admin: &mut Queue, cns: Cns, nsid: u32) -> Vec<u8> {
    let mut command = Command::new(AdminOpcode::IDENTIFY.0, 0, nsid);
    command.cdw10 = IdentifyCdw10::new().with_cns(cns).into_bits().into();
    let (status, _, page) = admin.execute(command, 4096);
    assert_eq!(status, Status::SUCCESS);
    page
}

fn log(admin: &mut Queue, lid: Lid, lpo: u64, len: u32) -> (Status, Vec<u8>) {
    let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 0xffff_ffff);
    let log = GetLogPage {
        lid,
        lpo,
        numd_z: len / 4 - 1,
        ..GetLogPage::default()
    };
    log.apply(&mut command);
    let (status, _, page) = admin.execute(command, len);
    (status, page)
}

#[test]
fn controller_reports_fabrics_capabilities() {
    let mut setup = Setup::memory(1 << 20);
    setup
        .namespaces
        .push(namespace(5, Arc::new(MemVolume::new(2 << 20).unwrap())));
    let served = Served::new(setup);
    let mut client = Client::disabled(served.address, Host::default());
    let cap = |client: &mut Client| {
        let (status, cap, _) = client.admin.execute(Property::get(0, 0, true), 0);
        assert_eq!(status, Status::SUCCESS);
        Cap::from_bits(cap)
    };
    assert_eq!(cap(&mut client).mqes_z(), 127);
    // Nothing but fabrics commands before it is enabled.
    let early = Command::new(AdminOpcode::IDENTIFY.0, 0, 0);
    let status = client.admin.execute(early, 4096).0;
    assert!(status.is(Status::COMMAND_SEQUENCE_ERROR), "{status}");
    client.enable();
    let admin = &mut client.admin;
    let id = IdentifyController::read_from_bytes(&identify(admin, Cns::CONTROLLER, 0)).unwrap();
    assert_eq!(id.cntlid.get(), client.cntlid);
    assert_eq!(id.subnqn.as_str(), Some(crate::common::NQN));
    assert_eq!(
        (id.ioccsz.get(), id.iorcsz.get(), id.icdoff.get()),
        (4 + 512, 1, 0)
    );
    assert!(id.sgls.ofs() && id.sgls.tsdbd() && id.sgls.sgls() == 1);
    assert!(id.cmic.anars() && id.cmic.mctrs() && id.kas.get() > 0 && id.maxcmd.get() == 128);
    assert!(id.oaes.anacn() && id.oaes.nsan() && id.nanagrpid.get() == 1);
    let ns = IdentifyNamespace::read_from_bytes(&identify(admin, Cns::NAMESPACE, 5)).unwrap();
    assert_eq!((ns.nsze.get(), ns.anagrpid.get()), (4096, 1));
    assert!(ns.nmic.shrns());
    let (status, page) = log(admin, Lid::ANA, 0, 4096);
    assert_eq!(status, Status::SUCCESS);
    let groups: Vec<_> = ana_groups(&page).collect();
    let nsids: Vec<u32> = groups[0].1.iter().map(|nsid| nsid.get()).collect();
    assert_eq!((groups.len(), nsids), (1, vec![1, 5]));
    assert_eq!(groups[0].0.state.anas(), AnaState::OPTIMIZED);
    // Long pages come by a list of their memory's pages.
    let (status, page) = log(admin, Lid::COMMANDS_SUPPORTED, 0, 16384);
    assert_eq!((status, page.len()), (Status::SUCCESS, 16384));
    let mut set = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    set.cdw10 = SetFeaturesCdw10::new()
        .with_fid(Fid::NUMBER_OF_QUEUES)
        .into_bits()
        .into();
    set.cdw11 = NumberOfQueues::new()
        .with_nsq_z(99)
        .with_ncq_z(99)
        .into_bits()
        .into();
    let (status, got, _) = admin.execute(set, 0);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(NumberOfQueues::from_bits(got as u32).nsq_z(), 15);
    // What only a bus has.
    for opcode in [
        AdminOpcode::CREATE_IO_SQ,
        AdminOpcode::CREATE_IO_CQ,
        AdminOpcode::DELETE_IO_SQ,
        AdminOpcode::DELETE_IO_CQ,
        AdminOpcode::DOORBELL_BUFFER_CONFIG,
    ] {
        let status = admin.execute(Command::new(opcode.0, 0, 0), 0).0;
        assert!(status.is(Status::INVALID_OPCODE), "{opcode} {status}");
    }
    for (offset, wide) in [(0u32, false), (0x14, true), (0x24, false), (0x1000, false)] {
        let status = admin.execute(Property::get(0, offset, wide), 0).0;
        assert!(status.is(Status::INVALID_FIELD), "{offset:#x}");
    }
    for offset in [0x20u32, 0x24, 0x1000] {
        let status = admin.execute(Property::set(0, offset, 1), 0).0;
        assert!(status.is(Status::INVALID_FIELD), "{offset:#x}");
    }
    assert_eq!(client.csts().shst(), Shst::NORMAL);
    let cc = Cc::new()
        .with_en(true)
        .with_iosqes(6)
        .with_iocqes(4)
        .with_shn(Shn::NORMAL);
    client.set_cc(cc);
    let began = Instant::now();
    while client.csts().shst() != Shst::COMPLETE {
        assert!(began.elapsed() < BOUND);
    }
}

#[test]
fn ana_change_sends_event_and_fails_io() {
    let served = Served::new(Setup::memory(1 << 20));
    let mut client = Client::new(served.address, Host::default());
    let mut queue = client.queue(1, 32);
    let admin = &mut client.admin;
    let mut set = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    set.cdw10 = SetFeaturesCdw10::new()
        .with_fid(Fid::ASYNC_EVENT_CONFIG)
        .into_bits()
        .into();
    set.cdw11 = AsyncEventConfig::new()
        .with_anacn(true)
        .with_nan(true)
        .into_bits()
        .into();
    assert_eq!(admin.execute(set, 0).0, Status::SUCCESS);
    let mut request = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
    request.set_sgl(SglDescriptor::transport(0));
    let event = admin.send(request, CommandInfo::default(), &[]);
    assert_eq!(
        admin.wait_within(event, Duration::from_millis(100)),
        Err(Other::Nothing)
    );
    for (state, status) in [
        (AnaState::INACCESSIBLE, Status::ANA_INACCESSIBLE),
        (AnaState::PERSISTENT_LOSS, Status::ANA_PERSISTENT_LOSS),
        (AnaState::CHANGE, Status::ANA_TRANSITION),
    ] {
        served.target.set_ana_state(state);
        let got = queue.execute(transfer(NvmOpcode::READ, 0, 1), 512).0;
        assert_eq!(got, status);
    }
    let (entry, _) = admin.wait(event).unwrap();
    assert_eq!(entry.dw0.get(), 0x000c_0302);
    let (_, page) = log(admin, Lid::ANA, 0, 64);
    assert_eq!(
        ana_groups(&page).next().unwrap().0.state.anas(),
        AnaState::CHANGE
    );
    // The log page was read, so the next event is sent.
    let event = admin.send(request, CommandInfo::default(), &[]);
    served.target.set_ana_state(AnaState::OPTIMIZED);
    assert!(admin.wait(event).is_ok());
    assert_eq!(read(&mut queue, 0, 512), [0; 512]);
}

#[test]
fn discovery_reports_subsystem() {
    let served = Served::new(Setup::memory(1 << 20));
    for host in DIGESTS {
        let mut admin = Queue::open(served.address, host);
        let entry = admin.connect(0, 32, CNTLID_DYNAMIC, |_, data| {
            data.subnqn = Nqn::new(DISCOVERY_NQN).unwrap();
        });
        assert_eq!(entry.status(), Status::SUCCESS);
        let status = admin
            .execute(Command::new(AdminOpcode::IDENTIFY.0, 0, 0), 4096)
            .0;
        assert!(status.is(Status::COMMAND_SEQUENCE_ERROR));
        let cc = Cc::new().with_en(true).into_bits();
        assert_eq!(
            admin.execute(Property::set(0, regs::CC as u32, cc), 0).0,
            Status::SUCCESS
        );
        let id = identify(&mut admin, Cns::CONTROLLER, 0);
        let id = IdentifyController::read_from_bytes(&id).unwrap();
        assert_eq!(id.cntrltype.0, 2);
        let (_, page) = log(&mut admin, Lid::DISCOVERY, 0, 4096);
        let (header, rest) = DiscoveryHeader::read_from_prefix(&page).unwrap();
        assert_eq!((header.genctr.get(), header.numrec.get()), (1, 1));
        let record = DiscoveryRecord::read_from_prefix(rest).unwrap().0;
        assert_eq!(record.subtype, SubsystemType::NVM);
        assert_eq!(record.subnqn.as_str(), Some(crate::common::NQN));
        assert_eq!(record.traddr.as_str(), Some("127.0.0.1"));
        let port = served.address.port().to_string();
        assert_eq!(record.trsvcid.as_str(), Some(port.as_str()));
        // Its end, and beyond.
        assert_eq!(
            log(&mut admin, Lid::DISCOVERY, 1024, 1024).1,
            page[1024..2048]
        );
        let beyond = log(&mut admin, Lid::DISCOVERY, 4096, 1024).0;
        assert!(beyond.is(Status::INVALID_FIELD));
        assert!(
            log(&mut admin, Lid::SMART, 0, 512)
                .0
                .is(Status::INVALID_LOG_PAGE)
        );
        assert_eq!(
            admin
                .execute(Command::new(AdminOpcode::KEEP_ALIVE.0, 0, 0), 0)
                .0,
            Status::SUCCESS
        );
        let unknown = Command::new(AdminOpcode::ABORT.0, 0, 0);
        assert!(admin.execute(unknown, 0).0.is(Status::INVALID_OPCODE));
    }
}

#[test]
fn discovery_hides_subsystem_from_forbidden_host() {
    let mut setup = Setup::memory(1 << 20);
    setup.hosts = vec!["nqn.2014-08.org.vnvme:another".into()];
    let served = Served::new(setup);
    for (hostnqn, records) in [(HOST_NQN, 0), ("nqn.2014-08.org.vnvme:another", 1)] {
        let mut admin = Queue::open(served.address, Host::default());
        let entry = admin.connect(0, 32, CNTLID_DYNAMIC, |_, data| {
            data.subnqn = Nqn::new(DISCOVERY_NQN).unwrap();
            data.hostnqn = Nqn::new(hostnqn).unwrap();
        });
        assert_eq!(entry.status(), Status::SUCCESS);
        let cc = Cc::new().with_en(true).into_bits();
        admin.execute(Property::set(0, regs::CC as u32, cc), 0);
        let (_, page) = log(&mut admin, Lid::DISCOVERY, 0, 4096);
        let header = DiscoveryHeader::read_from_prefix(&page).unwrap().0;
        assert_eq!(header.numrec.get(), records);
        let zeroes = page[size_of::<DiscoveryHeader>()..]
            .iter()
            .all(|byte| *byte == 0);
        assert_eq!(zeroes, records == 0);
    }
}

#[test]
fn invalid_connect_is_refused() {
    let mut setup = Setup::memory(1 << 20);
    setup.hosts = vec![HOST_NQN.into()];
    setup.limits.associations = 1;
    let served = Served::new(setup);
    use fabrics::status::*;
    let refused =
        |qid: u16, cntlid: u16, change: fn(&mut fabrics::Connect, &mut fabrics::ConnectData)| {
            let mut queue = Queue::open(served.address, Host::default());
            let entry = queue.connect(qid, 32, cntlid, change);
            // A host may try a busy controller again.
            let status = entry.status().without_flags();
            assert_eq!(entry.status().dnr(), status != CONNECT_CONTROLLER_BUSY);
            assert_eq!(queue.ends(), Other::Closed);
            (entry.status().without_flags(), entry.dw0.get())
        };
    let wrong =
        |at: u32, in_data: bool| (CONNECT_INVALID_PARAMETERS, at | u32::from(in_data) << 16);
    let dynamic = CNTLID_DYNAMIC;
    assert_eq!(
        refused(0, dynamic, |connect, _| connect.recfmt = 1).0,
        CONNECT_INCOMPATIBLE_FORMAT
    );
    assert_eq!(
        refused(0, dynamic, |_, data| data.subnqn =
            Nqn::new("nqn.x").unwrap()),
        wrong(256, true)
    );
    assert_eq!(
        refused(0, dynamic, |_, data| data.hostnqn =
            Nqn::new("nqn.x").unwrap())
        .0,
        CONNECT_INVALID_HOST
    );
    assert_eq!(
        refused(0, dynamic, |_, data| data.hostnqn = Nqn([0xff; 256])),
        wrong(512, true)
    );
    assert_eq!(refused(0, 1, |_, _| ()), wrong(16, true));
    assert_eq!(
        refused(0, dynamic, |connect, _| connect.sqsize_z = 0),
        wrong(44, false)
    );
    assert_eq!(refused(1, 1, |_, _| ()), wrong(16, true));
    let client = Client::new(served.address, Host::default());
    let cntlid = client.cntlid;
    assert_eq!(refused(0, dynamic, |_, _| ()).0, CONNECT_CONTROLLER_BUSY);
    assert_eq!(
        refused(1, cntlid, |_, data| data.hostid = [1; 16]).0,
        CONNECT_INVALID_HOST
    );
    assert_eq!(refused(17, cntlid, |_, _| ()), wrong(42, false));
    assert_eq!(
        refused(1, cntlid, |connect, _| connect.sqsize_z = 128),
        wrong(44, false)
    );
    assert_eq!(
        refused(1, cntlid, |connect, _| connect.sqsize_z = 0),
        wrong(44, false)
    );
    let queue = client.queue(1, 128);
    assert_eq!(refused(1, cntlid, |_, _| ()), wrong(42, false));
    // Each refusal counts once, and so do the client's association and its two queues.
    let stats = served.target.stats();
    let counts = || [&stats.associations, &stats.connections, &stats.refused].map(|one| one.get());
    let began = Instant::now();
    while counts() != [1, 2, 13] {
        assert!(began.elapsed() < BOUND, "{:?}", counts());
        std::thread::yield_now();
    }
    // A closed connection makes room.
    drop(queue);
    let began = Instant::now();
    loop {
        let mut queue = Queue::open(served.address, Host::default());
        if queue
            .connect(1, 32, cntlid, |_, _| ())
            .status()
            .is_success()
        {
            break;
        }
        assert!(began.elapsed() < BOUND);
    }
    drop(client);
    served.wait_for_hosts(0);
    drop(Client::new(served.address, Host::default()));
}

#[test]
fn flow_control_follows_connect() {
    let served = Served::new(Setup::memory(1 << 20));
    let client = Client::new(served.address, Host::default());
    for wanted in [false, true] {
        let mut queue = Queue::open(served.address, Host::default());
        let qid = 1 + u16::from(wanted);
        let entry = queue.connect(qid, 4, client.cntlid, |connect, _| {
            connect.cattr.set_dsqfc(!wanted);
        });
        assert_eq!(entry.sqhd.get() == SQHD_NO_FLOW_CONTROL, !wanted);
        let mut heads = Vec::new();
        for _ in 0..6 {
            let mut command = transfer(NvmOpcode::READ, 0, 1);
            command.set_sgl(SglDescriptor::transport(512));
            let asked = CommandInfo {
                data_in: 512,
                whole: true,
                data_out: 0,
            };
            let cid = queue.send(command, asked, &[]);
            heads.push(queue.wait(cid).unwrap().0.sqhd.get());
        }
        let expected = if wanted { [1, 2, 3, 0, 1, 2] } else { [0; 6] };
        assert_eq!(heads, expected);
    }
}

#[test]
fn commands_with_mismatched_data_are_refused_alone() {
    let served = Served::new(Setup::memory(1 << 20));
    let client = Client::new(served.address, Host::default());
    let mut queue = client.queue(1, 32);
    let mut status = |mut command: Command, sgl: SglDescriptor, data: &[u8], data_in: u32| {
        command.set_sgl(sgl);
        let asked = CommandInfo {
            data_in,
            ..CommandInfo::default()
        };
        let cid = queue.send(command, asked, data);
        let status = queue.wait(cid).unwrap().0.status();
        assert!(status.dnr(), "{status}");
        status.without_flags()
    };
    let read = transfer(NvmOpcode::READ, 0, 2);
    let write = transfer(NvmOpcode::WRITE, 0, 2);
    let (inside, outside) = (SglDescriptor::in_capsule, SglDescriptor::transport);
    let wrong_length = Status::DATA_SGL_LENGTH_INVALID;
    assert_eq!(status(read, outside(512), &[], 512), wrong_length);
    assert_eq!(status(read, outside(2048), &[], 2048), wrong_length);
    assert_eq!(status(read, outside(0), &[], 0), wrong_length);
    assert_eq!(status(read, inside(0, 1024), &[], 1024), wrong_length);
    assert_eq!(status(read, outside(1024), &[1; 512], 1024), wrong_length);
    assert_eq!(status(write, inside(0, 1024), &[1; 512], 0), wrong_length);
    assert_eq!(status(write, inside(0, 512), &[1; 512], 0), wrong_length);
    assert_eq!(status(write, inside(0, 1024), &[], 0), wrong_length);
    assert_eq!(status(write, outside(1024), &[1; 1024], 0), wrong_length);
    assert_eq!(
        status(write, inside(16, 1024), &[1; 1024], 0),
        Status::SGL_OFFSET_INVALID
    );
    let other = SglDescriptor::data_block(0, 1024);
    assert_eq!(
        status(write, other, &[1; 1024], 0),
        Status::SGL_DESCRIPTOR_TYPE_INVALID
    );
    assert_eq!(
        status(write, outside(2 << 20), &[], 0),
        Status::INVALID_FIELD
    );
    let flush = Command::new(NvmOpcode::FLUSH.0, 0, 1);
    assert_eq!(status(flush, outside(0), &[1; 16], 0), wrong_length);
    // Without an SGL.
    let mut bare = read;
    bare.set_prps(0x1000, 0);
    let cid = queue.send(bare, CommandInfo::default(), &[]);
    let got = queue.wait(cid).unwrap().0.status();
    assert!(got.is(Status::INVALID_FIELD));
    // What a controller refuses itself.
    let beyond = queue.execute(transfer(NvmOpcode::READ, 2048, 1), 512).0;
    assert!(beyond.is(Status::LBA_OUT_OF_RANGE), "{beyond}");
    let mut nowhere = transfer(NvmOpcode::READ, 0, 1);
    nowhere.nsid = 7.into();
    assert!(
        queue
            .execute(nowhere, 512)
            .0
            .is(Status::INVALID_NAMESPACE_OR_FORMAT)
    );
    assert!(
        queue
            .execute(Command::new(0x7d, 0, 1), 0)
            .0
            .is(Status::INVALID_OPCODE)
    );
    assert!(
        queue
            .execute(fabrics::disconnect(0), 0)
            .0
            .is(Status::INVALID_OPCODE)
    );
    assert_eq!(self::read(&mut queue, 0, 512), [0; 512]);
}
