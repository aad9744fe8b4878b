//! Two controllers are driven alike, and one of them is restored again and again: their hosts find
//! no difference, in registers, configuration space, rings or data.

use crate::common::*;
use controller::ControllerConfig;
use dma::Prot;
use nvme::cmd::admin::CreateQueueCdw10;
use nvme::feature::Fid;
use nvme::log::Lid;
use nvme::pci::command;
use nvme::regs::{self, Cc, Shn};
use nvme::{AdminOpcode, Command, NvmOpcode};
use proptest::prelude::*;

const PAIRS: u16 = 3;
/// A window that is mapped and unmapped, over the same memory as the low one.
const EXTRA: u64 = 0x50_0000_0000;

#[derive(Clone, Debug)]
enum Action {
    /// An I/O command: queue, opcode, first block, blocks, page of its data.
    Io(u16, u8, u64, u8, u64),
    /// Admin command of which dwords 10 and 11 are chosen.
    Admin(u8, u32, u32, u32),
    Feature(u8, u32, u32),
    Log(u8, bool),
    Reap(u16, u8),
    Pair(u16, u16),
    Delete(u16, bool),
    Shadow,
    Doorbell(u16, bool, u32),
    Register(u64, u32),
    Config(u64, u32),
    Master(bool),
    Window(bool),
    Vector(u16, bool),
    Disable,
    Enable,
    Shutdown,
    Reset,
    Disconnect,
    Die,
}

fn action() -> impl Strategy<Value = Action> {
    let opcode = prop_oneof![
        6 => Just(NvmOpcode::READ.0),
        6 => Just(NvmOpcode::WRITE.0),
        1 => Just(NvmOpcode::FLUSH.0),
        1 => Just(NvmOpcode::COMPARE.0),
        1 => Just(NvmOpcode::WRITE_ZEROES.0),
        1 => Just(NvmOpcode::VERIFY.0),
        1 => any::<u8>(),
    ];
    let pair = 1..=PAIRS;
    prop_oneof![
        20 => (pair.clone(), opcode, 0..300u64, 0..17u8, 0..64u64)
            .prop_map(|(q, o, s, n, p)| Action::Io(q, o, s, n, p)),
        3 => (0..0x20u8, 0..4u32, any::<u32>(), any::<u32>())
            .prop_map(|(o, n, a, b)| Action::Admin(o, n, a, b)),
        4 => (0..0x20u8, prop_oneof![0..4u32, any::<u32>()], 0..3u32)
            .prop_map(|(f, v, n)| Action::Feature(f, v, n)),
        2 => (0..0x14u8, any::<bool>()).prop_map(|(l, r)| Action::Log(l, r)),
        8 => (0..=PAIRS, 1..20u8).prop_map(|(q, n)| Action::Reap(q, n)),
        3 => (pair.clone(), 2..20u16).prop_map(|(q, n)| Action::Pair(q, n)),
        1 => (pair, any::<bool>()).prop_map(|(q, cq)| Action::Delete(q, cq)),
        1 => Just(Action::Shadow),
        1 => (0..8u16, any::<bool>(), 0..70u32).prop_map(|(q, cq, v)| Action::Doorbell(q, cq, v)),
        2 => (prop_oneof![Just(regs::INTMS), Just(regs::INTMC), Just(regs::AQA),
            Just(regs::CSTS), Just(regs::NSSR)], any::<u32>())
            .prop_map(|(r, v)| Action::Register(r, v)),
        2 => (prop_oneof![Just(0x0c), Just(0x10), Just(0x14), Just(0x3c), Just(0x52), Just(0x68)],
            any::<u32>()).prop_map(|(r, v)| Action::Config(r, v)),
        2 => any::<bool>().prop_map(Action::Master),
        2 => any::<bool>().prop_map(Action::Window),
        1 => (0..4u16, any::<bool>()).prop_map(|(v, on)| Action::Vector(v, on)),
        1 => Just(Action::Disable),
        3 => Just(Action::Enable),
        1 => Just(Action::Shutdown),
        1 => Just(Action::Reset),
        1 => Just(Action::Disconnect),
        16 => Just(Action::Die),
    ]
}

/// Rounds until nothing moves. Beside queues that were busy lately, one that was not has its turn
/// within so many.
fn rest(h: &mut Host) {
    let mut quiet = 0;
    while quiet < 20 {
        quiet = if h.round() { 0 } else { quiet + 1 };
    }
}

fn host(mapped: bool) -> Host {
    let config = ControllerConfig {
        mapped_doorbells: mapped,
        io_queues: 4,
        max_namespaces: 3,
        ..ControllerConfig::default()
    };
    let slow = faulty(1 << 20).0;
    Host::with(config, vec![ns(1, mem(1 << 20), 512), ns(2, slow, 4096)])
}

fn enable(h: &mut Host) {
    let ring = h.ring;
    h.set_command(command::MEMORY_SPACE | command::BUS_MASTER, true);
    h.set32(regs::AQA, 0x001f_001f);
    h.set64(regs::ASQ, ASQ);
    h.set64(regs::ACQ, ACQ);
    if !h.csts().rdy() {
        h.write(ACQ, &[0; 32 * 16]);
        h.pairs.clear();
        h.pairs.insert(0, Pair::new(ASQ, ACQ, 32));
        if ring == Ring::Shadow {
            h.ring = Ring::Register;
        }
    }
    h.set32(regs::CC, Host::cc_enabled().into_bits());
}

fn is_master(h: &mut Host) -> bool {
    h.command_register() & command::BUS_MASTER != 0
}

/// Submits to the admin queue, if it takes commands. Whether it does.
fn admin(h: &mut Host, command: Command) -> bool {
    let room = h.pairs.get(&0).is_some_and(|pair| {
        let next = (pair.sq.tail + 1) % pair.sq.size;
        // What the host knows of the head is not kept here: a few are never too many.
        next != pair.cq.head
    });
    let takes = room && h.csts().rdy();
    if takes {
        h.submit(0, command);
        rest(h);
        h.reap_all(0);
    }
    takes
}

fn act(h: &mut Host, action: &Action) {
    match *action {
        Action::Io(qid, opcode, slba, nlb, page) => {
            let Some(pair) = h.pairs.get(&qid) else {
                return;
            };
            // Never more than have room, whatever the controller has fetched.
            let queued = (pair.sq.tail + pair.sq.size - pair.cq.head % pair.sq.size) % pair.sq.size;
            if queued + 1 >= pair.sq.size || !h.csts().rdy() {
                return;
            }
            let nsid = u32::from(qid) % 4;
            let mut command = Command::new(opcode, 0, nsid);
            command.set_slba(slba);
            command.cdw12 = u32::from(nlb).into();
            let len = (u64::from(nlb) + 1) * if nsid == 2 { 4096 } else { 512 };
            h.prps(
                &mut command,
                DATA + page * 4096,
                len,
                PAGE + u64::from(qid) * 0x400,
            );
            h.submit(qid, command);
        }
        Action::Admin(opcode, nsid, cdw10, cdw11) => {
            // Queues are made and deleted so that the host knows of them, and a parked request
            // would be one more each time.
            let known = [0, 1, 4, 5, 0x0c, 0x7c, 8];
            if known.contains(&opcode) {
                return;
            }
            let mut command = Command::new(opcode, 0, nsid);
            command.cdw10 = cdw10.into();
            command.cdw11 = cdw11.into();
            command.set_prps(PAGE + 0x1000, PAGE + 0x2000);
            admin(h, command);
        }
        Action::Feature(fid, value, nsid) => {
            // Time passes, and a keep alive timer would end it all.
            if [Fid::TIMESTAMP.0, Fid::KEEP_ALIVE_TIMER.0].contains(&fid) {
                return;
            }
            for opcode in [AdminOpcode::SET_FEATURES, AdminOpcode::GET_FEATURES] {
                let mut command = Command::new(opcode.0, 0, nsid);
                command.cdw10 = u32::from(fid).into();
                command.cdw11 = value.into();
                command.set_prps(PAGE + 0x1000, 0);
                admin(h, command);
            }
        }
        Action::Log(lid, rae) => {
            // SMART's counters are committed now and then: what the last moment did is lost.
            if lid == Lid::SMART.0 {
                return;
            }
            let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 0xffff_ffff);
            command.cdw10 = (u32::from(lid) | u32::from(rae) << 15 | 127 << 16).into();
            command.set_prps(PAGE + 0x1000, 0);
            admin(h, command);
        }
        Action::Reap(qid, most) => {
            if h.pairs.contains_key(&qid) && h.csts().rdy() {
                for _ in 0..most {
                    let _ = h.reap(qid);
                }
            }
        }
        Action::Pair(qid, size) => {
            if h.pairs.contains_key(&qid) || !h.csts().rdy() || !is_master(h) {
                return;
            }
            let sq = RINGS + u64::from(qid) * RING_STEP;
            h.write(sq, &[0; 0x2000]);
            let queue = CreateQueueCdw10::new().with_qid(qid).with_qsize_z(size - 1);
            let mut command = Command::new(AdminOpcode::CREATE_IO_CQ.0, 0, 0);
            command.set_prps(sq + 0x1000, 0);
            command.cdw10 = queue.into_bits().into();
            command.cdw11 = (3 | u32::from(qid) << 16).into();
            admin(h, command);
            let mut command = Command::new(AdminOpcode::CREATE_IO_SQ.0, 0, 0);
            command.set_prps(sq, 0);
            command.cdw10 = queue.into_bits().into();
            command.cdw11 = (1 | u32::from(qid) << 16).into();
            admin(h, command);
            h.pairs.insert(qid, Pair::new(sq, sq + 0x1000, size.into()));
        }
        Action::Delete(qid, cq) => {
            // Without its submission queue it is refused. A host does not overwrite completions of
            // a queue that is there, so it has to know.
            let opcodes = [AdminOpcode::DELETE_IO_SQ, AdminOpcode::DELETE_IO_CQ];
            for opcode in &opcodes[usize::from(cq)..] {
                let mut command = Command::new(opcode.0, 0, 0);
                command.cdw10 = u32::from(qid).into();
                if !is_master(h) || !admin(h, command) {
                    return;
                }
            }
            if !cq {
                h.pairs.remove(&qid);
            }
        }
        Action::Shadow => {
            if h.ring != Ring::Register || !h.csts().rdy() || h.pairs.len() > 1 {
                return;
            }
            h.write(SHADOW, &[0; 0x2000]);
            let mut command = Command::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0, 0);
            command.set_prps(SHADOW, EVENTIDX);
            if is_master(h) {
                admin(h, command);
                h.ring = Ring::Shadow;
            }
        }
        Action::Doorbell(qid, cq, value) => {
            // A value that is none stays in the doorbell of a queue that exists: the next process
            // finds it there, and does not know that it is old.
            if !h.pairs.contains_key(&qid) {
                h.set32(Host::doorbell(qid, cq), value);
            }
        }
        Action::Register(offset, value) => h.set32(offset, value),
        Action::Config(offset, value) => {
            let bytes = value.to_le_bytes();
            h.outliving(|h| h.c.config_write(offset, &bytes));
            // Device Control: a function level reset. Else the queues are there still, and hosts do
            // not overwrite the completions of queues that are.
            if offset == 0x68 && value & 1 << 15 != 0 {
                h.pairs.clear();
                h.ring = first_ring(h);
            }
        }
        Action::Master(on) => h.set_command(command::BUS_MASTER, on),
        Action::Window(on) => {
            let backing = Some((h.low.clone(), 0));
            let _ = if on {
                h.c.dma_map(EXTRA, LOW_SIZE, backing, Prot::RW).map(|()| 0)
            } else {
                h.c.dma_unmap(EXTRA, LOW_SIZE)
            };
            h.c.dma_quiesced();
        }
        Action::Vector(vector, on) => {
            let sink = h.vectors[usize::from(vector)].clone();
            h.c.set_msix(vector, on.then_some(sink as _));
            if on {
                h.deaf.remove(&vector)
            } else {
                h.deaf.insert(vector)
            };
        }
        Action::Disable => {
            let cc = Cc::from_bits(h.reg32(regs::CC)).with_en(false);
            h.set32(regs::CC, cc.into_bits());
            h.pairs.clear();
            h.ring = first_ring(h);
        }
        Action::Enable => enable(h),
        Action::Shutdown => {
            let cc = Cc::from_bits(h.reg32(regs::CC)).with_shn(Shn::NORMAL);
            h.set32(regs::CC, cc.into_bits());
        }
        Action::Reset => {
            h.c.reset();
            h.pairs.clear();
            h.ring = first_ring(h);
        }
        Action::Disconnect => {
            h.c.disconnect();
            h.deaf = (0..h.c.vectors()).collect();
            h.pairs.clear();
            h.ring = first_ring(h);
            let [low, high] = [h.low.clone(), h.high.clone()];
            h.c.dma_map(LOW, LOW_SIZE, Some((low, 0)), Prot::RW)
                .unwrap();
            h.c.dma_map(HIGH, HIGH_SIZE, Some((high, 0)), Prot::RW)
                .unwrap();
        }
        Action::Die => {}
    }
}

fn first_ring(h: &Host) -> Ring {
    if h.c.config().mapped_doorbells {
        Ring::Mapped
    } else {
        Ring::Register
    }
}

/// What the host can see.
fn seen(h: &mut Host) -> Vec<u8> {
    let mut all = vec![0; 0x1000];
    h.c.bar0_read(0, &mut all);
    let mut config = vec![0; 256];
    h.c.config_read(0, &mut config);
    all.extend(config);
    all.extend(h.read(0, EVENTIDX as usize));
    // EventIdx is another one: the host may ring without need.
    all.extend(h.read(EVENTIDX + 0x1000, (LOW_SIZE - EVENTIDX - 0x1000) as usize));
    all.extend(h.read(DATA, 128 * 4096));
    all
}

fn play(mapped: bool, actions: &[Action]) {
    let (mut a, mut b) = (host(mapped), host(mapped));
    for (at, action) in actions.iter().enumerate() {
        for h in [&mut a, &mut b] {
            act(h, action);
            rest(h);
        }
        if matches!(action, Action::Die) {
            b.die();
            rest(&mut b);
        }
        let (first, second) = (seen(&mut a), seen(&mut b));
        if first != second {
            let differs = first.iter().zip(&second).position(|(a, b)| a != b);
            panic!("after action {at}, {action:?}: at {differs:?}");
        }
    }
}

/// Histories: more where the variable `VNVME_DEATHS` asks for a long run.
fn cases() -> u32 {
    std::env::var_os("VNVME_DEATHS").map_or(32, |_| 1000)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(),
        max_shrink_iters: 3000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn restored_controller_behaves_like_original(
        mapped: bool,
        actions in prop::collection::vec(action(), 1..60),
    ) {
        let mut all = vec![Action::Enable, Action::Pair(1, 16), Action::Pair(2, 9)];
        all.extend(actions);
        play(mapped, &all);
    }
}
