//! A hostile guest: whatever its commands say, the device is never told of a block outside
//! the guest's slice, nor of an address outside the guest's own memory; lists are read from
//! pages of the queue's own.
//!
//! What was broken on purpose, one thing at a time, to see a test go red: `Slice::lba` with a
//! wrapping addition; the end of the slice off by one; Dataset Management ranges sent unchecked;
//! the window's end not looked at in `Span::find`; a registration's end not looked at; a span kept
//! over a change of the map, of the table, and for another map; access rights not looked at;
//! another namespace's number accepted; a write let through to a read-only slice.

use crate::common::model::{Config, DeviceCommand, Model};
use crate::common::*;
use dma::{Memory, Prot};
use driver::{Device, Options};
use mediate::{DirectOptions, Slice};
use nvme::cmd::io::{DsmCdw10, DsmCdw11};
use nvme::sgl::SglDescriptor;
use nvme::{Command, NvmOpcode, Status};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zerocopy::{FromBytes, IntoBytes};

const MEMORY: u64 = 1 << 20;
/// Three neighbours, on a namespace that is a little larger than they are.
const SLICES: [(u64, u64); 3] = [(16, 512), (528, 1024), (1552, 512)];

struct World {
    guests: Vec<Guest>,
    device: Device,
    model: Arc<Model>,
}

fn world(config: Config, shared: bool) -> World {
    let model = Model::new(config);
    let device = open(&model, Options::default());
    let namespace = device.namespace(1).unwrap();
    let mut guests: Vec<Guest> = Vec::new();
    for (first, blocks) in SLICES {
        let slice = Slice::new(&namespace, first, blocks, false).unwrap();
        let options = DirectOptions::new(1, slice);
        let guest = match guests.first() {
            Some(other) if shared => {
                let queue = other.queue.share(options).unwrap();
                Guest::on(&device, queue, slice, MEMORY)
            }
            _ => Guest::with(&device, options, MEMORY),
        };
        guests.push(guest);
    }
    model.take_log();
    World {
        guests,
        device,
        model,
    }
}

impl World {
    fn in_a_guest(&self, at: u64, len: u64) -> bool {
        self.guests.iter().any(|guest| {
            let range = guest.device_range();
            at < range.end && at + len > range.start
        })
    }

    /// Everything that the device saw was this guest's to say; or, if it was
    /// `bounced`, lay in nobody's memory.
    fn check(&self, guest: usize, log: &[DeviceCommand], bounced: bool) {
        let (first, blocks) = SLICES[guest];
        let slice = first..first + blocks;
        let memory = self.guests[guest].device_range();
        let inside = |at: u64, len: u64, range: &std::ops::Range<u64>| {
            at >= range.start && at.checked_add(len).is_some_and(|end| end <= range.end)
        };
        for seen in log {
            for &(lba, blocks) in &seen.blocks {
                assert!(
                    inside(lba, blocks, &slice),
                    "block {lba}+{blocks}: {seen:x?}"
                );
            }
            for &(at, len) in &seen.data {
                // Data that the device cannot name where it is goes through
                // memory of the queue pair's own.
                let copied = bounced && !self.in_a_guest(at, len) && !self.model.in_a_ring(at, len);
                let own = inside(at, len, &memory) || copied;
                assert!(own, "data {at:#x}+{len}: {seen:x?}");
            }
            for &(at, len) in &seen.lists {
                assert!(!self.in_a_guest(at, len), "a list of a guest's: {seen:x?}");
                assert!(!self.model.in_a_ring(at, len), "{seen:x?}");
            }
        }
        assert!(self.model.faults().is_empty(), "{:x?}", self.model.faults());
    }

    fn attack(&mut self, guest: usize, command: &Command) {
        let attacker = &mut self.guests[guest];
        let before = attacker.queue.stats().bounced();
        let result = attacker.submit(command);
        attacker.queue.ring();
        attacker.drain();
        attacker.ended.clear();
        let bounced = attacker.queue.stats().bounced() > before;
        let log = self.model.take_log();
        if result.is_err() {
            assert!(log.is_empty(), "refused, and yet: {log:x?}");
        }
        self.check(guest, &log, bounced);
    }
}

/// An address that somebody hostile would try.
fn address() -> impl Strategy<Value = u64> {
    let page = (0..MEMORY / PAGE).prop_map(|page| BASE + page * PAGE);
    prop_oneof![
        8 => page.clone(),
        2 => (page.clone(), 0..PAGE / 4).prop_map(|(page, at)| page + at * 4),
        1 => (page, 0..PAGE).prop_map(|(page, at)| page + at),
        1 => (0..32u64).prop_map(|back| BASE + MEMORY - back * 256),
        1 => (0..32u64).prop_map(|back| BASE - back * 256),
        // Where the device sees the guests and the queues.
        2 => (0..4096u64).prop_map(|page| page * PAGE),
        1 => any::<u64>(),
        1 => (0..8192u64).prop_map(|back| u64::MAX - back),
    ]
}

fn lba() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 0..1024u64,
        3 => (0..20u64, 0..40u64).prop_map(|(a, b)| 512 + a - 20u64.min(b)),
        2 => (0..40u64).prop_map(|at| 1004 + at),
        1 => (0..70_000u64).prop_map(|back| u64::MAX - back),
        1 => any::<u64>(),
    ]
}

fn blocks() -> impl Strategy<Value = u32> {
    prop_oneof![6 => 1..40u32, 3 => 1..600u32, 1 => 1..=65_536u32]
}

fn opcode() -> impl Strategy<Value = u8> {
    let known = [
        0x00, 0x01, 0x01, 0x01, 0x02, 0x02, 0x02, 0x05, 0x08, 0x09, 0x09, 0x0c,
    ];
    prop_oneof![12 => prop::sample::select(known.to_vec()), 1 => any::<u8>()]
}

#[derive(Clone, Debug)]
struct Attack {
    guest: usize,
    command: Command,
    /// Words put into the guest's memory first: where, what.
    words: Vec<(u64, u64)>,
}

/// A command, half of it sensible; a list or an SGL segment or ranges for it, of the same kind.
fn attack() -> impl Strategy<Value = Attack> {
    let basics = (0..3usize, opcode(), lba(), blocks(), address(), address());
    let more = (
        prop_oneof![9 => Just(0u8), 2 => Just(0x40), 1 => any::<u8>()],
        prop_oneof![30 => Just(1u32), 1 => any::<u32>()],
        prop::array::uniform6(prop_oneof![4 => Just(0u32), 1 => any::<u32>()]),
        prop::collection::vec(address(), 0..40),
        prop::collection::vec((lba(), 0..600u32), 1..20),
        0..3u8,
        0..300u32,
    );
    (basics, more).prop_map(|(basics, more)| {
        let (guest, opcode, lba, blocks, one, two) = basics;
        let (flags, nsid, extra, entries, ranges, form, size) = more;
        let mut command = rw(NvmOpcode(opcode), lba, blocks, one, two);
        command.nsid = nsid.into();
        command.cid = (extra[0] as u16).into();
        command.cdw2 = extra[1].into();
        command.cdw3 = extra[2].into();
        command.cdw13 = extra[3].into();
        command.cdw14 = extra[4].into();
        command.cdw12 = (command.cdw12.get() | (extra[5] & 0xffff_0000)).into();
        let list = two & !7;
        let mut words: Vec<(u64, u64)> = Vec::new();
        if opcode == 9 {
            command.cdw10 = DsmCdw10::new()
                .with_nr_z((ranges.len() - 1) as u8)
                .into_bits()
                .into();
            command.cdw11 = DsmCdw11::new().with_ad(form != 0).into_bits().into();
            for (i, (lba, blocks)) in ranges.iter().enumerate() {
                words.push((one.wrapping_add(i as u64 * 16), u64::from(*blocks) << 32));
                words.push((one.wrapping_add(i as u64 * 16 + 8), *lba));
            }
        } else if flags & 0x40 != 0 {
            for (i, entry) in entries.iter().enumerate() {
                let last = i + 1 == entries.len();
                let descriptor = match form {
                    0 if last => SglDescriptor::last_segment(list.wrapping_add(0x200), size),
                    1 if last => SglDescriptor::segment(*entry, size * 16),
                    _ => SglDescriptor::data_block(*entry, 1 << (size % 13)),
                };
                let bytes = descriptor.as_bytes();
                for (j, word) in bytes.chunks_exact(8).enumerate() {
                    let word = u64::from_le_bytes(word.try_into().unwrap());
                    words.push((list.wrapping_add((i * 16 + j * 8) as u64), word));
                }
            }
            command.set_sgl(match form {
                0 => SglDescriptor::data_block(one, blocks * 512),
                1 => SglDescriptor::last_segment(list, entries.len() as u32 * 16),
                _ => SglDescriptor::segment(list, entries.len() as u32 * 16),
            });
        } else {
            for (i, entry) in entries.iter().enumerate() {
                words.push((list.wrapping_add(i as u64 * 8), *entry));
            }
        }
        let mut raw = [0; 64];
        raw.copy_from_slice(command.as_bytes());
        raw[1] = flags;
        Attack {
            guest,
            command: Command::read_from_bytes(&raw).unwrap(),
            words,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn random_attacks_never_leave_slice_and_memory(
        attacks in prop::collection::vec(attack(), 1..60),
        sgl in any::<bool>(),
        mdts in 0..4u8,
        shared in any::<bool>(),
    ) {
        let mut world = world(Config { sgl, mdts, ..Config::default() }, shared);
        for attack in &attacks {
            for (at, word) in &attack.words {
                // What lies elsewhere, the guest cannot write.
                let _ = world.guests[attack.guest].map.write(*at, &word.to_le_bytes());
            }
            world.attack(attack.guest, &attack.command);
        }
    }

    #[test]
    fn scattered_windows_are_translated_page_by_page(
        order in Just((0..32u64).collect::<Vec<_>>()).prop_shuffle(),
        read_only in prop::collection::vec(prop::bool::weighted(0.2), 32),
        holes in prop::collection::vec(prop::bool::weighted(0.1), 32),
        tries in prop::collection::vec((0..32u64, 0..1024u64, 1..24u32, any::<bool>()), 1..40),
    ) {
        // A map of pages in any order, with holes and read-only pages: what the device gets is what
        // the map says, or the command is refused.
        let mut world = world(Config::default(), false);
        let guest = &mut world.guests[0];
        guest.map.unmap(BASE, MEMORY).unwrap();
        for page in 0..32u64 {
            if holes[page as usize] {
                continue;
            }
            let at = order[page as usize] * PAGE;
            let prot = if read_only[page as usize] { Prot::RO } else { Prot::RW };
            let backing = Some((guest.memory.clone(), at));
            guest.map.map(BASE + page * PAGE, PAGE, backing, prot).unwrap();
        }
        let start = guest.device_range().start;
        for (page, dword, blocks, read) in tries {
            let len = u64::from(blocks) * 512;
            let data = BASE + page * PAGE + dword * 4;
            let opcode = if read { NvmOpcode::READ } else { NvmOpcode::WRITE };
            let mut command = rw(opcode, 0, blocks, 0, 0);
            let pages: Vec<u64> = (data / PAGE..(data + len).div_ceil(PAGE)).collect();
            let usable = pages.iter().all(|p| {
                let i = (p - BASE / PAGE) as usize;
                i < 32 && !holes[i] && !(read && read_only[i])
            });
            // The list has a place of its own, out of the way.
            let list = 0x4000_0000;
            let own = Memory::anonymous(4096).unwrap();
            guest.map.map(list, PAGE, Some((own, 0)), Prot::RW).unwrap();
            prps(guest, &mut command, data, len, list);
            let status = guest.run(&command);
            guest.map.unmap(list, PAGE).unwrap();
            prop_assert_eq!(status.is_success(), usable, "{:?} {:?}", pages, status);
            let log = world.model.take_log();
            if !usable {
                prop_assert!(log.is_empty());
                continue;
            }
            prop_assert_eq!(log.len(), 1);
            let mut left = len;
            let mut at = data;
            let mut expected = Vec::new();
            while left > 0 {
                let piece = (PAGE - at % PAGE).min(left);
                let page = order[((at - BASE) / PAGE) as usize];
                expected.push((start + page * PAGE + at % PAGE, piece));
                at += piece;
                left -= piece;
            }
            // The device's own pages may lie otherwise: compare bytes, not pieces.
            let flat = |pieces: &[(u64, u64)]| -> Vec<u64> {
                pieces.iter().flat_map(|(at, len)| (*at..at + len).step_by(4)).collect()
            };
            prop_assert_eq!(flat(&log[0].data), flat(&expected), "nothing is copied on its way");
        }
        prop_assert!(world.model.faults().is_empty());
    }
}

#[test]
fn lists_changed_during_read_leak_nothing() {
    // Another processor of the guest's turns list entries, SGL descriptors and ranges to and fro,
    // between what is its own and what is not, while they are read.
    for sgl in [false, true] {
        let mut world = world(
            Config {
                sgl,
                ..Config::default()
            },
            true,
        );
        let list = BASE + MEMORY - 2 * PAGE;
        let memory = world.guests[1].memory.clone();
        let (neighbour, heap) = (world.guests[0].device_range(), 4096u64);
        let stop = Arc::new(AtomicBool::new(false));
        let flipper = {
            let stop = stop.clone();
            std::thread::spawn(move || {
                let mut random = Random(77);
                let at = (list - BASE) as usize;
                while !stop.load(Ordering::Relaxed) {
                    let own = [(); 3].map(|()| BASE + random_page(&mut random));
                    let word = random.of(&[
                        own[0],
                        own[1],
                        own[2],
                        neighbour.start,
                        heap,
                        BASE + MEMORY,
                        u64::MAX,
                        1 << 32 | 512,
                        8 << 32,
                        1020,
                    ]);
                    let place = at + random.below(512) as usize * 8;
                    memory
                        .atomic_u64(place)
                        .unwrap()
                        .store(word, Ordering::Relaxed);
                }
            })
        };
        let mut random = Random(5);
        let mut served = 0;
        for _ in 0..20_000 {
            let command = match random.below(3) {
                0 => {
                    let mut dsm = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, 1);
                    dsm.cdw10 = DsmCdw10::new().with_nr_z(3).into_bits().into();
                    dsm.cdw11 = DsmCdw11::new().with_ad(true).into_bits().into();
                    dsm.set_prps(list + random.below(200) * 16, 0);
                    dsm
                }
                1 => {
                    let mut read = rw(NvmOpcode::READ, random.below(900), 8, 0, 0);
                    read.set_sgl(SglDescriptor::last_segment(list, 16));
                    read
                }
                _ => rw(
                    random.of(&[NvmOpcode::READ, NvmOpcode::WRITE]),
                    random.below(900),
                    24,
                    BASE,
                    list + random.below(500) * 8,
                ),
            };
            // Reads would overwrite the list itself; that is the guest's own affair, and
            // one more change under way.
            let before = world.guests[1].queue.stats().commands();
            world.attack(1, &command);
            served += world.guests[1].queue.stats().commands() - before;
        }
        stop.store(true, Ordering::Relaxed);
        flipper.join().unwrap();
        assert!(served > 300, "{served}");
    }
}

fn random_page(random: &mut Random) -> u64 {
    random.below(MEMORY / PAGE - 2) * PAGE
}

#[test]
fn slice_edges_are_enforced() {
    let mut world = world(Config::default(), false);
    for (guest, (_, size)) in SLICES.into_iter().enumerate() {
        for blocks in [1u32, 2, 8, 511, 512] {
            for back in 0..4u64 {
                for lba in [
                    size + back,
                    (size + 2).saturating_sub(back + u64::from(blocks)),
                ] {
                    for opcode in [
                        NvmOpcode::READ,
                        NvmOpcode::WRITE,
                        NvmOpcode::COMPARE,
                        NvmOpcode::VERIFY,
                        NvmOpcode::WRITE_ZEROES,
                    ] {
                        let mut command = rw(opcode, lba, blocks, 0, 0);
                        prps(
                            &world.guests[guest],
                            &mut command,
                            BASE,
                            u64::from(blocks) * 512,
                            BASE + 0x8_0000,
                        );
                        let fits = lba + u64::from(blocks) <= size;
                        let status = world.guests[guest].run(&command);
                        let over = Status::LBA_OUT_OF_RANGE.with_dnr(true);
                        assert_eq!(status == over, !fits, "{opcode} {lba}+{blocks}: {status}");
                        let log = world.model.take_log();
                        world.check(guest, &log, false);
                    }
                }
            }
        }
        for lba in [
            u64::MAX,
            u64::MAX - 1,
            u64::MAX - 65_535,
            1 << 55,
            (1 << 55) - 1,
        ] {
            for blocks in [1, 2, 65_536] {
                world.attack(guest, &rw(NvmOpcode::WRITE_ZEROES, lba, blocks, 0, 0));
            }
        }
    }
    // Nobody's blocks before and behind the slices.
    let disk = world.model.disk();
    assert!(
        disk[..16 * 512]
            .iter()
            .chain(&disk[2064 * 512..])
            .all(|&b| b == 0)
    );
}

#[test]
fn moved_or_removed_window_is_forgotten() {
    let mut world = world(Config::default(), false);
    let read = rw(NvmOpcode::READ, 0, 8, BASE + 0x3000, 0);
    let seen = |world: &World| world.model.take_log().pop().unwrap().data[0].0;
    let start = world.guests[0].device_range().start;
    assert_eq!(world.guests[0].run(&read), Status::SUCCESS);
    assert_eq!(seen(&world), start + 0x3000);
    // The window moves in its memory.
    let guest = &mut world.guests[0];
    guest.map.unmap(BASE, MEMORY).unwrap();
    assert_eq!(guest.run(&read), Status::DATA_TRANSFER_ERROR);
    let backing = Some((guest.memory.clone(), 0x1_0000));
    guest.map.map(BASE, 0x1_0000, backing, Prot::RW).unwrap();
    assert_eq!(guest.run(&read), Status::SUCCESS);
    assert_eq!(seen(&world), start + 0x1_3000);
    // Its end is an end.
    let guest = &mut world.guests[0];
    let over = rw(NvmOpcode::READ, 0, 8, BASE + 0xfe00, BASE + 0x1_0000);
    assert_eq!(guest.run(&over), Status::DATA_TRANSFER_ERROR);
    // What is read-only is read only.
    guest.map.unmap(BASE, 0x1_0000).unwrap();
    let backing = Some((guest.memory.clone(), 0));
    guest.map.map(BASE, MEMORY, backing, Prot::RO).unwrap();
    let write = rw(NvmOpcode::WRITE, 0, 8, BASE + 0x3000, 0);
    assert_eq!(guest.run(&write), Status::SUCCESS);
    assert_eq!(guest.run(&read), Status::DATA_TRANSFER_ERROR);
    world.model.take_log();

    // The memory is no longer registered: other memory is where the device saw it.
    world.guests[0].registration = None;
    for guest in &mut world.guests {
        guest.poll();
    }
    let stranger = Memory::anonymous(MEMORY as usize).unwrap();
    let registered = world.device.register(&stranger).unwrap();
    assert_eq!(registered.region().iova(), start);
    assert_eq!(world.guests[0].run(&write), Status::SUCCESS);
    let at = seen(&world);
    assert!(
        !(start..start + MEMORY).contains(&at),
        "{at:#x} is the stranger's"
    );
    assert_eq!(world.guests[0].queue.stats().bounced(), 1);
}

#[test]
fn guests_have_separate_maps() {
    // The same addresses, the same generation, another map: a server of two guests that mixes them
    // up gets refusals or the other's own memory, never the memory of the first.
    let mut world = world(Config::default(), false);
    let read = rw(NvmOpcode::READ, 0, 8, BASE, 0);
    assert_eq!(world.guests[0].run(&read), Status::SUCCESS);
    let (first, rest) = world.guests.split_at_mut(1);
    first[0].queue.submit(&read, &rest[0].map, 9).unwrap();
    first[0].drain();
    let log = world.model.take_log();
    let range = world.guests[1].device_range();
    assert!(range.contains(&log.last().unwrap().data[0].0));
}
