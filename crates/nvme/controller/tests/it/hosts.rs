//! Drivers that are no Linux, as their sources and bug threads show them: which registers they
//! access in which order and width, how large their queues are, and which commands they rely on.
//! They build their commands by hand, so that nothing of ours is both question and answer.
//!
//! Linux 6 and 7, SeaBIOS and OVMF run in the harness; GRUB and iPXE use what the firmware has.

use crate::common::*;
use controller::ControllerConfig;
use nvme::pci::command;

const CAP: u64 = 0;
const VS: u64 = 8;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;

const DELETE_SQ: u32 = 0;
const CREATE_SQ: u32 = 1;
const GET_LOG: u32 = 2;
const DELETE_CQ: u32 = 4;
const CREATE_CQ: u32 = 5;
const IDENTIFY: u32 = 6;
const ABORT: u32 = 8;
const SET_FEATURES: u32 = 9;
const GET_FEATURES: u32 = 10;
const ASYNC_EVENT: u32 = 12;
const FLUSH: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;

/// CC of all of them: enabled, NVM command set, pages of 4 KiB, entries of 64 and 16 bytes.
const ENABLED: u32 = 6 << 16 | 4 << 20 | 1;
/// Where hosts have their queues, a page each.
const QUEUES: u64 = 0x2_0000;
/// What they read and write.
const BUFFER: u64 = 0x4000;
/// Blocks of 512 bytes of namespaces 1 and 3; there is no second one.
const BLOCKS: u64 = 2048;

/// A pair of queues as a driver has it.
struct Queue {
    id: u64,
    sq: u64,
    cq: u64,
    entries: (u32, u32),
    tail: u32,
    head: u32,
    phase: u32,
    next_cid: u32,
}

/// DW0, DW1 (namespace) and the others that are not 0.
struct Sqe([u32; 16]);

impl Sqe {
    fn new(opcode: u32, nsid: u32) -> Sqe {
        let mut words = [0; 16];
        words[0] = opcode;
        words[1] = nsid;
        Sqe(words)
    }

    fn prp(mut self, first: u64, second: u64) -> Sqe {
        self.0[6] = first as u32;
        self.0[7] = (first >> 32) as u32;
        self.0[8] = second as u32;
        self.0[9] = (second >> 32) as u32;
        self
    }

    fn cdw(mut self, number: usize, value: u32) -> Sqe {
        self.0[number] = value;
        self
    }
}

/// What a completion says.
#[derive(Debug, PartialEq, Eq)]
struct Cqe {
    result: u32,
    cid: u32,
    /// Status Code and Status Code Type.
    status: u32,
}

impl Queue {
    /// `entries` of the submission and of the completion queue.
    fn new(id: u64, entries: (u32, u32)) -> Queue {
        let sq = QUEUES + id * 0x8000;
        Queue {
            id,
            sq,
            cq: sq + 0x4000,
            entries,
            tail: 0,
            head: 0,
            phase: 1,
            next_cid: 0,
        }
    }

    /// As each does before it creates its queue, or enables the controller.
    fn clear(&mut self, h: &Host) {
        h.write(self.cq, &vec![0; self.entries.1 as usize * 16]);
        (self.tail, self.head, self.phase) = (0, 0, 1);
    }

    /// Writes an entry and rings the doorbell, which has 32 bits.
    fn submit(&mut self, h: &mut Host, mut sqe: Sqe) -> u32 {
        let cid = self.next_cid;
        self.next_cid = (cid + 1) % 0xffff;
        sqe.0[0] |= cid << 16;
        let bytes: Vec<u8> = sqe.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        h.write(self.sq + u64::from(self.tail) * 64, &bytes);
        self.tail = (self.tail + 1) % self.entries.0;
        h.set32(0x1000 + 8 * self.id, self.tail);
        cid
    }

    /// Looks for the next completion by its phase, and gives its place back.
    fn reap(&mut self, h: &mut Host) -> Option<Cqe> {
        h.run();
        let bytes = h.read(self.cq + u64::from(self.head) * 16, 16);
        let word = |n: usize| u32::from_le_bytes(bytes[4 * n..4 * n + 4].try_into().unwrap());
        if word(3) >> 16 & 1 != self.phase {
            return None;
        }
        assert_eq!(word(2) >> 16, self.id as u32, "SQID");
        self.head += 1;
        if self.head == self.entries.1 {
            (self.head, self.phase) = (0, self.phase ^ 1);
        }
        h.set32(0x1004 + 8 * self.id, self.head);
        Some(Cqe {
            result: word(0),
            cid: word(3) & 0xffff,
            status: word(3) >> 17 & 0x7ff,
        })
    }

    /// One command at a time. It must succeed; the answer is its result.
    fn does(&mut self, h: &mut Host, sqe: Sqe) -> u32 {
        let opcode = sqe.0[0];
        let cqe = self.ends(h, sqe);
        assert_eq!(cqe.status, 0, "opcode {opcode:#x}");
        cqe.result
    }

    fn ends(&mut self, h: &mut Host, sqe: Sqe) -> Cqe {
        let cid = self.submit(h, sqe);
        let cqe = self.reap(h).expect("a completion");
        assert_eq!(cqe.cid, cid);
        cqe
    }

    fn identify(&mut self, h: &mut Host, cns: u32, nsid: u32) -> Vec<u8> {
        h.write(BUFFER, &[0xee; 4096]);
        self.does(h, Sqe::new(IDENTIFY, nsid).prp(BUFFER, 0).cdw(10, cns));
        h.read(BUFFER, 4096)
    }

    /// Creates it, the completion queue first. `cq_flags` besides PC, `sq_flags` too.
    fn create(&mut self, h: &mut Host, admin: &mut Queue, cq_flags: u32, sq_flags: u32) {
        self.clear(h);
        let id = self.id as u32;
        let size = |entries: u32| entries.wrapping_sub(1) << 16 | id;
        let cq = Sqe::new(CREATE_CQ, 0).prp(self.cq, 0);
        admin.does(h, cq.cdw(10, size(self.entries.1)).cdw(11, cq_flags | 1));
        let sq = Sqe::new(CREATE_SQ, 0).prp(self.sq, 0);
        let flags = id << 16 | sq_flags | 1;
        admin.does(h, sq.cdw(10, size(self.entries.0)).cdw(11, flags));
    }

    /// Writes and reads back `blocks` from `lba` on, with the data where `prps` say.
    fn writes_and_reads(&mut self, h: &mut Host, nsid: u32, lba: u64, blocks: u32, flags: u32) {
        let data = pattern(lba + u64::from(blocks), blocks as usize * 512);
        let rw = |opcode: u32| {
            let sqe = Sqe::new(opcode, nsid).prp(DATA, list(h_pages(blocks)));
            let sqe = sqe.cdw(10, lba as u32).cdw(11, (lba >> 32) as u32);
            sqe.cdw(12, flags | (blocks - 1))
        };
        let pages = h_pages(blocks);
        if pages > 2 {
            let entries = (1..pages).flat_map(|page| (DATA + page * 4096).to_le_bytes());
            h.write(LIST, &entries.collect::<Vec<u8>>());
        }
        h.write(DATA, &data);
        self.does(h, rw(WRITE));
        h.write(DATA, &vec![0; data.len()]);
        self.does(h, rw(READ));
        assert!(
            h.read(DATA, data.len()) == data,
            "{blocks} blocks from {lba}"
        );
    }
}

/// A list of PRPs.
const LIST: u64 = 0x6000;

fn h_pages(blocks: u32) -> u64 {
    u64::from(blocks).div_ceil(8)
}

/// What PRP2 is of a transfer over so many pages.
fn list(pages: u64) -> u64 {
    match pages {
        0 | 1 => 0,
        2 => DATA + 4096,
        _ => LIST,
    }
}

fn machine() -> Host {
    let volume = || mem(BLOCKS * 512);
    let namespaces = vec![ns(1, volume(), 512), ns(3, volume(), 512)];
    let mut h = Host::with(ControllerConfig::default(), namespaces);
    h.set_command(command::MEMORY_SPACE | command::BUS_MASTER, true);
    h
}

fn is_ready(h: &mut Host) -> bool {
    h.run();
    let csts = h.reg32(CSTS);
    assert_eq!(csts & 2, 0, "CSTS.CFS");
    csts & 1 == 1
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn interrupts(h: &Host) -> u32 {
    h.vectors.iter().map(|vector| vector.take()).sum()
}

/// U-Boot's `drivers/nvme/nvme.c`: disables a controller that was never enabled, has queues of two
/// entries, one command at a time, and polls a completion queue with interrupts enabled.
#[test]
fn u_boot_driver_works() {
    let mut h = machine();
    h.set32(CC, 0);
    assert!(!is_ready(&mut h));
    let mut admin = Queue::new(0, (2, 2));
    admin.clear(&h);
    h.set32(AQA, 0x0001_0001);
    for (register, address) in [(ASQ, admin.sq), (ACQ, admin.cq)] {
        h.set32(register, address as u32);
        h.set32(register + 4, (address >> 32) as u32);
    }
    h.set32(CC, ENABLED);
    assert!(is_ready(&mut h));
    // One I/O queue, asked for after nothing else.
    let queues = Sqe::new(SET_FEATURES, 0).cdw(10, 7).cdw(11, 0);
    // It takes no more than it asked for, however many are granted.
    admin.does(&mut h, queues);
    let mut io = Queue::new(1, (2, 2));
    let (irq, medium) = (2, 2 << 1);
    io.create(&mut h, &mut admin, irq, medium);
    let controller = admin.identify(&mut h, 1, 0);
    assert_eq!(le32(&controller, 516), 3, "NN");
    assert_eq!(controller[525] & 1, 1, "a write cache, to be flushed");
    for nsid in 1..=3 {
        let namespace = admin.identify(&mut h, 0, nsid);
        let blocks = if nsid == 2 { 0 } else { BLOCKS as u32 };
        assert_eq!(le32(&namespace, 0), blocks, "NSZE of {nsid}");
    }
    // Command identifiers go on from those of the admin queue, and around both queues often.
    io.next_cid = admin.next_cid;
    for turn in 0..9 {
        io.writes_and_reads(&mut h, 1, turn * 200, [1, 8, 16, 200][turn as usize % 4], 0);
        io.does(&mut h, Sqe::new(FLUSH, 1));
    }
    // Interrupts that nobody takes are in nobody's way.
    assert!(interrupts(&h) > 0);
    let id = Sqe::new(DELETE_SQ, 0).cdw(10, 1);
    admin.does(&mut h, id);
    admin.does(&mut h, Sqe::new(DELETE_CQ, 0).cdw(10, 1));
    h.set32(CC, ENABLED & !1);
    assert!(!is_ready(&mut h));
}

/// SeaBIOS's `src/hw/nvme.c`: the admin completion queue is four times as long as the submission
/// queue, there is no Number of Queues before queues are created, a completion queue without
/// interrupts, every namespace up to NN identified, and reads with Limited Retry.
#[test]
fn seabios_driver_works() {
    let mut h = machine();
    assert!(h.reg64(CAP) >> 37 & 1 == 1, "CAP.CSS: the NVM command set");
    assert_eq!(h.reg64(CAP) >> 32 & 0xf, 0, "CAP.DSTRD");
    assert!(h.reg32(VS) >= 0x1_0000);
    h.set32(CC, 0);
    assert!(!is_ready(&mut h));
    let mut admin = Queue::new(0, (64, 256));
    admin.clear(&h);
    h.set32(AQA, 255 << 16 | 63);
    for (register, address) in [(ASQ, admin.sq), (ACQ, admin.cq)] {
        h.set32(register, address as u32);
        h.set32(register + 4, 0);
    }
    h.set32(CC, ENABLED);
    assert!(is_ready(&mut h));
    let controller = admin.identify(&mut h, 1, 0);
    let nn = le32(&controller, 516);
    assert_eq!(nn, 3, "each costs it memory and a command");
    // The length of both is what a page has of completions.
    let length = (1 + (h.reg64(CAP) as u32 & 0xffff)).min(256);
    let mut io = Queue::new(1, (length, length));
    io.create(&mut h, &mut admin, 0, 0);
    let found: Vec<u32> = (1..=nn)
        .filter(|nsid| {
            let namespace = admin.identify(&mut h, 0, *nsid);
            let format = usize::from(namespace[26] & 0xf);
            assert!(format <= usize::from(namespace[25]), "FLBAS, NLBAF");
            let size = le32(&namespace, 0);
            assert!(size == 0 || namespace[128 + 4 * format + 2] == 9, "LBADS");
            size > 0
        })
        .collect();
    assert_eq!(found, [1, 3]);
    interrupts(&h);
    for turn in 0..600 {
        let limited_retry = 1 << 31;
        io.writes_and_reads(
            &mut h,
            3,
            turn % 90,
            [8, 1, 24][turn as usize % 3],
            limited_retry,
        );
    }
    assert_eq!(
        interrupts(&h),
        0,
        "its completion queue has none, and the admin queue is polled"
    );
}

/// EDK2's `NvmExpressDxe`: reads and writes the 64-bit registers as two dwords, has queues of two
/// entries and one of 64 and 256 besides, for what is asynchronous, and starts a controller again
/// that the firmware before it has left enabled.
#[test]
fn edk2_driver_works() {
    let mut h = machine();
    let cap = u64::from(h.reg32(CAP)) | u64::from(h.reg32(CAP + 4)) << 32;
    assert_eq!(cap >> 37 & 1, 1, "CAP.CSS: the NVM command set");
    assert_eq!(cap >> 48 & 0xf, 0, "CAP.MPSMIN");
    let mut admin = Queue::new(0, (2, 2));
    for turn in 0..2 {
        // It reads CC, clears EN, and writes it back.
        let cc = h.reg32(CC);
        assert_eq!(cc & 1, turn);
        h.set32(CC, cc & !1);
        assert!(!is_ready(&mut h));
        admin.clear(&h);
        h.set32(AQA, 0x0001_0001);
        for (register, address) in [(ASQ, admin.sq), (ACQ, admin.cq)] {
            h.set32(register, address as u32);
            h.set32(register + 4, (address >> 32) as u32);
        }
        h.set32(CC, ENABLED);
        assert!(is_ready(&mut h));
        let controller = admin.identify(&mut h, 1, 0);
        assert_eq!(le32(&controller, 516), 3, "NN");
        let two = Sqe::new(SET_FEATURES, 0).cdw(10, 7).cdw(11, 1 << 16 | 1);
        let granted = admin.does(&mut h, two);
        assert!(granted & 0xffff >= 1 && granted >> 16 >= 1, "{granted:#x}");
        // All completion queues, then all submission queues; without interrupts.
        let mut io = Queue::new(1, (2, 2));
        let mut slow = Queue::new(2, (64, 256));
        for queue in [&mut io, &mut slow] {
            queue.clear(&h);
            let id = queue.id as u32;
            let cq = Sqe::new(CREATE_CQ, 0).prp(queue.cq, 0);
            admin.does(
                &mut h,
                cq.cdw(10, (queue.entries.1 - 1) << 16 | id).cdw(11, 1),
            );
        }
        for queue in [&mut io, &mut slow] {
            let id = queue.id as u32;
            let sq = Sqe::new(CREATE_SQ, 0).prp(queue.sq, 0);
            let size = (queue.entries.0 - 1) << 16 | id;
            admin.does(&mut h, sq.cdw(10, size).cdw(11, id << 16 | 1));
        }
        assert_eq!(
            le32(&admin.identify(&mut h, 2, 0), 0),
            1,
            "the first active namespace"
        );
        for lba in 0..9 {
            io.writes_and_reads(&mut h, 1, lba * 8, [8, 64][lba as usize % 2], 0);
        }
        // The asynchronous one has up to 63 at a time, reaped by a timer.
        for _ in 0..9 {
            let cids: Vec<u32> = (0..63)
                .map(|n| {
                    let read = Sqe::new(READ, 3).prp(DATA + n * 4096, 0);
                    slow.submit(&mut h, read.cdw(10, n as u32).cdw(12, 7))
                })
                .collect();
            let mut seen: Vec<u32> = (0..63).map(|_| slow.reap(&mut h).unwrap().cid).collect();
            seen.sort_unstable();
            assert_eq!(seen, cids);
            assert_eq!(slow.reap(&mut h), None);
        }
    }
}

/// FreeBSD's `sys/dev/nvme/nvme_ctrlr.c`: two resets in a row, the queues' addresses before their
/// sizes, parked Asynchronous Event Requests as many as AERL allows up to eight, features that it
/// only asks about, and, when it is unloaded, its queues deleted and a shutdown before EN is
/// cleared.
#[test]
fn freebsd_driver_works() {
    let mut h = machine();
    let entries = 128;
    let mut admin = Queue::new(0, (entries, entries));
    for _ in 0..2 {
        let enabled = h.reg32(CC) & 1 == 1;
        assert_eq!(is_ready(&mut h), enabled);
        if enabled {
            let cc = h.reg32(CC);
            h.set32(CC, cc & !1);
            assert!(!is_ready(&mut h));
        }
        admin.clear(&h);
        h.set64(ASQ, admin.sq);
        h.set64(ACQ, admin.cq);
        h.set32(AQA, (entries - 1) << 16 | (entries - 1));
        h.set32(CC, ENABLED);
        assert!(is_ready(&mut h));
    }
    let two = Sqe::new(SET_FEATURES, 0).cdw(10, 7).cdw(11, 1 << 16 | 1);
    let granted = admin.does(&mut h, two);
    assert!(granted & 0xffff >= 1 && granted >> 16 >= 1, "{granted:#x}");
    let controller = admin.identify(&mut h, 1, 0);
    let mut queues = [Queue::new(1, (256, 256)), Queue::new(2, (256, 256))];
    for queue in &mut queues {
        let vector = (queue.id as u32) << 16;
        queue.create(&mut h, &mut admin, vector | 2, 0);
    }
    let found: Vec<u32> = (1..=le32(&controller, 516).min(16))
        .filter(|nsid| le32(&admin.identify(&mut h, 0, *nsid), 0) > 0)
        .collect();
    assert_eq!(found, [1, 3]);
    // Events: all critical warnings that there are, namespace attributes and firmware activation.
    let temperature = Sqe::new(GET_FEATURES, 0).cdw(10, 4);
    let threshold = admin.does(&mut h, temperature) & 0xffff;
    let warnings = 0b1_1101
        | if matches!(threshold, 0 | 0xffff) {
            0
        } else {
            2
        };
    let events = Sqe::new(SET_FEATURES, 0)
        .cdw(10, 11)
        .cdw(11, 0x300 | warnings);
    admin.does(&mut h, events);
    let limit = u32::from(controller[259]) + 1;
    for _ in 0..limit.min(8) {
        admin.submit(&mut h, Sqe::new(ASYNC_EVENT, 0));
    }
    assert_eq!(admin.reap(&mut h), None, "they wait for an event");
    let coalescing = Sqe::new(SET_FEATURES, 0).cdw(10, 8).cdw(11, 0);
    admin.does(&mut h, coalescing);
    interrupts(&h);
    for turn in 0..300 {
        let nsid = [1, 3][turn as usize % 2];
        queues[turn as usize % 2].writes_and_reads(&mut h, nsid, turn, 8, 0);
    }
    assert!(interrupts(&h) >= 600, "one for each");
    // A log page is read with the broadcast NSID.
    let health = Sqe::new(GET_LOG, u32::MAX).prp(BUFFER, 0);
    admin.does(&mut h, health.cdw(10, 127 << 16 | 2));
    assert_eq!(h.read(BUFFER, 1), [0], "no critical warning");
    for queue in &queues {
        let id = queue.id as u32;
        admin.does(&mut h, Sqe::new(DELETE_SQ, 0).cdw(10, id));
        admin.does(&mut h, Sqe::new(DELETE_CQ, 0).cdw(10, id));
    }
    let cc = h.reg32(CC);
    h.set32(CC, cc | 1 << 14);
    h.run();
    assert_eq!(h.reg32(CSTS) >> 2 & 3, 2, "the shutdown is complete");
    h.set32(CC, cc & !1);
    assert!(!is_ready(&mut h));
}

/// Windows Server 2025 and Windows 11 24H2 (stornvme), as oxidecomputer/propolis#1199 has found:
/// it reads AQA, ASQ and ACQ back while the controller is enabled, and ends where they read as
/// nothing; an Asynchronous Event Request that is completed, with whatever status, is sent again at
/// once, for ever. And spdk/spdk#2000, #2004: requests beyond AERL are an error and no more, and so
/// is a feature that there is not (0Ch), each of which it sends in order to go on. And #2576: it
/// does not start with 512 MSI-X vectors, but does with 128.
#[test]
fn windows_driver_works() {
    let mut h = machine();
    assert!(h.c.vectors() <= 128, "{}", h.c.vectors());
    let mut admin = Queue::new(0, (64, 64));
    admin.clear(&h);
    h.set32(AQA, 63 << 16 | 63);
    h.set64(ASQ, admin.sq);
    h.set64(ACQ, admin.cq);
    h.set32(CC, ENABLED);
    assert!(is_ready(&mut h));
    let controller = admin.identify(&mut h, 1, 0);
    for _ in 0..2 {
        assert_eq!(h.reg64(ASQ), admin.sq);
        assert_eq!(h.reg64(ACQ), admin.cq);
        assert_eq!(h.reg32(AQA), 63 << 16 | 63);
        assert_eq!(u64::from(h.reg32(ASQ)), admin.sq & 0xffff_ffff);
    }
    let four = Sqe::new(SET_FEATURES, 0).cdw(10, 7).cdw(11, 3 << 16 | 3);
    admin.does(&mut h, four);
    let mut io = Queue::new(1, (256, 256));
    io.create(&mut h, &mut admin, 1 << 16 | 2, 0);
    assert_eq!(
        le32(&admin.identify(&mut h, 2, 0), 0),
        1,
        "the first active namespace"
    );
    let absent = admin.ends(&mut h, Sqe::new(GET_FEATURES, 0).cdw(10, 0xc));
    assert_eq!(absent.status, 2, "Invalid Field in Command");
    let limit = u32::from(controller[259]) + 1;
    assert!(limit >= 4, "it parks four");
    for _ in 0..limit {
        admin.submit(&mut h, Sqe::new(ASYNC_EVENT, 0));
    }
    assert_eq!(admin.reap(&mut h), None, "they wait for an event");
    let beyond = admin.ends(&mut h, Sqe::new(ASYNC_EVENT, 0));
    assert_eq!(
        beyond.status,
        1 << 8 | 5,
        "Asynchronous Event Request Limit Exceeded"
    );
    for turn in 0..300 {
        io.writes_and_reads(&mut h, 1, turn, [1, 8, 256][turn as usize % 3], 0);
    }
    assert_eq!(admin.reap(&mut h), None, "they wait still");
    let cc = h.reg32(CC);
    h.set32(CC, cc | 1 << 14);
    h.run();
    assert_eq!(h.reg32(CSTS) >> 2 & 3, 2, "the shutdown is complete");
}

/// Linux 4.11's `drivers/nvme/host/pci.c`: 64-bit registers by dwords, the lower one first; an
/// admin queue of 256 entries; the first I/O queue has the admin queue's vector; submission queues
/// of medium priority, though nothing weighs them; an Asynchronous Event Request with an identifier
/// that no other request has; Abort of what has ended by then; all submission queues deleted at
/// once, then all completion queues, before the shutdown.
#[test]
fn linux_4_driver_works() {
    let mut h = machine();
    assert_ne!(h.reg32(CSTS), u32::MAX);
    let cap = u64::from(h.reg32(CAP)) | u64::from(h.reg32(CAP + 4)) << 32;
    assert!(
        h.reg32(VS) >= 0x1_0100 && cap >> 48 & 0xf == 0,
        "pages of 4 KiB"
    );
    let cc = h.reg32(CC);
    h.set32(CC, cc & !(3 << 14) & !1);
    assert!(!is_ready(&mut h));
    let mut admin = Queue::new(0, (256, 256));
    admin.clear(&h);
    h.set32(AQA, 255 << 16 | 255);
    for (register, address) in [(ASQ, admin.sq), (ACQ, admin.cq)] {
        h.set32(register, address as u32);
        h.set32(register + 4, (address >> 32) as u32);
    }
    h.set32(CC, ENABLED);
    assert!(is_ready(&mut h));
    admin.identify(&mut h, 1, 0);
    let two = Sqe::new(SET_FEATURES, 0).cdw(10, 7).cdw(11, 1 << 16 | 1);
    let granted = admin.does(&mut h, two);
    assert!(granted & 0xffff >= 1 && granted >> 16 >= 1, "{granted:#x}");
    let mut queues = [Queue::new(1, (256, 256)), Queue::new(2, (256, 256))];
    for queue in &mut queues {
        let (vector, medium) = ((queue.id as u32 - 1) << 16, 2 << 1);
        queue.create(&mut h, &mut admin, vector | 2, medium);
    }
    let next = std::mem::replace(&mut admin.next_cid, 255);
    admin.submit(&mut h, Sqe::new(ASYNC_EVENT, 0));
    admin.next_cid = next;
    assert_eq!(admin.reap(&mut h), None, "it waits for an event");
    let active = admin.identify(&mut h, 2, 0);
    assert_eq!([0, 4, 8].map(|at| le32(&active, at)), [1, 3, 0]);
    for nsid in [1, 3] {
        let namespace = admin.identify(&mut h, 0, nsid);
        assert_eq!(le32(&namespace, 0), BLOCKS as u32, "NSZE of {nsid}");
    }
    interrupts(&h);
    for turn in 0..300 {
        let fua = 1 << 30;
        let (nsid, which) = ([1, 3][turn as usize % 2], turn as usize % 2);
        queues[which].writes_and_reads(&mut h, nsid, turn, [8, 256][which], fua);
        let told: Vec<u32> = h.vectors.iter().map(|vector| vector.take()).collect();
        assert_eq!((told[which], told.iter().sum()), (2, 2), "{told:?}");
    }
    // It has ended meanwhile: not aborted.
    let late = Sqe::new(ABORT, 0).cdw(10, (queues[0].next_cid - 1) << 16 | 1);
    assert_eq!(admin.does(&mut h, late) & 1, 1);
    for opcode in [DELETE_SQ, DELETE_CQ] {
        for id in [1, 2] {
            admin.submit(&mut h, Sqe::new(opcode, 0).cdw(10, id));
        }
        for _ in 0..2 {
            assert_eq!(admin.reap(&mut h).map(|cqe| cqe.status), Some(0));
        }
    }
    let cc = h.reg32(CC);
    h.set32(CC, cc & !(3 << 14) | 1 << 14);
    h.run();
    assert_eq!(h.reg32(CSTS) >> 2 & 3, 2, "the shutdown is complete");
}

/// No interrupt is sent where a driver has set up none; the rest works.
#[test]
fn controller_works_without_interrupt_receivers() {
    let mut h = machine();
    for vector in 0..h.c.vectors() {
        h.c.set_msix(vector, None);
    }
    let mut admin = Queue::new(0, (2, 2));
    admin.clear(&h);
    h.set32(AQA, 0x0001_0001);
    h.set64(ASQ, admin.sq);
    h.set64(ACQ, admin.cq);
    h.set32(CC, ENABLED);
    assert!(is_ready(&mut h));
    let mut io = Queue::new(1, (2, 2));
    io.create(&mut h, &mut admin, 2, 0);
    for lba in 0..20 {
        io.writes_and_reads(&mut h, 1, lba, 1, 0);
    }
    assert_eq!(interrupts(&h), 0);
}
