//! A hostile guest at a vfio-user socket: crafted and random commands, PRP lists and ranges that
//! another thread rewrites while they are read, blocks at and over the slice's edges, nonsense in
//! doorbells and registers, memory that goes away. It expects nothing of the server but that every
//! command to a queue that is in order ends, and that the next reset works.

use crate::pattern::Random;
use crate::support::host::{BAR0, CONFIG, Host, RAM_BASE, RAM_SIZE};
use crate::{Outcome, ensure};
use nvme::cmd::io::RwCdw12;
use nvme::pci;
use nvme::regs::doorbell_offset;
use nvme::sgl::SglDescriptor;
use nvme::{Command, NvmOpcode};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vfio_user::DmaUnmapping;
use zerocopy::{FromBytes, IntoBytes};

const PAGE: u64 = 4096;
/// Where lists are, that the other thread rewrites; offset in the guest's memory.
const LISTS: u64 = 2 << 20;
const LIST_PAGES: u64 = 8;
/// Where data is.
const DATA: u64 = 4 << 20;
const QUEUES: u16 = 2;
/// Commands of a burst: fewer than the queue has entries.
const BURST: u64 = 24;

/// Attacks until the end; the slice holds anything then.
pub fn run(socket: &Path, end: Instant) -> Outcome {
    let mut host = Host::attach(socket);
    let blocks = begin(&mut host);
    let stop = AtomicBool::new(false);
    let ram = host.ram.try_clone()?;
    let counts = std::thread::scope(|scope| {
        let rewriter = scope.spawn(|| rewrite(&ram, &stop));
        let mut random = Random(99);
        let mut counts = Counts::default();
        while Instant::now() < end {
            for _ in 0..20 {
                burst(&mut host, &mut random, blocks, &mut counts);
            }
            mischief(&mut host, &mut random);
            begin(&mut host);
            counts.resets += 1;
        }
        stop.store(true, Ordering::Relaxed);
        counts.rewrites = rewriter.join().unwrap_or(0);
        counts
    });
    println!("{counts:?}");
    ensure(
        counts.served > 0 && counts.refused > 0 && counts.rewrites > 0,
        "some of it was not tried",
    )?;
    ensure(counts.unanswered == 0, "commands that never ended")?;
    // Memory that is not there any more, under commands in flight.
    for _ in 0..BURST {
        let command = attack(&host, &mut Random(7), blocks);
        host.submit(1, command);
    }
    host.ram.set_len(0)?;
    let tail = (BURST as u32).to_le_bytes();
    host.write_register(doorbell_offset(2, false, 0), &tail);
    std::thread::sleep(Duration::from_millis(200));
    Ok(())
}

#[derive(Debug, Default)]
struct Counts {
    served: u64,
    refused: u64,
    unanswered: u64,
    resets: u64,
    rewrites: u64,
}

/// Makes the controller ready; answers the namespace's blocks.
fn begin(host: &mut Host) -> u64 {
    host.enable();
    host.create_queues(QUEUES, None);
    host.identify_namespace(1).unwrap().nsze.get()
}

/// An address that somebody hostile would try.
fn address(random: &mut Random) -> u64 {
    let page = RAM_BASE + DATA + random.below((RAM_SIZE - DATA) / PAGE) * PAGE;
    match random.below(20) {
        0..=9 => page,
        10 | 11 => page + random.below(PAGE / 4) * 4,
        12 => page + random.below(PAGE),
        13 => RAM_BASE + RAM_SIZE - random.below(32) * 256,
        14 => RAM_BASE.wrapping_sub(random.below(32) * 256),
        // Where a device sees its own driver's memory, and other guests'.
        15 | 16 => random.below(1 << 15) * PAGE,
        17 => (1 << 39) - random.below(1 << 15) * PAGE,
        18 => u64::MAX - random.below(8192),
        _ => random.next(),
    }
}

fn lba(random: &mut Random, blocks: u64) -> u64 {
    match random.below(12) {
        0..=5 => random.below(blocks),
        6..=8 => blocks - random.below(40).min(blocks),
        9 => blocks + random.below(40),
        10 => u64::MAX - random.below(70_000),
        _ => random.next(),
    }
}

/// Rewrites lists as another processor of the guest: their entries alternate between the guest's
/// own addresses and foreign ones.
fn rewrite(ram: &File, stop: &AtomicBool) -> u64 {
    let mut random = Random(3);
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let at = LISTS + random.below(LIST_PAGES * PAGE / 8) * 8;
        let word = match random.below(8) {
            0 => random.below(64) << 32,
            1 => random.below(2048),
            // An entry that leads to the next list.
            2 => RAM_BASE + LISTS + random.below(LIST_PAGES) * PAGE,
            _ => address(&mut random),
        };
        // The memory is taken away at times.
        let _ = ram.write_all_at(&word.to_le_bytes(), at);
        count += 1;
        if count % 64 == 0 {
            // The guest may have few processors.
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    count
}

/// A command, most of it sensible.
fn attack(host: &Host, random: &mut Random, blocks: u64) -> Command {
    const OPCODES: [NvmOpcode; 10] = [
        NvmOpcode::READ,
        NvmOpcode::READ,
        NvmOpcode::WRITE,
        NvmOpcode::WRITE,
        NvmOpcode::COMPARE,
        NvmOpcode::WRITE_ZEROES,
        NvmOpcode::DATASET_MANAGEMENT,
        NvmOpcode::DATASET_MANAGEMENT,
        NvmOpcode::FLUSH,
        NvmOpcode::VERIFY,
    ];
    let opcode = match random.below(12) {
        0 => NvmOpcode(random.next() as u8),
        n => OPCODES[n as usize % OPCODES.len()],
    };
    let nsid = match random.below(20) {
        0 => random.next() as u32,
        1 => u32::MAX,
        _ => 1,
    };
    let mut command = Command::new(opcode.0, 0, nsid);
    let list = RAM_BASE + LISTS + random.below(LIST_PAGES) * PAGE;
    let skewed = list + random.below(PAGE / 8) * 8;
    let two = [skewed, list, address(random)][random.below(3) as usize];
    command.set_prps(address(random), two);
    command.set_slba(lba(random, blocks));
    let count = [
        1 + random.below(16),
        1 + random.below(256),
        1 + random.below(65_536),
    ];
    let count = count[(random.below(8) / 3) as usize];
    let mut cdw12 = RwCdw12::new().with_nlb_z((count - 1) as u16).into_bits();
    if random.below(16) == 0 {
        cdw12 |= (random.next() as u32) & 0xffff_0000;
    }
    command.cdw12 = cdw12.into();
    if opcode == NvmOpcode::DATASET_MANAGEMENT {
        // The other thread changes the ranges while they are read; some are valid on purpose.
        let ranges = 1 + random.below(8);
        for i in 0..ranges {
            let range = [random.below(64) << 32, lba(random, blocks)];
            let at = list - RAM_BASE + i * 16;
            let _ = host.ram.write_all_at(range.as_bytes(), at);
        }
        command.set_prps(list, address(random));
        command.cdw10 = (ranges as u32 - 1).into();
        command.cdw11 = 4.into();
    } else if random.below(8) == 0 {
        let len = (count as u32).wrapping_mul(512);
        let sgl = match random.below(3) {
            0 => SglDescriptor::data_block(address(random), len),
            1 => SglDescriptor::segment(list, 64 * 16),
            _ => SglDescriptor::last_segment(list, 64 * 16),
        };
        command.set_sgl(sgl);
    }
    let mut raw = [0; 64];
    raw.copy_from_slice(command.as_bytes());
    if random.below(16) == 0 {
        // Randomizes one byte of the entry; the identifier is set later.
        raw[random.below(64) as usize] = random.next() as u8;
    }
    Command::read_from_bytes(&raw).unwrap_or(command)
}

fn burst(host: &mut Host, random: &mut Random, blocks: u64, counts: &mut Counts) {
    let mut waiting = [0; 1 + QUEUES as usize];
    for _ in 0..1 + random.below(BURST) {
        let qid = 1 + random.below(u64::from(QUEUES)) as u16;
        let command = attack(host, random, blocks);
        host.submit(qid, command);
        waiting[usize::from(qid)] += 1;
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    for qid in 1..=QUEUES {
        while waiting[usize::from(qid)] > 0 {
            match host.try_completion(qid) {
                Some(completion) if completion.status().is_success() => counts.served += 1,
                Some(_) => counts.refused += 1,
                None if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_micros(50));
                    continue;
                }
                None => {
                    counts.unanswered += 1;
                }
            }
            waiting[usize::from(qid)] -= 1;
        }
    }
}

/// Wakes the function: bus mastering and memory access may be off, and in D3hot no register
/// answers, not even to the next driver.
fn wake_function(host: &mut Host) {
    // Power Management is the first capability; the written value has no effect on others.
    let mut first = [0];
    let pointer = pci::CAPABILITIES_POINTER as u64;
    if host.client.region_read(CONFIG, pointer, &mut first).is_ok() {
        let at = u64::from(first[0]) + pci::pm::PMCSR as u64;
        let _ = host.client.region_write(CONFIG, at, &0u16.to_le_bytes());
    }
    let bits =
        pci::command::MEMORY_SPACE | pci::command::BUS_MASTER | pci::command::INTERRUPT_DISABLE;
    let at = pci::COMMAND as u64;
    let _ = host.client.region_write(CONFIG, at, &bits.to_le_bytes());
}

/// Does things that no driver does; the controller may be unusable afterwards, until a reset.
fn mischief(host: &mut Host, random: &mut Random) {
    for _ in 0..BURST / 2 {
        let command = attack(host, random, 1 << 11);
        host.submit(1, command);
    }
    match random.below(5) {
        0 => {
            for _ in 0..8 {
                let doorbell = doorbell_offset(random.below(8) as u16, random.below(2) == 0, 0);
                let value = [random.below(64), random.next()][random.below(2) as usize];
                let _ = host
                    .client
                    .region_write(BAR0, doorbell, &(value as u32).to_le_bytes());
            }
        }
        1 => {
            for _ in 0..8 {
                let value = random.next().to_le_bytes();
                let at = random.below(0x1800) & !3;
                let _ = host.client.region_write(BAR0, at, &value[..4]);
                let at = random.below(256) & !3;
                let _ = host.client.region_write(CONFIG, at, &value[..4]);
            }
        }
        2 => {
            let unmap = DmaUnmapping::Range {
                iova: RAM_BASE,
                size: RAM_SIZE,
            };
            host.client.dma_unmap(unmap).unwrap();
            host.map_ram();
        }
        3 => host.client.reset().unwrap(),
        _ => {
            // Admin commands at random; queues are made where they should not be.
            for _ in 0..8 {
                let mut command = attack(host, random, 1 << 11);
                command.opcode = [0, 1, 2, 4, 5, 6, 9, 0xc, 0x7c][random.below(9) as usize];
                command.cdw10 = (random.next() as u32 & 0x003f_0007).into();
                command.cdw11 = (random.next() as u32 & 0x0007_0007).into();
                host.submit(0, command);
            }
        }
    }
    wake_function(host);
    std::thread::sleep(Duration::from_millis(2));
}
