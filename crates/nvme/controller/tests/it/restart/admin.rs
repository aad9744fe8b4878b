//! Admin commands take effect once and complete once, wherever the process dies.

use crate::common::*;
use controller::ControllerConfig;
use nvme::cmd::admin::CreateQueueCdw10;
use nvme::feature::Fid;
use nvme::log::Lid;
use nvme::pci::command;
use nvme::regs;
use nvme::{AdminOpcode, Command, Completion, NvmOpcode, Status};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use volume::{Effect, Fault, OpKind};
use zerocopy::IntoBytes;

/// What a command must complete with.
enum Expected {
    Success,
    /// Success, with this dword 0.
    Value(u32),
    Status(Status),
    /// An event, at some time.
    Event,
    /// Success, and the bytes behind the page's number are these.
    Data(u64, Vec<u8>),
    /// Success, whether the command was there or not.
    Abort,
}

struct Guest {
    h: Host,
    seed: u64,
    waiting: BTreeMap<u16, Expected>,
    /// Value of the arbitration feature, as the last command submitted leaves it.
    arbitration: u32,
    queues: BTreeMap<u16, bool>,
    aers: usize,
    events: u32,
    /// Pages of data in use, oldest first.
    pages: VecDeque<u64>,
}

impl Guest {
    fn new(seed: u64) -> Guest {
        let config = ControllerConfig {
            io_queues: 6,
            ..ControllerConfig::default()
        };
        let (volume, faults) = faulty(1 << 20);
        faults.add(Fault::always(OpKind::Flush, Effect::Hold));
        let mut h = Host::with(config, vec![ns(1, volume, 512)]);
        h.enable();
        h.create_pair(1, 16);
        Guest {
            h,
            seed,
            waiting: BTreeMap::new(),
            arbitration: 5,
            queues: BTreeMap::new(),
            aers: 0,
            events: 0,
            pages: (0..64).collect(),
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.seed >> 33) % below
    }

    fn submit(&mut self, mut command: Command, expected: Expected) {
        if let Expected::Data(page, _) = expected {
            command.set_prps(DATA + page * 4096, 0);
        }
        let cid = self.h.submit(0, command);
        assert!(self.waiting.insert(cid, expected).is_none());
    }

    fn page(&mut self) -> u64 {
        let page = self.pages.pop_front().unwrap();
        self.pages.push_back(page);
        self.h.write(DATA + page * 4096, &[0xee; 4096]);
        page
    }

    fn act(&mut self) {
        // The host never submits more than have room.
        if self.waiting.len() > 24 {
            return self.reap();
        }
        match self.random(12) {
            0 if self.aers < 4 => {
                self.aers += 1;
                let command = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
                self.submit(command, Expected::Event);
            }
            1 => {
                self.arbitration = self.random(1 << 16) as u32 & 0xff07;
                let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
                command.cdw10 = u32::from(Fid::ARBITRATION.0).into();
                command.cdw11 = self.arbitration.into();
                self.submit(command, Expected::Success);
            }
            2 => {
                let mut command = Command::new(AdminOpcode::GET_FEATURES.0, 0, 0);
                command.cdw10 = u32::from(Fid::ARBITRATION.0).into();
                self.submit(command, Expected::Value(self.arbitration));
            }
            3 => {
                let mut command = Command::new(AdminOpcode::IDENTIFY.0, 0, 0);
                command.cdw10 = 2.into();
                let page = self.page();
                self.submit(command, Expected::Data(page, vec![1, 0, 0, 0, 0, 0, 0, 0]));
            }
            4 => {
                let expected = Expected::Status(Status::INVALID_OPCODE);
                self.submit(Command::new(0xc5, 0, 0), expected);
            }
            5 | 6 => {
                let qid = self.random(4) as u16 + 2;
                self.create_or_delete(qid);
            }
            7 => {
                // A doorbell of a queue that is not there: an event.
                self.events += 1;
                self.h.set32(Host::doorbell(6, false), 1);
            }
            8 => {
                let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 0xffff_ffff);
                command.cdw10 = (u32::from(Lid::ERROR_INFORMATION.0) | 15 << 16).into();
                let page = self.page();
                self.submit(command, Expected::Data(page, vec![]));
            }
            9 => {
                // Held by its volume until it is aborted.
                let cid = self.h.submit(1, Command::new(NvmOpcode::FLUSH.0, 0, 1));
                let mut command = Command::new(AdminOpcode::ABORT.0, 0, 0);
                command.cdw10 = (u32::from(cid) << 16 | 1).into();
                self.submit(command, Expected::Abort);
            }
            _ => {
                self.h.round();
            }
        }
    }

    fn create_or_delete(&mut self, qid: u16) {
        let there = self.queues.entry(qid).or_default();
        *there = !*there;
        let iova = RINGS + u64::from(qid) * RING_STEP;
        if !*there {
            for opcode in [AdminOpcode::DELETE_IO_SQ, AdminOpcode::DELETE_IO_CQ] {
                let mut command = Command::new(opcode.0, 0, 0);
                command.cdw10 = u32::from(qid).into();
                self.submit(command, Expected::Success);
                // The one ends before the other begins.
                self.h.run();
            }
            return;
        }
        self.h.write(iova, &[0; 0x2000]);
        let queue = CreateQueueCdw10::new().with_qid(qid).with_qsize_z(7);
        let kinds = [
            (AdminOpcode::CREATE_IO_CQ, 3 | u32::from(qid) << 16, 0x1000),
            (AdminOpcode::CREATE_IO_SQ, 1 | u32::from(qid) << 16, 0),
        ];
        for (opcode, cdw11, offset) in kinds {
            let mut command = Command::new(opcode.0, 0, 0);
            command.set_prps(iova + offset, 0);
            command.cdw10 = queue.into_bits().into();
            command.cdw11 = cdw11.into();
            self.submit(command, Expected::Success);
        }
    }

    fn reap(&mut self) {
        self.h.run();
        while let Some(completion) = self.h.reap(0) {
            self.completed(&completion);
        }
        // What was held and is aborted; the submission queue is not to fill up.
        self.h.reap_all(1);
    }

    fn completed(&mut self, completion: &Completion) {
        let cid = completion.cid.get();
        let Some(expected) = self.waiting.remove(&cid) else {
            panic!("{cid} completed twice, or never asked for");
        };
        let (status, dw0) = (completion.status(), completion.dw0.get());
        match expected {
            Expected::Success | Expected::Abort => assert_eq!(status, Status::SUCCESS, "{cid}"),
            Expected::Value(value) => assert_eq!((status, dw0), (Status::SUCCESS, value), "{cid}"),
            Expected::Status(wanted) => assert!(status.is(wanted), "{cid}: {status}"),
            Expected::Event => {
                assert_eq!(status, Status::SUCCESS);
                assert!(self.events > 0, "an event of nothing");
                self.aers -= 1;
            }
            Expected::Data(page, bytes) => {
                assert_eq!(status, Status::SUCCESS, "{cid}");
                let found = self.h.read(DATA + page * 4096, bytes.len().max(1));
                assert_eq!(found[..bytes.len()], bytes);
            }
        }
    }

    /// Everything but requests for events completes.
    fn finish(&mut self) {
        self.reap();
        self.reap();
        let all = self.waiting.values();
        let lost = all.filter(|expected| !matches!(expected, Expected::Event));
        assert_eq!(lost.count(), 0, "lost");
        assert_eq!(self.waiting.len(), self.aers);
        // Requests are parked still: each is answered once.
        for _ in 0..self.aers {
            self.h.set32(Host::doorbell(6, false), 1);
            self.events += 1;
            let (status, _) = self.log_read();
            assert_eq!(status, Status::SUCCESS);
        }
    }

    /// Reads the error log, which lets the next event through.
    fn log_read(&mut self) -> (Status, Vec<u8>) {
        let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 0xffff_ffff);
        command.cdw10 = (u32::from(Lid::ERROR_INFORMATION.0) | 15 << 16).into();
        let page = self.page();
        self.submit(command, Expected::Data(page, vec![]));
        self.reap();
        (Status::SUCCESS, self.h.read(DATA + page * 4096, 64))
    }
}

const POINTS: [&str; 8] = [
    "controller.admin.fetched",
    "controller.admin.posted",
    "controller.commit.after",
    "controller.commit.before",
    "controller.post.posted",
    "state-memory.control.head",
    "state-memory.control.published",
    "state-memory.control.written",
];

#[test]
fn admin_commands_complete_once_with_death_at_every_point() {
    for name in POINTS {
        let (mut deaths, mut seed) = (0, 0);
        while deaths < 20 {
            seed += 1;
            assert!(seed < 500, "{name}: {deaths} deaths");
            println!("{name}: seed {seed}");
            crash::disarm();
            let mut guest = Guest::new(seed);
            for _ in 0..200 {
                if guest.random(8) == 0 {
                    crash::arm(name, guest.random(12) + 1);
                }
                if guest.random(40) == 0 {
                    guest.h.die();
                }
                if guest.random(20) == 0 {
                    guest.reap();
                }
                guest.act();
            }
            guest.finish();
            deaths += guest.h.crashes.get(name).unwrap_or(&0);
        }
        crash::disarm();
    }
}

#[test]
fn smart_counters_never_decrease() {
    let mut h = Host::ready();
    let mut before = (0, 0);
    for round in 0..20_u64 {
        for n in 0..5 {
            let read = h.rw(NvmOpcode::READ, 1, n * 8, 8, DATA);
            assert_eq!(h.io(read), Status::SUCCESS);
        }
        let (status, page) = h.log(Lid::SMART.0, 512, 0, true);
        assert_eq!(status, Status::SUCCESS);
        let number = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().unwrap());
        // Host Read Commands, Power Cycles.
        let now = (number(64), number(112));
        assert!(now.0 >= before.0 + 5 || round == 0, "{before:?} {now:?}");
        assert_eq!(now.1, 1);
        before = now;
        h.die();
    }
}

/// Nothing but I/O for a while: what it did is committed all the same, once a second.
#[test]
fn counters_survive_process() {
    let mut h = Host::ready();
    for n in 0..5 {
        let read = h.rw(NvmOpcode::READ, 1, n * 8, 8, DATA);
        assert_eq!(h.io(read), Status::SUCCESS);
    }
    h.now += Duration::from_secs(1);
    h.round();
    h.die();
    assert_eq!(h.c.stats().host_reads(), 5);
    assert_eq!(h.c.stats().bytes_read(), 5 * 4096);
}

/// Linux clears the memory of a completion queue only when the commands have completed that create
/// it and its submission queue: a process that ends before finds completions of an earlier queue.
#[test]
fn stale_completions_are_not_taken_for_new_queue() {
    let mut h = Host::ready();
    let (sq, cq) = (RINGS + 0x8000, RINGS + 0x9000);
    let earlier = Completion {
        sqhd: 2.into(),
        sqid: 2.into(),
        cid: 7.into(),
        status_phase: Completion::pack_status(Status::SUCCESS, true),
        ..Completion::default()
    };
    for place in 0..2 {
        h.write(cq + place * 16, earlier.as_bytes());
    }
    h.create_cq_in(sq);
    h.die();
    h.write(cq, &[0; 16 * 16]);
    h.pairs.insert(2, Pair::new(sq, cq, 16));
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, PAGE);
    assert_eq!(h.command(2, read).status(), Status::SUCCESS);
}

/// The same of a queue that was created without Bus Master Enable: its memory is cleared by the
/// process that may reach it, though another one made the queue.
#[test]
fn queue_created_without_bus_master_is_cleared_by_later_process() {
    let mut h = Host::with(ControllerConfig::default(), vec![ns(1, mem(1 << 20), 512)]);
    let earlier = Completion {
        sqhd: 2.into(),
        cid: 7.into(),
        status_phase: Completion::pack_status(Status::SUCCESS, true),
        ..Completion::default()
    };
    for place in 0..2 {
        h.write(ACQ + place * 16, earlier.as_bytes());
    }
    h.set_command(command::MEMORY_SPACE, true);
    h.set32(regs::AQA, 0x001f_001f);
    h.set64(regs::ASQ, ASQ);
    h.set64(regs::ACQ, ACQ);
    h.pairs.insert(0, Pair::new(ASQ, ACQ, 32));
    h.set32(regs::CC, Host::cc_enabled().into_bits());
    assert!(h.csts().rdy());
    assert_eq!(h.read(ACQ, 16), earlier.as_bytes(), "no bus master");
    h.die();
    h.set_command(command::BUS_MASTER, true);
    h.round();
    assert_eq!(h.read(ACQ, 32), [0; 32]);
    h.die();
    let (status, _) = h.identify(1, 0, 0);
    assert_eq!(status, Status::SUCCESS);
}
