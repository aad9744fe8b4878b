//! The three instructions on a processor of paper: registers, storage, condition codes and
//! exceptions, and the queues' messages.

use ap::card::Latency;
use ap::instruction::{Cpu, LARGEST_MESSAGE, PSW_PROBLEM, execute};
use ap::{Apqn, Facilities, ProgramException, QueueStatus, Response};

use proptest::prelude::*;

use crate::common::{Device, all_queues, device, millis};

const QUEUE: u64 = 0x0106;
/// 64-bit addressing.
const MODE: u64 = 0x0000_0001_8000_0000;
const LAST: u64 = 0x4000_0000;
const NEW: u64 = 0x8000_0000;

struct Paper {
    gr: [u64; 16],
    mask: u64,
    storage: Vec<u8>,
}

impl Paper {
    fn new() -> Paper {
        Paper {
            gr: [0; 16],
            mask: MODE,
            storage: vec![0; 0x2000],
        }
    }

    fn status(&self) -> QueueStatus {
        QueueStatus::from_word(self.gr[1] as u32)
    }

    /// NQAP with the identifier in 4 and 5, the message in 6 and 7.
    fn send(&mut self, device: &mut Device, id: u64, bytes: &[u8], flags: u64) -> u8 {
        self.storage[0x100..0x100 + bytes.len()].copy_from_slice(bytes);
        self.gr[0] = QUEUE | flags;
        self.gr[4..8].copy_from_slice(&[id >> 32, id & 0xffff_ffff, 0x100, bytes.len() as u64]);
        execute(self, [0xb2, 0xad, 0, 0x46], Facilities::ALL, device).unwrap()
    }

    /// DQAP with a buffer of `room` bytes.
    fn receive(&mut self, device: &mut Device, gr0: u64, room: u64) -> u8 {
        self.gr[0] = gr0;
        self.gr[2] = 0;
        self.gr[4..8].copy_from_slice(&[0, 0, 0x1000, room]);
        execute(self, [0xb2, 0xae, 0, 0x46], Facilities::ALL, device).unwrap()
    }

    fn pqap(&mut self, device: &mut Device) -> Result<u8, ProgramException> {
        execute(self, [0xb2, 0xaf, 0, 0], Facilities::ALL, device)
    }
}

impl Cpu for Paper {
    fn gr(&self, register: u8) -> u64 {
        self.gr[usize::from(register)]
    }

    fn set_gr(&mut self, register: u8, value: u64) {
        self.gr[usize::from(register)] = value;
    }

    fn psw_mask(&self) -> u64 {
        self.mask
    }

    fn load(&mut self, address: u64, into: &mut [u8]) -> Result<(), ProgramException> {
        let from = self.storage.get(address as usize..);
        let from = from
            .and_then(|s| s.get(..into.len()))
            .ok_or(ProgramException::Addressing)?;
        into.copy_from_slice(from);
        Ok(())
    }

    fn store(&mut self, address: u64, bytes: &[u8]) -> Result<(), ProgramException> {
        let to = self.storage.get_mut(address as usize..);
        let to = to
            .and_then(|s| s.get_mut(..bytes.len()))
            .ok_or(ProgramException::Addressing)?;
        to.copy_from_slice(bytes);
        Ok(())
    }
}

fn instant() -> (Paper, Device) {
    (Paper::new(), device(Latency::default()).0)
}

#[test]
fn request_returns_reply() {
    let (mut cpu, mut device) = instant();
    let id = 0x1234_5678_9abc_def0;
    assert_eq!(cpu.send(&mut device, id, b"abcdef", LAST), 0);
    assert_eq!((cpu.gr[6], cpu.gr[7]), (0x106, 0), "moved past the message");
    assert!(!cpu.status().empty);
    assert_eq!(cpu.receive(&mut device, QUEUE | NEW, 64), 0);
    assert_eq!(&cpu.storage[0x1000..0x1006], b"fedcba");
    assert_eq!(cpu.gr[4] << 32 | cpu.gr[5], id);
    assert_eq!((cpu.gr[6], cpu.gr[7], cpu.gr[2]), (0x1006, 58, 0));
    assert!(cpu.status().empty && cpu.status().response == Response::NORMAL);
    // And nothing more.
    assert_eq!(cpu.receive(&mut device, QUEUE | NEW, 64), 3);
    assert_eq!(cpu.status().response, Response::NO_PENDING_REPLY);
    assert!(cpu.status().empty);
}

#[test]
fn request_in_progress_has_no_reply() {
    let (mut device, world) = device(Latency {
        request: millis(5),
        ..Latency::default()
    });
    let mut cpu = Paper::new();
    cpu.send(&mut device, 1, b"x", LAST);
    assert_eq!(cpu.receive(&mut device, QUEUE | NEW, 64), 3);
    assert_eq!(cpu.status().response, Response::NO_PENDING_REPLY);
    assert!(!cpu.status().empty && !cpu.status().replies_waiting);
    world.now.set(millis(5));
    assert_eq!(cpu.receive(&mut device, QUEUE | NEW, 64), 0);
}

#[test]
fn full_queue_refuses_request_and_keeps_replies() {
    let (mut cpu, mut device) = instant();
    for id in 0..3 {
        assert_eq!(cpu.send(&mut device, id, &[id as u8], LAST), 0);
    }
    assert!(cpu.status().full);
    assert_eq!(cpu.send(&mut device, 3, &[3], LAST), 3);
    assert_eq!(cpu.status().response, Response::QUEUE_FULL);
    assert_eq!(cpu.gr[7], 1, "the message is still the program's");
    for id in 0..3 {
        assert_eq!(cpu.receive(&mut device, QUEUE | NEW, 64), 0);
        assert_eq!((cpu.gr[5], cpu.storage[0x1000]), (id, id as u8));
    }
}

#[test]
fn reply_longer_than_buffer_arrives_in_parts() {
    let (mut cpu, mut device) = instant();
    cpu.send(&mut device, 77, b"abcdefgh", LAST);
    assert_eq!(cpu.receive(&mut device, QUEUE | NEW, 3), 1);
    assert_eq!(&cpu.storage[0x1000..0x1003], b"hgf");
    assert_eq!((cpu.gr[2], cpu.gr[7]), (5, 0), "residual length, no room");
    assert!(cpu.gr[0] & NEW == 0 && cpu.gr[0] & 0xffff_ffff != 0);
    let gr0 = cpu.gr[0];
    assert_eq!(cpu.receive(&mut device, gr0, 3), 1);
    assert_eq!((&cpu.storage[0x1000..0x1003], cpu.gr[2]), (&b"edc"[..], 2));
    // A program that begins again gets all of it again.
    assert_eq!(cpu.receive(&mut device, QUEUE | NEW, 6), 1);
    assert_eq!(&cpu.storage[0x1000..0x1006], b"hgfedc");
    let gr0 = cpu.gr[0];
    assert_eq!(cpu.receive(&mut device, gr0, 6), 0);
    assert_eq!((&cpu.storage[0x1000..0x1002], cpu.gr[5]), (&b"ba"[..], 77));
    // There is nothing to go on with any more.
    cpu.send(&mut device, 78, b"x", LAST);
    assert_eq!(cpu.receive(&mut device, QUEUE, 6), 3);
    assert_eq!(cpu.status().response, Response::NO_FIRST_PART);
}

#[test]
fn request_in_parts_is_assembled() {
    let (mut cpu, mut device) = instant();
    assert_eq!(cpu.send(&mut device, 5, b"abc", 0), 1, "more is expected");
    assert_eq!(cpu.send(&mut device, 6, b"x", LAST), 3);
    assert_eq!(cpu.status().response, Response::NO_FIRST_PART);
    assert_eq!(cpu.send(&mut device, 5, b"de", LAST), 0);
    assert_eq!(cpu.receive(&mut device, QUEUE | NEW, 64), 0);
    assert_eq!(&cpu.storage[0x1000..0x1005], b"edcba");
}

#[test]
fn oversized_or_unsupported_message_is_refused() {
    let (mut cpu, mut device) = instant();
    assert_eq!(cpu.send(&mut device, 1, &[0; 101], LAST), 3);
    assert_eq!(cpu.status().response, Response::MESSAGE_TOO_BIG);
    assert_eq!(cpu.send(&mut device, 1, b"x", LAST | 0x0040_0000), 3);
    assert_eq!(cpu.status().response, Response::FACILITY_NOT_INSTALLED);
    // A length that no storage could hold is refused before it is looked at.
    cpu.gr[0] = QUEUE | LAST;
    for length in [LARGEST_MESSAGE + 1, u64::MAX] {
        cpu.gr[7] = length;
        assert_eq!(
            execute(
                &mut cpu,
                [0xb2, 0xad, 0, 0x46],
                Facilities::ALL,
                &mut device
            ),
            Ok(3)
        );
        assert_eq!(cpu.status().response, Response::MESSAGE_TOO_BIG);
    }
}

#[test]
fn operands_outside_storage_change_nothing() {
    let (mut cpu, mut device) = instant();
    cpu.gr[0] = QUEUE | LAST;
    cpu.gr[6..8].copy_from_slice(&[0xffff_0000, 8]);
    let addressing = Err(ProgramException::Addressing);
    let nqap = [0xb2, 0xad, 0, 0x46];
    assert_eq!(
        execute(&mut cpu, nqap, Facilities::ALL, &mut device),
        addressing
    );
    cpu.send(&mut device, 9, b"abc", LAST);
    cpu.gr[0] = QUEUE | NEW;
    cpu.gr[6..8].copy_from_slice(&[0xffff_0000, 8]);
    let dqap = [0xb2, 0xae, 0, 0x46];
    assert_eq!(
        execute(&mut cpu, dqap, Facilities::ALL, &mut device),
        addressing
    );
    assert_eq!(
        cpu.receive(&mut device, QUEUE | NEW, 8),
        0,
        "the reply is still there"
    );
    cpu.gr[0] = 0x0400_0000;
    cpu.gr[2] = 0xffff_0000;
    assert_eq!(cpu.pqap(&mut device), addressing);
}

#[test]
fn exceptions_of_nqap_and_dqap_match_architecture() {
    let (mut cpu, mut device) = instant();
    cpu.gr[0] = QUEUE | LAST;
    let mut run =
        |cpu: &mut Paper, code: [u8; 4], facilities| execute(cpu, code, facilities, &mut device);
    for operation in [0xad, 0xae] {
        for registers in [0x56, 0x47, 0x11] {
            let got = run(&mut cpu, [0xb2, operation, 0, registers], Facilities::ALL);
            assert_eq!(got, Err(ProgramException::Specification), "odd registers");
        }
        let code = [0xb2, operation, 0, 0x46];
        let got = run(&mut cpu, code, Facilities::NONE);
        assert_eq!(got, Err(ProgramException::Operation));
        cpu.mask |= PSW_PROBLEM;
        let got = run(&mut cpu, code, Facilities::ALL);
        assert_eq!(got, Err(ProgramException::PrivilegedOperation));
        cpu.mask = MODE;
    }
    let other = run(&mut cpu, [0xb2, 0xb0, 0, 0], Facilities::ALL);
    assert_eq!(other, Err(ProgramException::Operation));
}

#[test]
fn pqap_reads_and_writes_registers() {
    let (mut cpu, mut device) = instant();
    cpu.gr[0] = QUEUE | 0x0080_0000;
    assert_eq!(cpu.pqap(&mut device), Ok(0));
    // Accelerator, CEX8, 72 domains, depth 3.
    assert_eq!(cpu.gr[2], 0x0800_0000_0e47_0002);
    assert!(cpu.status().empty);

    cpu.gr[..3].copy_from_slice(&[QUEUE | 0x0300_0000, 0x0000_8000_0000_0006, 0x3008]);
    assert_eq!(cpu.pqap(&mut device), Ok(0));
    let held = device.registration(Apqn::from_register(QUEUE)).unwrap();
    assert_eq!((held.0.0, held.1.get()), (3, 6));

    cpu.gr[0] = QUEUE | 0x0100_0000;
    assert_eq!(cpu.pqap(&mut device), Ok(0));
    assert_eq!(device.registration(Apqn::from_register(QUEUE)), None);

    cpu.gr[0] = 0x0400_0000;
    cpu.gr[2] = 0x1000;
    assert_eq!(cpu.pqap(&mut device), Ok(0));
    assert_eq!(cpu.storage[0x1000], 0x40);
    assert_eq!(
        cpu.storage[0x1010..0x1012],
        [0x40, 0x40],
        "adapters 1 and 9"
    );

    cpu.gr[0] = 0x0106 | 1 << 9;
    assert_eq!(cpu.pqap(&mut device), Ok(3), "adapter 3");
    assert_eq!(cpu.status().response, Response::QUEUE_NOT_AVAILABLE);
}

#[test]
fn addressing_mode_truncates_addresses() {
    let (mut cpu, mut device) = instant();
    for (mask, high) in [(1 << 31, 0x1_8000_0000), (0, 0xffff_ffff_ff00_0000)] {
        cpu.mask = mask;
        cpu.gr[0] = 0x0400_0000;
        cpu.gr[2] = high | 0x1800;
        cpu.storage[0x1800] = 0;
        assert_eq!(cpu.pqap(&mut device), Ok(0));
        assert_eq!(cpu.storage[0x1800], 0x40);
    }
    // 31 bits: the left halves of the registers are not touched.
    cpu.mask = 1 << 31;
    cpu.storage[0x100..0x103].copy_from_slice(b"abc");
    cpu.gr[0] = QUEUE | LAST;
    let left = 0xaaaa_aaaa_0000_0000;
    cpu.gr[4..8].copy_from_slice(&[0, 1, left | 0x100, left | 3]);
    assert_eq!(
        execute(
            &mut cpu,
            [0xb2, 0xad, 0, 0x46],
            Facilities::ALL,
            &mut device
        ),
        Ok(0)
    );
    assert_eq!((cpu.gr[6], cpu.gr[7]), (left | 0x103, left));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// A guest that puts anything into its registers: every instruction ends, what is held stays
    /// balanced, and an exception changes no register.
    #[test]
    fn random_registers_keep_invariants(
        instructions in prop::collection::vec((any_code(), any_gr(), any::<[u8; 3]>()), 1..40),
    ) {
        let (mut device, world) = device(Latency { request: millis(1), ..Latency::default() });
        let mut cpu = Paper::new();
        for (code, gr, [mode, time, _]) in instructions {
            cpu.gr = gr;
            cpu.mask = u64::from(mode & 3) << 31 | u64::from(mode & 4 != 0 && mode & 8 != 0) << 48;
            world.now.set(world.now.get() + millis(u64::from(time & 3)));
            match execute(&mut cpu, code, Facilities::ALL, &mut device) {
                Ok(condition) => prop_assert!(condition <= 3),
                Err(_) => prop_assert_eq!(cpu.gr, gr),
            }
            let held = all_queues().filter(|apqn| device.registration(*apqn).is_some()).count();
            prop_assert_eq!(world.pins.borrow().values().sum::<u32>() as usize, held);
            prop_assert!(world.faults.borrow().is_empty(), "{:?}", world.faults.borrow());
        }
    }
}

/// Mostly AP instructions, mostly with registers in pairs.
fn any_code() -> impl Strategy<Value = [u8; 4]> {
    let operation = prop::sample::select(&[0xad_u8, 0xae, 0xaf, 0xaf, 0xb0][..]);
    let registers = prop_oneof![4 => Just(0x46), 1 => any::<u8>()];
    (operation, registers).prop_map(|(operation, registers)| [0xb2, operation, 0, registers])
}

/// Registers that are often those of a sensible program.
fn any_gr() -> impl Strategy<Value = [u64; 16]> {
    let queue = prop_oneof![
        Just(0x0106_u64),
        Just(0x0947),
        any::<u16>().prop_map(u64::from)
    ];
    let flags = prop_oneof![
        (0..6_u64).prop_map(|function| function << 24),
        Just(LAST),
        Just(NEW),
        any::<u64>(),
    ];
    let number = || prop_oneof![0..0x3000_u64, Just(0x8000_0000_0006), any::<u64>()];
    let rest = prop::collection::vec(number(), 15);
    (queue, flags, rest).prop_map(|(queue, flags, rest)| {
        let mut gr = [0; 16];
        gr[1..].copy_from_slice(&rest);
        gr[0] = flags & !0xffff | queue;
        gr
    })
}
